"""Chat rows -> token ids and loss mask: what is supervised, what is left out, what is cached."""

import gzip
import json
import re
import shutil
import threading
import time
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import train_dflash_pipeline as pipeline
from helpers import arguments
from train_dflash_pipeline import (
    ChatTokenizer, Topology, UserError, byte_tokenizer, choose_mask_token, parse_arguments, tokenise_rows,
)  # fmt: skip

LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Reasoning stays in turns after the last question only, where a turn without any gets an empty think block.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set reason = m.reasoning_content or '' %}{% set text = m.content or '' %}{% if '</think>' in text %}"
    "{% set reason = text.split('</think>')[0].split('<think>')[-1] %}{% set text = text.split('</think>')[-1] %}"
    "{% endif %}{% if loop.index0 > ns.last %}<think>\n{{ reason.strip('\n') }}\n</think>\n\n{{ text.lstrip('\n') }}"
    "{% else %}{{ text }}{% endif %}{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function.name }}\n"
    "</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Channels; the last turn ends with another token than earlier ones.
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "Rayleigh scattering."},
    {"role": "user", "content": "And at dusk?"},
    {"role": "assistant", "content": "Red: a longer path.\nÄther? No."},
]
FIRST, SECOND = CHAT[1]["content"], CHAT[3]["content"]


def tokenizer_with(template: str):
    special = {
        LLAMA3: ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        GEMMA: ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        HARMONY: ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
    }
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *special.get(template, [])]})
    tokenizer.chat_template = template
    return tokenizer


def supervised(template: str, messages: list[dict], **row) -> list[list[str]]:
    """Per document: the supervised stretches, decoded."""
    tokenizer = tokenizer_with(template)
    documents, _ = ChatTokenizer(tokenizer).documents({"messages": messages} | row)
    runs = [[(k, [i for i, _ in g]) for k, g in groupby(zip(*d), key=lambda pair: pair[1])] for d in documents]
    return [[tokenizer.decode(ids) for on, ids in document if on] for document in runs]


def whole_texts(template: str, messages: list[dict], **row) -> list[str]:
    tokenizer = tokenizer_with(template)
    documents, _ = ChatTokenizer(tokenizer).documents({"messages": messages} | row)
    return [tokenizer.decode(ids) for ids, _ in documents]


def write_rows(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokenise(paths, max_tokens=1000, template=pipeline.CHATML):
    return tokenise_rows(paths, ChatTokenizer(tokenizer_with(template), max_tokens), show_progress=False)


def valid_row(answer="fine") -> dict:
    return {"messages": [{"role": "user", "content": "ok?"}, {"role": "assistant", "content": answer}]}


# Loss mask ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template, end", [(pipeline.CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (GEMMA, "<end_of_turn>")])
def test_answers_and_their_end_of_turn_are_supervised(template, end):
    assert supervised(template, CHAT) == [[FIRST + end, SECOND + end]]
    [text] = whole_texts(template, CHAT)
    assert text == tokenizer_with(template).apply_chat_template(CHAT, tokenize=False)


def test_template_that_rewrites_earlier_turns_gives_a_document_per_answer():
    """Qwen3 drops earlier think blocks: each answer is trained in the context in which it was written."""
    assert supervised(QWEN3, CHAT) == [[FIRST + "<|im_end|>"], [SECOND + "<|im_end|>"]]
    first, second = whole_texts(QWEN3, CHAT)
    assert first.endswith(f"<|im_start|>assistant\n<think>\n\n</think>\n\n{FIRST}<|im_end|>\n")
    assert f"assistant\n{FIRST}<|im_end|>" in second and second.count("<think>") == 1


def test_inserted_empty_think_block_is_not_supervised_even_if_it_holds_the_answer():
    for answer in ("think", "in", ">", "a"):
        chat = [CHAT[0], {"role": "assistant", "content": answer}]
        assert supervised(QWEN3, chat) == [[answer + "<|im_end|>"]]
        assert supervised(HARMONY, chat) == [[answer + "<|return|>"]]


def test_reasoning_is_supervised_as_the_template_writes_it():
    written = "<think>\nwaves\n</think>\n\nwaves, a lot<|im_end|>"
    inline = [CHAT[0], {"role": "assistant", "content": "<think>waves</think>waves, a lot"}]
    field = [CHAT[0], {"role": "assistant", "content": "waves, a lot", "reasoning_content": "waves"}]
    assert supervised(QWEN3, inline) == supervised(QWEN3, field) == [[written]]


@pytest.mark.parametrize("content", ["Let me see.", "", None])
def test_tool_calls_are_supervised(content):
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
    chat = [CHAT[0], {"role": "assistant", "content": content, "tool_calls": [call]}]
    assert supervised(QWEN3, chat) == [[f"{content or ''}<tool_call>\nlook_up\n</tool_call><|im_end|>"]]


def test_last_turn_with_another_end_token():
    assert supervised(HARMONY, CHAT) == [[FIRST + "<|return|>"], [SECOND + "<|return|>"]]


def test_white_space_around_an_answer_is_supervised_where_the_template_keeps_it():
    chat = [CHAT[0], {"role": "assistant", "content": " spaced \n"}]
    assert supervised(pipeline.CHATML, chat) == [[" spaced \n<|im_end|>"]]
    assert supervised(LLAMA3, chat) == [["spaced<|eot_id|>"]]


def test_answer_that_quotes_the_question_or_itself():
    chat = [{"role": "user", "content": "say no no"}, {"role": "assistant", "content": "no"},
            {"role": "user", "content": "no"}, {"role": "assistant", "content": "no no"}]  # fmt: skip
    assert supervised(pipeline.CHATML, chat) == [["no<|im_end|>", "no no<|im_end|>"]]


@pytest.mark.parametrize("template", [pipeline.CHATML, LLAMA3, GEMMA])
def test_cut_off_answer_ends_the_document_without_an_end_of_turn(template):
    [runs] = supervised(template, CHAT, finish_reason="length")
    assert runs[0].startswith(FIRST) and runs[0] != FIRST and runs[1] == SECOND
    assert whole_texts(template, CHAT, finish_reason="length")[0].endswith(SECOND)
    assert supervised(template, CHAT, finish_reason="stop")[0][1] != SECOND


def test_cut_off_answer_with_reasoning_gets_no_end_of_turn_either():
    chat = [CHAT[0], {"role": "assistant", "content": "so", "reasoning_content": "because"}]
    assert supervised(QWEN3, chat, finish_reason="length") == [["<think>\nbecause\n</think>\n\nso"]]
    assert whole_texts(QWEN3, chat, finish_reason="length")[0].endswith("</think>\n\nso")


def test_cut_off_concerns_the_last_turn_only():
    """Qwen3 gives a document per answer: the earlier one was not cut."""
    assert supervised(QWEN3, CHAT, finish_reason="length") == [[FIRST + "<|im_end|>"], [SECOND]]


@pytest.mark.parametrize("template", [pipeline.CHATML, LLAMA3, GEMMA, QWEN3, HARMONY])
def test_rows_with_a_cut_off_answer_can_be_left_out(template):
    chat = ChatTokenizer(tokenizer_with(template), cut_off_answers="drop")
    assert chat.documents({"messages": CHAT, "finish_reason": "length"}) == ([], ["cut off by a length limit"])
    for reason in ("stop", "tool_calls", None, 7):
        assert supervised(template, CHAT, finish_reason=reason) == supervised(template, CHAT)


def test_cut_off_does_not_concern_a_chat_that_ends_with_another_turn():
    chat = [*CHAT, {"role": "user", "content": "thanks"}]
    assert supervised(pipeline.CHATML, chat, finish_reason="length") == supervised(pipeline.CHATML, CHAT)


def test_a_turn_after_the_last_answer_adds_nothing():
    assert whole_texts(QWEN3, [*CHAT, {"role": "user", "content": "thanks"}]) == whole_texts(QWEN3, CHAT)


def test_template_variables_reach_every_rendering():
    template = QWEN3.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n"
                             "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}")
    template = template.replace("{% for m in messages %}<", "{{ greeting }}{% for m in messages %}<")
    tokenizer, variables = tokenizer_with(template), {"enable_thinking": False, "greeting": "Hello! "}
    [(ids, mask)], reasons = ChatTokenizer(tokenizer, template_kwargs=variables).documents({"messages": CHAT[:2]})
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHAT[:2], tokenize=False, **variables)
    assert tokenizer.decode(ids).startswith("Hello! ") and not reasons
    assert tokenizer.decode(ids[mask]) == FIRST + "<|im_end|>"


def test_tools_and_calls_render_as_the_served_template_does():
    """Arguments that are JSON text, as servers give them, become objects, as servers hand them to the template."""
    template = pipeline.CHATML.replace("{% for", "{% if tools %}{{ tools | tojson }}{% endif %}{% for", 1).replace(
        "{{ message.content }}", "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
        "<call>{{ call.function | tojson }}</call>{% endfor %}")  # fmt: skip
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]

    def chat(arguments):
        call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
        return [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "blue"}, CHAT[1]]  # fmt: skip

    served = tokenizer_with(template).apply_chat_template(chat({"of": "sky"}), tools=tools, tokenize=False)
    for arguments in ({"of": "sky"}, '{"of": "sky"}'):
        assert whole_texts(template, chat(arguments), tools=tools) == [served]
        [[call, answer]] = supervised(template, chat(arguments), tools=tools)
        assert call == '<call>{"name": "look_up", "arguments": {"of": "sky"}}</call><|im_end|>'
        assert answer == FIRST + "<|im_end|>"
    assert '"not json"' in whole_texts(template, chat("not json"), tools=tools)[0]


def test_white_space_trimmed_from_offsets_leaves_no_hole():
    """Llama-3's tokenizer gives tokens of mere spaces an empty range of characters."""
    tokenizer = tokenizer_with(pipeline.CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    answer = "  if x:\n        return  1  "
    [(ids, mask)], _ = ChatTokenizer(tokenizer).documents({"prompt": " code? ", "response": answer})
    assert [on for on, _ in groupby(mask.tolist())] == [False, True, False]
    assert tokenizer.decode(ids[mask]) == answer + "<|im_end|>"


def test_tokens_are_those_of_the_whole_text_with_one_bos():
    tokenizer = tokenizer_with(LLAMA3)
    bos = tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    assert tokenizer("x")["input_ids"][0] == bos
    [(ids, _)], _ = ChatTokenizer(tokenizer).documents({"messages": CHAT})
    assert ids.tolist().count(bos) == 1 and ids[0] == bos
    assert ids.tolist() == tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]


def test_many_turns_are_tokenised_once(monkeypatch):
    tokenizer, calls = tokenizer_with(pipeline.CHATML), []
    monkeypatch.setattr(type(tokenizer), "_encode_plus", lambda self, text, *a, right=type(tokenizer)._encode_plus, **k:
                        calls.append(len(text)) or right(self, text, *a, **k))  # fmt: skip
    turns = [{"role": role, "content": f"turn {i}"} for i in range(30) for role in ("user", "assistant")]
    [(ids, _)], _ = ChatTokenizer(tokenizer).documents({"messages": turns})
    assert calls == [len(tokenizer.decode(ids))]


# Generation tags ------------------------------------------------------------------------------------------------------

ANSWER = "{{ message.content }}<|im_end|>"
TAGS = {
    "answer and end of turn": "{% generation %}" + ANSWER + "{% endgeneration %}",
    "answer only": "{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>",
    "answer, end of turn, line feed": "{%- generation -%}" + ANSWER + "{{ '\n' }}{%- endgeneration -%}",
    "in two pieces": "{% generation %}{{ message.content[:3] }}{% endgeneration %}"
    "{% generation %}{{ message.content[3:] }}<|im_end|>{% endgeneration %}",
}


def tagged_chatml(body: str) -> str:
    newline = "" if "'\n'" in body else "{{ '\n' }}"
    return pipeline.CHATML.replace(
        ANSWER + "\n",
        "{% if message.role == 'assistant' %}" + body + newline + "{% else %}" + ANSWER + "{{ '\n' }}{% endif %}",
    )


@pytest.mark.parametrize("body", TAGS.values(), ids=TAGS)
@pytest.mark.parametrize("row", [{}, {"finish_reason": "length"}], ids=["whole", "cut off"])
def test_generation_tags_give_the_mask_of_the_prefix_method(body, row):
    row |= {"messages": [{"role": "system", "content": "Answer."}, *CHAT]}
    [(ids, mask)], _ = ChatTokenizer(tokenizer_with(pipeline.CHATML)).documents(row)
    [(tagged_ids, tagged_mask)], reasons = ChatTokenizer(tokenizer_with(tagged_chatml(body))).documents(row)
    assert np.array_equal(ids, tagged_ids) and np.array_equal(mask, tagged_mask) and not reasons


def test_generation_tags_around_all_never_reach_into_the_prompt():
    template = "{% generation %}" + pipeline.CHATML + "{% endgeneration %}"
    assert supervised(template, CHAT) == [[FIRST + "<|im_end|>", SECOND + "<|im_end|>"]]


def test_generation_tags_serve_where_the_generation_prompt_is_not_continued():
    opens_thinking = [t.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
                      for t in (tagged_chatml(TAGS["answer only"]), pipeline.CHATML)]  # fmt: skip
    assert supervised(opens_thinking[0], CHAT) == [[FIRST + "<|im_end|>", SECOND + "<|im_end|>"]]
    assert ChatTokenizer(tokenizer_with(opens_thinking[1])).documents({"messages": CHAT}) == (
        [], ["whose chat template does not continue its own generation prompt"]
    )  # fmt: skip


def test_tags_of_a_template_that_renders_otherwise_each_time_are_not_trusted():
    now = "{{ strftime_now('%f') }}"
    template = tagged_chatml("{% generation %}{{ message.content }}" + now + "{% endgeneration %}<|im_end|>")
    assert ChatTokenizer(tokenizer_with(template)).documents({"messages": CHAT[:2]}) == (
        [], ["that renders otherwise when its generation tags are followed"]
    )  # fmt: skip


def test_tagged_template_that_rewrites_earlier_turns_gives_a_document_per_answer():
    opening = "{% if loop.index0 > ns.last %}<think>"
    marked = QWEN3.replace(opening, "{% generation %}" + opening)
    marked = marked.replace("{% else %}{{ m.content }}{% endif %}<|im_end|>\n", "<|im_end|>{% endgeneration %}"
                            "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}")  # fmt: skip
    chat = [CHAT[0], CHAT[1] | {"reasoning_content": "waves"}, *CHAT[2:]]
    think = "<think>\nwaves\n</think>\n\n"
    assert supervised(marked, chat) == [[f"{think}{FIRST}<|im_end|>"], [f"<think>\n\n</think>\n\n{SECOND}<|im_end|>"]]
    assert supervised(marked, chat, finish_reason="length")[1] == [f"<think>\n\n</think>\n\n{SECOND}"]


@pytest.mark.parametrize("template, reason", [
    ("{% generation %}{% endgeneration %}" + pipeline.CHATML, "without a supervised token"),
    ("{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}",
     "in which every token would be supervised"),
    ("{% for m in messages if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
     "{% endfor %}", "in which every token would be supervised"),
])  # fmt: skip
def test_mask_of_nothing_or_of_everything_is_an_error_that_names_the_tokenizer(tmp_path, template, reason):
    tokenizer = tokenizer_with(template)
    tokenizer.name_or_path = "some/tokenizer"
    path = write_rows(tmp_path / "x.jsonl", [valid_row()])
    with pytest.raises(UserError, match=f"chat template of some/tokenizer: 1 {reason}"):
        tokenise_rows([path], ChatTokenizer(tokenizer, 100), show_progress=False)


@pytest.mark.parametrize("template, text", [
    ("[INST] {question} [/INST] {answer}</s>", "▁deep space</s>"),  # Llama 2, Mistral: the first token holds the space
    ("[INST] {question} [/INST]{answer}</s>", "deep space</s>"),
    ("[INST] {question} [/INST]\n{answer}</s>", "deep space</s>"),
])  # fmt: skip
def test_a_space_before_the_answer_is_of_its_first_token(template, text):
    """With a tokenizer whose tokens begin with the space before them: ▁space is one token, ▁deep another than deep."""
    words = ["[INST]", "[/INST]", "</s>", "<unk>", "▁deep", "deep", "▁space", "▁how", "▁", "\n", "▁[INST]"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    head, tail = template.replace("{question}", "{{ m.content }}").split("{answer}")
    user, before_answer = head.split("[/INST]")
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}{user}[/INST]{{% else %}}{before_answer}{{{{ m.content }}}}{tail}"
        "{% endif %}{% endfor %}"
    )
    [(ids, mask)], reasons = ChatTokenizer(tokenizer).documents({"prompt": "how", "response": "deep space"})
    assert not reasons and "".join(tokenizer.convert_ids_to_tokens(ids[mask])).replace("▁space", " space") == text


def test_white_space_between_an_answer_and_the_end_of_its_turn_is_no_gap():
    """Blocks end at gaps: with one, the end of turn would never be a label (Llama 2 writes a space there)."""
    template = pipeline.CHATML.replace("{{ message.content }}<|im_end|>", "{{ message.content }} \n<|im_end|>")
    assert supervised(template, CHAT) == [[f"{FIRST} \n<|im_end|>", f"{SECOND} \n<|im_end|>"]]
    other = pipeline.CHATML.replace("{{ message.content }}<|im_end|>", "{{ message.content }} (by me)<|im_end|>")
    assert supervised(other, CHAT[:2]) == [[FIRST, "<|im_end|>"]]


def test_an_end_of_turn_that_is_no_special_token_is_supervised():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|eot|>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot|>\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    plain = tokenizer.chat_template
    tagged = plain.replace("{{ m.content }}<|eot|>", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot|>"
                           "{% endgeneration %}{% else %}{{ m.content }}{% endif %}")  # fmt: skip
    outside = tagged.replace("<|eot|>{% endgeneration %}", "{% endgeneration %}<|eot|>")
    for template in (plain, tagged, outside):
        tokenizer.chat_template = template
        for row, end in (({}, "<|eot|>"), ({"finish_reason": "length"}, "")):
            [(ids, mask)], reasons = ChatTokenizer(tokenizer).documents({"messages": CHAT[:2]} | row)
            assert not reasons and tokenizer.decode(ids[mask]) == FIRST + end


def test_the_rest_of_a_think_block_that_the_prompt_opens_is_not_supervised():
    template = QWEN3.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    call = {"function": {"name": "look", "arguments": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert supervised(template, [CHAT[0], answer]) == [["<tool_call>\nlook\n</tool_call><|im_end|>"]]
    thought = answer | {"reasoning_content": "waves"}
    assert supervised(template, [CHAT[0], thought])[0][0].startswith("waves\n</think>")


def test_documents_with_nothing_to_predict_are_counted_and_refused():

    def three(marks: str) -> pipeline.Documents:
        mask = np.array([mark == "x" for mark in marks.replace(" ", "")])
        return pipeline.Documents(np.arange(9, dtype=np.int32), mask, np.array([0, 3, 6, 9]), np.arange(3), {}, 3)

    for expected, marks in ((0, "... ..x x.x"), (1, "x.x xxx ..x"), (2, "xx. .xx x.."), (3, "xxx xx. .xx")):
        documents = three(marks)
        assert documents.num_trainable == expected == sum("xx" in part for part in marks.split())
        assert (f"{3 - expected} without anything to predict" in documents.summary()) == (expected < 3)
    good, idle = three("xxx xxx xxx"), three("... ..x x.x")
    pipeline.check_data(good, None, 99)
    for parts, complaint in (((idle, None), "--train-data: no document"), ((good, idle), "--eval-data: no document")):
        with pytest.raises(UserError, match=complaint):
            pipeline.check_data(*parts, 99)
    with pytest.raises(UserError, match="--train-data: 1 of 3 documents hold the mask token 4: choose another"):
        pipeline.check_data(good, None, 4)
    with pytest.raises(UserError, match="--eval-data: 1 of 3 documents hold the mask token 4"):
        pipeline.check_data(pipeline.Documents(np.arange(9, 18), *(getattr(good, n) for n in ("loss_mask", "offsets", "rows")),
                                               {}, 3), good, 4)  # fmt: skip


def test_a_quoted_mask_token_is_warned_of(capsys):
    rng, lengths = np.random.default_rng(0), np.full(500, 4)
    ids = rng.integers(0, 50, 2000).astype(np.int32)
    ids[[3, 40, 41, 1999]] = 77  # in documents 0, 10 and 499
    documents = pipeline.Documents(ids, np.ones(2000, bool), np.cumsum([0, *lengths]), np.arange(500), {}, 500)
    assert documents.holding(77) == 3 and documents.holding(78) == 0 and documents.num_trainable == 500
    pipeline.check_data(documents, None, 77)
    assert capsys.readouterr().out.startswith("warning: --train-data: 3 of 500 documents hold the mask token 77")


# Formats and files ----------------------------------------------------------------------------------------------------


def test_three_formats_of_one_chat_give_the_same_document(tmp_path):
    question, answer = CHAT[0]["content"], FIRST
    rows = [
        {"messages": CHAT[:2]},
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]},
        {"prompt": question, "response": answer},
    ]
    documents = tokenise([write_rows(tmp_path / "x.jsonl", rows)])
    assert len(documents) == 3 and documents.dropped == {} and documents.rows.tolist() == [0, 1, 2]
    ids, masks = documents.token_ids.reshape(3, -1), documents.loss_mask.reshape(3, -1)
    assert (ids == ids[0]).all() and (masks == masks[0]).all() and 0 < masks[0].sum() < masks.shape[1]


def test_sharegpt_system_turn_is_kept(tmp_path):
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]
    documents = tokenise([write_rows(tmp_path / "x.jsonl", [{"conversations": turns}])])
    text = byte_tokenizer().decode(documents.token_ids)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n!<|im_end|>\n"


def test_odd_rows_are_counted_by_reason_and_the_rest_is_kept(tmp_path):
    system = {"role": "system", "content": "s"}
    rows = [
        {"messages": []},
        {"text": "no chat"},
        {"messages": "not a list"},
        {"messages": [system]},
        {"messages": [CHAT[0], {"role": "assistant", "content": ""}]},
        {"prompt": "x", "response": ""},
        {"messages": [system, *CHAT]},  # this template takes no system turn
        valid_row("z" * 900),
        valid_row(),
    ]
    documents = tokenise([write_rows(tmp_path / "x.jsonl", rows)], max_tokens=500, template=GEMMA)
    assert documents.dropped == {
        "without a conversation": 3,
        "without an assistant turn": 3,
        "refused by the chat template": 1,
        "over 500 tokens": 1,
    }
    assert documents.rows.tolist() == [8]


def test_documents_at_the_limit_stay_and_one_token_more_goes(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [valid_row("a" * 10), valid_row("a" * 11)])
    shorter = int(tokenise([path]).lengths[0])
    documents = tokenise([path], max_tokens=shorter)
    assert documents.lengths.tolist() == [shorter] and documents.dropped == {f"over {shorter} tokens": 1}


@pytest.mark.parametrize("response", ["ab" * 6400, "a" * 6400, "z" * 200], ids=["128 a token", "64", "1"])
def test_long_texts_of_few_tokens_are_measured_in_tokens(response):
    """A text of more than 64 characters a token is first judged by its beginning."""
    tokenizer = tokenizer_with(pipeline.CHATML)
    tokenizer.add_tokens(["a" * 64, "ab" * 64])
    [(ids, _)], _ = ChatTokenizer(tokenizer).documents({"prompt": "", "response": response})
    for limit in (len(ids), len(ids) - 1):
        documents, reasons = ChatTokenizer(tokenizer, limit).documents({"prompt": "", "response": response})
        assert (len(documents), reasons) == ((1, []) if limit == len(ids) else (0, [f"over {limit} tokens"]))


def test_template_that_does_not_continue_its_generation_prompt_is_an_error(tmp_path):
    template = pipeline.CHATML.replace("<|im_start|>assistant\n", "<|im_start|>bot\n")
    with pytest.raises(UserError, match="1 whose chat template does not continue its own generation prompt"):
        tokenise([write_rows(tmp_path / "x.jsonl", [valid_row()])], template=template)


def test_no_usable_row_is_an_error_with_the_reasons(tmp_path):
    with pytest.raises(UserError, match="no usable row in .*x.jsonl: 2 without a conversation"):
        tokenise([write_rows(tmp_path / "x.jsonl", [{}, {"messages": []}])])
    with pytest.raises(UserError, match="the files are empty"):
        tokenise([write_rows(tmp_path / "empty.jsonl", [])])


@pytest.mark.parametrize("broken, complaint", [
    (b"{not json", "not valid JSON"),
    (b"[1, 2]", "expected a JSON object, found list"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"prompt": "\xff", "response": "x"}', "not valid Unicode"),
    (b'{"prompt": "x", "response": "half \\ud83d"}', "not valid Unicode"),
    ("{}".encode("utf-16"), "not valid Unicode"),
])  # fmt: skip
def test_broken_line_is_named_by_file_and_number(tmp_path, broken, complaint):
    path = tmp_path / "x.jsonl"
    path.write_bytes(json.dumps(valid_row()).encode() + b"\n\n" + broken + b"\n")
    with pytest.raises(UserError, match=f"x.jsonl, line 3: {complaint}"):
        tokenise([str(path)])


def test_byte_order_mark_crlf_blank_lines_and_gzip_change_nothing(tmp_path):
    rows = [valid_row("eins"), valid_row("zwei — drei")]
    plain = tokenise([write_rows(tmp_path / "plain.jsonl", rows)])
    text = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n"
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    with gzip.open(tmp_path / "packed.jsonl.gz", "wb") as file:
        file.write(text.encode())
    for name in ("windows.jsonl", "packed.jsonl.gz"):
        assert tokenise([str(tmp_path / name)]).fingerprint == plain.fingerprint


def test_broken_gzip_is_an_error_that_names_the_file(tmp_path):
    whole = gzip.compress((json.dumps(valid_row()) + "\n").encode() * 50)
    for name, content in (("none.jsonl.gz", b"plain"), ("cut.jsonl.gz", whole[:-20])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"cannot read .*{name}"):
            tokenise([str(tmp_path / name)])


USER, ANSWERED = {"role": "user", "content": "q?"}, {"role": "assistant", "content": "a."}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
ODD_FILES = {  # name: (content, supervised stretches by document, dropped)
    "empty lists": ([{"messages": []}, {"conversations": []}, {"messages": [], "tools": []}],
                    [], {"without a conversation": 3}),
    "system only": ([{"messages": [{"role": "system", "content": "s"}]}], [], {"without an assistant turn": 1}),
    "assistant first": ([{"messages": [ANSWERED, USER]}, {"messages": [ANSWERED, USER, ANSWERED]}],
                        [["a.<|im_end|>"]], {"whose only assistant turn answers nothing": 1}),
    "tool calls": ([{"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                                  {"role": "tool", "content": "r"}, ANSWERED], "tools": [CALL]}],
                   [["<call>f</call><|im_end|>", "a.<|im_end|>"]], {}),
    "emoji and combining characters": ([{"prompt": "👩‍👩‍👧 e\u0301?", "response": "🏳️‍🌈 a\u0308o\u0308 \u0301x 𝔘"}],
                                       [["🏳️‍🌈 a\u0308o\u0308 \u0301x 𝔘<|im_end|>"]], {}),
    "closing think tag": ([{"prompt": "q?", "response": "</think>\n\na."}], [["</think>\n\na.<|im_end|>"]], {}),
    "doubled bos": ([{"messages": [USER, ANSWERED]}], [["a.<|im_end|>"]], {}),
    "giant": ([{"prompt": "x" * 10_000_000, "response": "y"}, {"prompt": "x", "response": "y" * 10_000_000}],
              [], {"over 5000 tokens": 2}),
    "windows": ("".join(json.dumps({"prompt": "q", "response": "a\r\nb"}) + "\r\n" for _ in range(2)),
                [["a\r\nb<|im_end|>"]] * 2, {}),
    "byte order mark": ("\ufeff" + json.dumps({"prompt": "q", "response": "a"}), [["a<|im_end|>"]], {}),
    "parts": ([{"messages": [USER | {"content": TEXT_PARTS}, ANSWERED | {"content": TEXT_PARTS}]},
               {"messages": [USER | {"content": [*TEXT_PARTS, {"type": "image_url", "image_url": "x"}]}, ANSWERED]},
               {"messages": [USER | {"content": ["a"]}, ANSWERED]}, {"messages": [USER | {"content": 5}, ANSWERED]},
               {"messages": [USER, ANSWERED | {"content": []}]}],
              [["ab<|im_end|>"]], {"with content that is not text": 3, "without an assistant turn": 1}),
    "roles": ([{"messages": [{"content": "q?"}, ANSWERED]}, {"messages": [USER | {"role": None}, ANSWERED]},
               {"conversations": [{"from": ["x"], "value": "q"}, {"from": "gpt", "value": "a"}]},
               {"conversations": [{"from": "human", "value": "q"}, "a"]}, {"messages": [USER, None, ANSWERED]}],
              [], {"with a turn without a role": 3, "without a conversation": 2}),
    "odd values": ([{"messages": [USER, ANSWERED], "tools": "[]"}, {"messages": [USER, ANSWERED], "tools": 7},
                    {"messages": [USER, {"role": "assistant", "tool_calls": "f()"}]},
                    {"messages": [USER, {"role": "assistant", "tool_calls": [None, 3]}]}],
                   [], {"refused by the chat template": 3, "with tool calls that are no list": 1}),
}  # fmt: skip
ODD_TEMPLATE = pipeline.CHATML.replace(
    "{{ message.content }}",
    "{{ message.content or '' }}{% for c in message.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}",
)


@pytest.mark.parametrize("content, expected, dropped", ODD_FILES.values(), ids=ODD_FILES)
def test_odd_files_give_the_right_mask_or_a_counted_drop(tmp_path, content, expected, dropped):
    rows = [] if isinstance(content, str) else content
    path = tmp_path / "odd.jsonl"
    text = content if isinstance(content, str) else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes((text.rstrip("\n") + "\n" + json.dumps(valid_row("sound")) + "\n").encode())
    tokenizer = tokenizer_with(ODD_TEMPLATE)
    documents = tokenise_rows([str(path)], ChatTokenizer(tokenizer, 5000), show_progress=False)
    found = []
    for start, end in zip(documents.offsets, documents.offsets[1:]):
        pairs = zip(documents.token_ids[start:end].tolist(), documents.loss_mask[start:end].tolist())
        runs = [(k, [i for i, _ in g]) for k, g in groupby(pairs, key=lambda pair: pair[1])]
        found.append([tokenizer.decode(ids) for on, ids in runs if on])
    assert found == [*expected, ["sound<|im_end|>"]] and documents.dropped == dropped
    assert documents.num_rows == len(expected) + sum(dropped.values()) + 1


def test_rows_are_numbered_over_all_files_and_chunks(tmp_path, monkeypatch):
    rows = [valid_row(str(i)) if i % 3 else {} for i in range(11)]
    paths = [write_rows(tmp_path / f"{n}.jsonl", rows[:n]) for n in (7, 11)]
    whole = tokenise(paths)
    assert whole.rows.tolist() == [i for i in range(7) if i % 3] + [7 + i for i in range(11) if i % 3]
    for limits in ((1, 1 << 20), (5, 1 << 20), (256, 100)):
        monkeypatch.setattr(pipeline.line_chunks, "__defaults__", limits)
        assert tokenise(paths).fingerprint == whole.fingerprint and tokenise(paths).rows.tolist() == whole.rows.tolist()


# Cache ----------------------------------------------------------------------------------------------------------------


def test_cache_gives_the_same_documents_and_is_renewed_when_the_data_changes(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "x.jsonl", [valid_row("one"), {}, {"messages": CHAT}])
    args = arguments(train_data=[path], output_dir=str(tmp_path / "run"))

    store = dist.HashStore()

    def load_as(local_rank):
        topology = Topology(local_rank, 2, local_rank, 2, 1)
        return pipeline.load_documents([path], args, byte_tokenizer(), topology, store, "train")

    first = load_as(0)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "tokenise_rows", None)  # calling it would raise
        for again in (load_as(0), load_as(1)):
            for name in ("token_ids", "loss_mask", "offsets", "rows"):
                a, b = getattr(first, name), getattr(again, name)
                assert a.dtype == b.dtype and np.array_equal(a, b)
            assert again.dropped == first.dropped == {"without a conversation": 1}
    write_rows(tmp_path / "x.jsonl", [valid_row("other")])
    assert load_as(0).fingerprint != first.fingerprint


def settled(tmp_path, paths, tokenizer=None, **flags):
    args = arguments(output_dir=str(tmp_path / "run"), **flags)
    return pipeline.settle_documents(paths, args, tokenizer or byte_tokenizer(), show_progress=False)


def test_cache_is_named_by_all_that_decides_what_is_in_it(tmp_path):
    paths = [write_rows(tmp_path / f"{n}.jsonl", [valid_row(n)]) for n in "ab"]
    other_template, other_vocabulary = byte_tokenizer(), byte_tokenizer()
    other_template.chat_template = "{# #}" + pipeline.CHATML
    other_vocabulary.add_tokens(["fine"])
    caches = [
        settled(tmp_path, paths), settled(tmp_path, paths[::-1]), settled(tmp_path, paths[:1]),
        settled(tmp_path, paths, max_document_tokens=1000), settled(tmp_path, paths, cut_off_answers="drop"),
        settled(tmp_path, paths, chat_template_kwargs='{"a": 1}'), settled(tmp_path, paths, other_template),
        settled(tmp_path, paths, other_vocabulary),
    ]  # fmt: skip
    assert len(set(caches)) == len(caches) == len(list((tmp_path / "run" / "data").iterdir()))
    used = byte_tokenizer()
    used("some text", truncation=True, max_length=3)  # leaves its mark in the tokenizer's state
    assert settled(tmp_path, paths, used) == settled(tmp_path, paths, max_document_tokens=1024) == caches[0]


def test_a_cache_has_the_same_bytes_each_time(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [valid_row("one"), {}, {"messages": CHAT}])
    first = settled(tmp_path / "1", [path])
    assert first.read_bytes() == settled(tmp_path / "2", [path]).read_bytes()
    assert [p.name for p in first.parent.iterdir()] == [first.name]


def test_opened_documents_are_mapped_not_copied(tmp_path):
    path = tmp_path / "x.safetensors"
    ids = np.arange(100_000, dtype=np.int32)
    written = pipeline.Documents(ids, ids % 3 == 0, np.arange(0, 100_001, 1000), np.arange(100), {"odd": 2}, 9)
    pipeline.write_documents(written, path, {"layout": 0})
    opened, text = pipeline.open_documents(path)
    assert (opened.dropped, opened.num_rows, text) == ({"odd": 2}, 9, {"layout": 0})
    assert opened.fingerprint == written.fingerprint
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    mapped = [[int(address, 16) for address in fields[0].split("-")] for fields in maps]
    for name in pipeline.DOCUMENT_ARRAYS:
        a, b = getattr(written, name), getattr(opened, name)
        assert a.dtype == b.dtype and np.array_equal(a, b)
        assert any(start <= b.ctypes.data and b.ctypes.data + b.nbytes <= end for start, end in mapped), name


def test_prepared_file_serves_a_run_of_the_same_settings_only(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [valid_row("one"), {"messages": CHAT}])
    prepared = [str(shutil.copy(settled(tmp_path, [path], max_document_tokens=500), tmp_path / "p.safetensors"))]
    assert settled(tmp_path, prepared, max_document_tokens=500) == Path(prepared[0])
    assert settled(tmp_path, prepared, tokens_per_micro_batch=500) == Path(prepared[0])
    other = byte_tokenizer()
    other.chat_template = "{# #}" + pipeline.CHATML
    with pytest.raises(UserError, match="p.safetensors was prepared with another chat template: prepare it again"):
        settled(tmp_path, prepared, other, max_document_tokens=500)
    flags = dict(max_document_tokens=400, cut_off_answers="drop", chat_template_kwargs='{"a": 1}')
    complaint = ('--chat-template-kwargs {}, not {"a": 1}, --max-document-tokens 500, not 400, '
                 '--cut-off-answers "keep", not "drop"')  # fmt: skip
    with pytest.raises(UserError, match=re.escape(complaint)):
        settled(tmp_path, prepared, **flags)
    other.add_tokens(["fine"])
    with pytest.raises(UserError, match="with another tokenizer, another chat template, --max-document-tokens 500, "):
        settled(tmp_path, prepared, other)


def test_what_is_no_prepared_file_is_refused(tmp_path):
    for number, content in enumerate([b"", b"{}", b"\x02" + b"\0" * 7 + b"{}"]):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{number}.safetensors is no file of tools/prepare_data.py"):
            settled(tmp_path, [str(path)])
    with pytest.raises(UserError, match="a prepared file stands alone"):
        parse_arguments(["--train-data", str(path), write_rows(tmp_path / "x.jsonl", [valid_row()])])


@pytest.mark.parametrize("text, complaint", [
    ("{thinking: false}", "expected a JSON object"),
    ("[1]", "expected a JSON object"),
    ("null", "expected a JSON object"),
    ('{"tokenize": true, "tools": []}', "tokenize, tools cannot be set"),
])  # fmt: skip
def test_template_variables_are_checked_with_the_flags(text, complaint):
    with pytest.raises(UserError, match=f"--chat-template-kwargs.*{complaint}"):
        parse_arguments(["--chat-template-kwargs", text])


def test_no_rank_goes_on_before_every_host_has_its_data(tmp_path, monkeypatch):
    """Later waits have a limit (here one second, long past), so none may start while another host still tokenises."""
    path = write_rows(tmp_path / "x.jsonl", [valid_row()])
    args, store, done = arguments(output_dir=str(tmp_path / "run")), dist.HashStore(), threading.Event()
    store.set_timeout(timedelta(seconds=1))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")

    def load():
        pipeline.load_documents([path], args, byte_tokenizer(), Topology(0, 2, 0, 1, 1), store, "train")
        done.set()

    threading.Thread(target=load, daemon=True).start()
    while not store.check(["data/train/0"]):
        time.sleep(0.01)
    assert not done.wait(1.5)
    store.set("data/train/1", "elsewhere")
    assert done.wait(60)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no chat template: give one that has with --tokenizer"):
        pipeline.load_tokenizer(arguments(target=str(tmp_path)).target)


def test_fingerprint_sees_tokens_mask_and_boundaries(tmp_path):
    rows = [valid_row("ab"), valid_row("cd")]
    base = tokenise([write_rows(tmp_path / "x.jsonl", rows)])
    prints = {base.fingerprint}
    for name, change in (("token_ids", 1), ("loss_mask", True), ("offsets", 1)):
        arrays = {n: getattr(base, n).copy() for n in ("token_ids", "loss_mask", "offsets", "rows")}
        arrays[name][1] ^= change
        prints.add(pipeline.Documents(**arrays, dropped={}).fingerprint)
    assert len(prints) == 4


# Mask token -----------------------------------------------------------------------------------------------------------


def test_mask_token_is_the_requested_one_before_the_tokenizers_own():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert choose_mask_token(tokenizer, 320, 300) == 300
    assert choose_mask_token(tokenizer, 320, None) == tokenizer.mask_token_id


def test_mask_token_is_the_first_embedding_row_without_a_token():
    tokenizer = byte_tokenizer()
    assert choose_mask_token(tokenizer, 320, None) == len(tokenizer) == 259


def test_mask_token_is_else_a_special_token_that_the_template_never_writes():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|spare|>"]})
    spare = tokenizer.convert_tokens_to_ids("<|spare|>")
    assert choose_mask_token(tokenizer, len(tokenizer), None) == spare


def test_mask_token_is_no_marker_that_the_template_puts_together():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>", "<|spare|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ '<|' + m.role + '|>' }}{{ m.content }}<|im_end|>{% endfor %}"
    spare, user = tokenizer.convert_tokens_to_ids(["<|spare|>", "<|user|>"])
    assert choose_mask_token(tokenizer, len(tokenizer), None) == spare
    with pytest.raises(UserError, match="is a chat template's token"):
        choose_mask_token(tokenizer, len(tokenizer), user)


def test_no_free_mask_token_is_an_error():
    """bos, eos, pad and the template's own markers are never taken in silence."""
    tokenizer = byte_tokenizer()
    with pytest.raises(UserError, match="name one with --mask-token-id"):
        choose_mask_token(tokenizer, len(tokenizer), None)


def test_tokenizers_mask_token_is_passed_over_where_it_is_no_row_or_taken():
    tokenizer = byte_tokenizer()
    tokenizer.mask_token = tokenizer.pad_token
    assert choose_mask_token(tokenizer, 320, None) == 259
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    with pytest.raises(UserError, match="name one with --mask-token-id"):
        choose_mask_token(tokenizer, tokenizer.mask_token_id, None)


@pytest.mark.parametrize("requested, complaint", [(320, "rows 0 to 319"), (-1, "rows 0 to 319"), ("eos", "eos token"), ("pad", "pad token")])
def test_requested_mask_token_is_refused(requested, complaint):
    tokenizer = byte_tokenizer()
    token_id = getattr(tokenizer, f"{requested}_token_id") if isinstance(requested, str) else requested
    with pytest.raises(UserError, match=complaint):
        choose_mask_token(tokenizer, 320, token_id)
