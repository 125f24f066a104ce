"""Evaluation by decoding: rules, exactness, the training estimate against the decoder, prompts, figures, real runs."""

import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import eval_acceptance as evaluation
import train_dflash_pipeline as pipeline
from check_pipeline_equiv import started, torchrun_command
from eval_acceptance import Decoded, Decoder, Rule, Turn, block_figures, figures
from helpers import arguments, load
from train_dflash_pipeline import UserError

CPU = torch.device("cpu")
SCRIPT = Path(evaluation.__file__)
BLOCK = 4
PROMPTS = ["Hello", "What is a volcano?", "Name two birds.", "Why?"]


# ---- Sampling rule ----


def total_variation(counts: np.ndarray, probabilities: np.ndarray) -> float:
    return 0.5 * np.abs(counts / counts.sum() - probabilities).sum()


def test_speculative_sampling_gives_the_targets_distribution():
    """Three tokens of a random Markov target, drafted from other distributions: each outcome as often as it should."""
    vocabulary, count, temperature = 4, 4_000, 0.7
    draw = torch.Generator().manual_seed(1)
    after = torch.randn(vocabulary, vocabulary, generator=draw) * 1.5  # logits of the target after each token
    draft_logits = torch.randn(2, vocabulary, generator=draw) * 1.5
    rule = Rule(temperature, torch.Generator().manual_seed(0))
    counts, accepted_sum = np.zeros((vocabulary,) * 3), 0
    for _ in range(count):
        proposals, q = rule.draw(draft_logits)
        accepted, bonus = rule.verify(after[[0, *proposals.tolist()]], proposals, q).tolist()
        tokens = proposals[:accepted].tolist() + [bonus]
        while len(tokens) < 3:
            tokens += rule.draw(after[tokens[-1:]])[0].tolist()
        counts[tuple(tokens[:3])] += 1
        accepted_sum += accepted
    p = (after / temperature).softmax(-1).double().numpy()
    exact = np.einsum("a,ab,bc->abc", p[0], p, p)
    chi_square = ((counts - count * exact) ** 2 / (count * exact)).sum()
    assert chi_square < 63 + 4 * np.sqrt(2 * 63)  # 63 degrees of freedom, four standard deviations
    # what the theory says is accepted: sum of min(p, q), slot by slot
    q = (draft_logits / temperature).softmax(-1).double().numpy()
    first = np.minimum(p[0], q[0])
    second = first @ np.minimum(p, q[1]).sum(1)
    assert accepted_sum / count == pytest.approx(first.sum() + second, abs=0.04)


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing():
    rule = Rule(1.0, torch.Generator().manual_seed(0))
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(200):
        proposals, q = rule.draw(logits[:2])
        assert rule.verify(logits, proposals, q)[0] == 2
    one, other = torch.tensor([0.0, 0, -1e9, -1e9]), torch.tensor([-1e9, -1e9, 0.0, 0])
    for _ in range(50):
        proposals, q = rule.draw(other.expand(2, 4))
        accepted, token = rule.verify(one.expand(3, 4), proposals, q).tolist()
        assert accepted == 0 and token in (0, 1)


def test_greedy_rule_stops_at_the_first_wrong_proposal():
    rule = Rule(0.0)
    logits = torch.eye(6)[[3, 1, 4, 5]]  # the target says 3, 1, 4, then 5
    for proposals, expected in (([3, 1, 4], [3, 5]), ([3, 1, 2], [2, 4]), ([0, 1, 4], [0, 3]), ([3, 0, 4], [1, 1])):
        assert rule.verify(logits, torch.tensor(proposals), None).tolist() == expected


# ---- Decoding, against plain references and the training path ----


def prompt_ids(tokenizer) -> list[list[int]]:
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    return [
        tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
        for chat in chats
    ]


class Subject:
    """A tiny target with its decoder and the answers that uncached greedy decoding gives."""

    def __init__(self, folder: str, limit: int = 24):
        self.folder, self.limit = folder, limit
        self.config, self.model = load(folder)
        target = arguments(target=folder).target
        self.tokenizer = pipeline.load_tokenizer(target)
        self.ends = pipeline.load_frozen_ends(target, self.config, CPU, torch.float32)
        self.prompts = prompt_ids(self.tokenizer)
        free = [self.greedy(prompt) for prompt in self.prompts]

        # the random target never ends a turn by itself: end it with a token that some answers hold, as late as can be
        def cut(answer: list[int], stop: int) -> list[int]:
            return answer[: answer.index(stop) + 1] if stop in answer else answer

        some = [t for t in set().union(*free) if 0 < sum(t in answer for answer in free) < len(free)]
        stop = max(some, key=lambda t: (min(len(cut(a, t)) for a in free if t in a), t))
        self.stop_ids, self.answers = {stop}, [cut(answer, stop) for answer in free]
        self.decoder = Decoder(self.model, self.ends, self.stop_ids, limit)

    @torch.no_grad()
    def greedy(self, prompt: list[int]) -> list[int]:
        tokens = []
        for _ in range(self.limit):
            tokens.append(int(self.model(torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
        return tokens

    def drafter(self, layer_types: str, window: int = 6, seed: int = 0) -> pipeline.DFlashDrafter:
        """Layers by letter, f(ull) or s(liding); random, norms included."""
        text = self.config.get_text_config()
        config = pipeline.DrafterConfig.for_target(
            text, arguments(block_size=BLOCK, num_draft_layers=len(layer_types)).drafter, (1, 3, 6), text.vocab_size - 1
        )
        kinds = tuple({"f": "full_attention", "s": "sliding_attention"}[letter] for letter in layer_types)
        config = pipeline.dataclasses.replace(config, layer_types=kinds, sliding_window=window)
        drafter = pipeline.DFlashDrafter(config, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return drafter

    def train(self, drafter: pipeline.DFlashDrafter, answers: list[list[int]], steps: int) -> pipeline.DFlashDrafter:
        """Fit the drafter to answers with the pipeline's plan and loss."""
        texts = [prompt + answer for prompt, answer in zip(self.prompts, answers)]
        lengths = [len(text) for text in texts]
        mask = np.concatenate([np.arange(len(t)) >= len(p) for t, p in zip(texts, self.prompts)])
        ids = np.concatenate(texts).astype(np.int32)
        offsets = np.cumsum([0, *lengths])
        documents = pipeline.Documents(ids, mask, offsets, np.arange(len(texts)), {})
        args = arguments(
            tokens_per_micro_batch=sum(lengths), anchors_per_micro_batch=64, block_size=BLOCK, noise_std=0.0, seed=1
        )
        planner = pipeline.Planner(documents, args, 1)
        features = [hidden_states(self.model, text, drafter.config.target_layer_ids) for text in texts]
        optimizer = torch.optim.Adam(drafter.parameters(), lr=4e-3)
        for m in range(steps):
            plan = planner.plan(m)
            batch = pipeline.DrafterBatch.from_plan(plan, drafter.config, CPU)
            joined = torch.cat([features[i] for i in plan.documents])
            loss = pipeline.micro_batch_loss(drafter, self.ends, joined, batch, None)[0] / plan.weight_sum
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
        return drafter


@torch.no_grad()
def hidden_states(model, text: list[int], layer_ids) -> torch.Tensor:
    """transformers' own hidden states, [len(text), K*H]; layer i's output is number i + 1."""
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1][0] for i in layer_ids], dim=-1)


@pytest.fixture(scope="module")
def subject(target_folder):
    """kind of target -> Subject."""
    subjects = {}

    def get(kind: str) -> Subject:
        if kind not in subjects:
            subjects[kind] = Subject(target_folder(kind))
        return subjects[kind]

    return get


@pytest.fixture(scope="module")
def trained(subject):
    """(kind, layer letters, steps) -> a drafter fitted so far."""
    made = {}

    def get(kind: str, letters: str, steps: int):
        if (kind, letters, steps) not in made:
            made[kind, letters, steps] = subject(kind).train(
                subject(kind).drafter(letters), subject(kind).answers, steps
            )
        return made[kind, letters, steps]

    return get


CASES = [
    ("qwen3", "sf", 0), ("qwen3", "ff", 30), ("qwen3", "ss", 30), ("qwen3", "ff", 90), ("gemma2", "sf", 60),
]  # fmt: skip


@pytest.mark.parametrize("kind, letters, steps", CASES)
def test_greedy_decoding_is_exact_and_walks_as_the_training_path_does(subject, trained, kind, letters, steps):
    case, drafter = subject(kind), trained(kind, letters, steps)
    blocks = []
    for prompt, answer in zip(case.prompts, case.answers):
        plain = case.decoder.plain(prompt, Rule(0.0))
        drafted = case.decoder.speculative(prompt, Rule(0.0), drafter)
        assert plain.tokens == drafted.tokens == answer
        assert plain.forwards == len(answer) - 1 and drafted.forwards == len(drafted.accepted)
        estimated = evaluation.training_estimate(case.model, case.ends, drafter, prompt, answer)
        assert len(estimated) == len(answer) - 1
        assert evaluation.walk(estimated) == drafted.accepted
        # every block ends in a token of the target's own, unless the answer ends before it
        assert len(answer) - 1 - len(drafted.accepted) <= sum(drafted.accepted) <= len(answer) - len(drafted.accepted)
        blocks += drafted.accepted
    if steps:  # blocks of several lengths were there
        assert {0, 1} <= set(blocks) if steps == 30 else BLOCK - 1 in blocks


def test_answers_end_in_a_stop_token_or_at_the_limit(subject):
    case = subject("qwen3")
    ends = [answer[-1] in case.stop_ids for answer in case.answers]
    assert any(ends) and not all(ends)  # else the test above sees one kind only
    assert all(len(a) == case.limit for a, end in zip(case.answers, ends) if not end)


def test_an_answer_over_with_its_first_token_has_no_block(subject, trained):
    case, drafter = subject("qwen3"), trained("qwen3", "ff", 30)
    decoder = Decoder(case.model, case.ends, {case.answers[1][0]}, case.limit)
    prompt = case.prompts[1]
    for decoded in (decoder.plain(prompt, Rule(0.0)), decoder.speculative(prompt, Rule(0.0), drafter)):
        assert (decoded.tokens, decoded.forwards, decoded.accepted) == (case.answers[1][:1], 0, [])
    assert evaluation.training_estimate(case.model, case.ends, drafter, prompt, case.answers[1][:1]) == []


def test_the_estimate_is_what_training_logs(subject, trained, monkeypatch):
    """Every position at once through micro_batch_loss, with features of transformers' own; groups change nothing."""
    case, drafter = subject("qwen3"), trained("qwen3", "ss", 30)
    prompt, answer = case.prompts[2], case.answers[2]
    plan = evaluation.every_anchor(prompt, answer, BLOCK)
    assert plan.anchor_rows.tolist()[: plan.num_anchors] == list(range(len(prompt), len(prompt + answer) - 1))
    batch = pipeline.DrafterBatch.from_plan(plan, drafter.config, CPU)
    features = hidden_states(case.model, prompt + answer, drafter.config.target_layer_ids)
    _, statistics = pipeline.micro_batch_loss(drafter, case.ends, features, batch, None)[:2]
    for group in (1, 7, 1000):
        monkeypatch.setattr(evaluation, "ESTIMATE_ANCHORS", group)
        estimated = evaluation.training_estimate(case.model, case.ends, drafter, prompt, answer)
        assert [sum(estimated), len(estimated)] == statistics[:2].tolist()


def test_the_training_estimate_agrees_with_decoding_when_overfitted(subject):
    """On answers long enough that the blocks cut by their ends weigh little, by a drafter that has them by heart: a block
    that fails is followed by others near it, so that the shares of half a drafter differ by more."""
    case = subject("qwen3")
    decoder = Decoder(case.model, case.ends, set(), 128)
    plain = [decoder.plain(prompt, Rule(0.0)) for prompt in case.prompts[:2]]
    drafter = case.train(case.drafter("ff", seed=1), [p.tokens for p in plain], 500)
    turns = []
    for prompt, p in zip(case.prompts, plain):
        drafted = decoder.speculative(prompt, Rule(0.0), drafter)
        drafted.estimated = evaluation.training_estimate(case.model, case.ends, drafter, prompt, p.tokens)
        turns.append(Turn(prompt, p, {"it": drafted}))
    result = figures(turns, "it", BLOCK, greedy=True, estimate=True)
    decoded, estimate = (f["acceptance_length_with_bonus"] for f in (result, result["training_estimate"]))
    assert decoded > 3.8
    assert estimate == pytest.approx(decoded, rel=0.05)
    assert result["training_estimate"]["slot_acceptance"] == pytest.approx(result["slot_acceptance"], abs=0.03)
    assert result["training_walk"]["answers_equal_to_decoded"] == len(turns) == result["texts_equal_to_plain_greedy"]


def test_sampled_decoding_follows_the_target(target_folder, tmp_path):
    """The third sampled token of the whole decoder, over a tiny vocabulary, against its exact distribution."""
    import transformers

    vocabulary, count, temperature = 12, 250, 0.8
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, dtype="float32", eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path)
    target = arguments(target=str(tmp_path)).target
    ends = pipeline.load_frozen_ends(target, pipeline.load_target_config(target), CPU, torch.float32)
    draft_config = pipeline.DrafterConfig.for_target(
        config, arguments(block_size=3, num_draft_layers=1).drafter, (0, 1), vocabulary - 1
    )
    drafter = pipeline.DFlashDrafter(draft_config, seed=0)
    decoder, prompt = Decoder(model, ends, set(), 3), [1, 2, 3]
    rule = Rule(temperature, torch.Generator().manual_seed(0))
    counts = np.zeros(vocabulary)
    for _ in range(count):
        counts[decoder.speculative(prompt, rule, drafter).tokens[2]] += 1
    with torch.no_grad():
        pairs = torch.tensor([prompt + [a, b] for a in range(vocabulary) for b in range(vocabulary)])
        p = (model(pairs).logits.double() / temperature).softmax(-1)
    first, second = p[0, 2], p[::vocabulary, 3]  # after the prompt; after each first token
    third = p[:, 4].view(vocabulary, vocabulary, vocabulary)
    exact = torch.einsum("a,ab,abc->c", first, second, third).numpy()
    assert total_variation(np.ones(vocabulary), exact) > 0.3  # the untrained drafter's is nearly uniform
    assert total_variation(counts, exact) < 0.15


# ---- Figures ----


def test_means_are_over_blocks():
    """3, 2, 1, 0 accepted, in two answers: not a mean of means."""
    parts = [[3, 1], [2, 0]]
    turns = [Turn([0], Decoded([0] * 7, 6), {"it": Decoded([0] * 7, 2, a, 1.0)}) for a in parts]
    f = figures(turns, "it", 4, greedy=True, estimate=False)
    assert (f["acceptance_length_without_bonus"], f["acceptance_length_with_bonus"]) == (1.5, 2.5)
    assert (f["slot_acceptance"], f["accepted_histogram"], f["blocks"]) == ([0.75, 0.5, 0.25], [1, 1, 1, 1], 4)
    uneven = [Turn([0], Decoded([0] * 9, 8), {"it": Decoded([0] * 9, len(a), a)}) for a in ([3, 3, 3], [0])]
    assert figures(uneven, "it", 4, True, False)["acceptance_length_without_bonus"] == 2.25


def test_ends_of_the_scale():
    assert block_figures([0] * 5, 4)["acceptance_length_with_bonus"] == 1.0
    assert block_figures([3] * 5, 4)["acceptance_length_with_bonus"] == 4.0
    nothing = block_figures([], 4)
    assert nothing["acceptance_length_with_bonus"] is None and nothing["slot_acceptance"] == [None] * 3


def test_savings_speed_and_exactness():
    plain = [Decoded([1, 2, 3, 4, 5], 4, seconds=4.0), Decoded([1, 2, 3], 2, seconds=2.0)]
    drafted = [Decoded([1, 2, 3, 4, 5], 2, [2, 0], 2.0), Decoded([1, 9, 3], 1, [1], 1.0)]
    turns = [Turn([0], p, {"it": d}) for p, d in zip(plain, drafted)]
    f = figures(turns, "it", 4, greedy=True, estimate=False)
    assert (f["target_forwards"], f["plain_target_forwards"], f["target_forwards_saved"]) == (3, 6, 0.5)
    assert (f["seconds"], f["plain_seconds"], f["speed_up"]) == (3.0, 6.0, 2.0)
    assert (f["texts_equal_to_plain_greedy"], f["tokens_equal_to_plain_greedy"], f["first_differences"]) == (1, 6, [1])
    # sampled answers differ in length: time per token is compared, and there is no exactness
    turns = [Turn([0], Decoded([1] * 5, 4, seconds=4.0), {"it": Decoded([1] * 9, 4, [1] * 4, seconds=4.0)})]
    f = figures(turns, "it", 4, greedy=False, estimate=False)
    assert (f["speed_up"], f["target_forwards_saved"]) == (2.0, 0.5) and "texts_equal_to_plain_greedy" not in f


def test_walk_skips_what_a_block_covers():
    assert evaluation.walk([2, 9, 9, 0, 1, 9, 0]) == [2, 0, 1, 0]
    assert evaluation.walk([]) == []


# ---- Prompts ----


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompt_files(tmp_path):
    system, user, answer = ({"role": r, "content": c} for r, c in (("system", "s"), ("user", "u"), ("assistant", "a")))
    first = write(tmp_path / "first.jsonl", [
        {"messages": [system, user, answer, user, answer], "category": "x"},
        {"messages": [user, answer, user]},
        {"turns": ["one", "two", "three"], "category": 7},
        {"messages": [system, user]},  # the first row's prompt once more
        {"turns": ["u"]},
    ])  # fmt: skip
    second = write(tmp_path / "second.jsonl", [{"prompt": "u", "response": "a"}, {"prompt": "one"}])
    conversations, sets = evaluation.read_prompts([first, second], 0)
    asked = [([m["content"] for m in c.opening], c.later, c.category, c.set) for c in conversations]
    assert asked == [
        (["s", "u"], [], "x", "first"), (["u", "a", "u"], [], "", "first"), (["one"], ["two", "three"], "7", "first"),
        (["u"], [], "", "first"), (["one"], [], "", "second"),
    ]  # fmt: skip
    assert [(s["rows"], s["used"], s["duplicates"]) for s in sets.values()] == [(5, 4, 1), (2, 1, 1)]
    conversations, sets = evaluation.read_prompts([first], 2)
    assert len(conversations) == 2 and sets["first"]["used"] == 2


@pytest.mark.parametrize("rows, message", [
    ([], "no prompts"),
    ([{"turns": ["a"]}, {"turns": []}], "row 2: no prompt"),
    ([{"turns": ["a", ""]}], "row 1: no prompt"),
    ([{"turns": "abc"}], "row 1: no prompt"),
    ([{"messages": []}], "row 1: no prompt"),
    ([{"messages": [{"role": "assistant", "content": "a"}]}], "row 1: no prompt"),
    ([{"messages": "hello"}], "row 1: no prompt"),
    ([{"prompt": ["hello"]}], "row 1: no prompt"),
])  # fmt: skip
def test_prompt_files_without_a_prompt(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        evaluation.read_prompts([write(tmp_path / "p.jsonl", rows)], 0)


def test_a_file_of_duplicates_and_a_missing_file(tmp_path):
    first, second = (write(tmp_path / f"{name}.jsonl", [{"turns": ["u"]}]) for name in "ab")
    with pytest.raises(UserError, match="all are in earlier files"):
        evaluation.read_prompts([first, second], 0)
    with pytest.raises(UserError, match="no such file"):
        evaluation.read_prompts([str(tmp_path / "c.jsonl")], 0)


def test_thinking_mode_in_words():
    template = "{% if enable_thinking %}<think>{% endif %}"
    assert evaluation.thinking_mode("{{ messages }}", {}, "x") == "the template has none"
    assert "default (enable_thinking not given)" in evaluation.thinking_mode(template, {}, "x")
    shown = evaluation.thinking_mode(template, {"enable_thinking": False}, "x<think>\n\n</think>\n\n")
    assert shown == "enable_thinking=false; the prompt closes the think block"


# ---- The command ----


@pytest.fixture(scope="module")
def runs(subject, trained, tmp_path_factory):
    """Two run folders and a bare drafter folder for the tiny target, and a prompt file of two conversations."""
    from safetensors.torch import save_file

    case, root = subject("qwen3"), tmp_path_factory.mktemp("runs")
    for name, drafter in (("full", trained("qwen3", "ff", 30)), ("sliding", trained("qwen3", "ss", 30))):
        folder = root / name / "checkpoints" / "step-000030" / "drafter"
        folder.mkdir(parents=True)
        pipeline.write_json(folder / "config.json", drafter.config.to_json())
        save_file(drafter.state_dict(), folder / "model.safetensors")
        flags = arguments(target=case.folder, target_dtype="float32", block_size=BLOCK, num_draft_layers=2).flat()
        identity = {"data": "abc", "target": pipeline.target_hashes(case.folder)}
        pipeline.write_json(folder.parent / "state.json", {"step": 30, "arguments": flags, "identity": identity})
        (folder.parents[1] / "latest").write_text("step-000030")
    (root / "bare").mkdir()
    for file in folder.iterdir():
        (root / "bare" / file.name).write_bytes(file.read_bytes())
    (root / "broken").mkdir()
    write(root / "mixed.jsonl", [
        {"turns": [PROMPTS[0], "And then?"], "category": "short"}, {"turns": [PROMPTS[1]], "category": "long"},
        {"turns": [PROMPTS[1]]},
    ])  # fmt: skip
    write(root / "other.jsonl", [{"messages": [{"role": "user", "content": PROMPTS[2]}]}])
    return root


def command(monkeypatch, capsys, *flags) -> tuple[str, str]:
    """(stdout, stderr) of the tool's main()."""
    monkeypatch.setattr(sys, "argv", ["eval_acceptance.py", *map(str, flags), "--device", "cpu"])
    capsys.readouterr()
    evaluation.main()
    return capsys.readouterr()


def test_two_drafters_on_two_sets(subject, runs, monkeypatch, capsys):
    prompts = [runs / "mixed.jsonl", runs / "other.jsonl"]
    out, err = command(monkeypatch, capsys, runs / "full", runs / "sliding", "--prompts", *prompts,
                       "--max-new-tokens", 20, "--json", runs / "r.json", "--target-dtype", "float32")  # fmt: skip
    report = json.loads((runs / "r.json").read_text())
    assert report["sets"] == ["mixed", "mixed: long", "mixed: short", "other", "all sets"]
    assert report["prompt_files"]["mixed"]["duplicates"] == 1 and report["rule"] == "greedy"
    assert "mixed: 2 prompts, 1 duplicates left out" in out and "<|im_start|>user\\nHello<|im_end|>" in out
    assert "thinking mode: the template has none" in out and "warning" not in err
    case = subject("qwen3")
    for name, drafter in report["drafters"].items():
        sets = drafter["sets"]
        assert [sets[s]["turns"] for s in report["sets"]] == [3, 1, 2, 1, 4]
        for key in ("tokens", "blocks", "target_forwards", "tokens_equal_to_plain_greedy"):
            assert sets["mixed: long"][key] + sets["mixed: short"][key] == sets["mixed"][key]
            assert sets["mixed"][key] + sets["other"][key] == sets["all sets"][key]
        assert sets["all sets"]["texts_equal_to_plain_greedy"] == 4 and sets["all sets"]["first_differences"] == []
        assert sets["all sets"]["training_walk"]["answers_equal_to_decoded"] == 4
        assert sets["other"]["tokens"] == min(20, len(case.greedy(case.prompts[2])))
        assert out.count(f"| {name}") == 5
    figures_seen = [d["sets"]["all sets"]["acceptance_length_with_bonus"] for d in report["drafters"].values()]
    assert figures_seen[0] != figures_seen[1]


def test_turns_hold_the_plain_answer(subject, runs, monkeypatch, capsys):
    """The second prompt of a conversation: the chat with the target's own first answer, the same for every drafter."""
    case, asked = subject("qwen3"), []
    right = Decoder.speculative

    def speculative(self, prompt, *rest):
        asked.append(prompt)
        return right(self, prompt, *rest)

    monkeypatch.setattr(Decoder, "speculative", speculative)
    command(monkeypatch, capsys, runs / "full", runs / "sliding", "--prompts", runs / "mixed.jsonl",
            "--max-new-tokens", 12, "--num-prompts", 1)  # fmt: skip
    first = case.tokenizer.decode(case.greedy(case.prompts[0])[:12], skip_special_tokens=True)
    chat = [{"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": first},
            {"role": "user", "content": "And then?"}]  # fmt: skip
    text = case.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    second = case.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert asked[2:] == [case.prompts[0]] * 2 + [second] * 2  # after one warm-up each


def test_template_variables_reach_the_prompts(subject, runs, monkeypatch, capsys):
    tokenizer = pipeline.byte_tokenizer()
    tokenizer.chat_template += "{% if not enable_thinking %}<think></think>{% endif %}"
    tokenizer.save_pretrained(runs / "thinker")
    for value, end in ((False, "<think></think>"), (True, "assistant\n")):
        out, err = command(
            monkeypatch, capsys, runs / "full", "--prompts", runs / "other.jsonl", "--max-new-tokens", 3, "--tokenizer",
            runs / "thinker", "--chat-template-kwargs", json.dumps({"enable_thinking": value, "thnking": 1}),
            "--json", runs / "t.json",
        )  # fmt: skip
        report = json.loads((runs / "t.json").read_text())
        assert report["first_prompt"].endswith(end) and repr(report["first_prompt"]) in out
        assert report["thinking_mode"].startswith(f"enable_thinking={json.dumps(value)}")
        assert err.count("the chat template does not read thnking\n") == 1


def test_template_variables_are_those_of_the_runs(capsys):
    off, on = '{"enable_thinking": false}', '{"enable_thinking": true}'
    trained = {"a": {"chat_template_kwargs": off}, "b": {"chat_template_kwargs": off}, "bare": {}}
    choose = evaluation.choose_template_kwargs
    assert choose(None, trained) == {"enable_thinking": False} and choose(None, {"bare": {}}) == {}
    assert choose("{}", {"bare": {}}) == {} and choose(off, trained) == {"enable_thinking": False}
    assert capsys.readouterr().err == ""
    assert choose(on, trained | {"c": {"chat_template_kwargs": on}}) == {"enable_thinking": True}
    warned = capsys.readouterr().err.splitlines()
    assert [line.split(" was trained")[0] for line in warned] == ["warning: a", "warning: b"]
    for other in (on, None):
        with pytest.raises(UserError, match="different --chat-template-kwargs"):
            choose(None, trained | {"c": {"chat_template_kwargs": other}})


def test_targets_whose_cache_cannot_take_tokens_back_are_refused(runs, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "load_target", lambda *_: pytest.fail("loaded"))
    right = pipeline.load_target_config

    def hybrid(target):
        config = right(target)
        config.layer_types = ["linear_attention", "full_attention"]
        return config

    monkeypatch.setattr(pipeline, "load_target_config", hybrid)
    with pytest.raises(UserError, match="running state \\(linear_attention\\)"):
        command(monkeypatch, capsys, runs / "full", "--prompts", runs / "other.jsonl")


def test_a_prompt_that_the_template_refuses(runs, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "load_target", lambda *_: pytest.fail("loaded"))
    write(runs / "odd.jsonl", [{"turns": ["fine"]}, {"messages": [{"role": "user", "content": None}, {}]}])
    tokenizer = pipeline.byte_tokenizer()
    tokenizer.chat_template += "{{ raise_exception('no role') if not messages[-1].role }}"
    tokenizer.save_pretrained(runs / "strict")
    with pytest.raises(UserError, match="odd.jsonl, row 2: refused by the chat template .*no role"):
        command(monkeypatch, capsys, runs / "full", "--prompts", runs / "odd.jsonl", "--tokenizer", runs / "strict")


def test_prompts_that_leave_no_room_are_counted(runs, monkeypatch, capsys):
    write(runs / "long.jsonl", [{"turns": ["Hi", "x" * 600, "never asked"]}])
    _, err = command(monkeypatch, capsys, runs / "full", "--prompts", runs / "long.jsonl", "--max-new-tokens", 5)
    assert "long: 2 turns left out, too long for the target" in err


def test_untrained_beside_trained_and_a_bare_folder(subject, runs, monkeypatch, capsys):
    flags = ["--prompts", runs / "other.jsonl", "--max-new-tokens", 20, "--no-estimate"]
    out, _ = command(monkeypatch, capsys, runs / "full", *flags, "--untrained")
    last = out.strip().splitlines()[-1]
    before, after = (float(x) for x in last.removeprefix("held-out acceptance length: ").split(" -> "))
    assert before < after and f"| {runs / 'full'} (untrained)" in out and "estimate" not in out
    out, _ = command(monkeypatch, capsys, runs / "bare", *flags, "--target", subject("qwen3").folder)
    assert f"| {runs / 'bare'}" in out


def test_sampled_runs_are_labelled_and_repeatable(runs, monkeypatch, capsys):
    seen = []
    for seed in (3, 3, 4):
        out, _ = command(monkeypatch, capsys, runs / "full", "--prompts", runs / "other.jsonl", "--max-new-tokens", 20,
                         "--temperature", 0.9, "--seed", seed, "--json", runs / "s.json")  # fmt: skip
        report = json.loads((runs / "s.json").read_text())
        f = report["drafters"][str(runs / "full")]["sets"]["other"]
        seen.append((f["accepted_histogram"], f["tokens"]))
        assert report["rule"] == "speculative sampling at temperature 0.9" and report["rule"] in out
        assert not {"training_estimate", "texts_equal_to_plain_greedy"} & f.keys()
    assert seen[0] == seen[1] != seen[2]


def test_a_target_in_another_dtype_is_warned_of(runs, monkeypatch, capsys):
    _, err = command(monkeypatch, capsys, runs / "full", "--prompts", runs / "other.jsonl", "--max-new-tokens", 4,
                     "--target-dtype", "bfloat16")  # fmt: skip
    assert err.count("was trained on a target in float32, this one is in bfloat16") == 1


def test_an_export_knows_its_target_and_its_template_variables(subject, runs, monkeypatch, capsys):
    """As a checkpoint does: nothing need be said again, and what differs is warned of."""
    folder, target = runs / "exported", subject("qwen3").folder
    folder.mkdir()
    for file in (runs / "bare").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    record = {"name": target, "dtype": "float32", "trained_on": "float32", **pipeline.target_hashes(target)}
    record = {"step": 30, "data": "abc", "chat_template_kwargs": '{"enable_thinking": true}', "target": record}
    flags = [folder, "--prompts", runs / "other.jsonl", "--max-new-tokens", 4, "--json", runs / "x.json"]
    pipeline.write_json(folder / "export.json", record)
    _, err = command(monkeypatch, capsys, *flags)
    assert json.loads((runs / "x.json").read_text())["chat_template_kwargs"] == {"enable_thinking": True}
    assert "other weights" not in err
    _, err = command(monkeypatch, capsys, *flags, "--chat-template-kwargs", "{}")
    assert f"{folder} was trained with --chat-template-kwargs" in err
    for name in ("weights_sha256", "matrices_sha256"):
        other = record | {"target": record["target"] | {name: "0" * 64}}
        pipeline.write_json(folder / "export.json", other)
        _, err = command(monkeypatch, capsys, *flags)
        assert f"{folder} was trained on, or exported for, a target with other weights than {target}" in err
    del record["chat_template_kwargs"], record["target"]["matrices_sha256"]  # of an earlier version: not known, not compared
    pipeline.write_json(folder / "export.json", record)
    _, err = command(monkeypatch, capsys, *flags, "--chat-template-kwargs", '{"enable_thinking": true}')
    assert "other weights" not in err and "was trained with" not in err


def test_a_json_file_of_somebody_else_beside_a_drafter_says_nothing(runs, tmp_path):
    for file in (runs / "bare").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for text in ("[]", "{", '{"target": "x"}', '{"target": {"name": "x"}}'):
        (tmp_path / "export.json").write_text(text)
        assert evaluation.find_drafter(str(tmp_path)) == (tmp_path, {})


def test_drafters_take_turns_in_coming_first(subject, runs, monkeypatch, capsys):
    """What the first one of a turn fills or loads counts against it."""
    order, right = [], evaluation.Decoder.speculative

    def speculative(self, ids, rule, drafter):
        order.append(drafter.config.layer_types[0])
        return right(self, ids, rule, drafter)

    monkeypatch.setattr(evaluation.Decoder, "speculative", speculative)
    prompts = ["--prompts", runs / "mixed.jsonl", "--max-new-tokens", 4]
    command(monkeypatch, capsys, runs / "full", runs / "sliding", *prompts)
    pairs = [pair[0] for pair in zip(order[2::2], order[3::2])]  # after the warm-up
    assert set(pairs) == {"full_attention", "sliding_attention"}


def test_expected_acceptance(runs, monkeypatch, capsys):
    flags = [runs / "full", "--prompts", runs / "other.jsonl", "--max-new-tokens", 8, "--expect-acceptance"]
    command(monkeypatch, capsys, *flags, 1)
    with pytest.raises(UserError, match="acceptance length .*, expected 4.1"):
        command(monkeypatch, capsys, *flags, 4.1)


@pytest.mark.parametrize("flags, message", [
    (["full", "--max-new-tokens", "1"], "--max-new-tokens 1: must be at least 2"),
    (["full", "--temperature", "nan"], "--temperature nan: must be at least 0"),
    (["full", "--temperature", "0.5", "--estimate"], "--estimate is for greedy"),
    (["full", "--chat-template-kwargs", "[1]"], "expected a JSON object"),
    (["full", "full"], "named twice"),
    (["full", "--json", "nowhere/x.json"], "no such folder"),
    (["full", "--plot", "x.png"], "pip install matplotlib"),
    (["bare"], "does not say which target"),
    (["full", "bare", "--untrained"], "--untrained needs runs"),
    (["broken"], "broken: "),
])  # fmt: skip
def test_mistakes_are_told_before_a_model_is_loaded(runs, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(pipeline, "load_target", lambda *_: pytest.fail("loaded"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(runs)
    with pytest.raises(UserError, match=message):
        command(monkeypatch, capsys, *flags, "--prompts", "other.jsonl")


def test_a_drafter_of_another_target_is_refused(runs, target_folder, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "load_target", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UserError, match="hidden size"):
        command(monkeypatch, capsys, runs / "full", "--prompts", runs / "other.jsonl", "--target", "toy")


def test_processes_share_the_prompts_out(runs, monkeypatch, capsys):
    """Two processes give every figure that one gives, but the seconds."""
    flags = [runs / "full", "--prompts", runs / "mixed.jsonl", runs / "other.jsonl", "--max-new-tokens", 10,
             "--device", "cpu", "--json"]  # fmt: skip
    command(monkeypatch, capsys, *flags, runs / "one.json")
    log = runs / "two.log"
    with started(torchrun_command(2, SCRIPT, [*map(str, flags), str(runs / "two.json")]), log) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(200)
    assert process.returncode == 0, log.read_text()
    one, two = (json.loads((runs / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one.pop("processes"), two.pop("processes")) == (1, 2)
    for report in (one, two):
        for drafter, key in itertools.product(report["drafters"].values(), ("seconds", "plain_seconds", "speed_up")):
            for f in drafter["sets"].values():
                del f[key]
    assert one == two
