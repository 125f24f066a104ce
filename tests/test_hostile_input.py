"""Broken and hostile input: one line that names the place, or a counted drop; never a traceback, nothing evaluated."""

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import train_dflash_pipeline as pipeline
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

REPOSITORY = Path(pipeline.__file__).parent
INT64 = st.integers(-(2**63), 2**63 - 1)
TOKEN = 77
FIELDS = [f.name for f in dataclasses.fields(pipeline.Header)]

# ---------------------------------------------------------------------------------------------------------------------
# Headers
# ---------------------------------------------------------------------------------------------------------------------


def valid(header: pipeline.Header) -> bool:
    """What a header must be, written out."""
    counts = (header.m, header.tokens, header.width, header.checksum, header.forward_us, header.pack_us, header.wait_us)
    return (
        header.magic == 0x44464C415348 and header.protocol == 3 and header.token == TOKEN and header.status in (1, 2, 5)
        and header.dtype in (0, 1, 2) and {header.split, header.last, header.stop_requested} <= {0, 1}
        and all(0 <= count < 2**62 for count in counts)
    )  # fmt: skip


def parse(words: list[int]):
    """The header, or None where it is refused in one line that names the sender."""
    try:
        return pipeline.Header.parse(torch.tensor(words, dtype=torch.int64), TOKEN, "target 0 (rank 0)")
    except pipeline.TransportError as error:
        assert str(error).startswith("target 0 (rank 0) sent ") and "\n" not in str(error)
        return None


@given(st.lists(INT64, max_size=20))
def test_any_words_are_a_header_or_refused(words):
    header = parse(words)
    assert header is None or (valid(header) and list(dataclasses.astuple(header)) == words)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS), INT64 | st.integers(-1, 6), max_size=3))
@example({})
def test_a_header_with_a_few_wild_fields(changes):
    """Nearly right ones: accepted exactly when every field is in its range."""
    header = dataclasses.replace(pipeline.Header(token=TOKEN, m=3, tokens=100, width=320), **changes)
    assert (parse(list(dataclasses.astuple(header))) is not None) == valid(header)


# ---------------------------------------------------------------------------------------------------------------------
# Data files
# ---------------------------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.just(10**400)
KEYS = st.sampled_from(["messages", "conversations", "prompt", "response", "role", "content", "from", "value", "tools",
                        "tool_calls", "function", "arguments", "type", "text", "finish_reason"]) | TEXT  # fmt: skip
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4))
ROLES = st.sampled_from(["user", "assistant", "system", "human", "gpt", "tool"])
TURN = st.fixed_dictionaries({"role": ROLES | JSON, "content": TEXT | JSON}, optional={"tool_calls": JSON})
SHAREGPT_TURN = st.fixed_dictionaries({"from": ROLES | JSON, "value": TEXT | JSON})
ROWS = st.one_of(
    JSON,
    st.fixed_dictionaries({"messages": st.lists(TURN, max_size=4)}, optional={"tools": JSON, "finish_reason": JSON}),
    st.fixed_dictionaries({"conversations": st.lists(SHAREGPT_TURN, max_size=4)}),
    st.fixed_dictionaries({"prompt": TEXT | JSON, "response": TEXT | JSON}),
)
DEEP = 200_000


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile") / "rows.jsonl"


@pytest.fixture(scope="module")
def chat():
    return pipeline.ChatTokenizer(pipeline.byte_tokenizer(), 512)


def read(file, content: bytes, chat):
    """(documents of the file, None), or (None, the line of the UserError): nothing else may come out."""
    file.write_bytes(content)
    try:
        parts = [chat.tokenise_lines(lines) for lines in pipeline.line_chunks([str(file)])]
    except pipeline.UserError as error:
        line = str(error)
        assert "\n" not in line and re.match(rf"{re.escape(str(file))}, line \d+: ", line), line
        return None, line
    for part in parts:
        assert len(set(part.rows.tolist())) + sum(part.dropped.values()) >= part.num_rows  # no row vanishes uncounted
        assert all(part.loss_mask[a:b].any() for a, b in zip(part.offsets, part.offsets[1:]))
    return parts, None


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
@example(content=b"\xff\xfe{}")
@example(content=b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
@example(content=b"\x00" * 10)
def test_any_bytes_as_data(file, chat, content):
    read(file, content, chat)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows=st.lists(ROWS, max_size=3))
def test_any_json_as_data(file, chat, rows):
    """Rows of every shape: only rows that are no object end the run, the others give documents or are counted."""
    content = "\n".join(json.dumps(row) for row in rows)
    parts, refused = read(file, content.encode(), chat)
    surrogates = re.search(r"\\ud[89a-f]", content, re.IGNORECASE)
    if all(isinstance(row, dict) for row in rows) and not surrogates:
        assert refused is None
    elif not surrogates:
        number = next(i for i, row in enumerate(rows, 1) if not isinstance(row, dict))
        assert f"line {number}: expected a JSON object" in refused


@pytest.mark.parametrize("line, outcome", [
    (b"[" * DEEP, "not valid JSON"),
    (json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": "[" * DEEP}}]}]}).encode(), None),
    (b'{"a":' * DEEP, "not valid JSON"),
    (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", "without a conversation"),
    (b'{"prompt": NaN, "response": Infinity}', "without a conversation"),
    (b'{"prompt": 1e999, "response": "a"}', "without a conversation"),
    (b'{"prompt": "a", "response": ' + b"9" * 5000 + b"}", "not valid JSON"),  # Python's limit on digits
    (b'{"messages": null, "prompt": null, "response": null}', "without a conversation"),
    (b'{"messages": [null, null]}', "without a conversation"),
    (b'{"messages": [{"role": null, "content": null}]}', "with a turn without a role"),
    (b'{"messages": [{"role": "user", "content": {"a": 1}}]}', "with content that is not text"),
    (b'{"messages": [{"role": "assistant", "content": "b", "tool_calls": 7}]}', "with tool calls that are no list"),
    (b'{"prompt": "a", "response": "b"', "not valid JSON"),
    (b"__import__('os').system('touch evaluated')", "not valid JSON"),
    (b'{"prompt": "{{ 7 * 7 }}{% for i in range(9) %}x{% endfor %}", "response": "{{ cycler.__init__ }}"}', None),
    (b'{"response": "first", "prompt": "a", "response": "second"}', None),
], ids=range(16))  # fmt: skip
def test_a_hostile_line(file, chat, line, outcome):
    parts, refused = read(file, line, chat)
    if refused is not None:
        assert outcome in refused
    elif outcome is None:
        assert len(parts[0]) == 1
    else:
        assert parts[0].dropped == {outcome: 1} and not len(parts[0])


def test_text_is_never_a_template(file, chat):
    """What looks like Jinja in a message stays as it is; of two equal keys the last one counts, as in every parser."""
    row = b'{"prompt": "{{ 7 * 7 }}", "response": "no", "response": "{% if x %}{{ messages }}"}'
    [part], _ = read(file, row, chat)
    text = chat.tokenizer.decode(part.token_ids)
    assert "{{ 7 * 7 }}" in text and "{% if x %}{{ messages }}" in text and "no<|im_end|>" not in text


def test_a_prepared_file_of_another_kind_is_refused(tmp_path):
    giant = (2**40).to_bytes(8, "little") + b"{}"  # a header of a terabyte
    foreign = save({name: torch.zeros(1) for name in pipeline.DOCUMENT_ARRAYS}, {"documents": "{}"})
    for number, content in enumerate([b"", b"\x00" * 64, b"\xff" * 64, giant, b"{}" * 9, foreign]):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        with pytest.raises(pipeline.UserError, match="no file of tools/prepare_data.py"):
            pipeline.open_documents(path)


# ---------------------------------------------------------------------------------------------------------------------
# Trust: what the sources may not do
# ---------------------------------------------------------------------------------------------------------------------

SOURCES = sorted([REPOSITORY / "train_dflash_pipeline.py", *(REPOSITORY / "tools").glob("*.py")])


def calls(path: Path):
    """(dotted name, call) of every call in a source file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(node: ast.Call, name: str):
    return next((ast.unparse(k.value) for k in node.keywords if k.arg == name), None)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_data_is_executed(path):
    """No unpickling, eval or exec of anything, torch.load with weights_only alone, YAML by the safe loader."""
    source = path.read_text()
    assert not re.search(r"import (cloudpickle|dill|joblib|marshal|shelve)|from (dill|joblib|pickle) ", source)
    assert set(re.findall(r"pickle\.(\w+)", source)) <= {"UnpicklingError"}
    for name, node in calls(path):
        assert name not in ("eval", "exec", "compile", "__import__"), name
        assert not re.fullmatch(r"yaml\.(load|full_load|unsafe_load)(_all)?", name), name
        assert not name.endswith((".read_pickle", "os.system", "os.popen")), name
        assert keyword(node, "shell") in (None, "False") and keyword(node, "allow_pickle") in (None, "False"), name
        if name == "torch.load":
            assert keyword(node, "weights_only") == "True", f"{path.name}, line {node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_remote_code_needs_the_flag(path):
    """`trust_remote_code` is only ever the flag's value, and a model by name is never loaded without passing it on."""
    for name, node in calls(path):
        value = keyword(node, "trust_remote_code")
        assert value in (None, "args.trust_remote_code", "args.target.trust_remote_code"), f"{path.name}, line {node.lineno}: {value}"
        if value is None and name.endswith("from_pretrained"):  # the default of transformers is False
            assert not any(k.arg is None for k in node.keywords), f"{path.name}, line {node.lineno}: hidden arguments"


def test_remote_code_is_off_by_default():
    assert pipeline.TargetArguments().trust_remote_code is False
