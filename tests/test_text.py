"""Chat rows -> token ids and loss mask: what is supervised, what is left out, what is cached."""

import gzip
import json
from itertools import groupby

import numpy as np
import pytest
import torch.distributed as dist

import train_dflash_pipeline as pipeline
from helpers import arguments
from train_dflash_pipeline import ChatTokenizer, Topology, UserError, byte_tokenizer, choose_mask_token, tokenise_rows

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
    documents = ChatTokenizer(tokenizer).documents({"messages": messages} | row)
    runs = [[(k, [i for i, _ in g]) for k, g in groupby(zip(*d), key=lambda pair: pair[1])] for d in documents]
    return [[tokenizer.decode(ids) for on, ids in document if on] for document in runs]


def whole_texts(template: str, messages: list[dict], **row) -> list[str]:
    tokenizer = tokenizer_with(template)
    documents = ChatTokenizer(tokenizer).documents({"messages": messages} | row)
    return [tokenizer.decode(ids) for ids, _ in documents]


def write_rows(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokenise(paths, max_tokens=1000, template=pipeline.CHATML):
    return tokenise_rows(paths, tokenizer_with(template), max_tokens, show_progress=False)


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


def test_template_that_does_not_continue_its_generation_prompt_is_an_error(tmp_path):
    template = pipeline.CHATML.replace("<|im_start|>assistant\n", "<|im_start|>bot\n")
    with pytest.raises(UserError, match="1 whose chat template does not continue its own generation prompt"):
        tokenise([write_rows(tmp_path / "x.jsonl", [valid_row()])], template=template)


def test_no_usable_row_is_an_error_with_the_reasons(tmp_path):
    with pytest.raises(UserError, match="no usable row in .*x.jsonl: 2 without a conversation"):
        tokenise([write_rows(tmp_path / "x.jsonl", [{}, {"messages": []}])])
    with pytest.raises(UserError, match="the files are empty"):
        tokenise([write_rows(tmp_path / "empty.jsonl", [])])


@pytest.mark.parametrize("broken, complaint", [("{not json", "not valid JSON"), ("[1, 2]", "expected a JSON object, found list")])
def test_broken_line_is_named_by_file_and_number(tmp_path, broken, complaint):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(valid_row()) + "\n\n" + broken + "\n")
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


def test_rows_are_numbered_over_all_files(tmp_path):
    a = write_rows(tmp_path / "a.jsonl", [valid_row("1"), {}])
    b = write_rows(tmp_path / "b.jsonl", [{}, valid_row("2")])
    assert tokenise([a, b]).rows.tolist() == [0, 3]


# Cache ----------------------------------------------------------------------------------------------------------------


def test_cache_gives_the_same_documents_and_is_renewed_when_the_data_changes(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "x.jsonl", [valid_row("one"), {}, {"messages": CHAT}])
    args = arguments(train_data=[path], output_dir=str(tmp_path / "run"))

    def load_as(local_rank):
        store = dist.HashStore()
        store.set("data/0", "1")
        return pipeline.load_documents(args, byte_tokenizer(), Topology(local_rank, 2, local_rank, 2, 1), store)

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
