#!/usr/bin/env python3
"""Write the demo's training data: our own short prompts, answered greedily by the demo target.

The prompts are composed from the tables below (every question form with every topic).  The
held-out prompts use the same forms with topics that no training prompt mentions.  On two cores:

    python tools/prepare_demo_target.py
    torchrun --nproc-per-node 2 tools/make_demo_data.py        # or plain python, on one core

    # on one GPU, where the shipped files were made
    python tools/make_demo_data.py --device cuda --batch-size 256

    launch/demo_train.jsonl.gz     {"messages": [user, assistant], "finish_reason": "stop" | "length"}
    launch/demo_heldout.jsonl      {"messages": [user]}

The answers come from tools/regenerate_responses.py, which marks those cut off at --max-new-tokens and drops those that
do not tokenise back to the ids that the model wrote; a killed run goes on when it is started again.  Dropped here, and
counted, are answers that repeat an earlier one word for word.
"""

import argparse
import os
import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import regenerate_responses
import train_dflash_pipeline as pipeline
from regenerate_responses import write_jsonl
from train_dflash_pipeline import UserError

# (question forms, training topics, held-out topics), each list separated by "|"
TABLES = (
    (
        """What is {}? Answer in one sentence. | Explain {} in simple terms. | Why does {} matter?
        | Give me three facts about {}. | How would you explain {} to a child?
        | What is a common mistake people make about {}?""",
        """photosynthesis | gravity | the water cycle | electricity | a rainbow | inflation | democracy
        | the solar system | a black hole | recycling | machine learning | the internet | a battery
        | the immune system | DNA | evolution | magnetism | a vaccine | the ozone layer | the tide
        | an earthquake | sleep | friction | sound | a budget | compound interest | supply and demand
        | a computer virus | encryption | a search engine | a database | an operating system
        | the telescope | the microscope | a suspension bridge | the steam engine | the printing press
        | the Roman Empire | the Industrial Revolution | the Renaissance | ancient Egypt | the human heart
        | digestion | a healthy diet | regular exercise | meditation | climate change | solar power
        | wind energy | nuclear energy | a desert | a rainforest | a coral reef | the ocean | a glacier
        | jazz | chess | the orchestra | cloud computing | open source software""",
        "a volcano | the compass | anesthesia",
    ),
    (
        """How do I {}? | List the steps to {}. | What do I need to {}? | Give me one good tip on how to {}.""",
        """boil an egg | bake a chocolate cake | make a cup of tea | cook rice | make pancakes | grow tomatoes
        | plant a tree | water house plants | clean a window | wash a wool sweater | iron a shirt
        | remove a coffee stain | sharpen a knife | paint a room | hang a picture | fix a flat bicycle tire
        | change a light bulb | unclog a sink | pack a suitcase | plan a road trip | save money every month
        | write a cover letter | prepare for a job interview | learn a new language | remember names
        | study for an exam | take better notes | give a speech | fall asleep faster | start running
        | stretch before a workout | tie a tie | wrap a present | make a paper airplane | draw a face
        | take a good photo | play the guitar | train a puppy | bathe a cat | choose a strong password
        | back up a computer | speed up a slow laptop | organize a desk | host a dinner party
        | apologize to a friend""",
        "knit a scarf | pitch a tent | brew beer",
    ),
    (
        """What is the capital of {}? | Name three traditional dishes from {}.
        | What should I see on a first trip to {}? | Describe the climate of {} in two sentences.""",
        """France | Japan | Brazil | Canada | Egypt | India | Italy | Kenya | Mexico | Norway | Peru | Spain
        | Turkey | Vietnam | Australia | Austria | Chile | China | Cuba | Denmark | Ethiopia | Finland
        | Germany | Greece | Hungary | Iceland | Indonesia | Ireland | Jamaica | Morocco | Nepal
        | New Zealand | Nigeria | Poland | Russia | South Korea | Sweden | Switzerland | Thailand
        | the United Kingdom""",
        "Portugal | Argentina",
    ),
    (
        """What do {} eat? | Where do {} live? | Describe {} in one sentence. | How do {} protect themselves?
        | Tell me something surprising about {}.""",
        """elephants | dolphins | honeybees | owls | wolves | bears | tigers | giraffes | zebras | kangaroos
        | koalas | pandas | monkeys | gorillas | rabbits | squirrels | hedgehogs | bats | foxes | deer
        | horses | cows | sheep | goats | chickens | ducks | eagles | parrots | crows | frogs | turtles
        | snakes | sharks | whales | octopuses""",
        "penguins | crocodiles",
    ),
    (
        """Write a Python function that {}. | How can I write Python code that {}?
        | Show me short Python code that {}, with an example.""",
        """adds two numbers | finds the largest number in a list | reverses a string | counts the vowels in a word
        | checks whether a number is even | checks whether a word is a palindrome | computes a factorial
        | prints the numbers from 1 to 10 | sums the digits of a number | removes duplicates from a list
        | sorts a list of names | converts Celsius to Fahrenheit | computes the average of a list
        | counts the words in a sentence | reads a text file line by line | writes a list to a file
        | merges two dictionaries | swaps two variables | finds the shortest word in a list
        | checks whether a year is a leap year | computes the area of a circle | squares every number in a list
        | counts how often each letter occurs | joins a list of words with commas | rounds a price to two decimals
        | picks a random item from a list | finds the index of an item | flattens a nested list
        | filters out negative numbers | turns a string into uppercase | computes the Fibonacci sequence
        | checks whether a number is prime | prints a multiplication table | finds common items in two lists
        | parses a date | rolls two dice | validates an email address | loads a JSON file
        | measures how long a loop takes | splits a list into two halves""",
        "transposes a matrix | encodes text in Morse code",
    ),
    (
        """Rewrite this sentence in a formal tone: "{}" | Make this sentence shorter: "{}"
        | Turn this sentence into a question: "{}" | Rewrite this sentence in the past tense: "{}"
        | Rewrite this sentence in the future tense: "{}" | Say this in other words: "{}" """,
        """The meeting is gonna start late because the boss is stuck in traffic.
        | I really want to buy that red car. | We can't find the keys anywhere in the house.
        | The kids play soccer in the park after school. | She sings in a small choir every Sunday.
        | My phone dies whenever it gets cold outside. | He walks his dog along the river each morning.
        | The food at this restaurant is great but way too expensive. | They plan to move to a bigger apartment.
        | The train leaves the station at nine. | I don't get why the printer never works.
        | Our team needs more time to finish the report. | The old man tells funny stories about his youth.
        | It rains a lot here in autumn. | You should see a doctor about that cough.
        | The library opens at eight and closes at six. | My sister is learning how to drive.
        | The movie is too long and kind of boring. | We need milk, bread and a few apples.
        | The teacher gives us homework every day. | The store sends me way too many emails.
        | The baby smiles when she hears music. | He forgets his umbrella all the time.
        | Thanks a lot for helping me out yesterday. | The new software makes our work much easier.
        | I think the blue jacket looks better on you. | The neighbors are having a loud party again.
        | The company hires ten new people every year. | The soup needs a little more salt.
        | Nobody knows the answer to this question.""",
        """The pilot hopes the haze clears by noon. | Grandma keeps her buttons in a rusty tin.""",
    ),
    (
        """Write a very short story about {}. | Write a four-line poem about {}.
        | Suggest a title for a book about {}. | Write the first sentence of a novel about {}.""",
        """a lost key | a rainy day | an old clock | a brave mouse | a talking tree | two best friends
        | a secret garden | a long train ride | the first day of school | a robot who wants to paint
        | a birthday surprise | a snowy village | a dragon who is afraid of fire | a kind baker
        | a message in a bottle | a star that fell from the sky | a summer at the beach | a haunted house
        | a king without a crown | a magic pencil | a little boat | a detective and her cat | a broken mirror
        | a journey to the moon | an empty theater | a boy who could fly | a sleepy town | a quiet librarian
        | a market in the morning | a letter that arrived too late | a girl who collects shells
        | the last leaf of autumn | a clever thief | a storm at night | a family dinner | a missing painting
        | a bridge between two worlds | an unexpected guest | a wooden toy | a farmer and his donkey""",
        "a lighthouse keeper | a shy violinist | a forgotten scarecrow",
    ),
    (
        """Define the word "{}". | Use the word "{}" in a sentence. | Give me two synonyms for "{}".
        | What is the opposite of "{}"?""",
        """happy | brave | ancient | generous | fragile | curious | honest | lazy | bright | calm | clumsy | eager
        | fierce | gentle | humble | jealous | loyal | modest | narrow | patient | polite | proud | quick
        | rare | rough | scarce | shallow | silent | simple | sincere | smooth | steady | stubborn | sudden
        | tidy | timid | vast | vivid | wise | young""",
        "reluctant | cheerful | transparent",
    ),
    (
        """List five {}. | Name three {} and say one thing about each.""",
        """fruits | vegetables | musical instruments | sports | planets | colors | board games | famous inventors
        | famous painters | kinds of weather | kitchen tools | garden tools | school subjects | jobs in a hospital
        | ways to save water | ways to relax | healthy snacks | winter clothes | summer activities
        | programming languages | parts of a computer | parts of a plant | parts of a bicycle | means of transport
        | types of cheese | types of pasta | spices | trees | flowers | insects | sea animals | birds
        | large rivers | high mountains | big cities | good habits | hobbies for a rainy day | gifts for a child
        | team building games | questions to ask a new colleague""",
        "gemstones | dance styles",
    ),
    (
        """What is the difference between {}? | Compare {} in two sentences.""",
        """a lake and a pond | a frog and a toad | tea and coffee | a novel and a short story | weather and climate
        | a comet and an asteroid | a city and a village | a list and a tuple in Python | a virus and a bacterium
        | a fruit and a vegetable | butter and margarine | a laptop and a tablet | a bus and a tram
        | speed and velocity | mass and weight | a job and a career | rent and a mortgage | a debit and a credit card
        | a piano and an organ | a simile and a metaphor | a rabbit and a hare | fog and mist | baking and roasting
        | a hurricane and a tornado | a president and a prime minister | a loan and a gift | stocks and bonds
        | a hill and a mountain | cotton and wool | a moth and a butterfly | yoga and stretching
        | a hotel and a hostel | an atom and a molecule | hardware and software | a question and a request""",
        "a lizard and a salamander",
    ),
    (
        """Write a short email to {}. | What should I say in a text message to {}?""",
        """ask for a day off | invite a friend to lunch | thank a teacher | cancel a dentist appointment
        | congratulate a coworker on a promotion | ask the landlord to fix the heating | reschedule a meeting
        | wish someone a happy birthday | return a pair of shoes | ask a professor for advice
        | welcome a new neighbor | confirm a hotel booking | say sorry for being late | ask for a refund
        | remind the team about a deadline | recommend a good book | announce a school trip | decline an invitation
        | ask for directions to an office | offer help with moving | thank a host for dinner | report a lost bag
        | request a copy of an invoice | say goodbye to colleagues | ask about opening hours
        | order a birthday cake | share good news with family | ask for feedback on a draft
        | cancel a gym membership | plan a weekend hike""",
        "ask a plumber for a quote",
    ),
)


def split(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split("|")]


def compose() -> tuple[list[str], list[str]]:
    """Return the training prompts, shuffled, and the held-out prompts, one for each held-out topic."""
    train, heldout = [], []
    for forms, topics, unseen in TABLES:
        forms = split(forms)
        train += [form.format(topic) for form in forms for topic in split(topics)]
        heldout += [forms[i % len(forms)].format(topic) for i, topic in enumerate(split(unseen), len(heldout))]
    random.Random(0).shuffle(train)
    return list(dict.fromkeys(train)), heldout


def messages(prompt: str) -> list[dict]:
    return [{"role": "user", "content": prompt}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", type=Path, default=pipeline.DEMO_TARGET,
        help="model folder (default: models/SmolLM2-135M-Instruct in this repository)",
    )  # fmt: skip
    parser.add_argument(
        "--output-dir", type=Path, default=pipeline.REPOSITORY / "launch", help="for both files (default: launch/)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=96, help="cut answers here (default: %(default)s)")
    parser.add_argument(
        "--target-dtype", choices=("float32", "bfloat16"), default="float32",
        help="bfloat16 is faster on CPUs with AVX512-BF16 or AMX, many times slower on others (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="prompts at a time (default: %(default)s)")
    args = parser.parse_args()
    if not (args.target / "config.json").is_file():
        raise UserError(f"no model in {args.target}; run: python tools/prepare_demo_target.py")

    train, heldout = compose()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    prompts, answers = args.output_dir / "demo_prompts.jsonl", args.output_dir / "demo_answers.jsonl"
    # every rank writes the same bytes, so none has to wait for another
    write_jsonl(prompts, ({"messages": messages(prompt)} for prompt in train), prompts.with_suffix(f".{os.getpid()}"))
    flags = ("target", "max_new_tokens", "target_dtype", "device", "batch_size")
    chosen = [part for name in flags for part in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    regenerate_responses.main([str(prompts), str(answers), *chosen])
    if int(os.environ.get("RANK", 0)) > 0:
        return

    rows = list(pipeline.read_rows([str(answers)]))
    unique = list({row["messages"][1]["content"]: row for row in reversed(rows)}.values())[::-1]
    print(f"dropped {len(rows) - len(unique)} repeated answers, kept {len(unique)}")
    unseen = [{"messages": messages(prompt)} for prompt in heldout]
    for name, kept in (("demo_train.jsonl.gz", unique), ("demo_heldout.jsonl", unseen)):
        path = args.output_dir / name
        write_jsonl(path, kept, path.with_suffix(f".{os.getpid()}"))
        print(f"wrote {path}: {len(kept)} rows, {path.stat().st_size / 1e3:.0f} KB")
    prompts.unlink()
    answers.unlink()


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
