"""tools/prepare_data.py and tools/show_loss_mask.py: same bytes whatever happens, true figures, a mask one can read."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from helpers import arguments, make_documents

import train_dflash_pipeline as pipeline
from train_dflash_pipeline import UserError

REPOSITORY = Path(pipeline.__file__).parent
sys.path.append(str(REPOSITORY / "tools"))
import prepare_data
import show_loss_mask

ODD = [{}, {"messages": []}, {"prompt": "long", "response": "z" * 200}]
CUT = {"prompt": "count", "response": "1 2 3", "finish_reason": "length"}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A file of 700 rows: some odd, some cut off, some too long for 120 tokens."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [ODD[i % 3] if i % 7 == 0 else CUT if i % 11 == 0 else {"prompt": f"say {i}", "response": "word " * (i % 9)}
            for i in range(700)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare(chats, output, *flags, limit="120"):
    prepare_data.main(["--train-data", chats, "--target", "toy", "--max-document-tokens", limit, "--processes", "1",
                       "--output", str(output), *flags])  # fmt: skip
    return output


# prepare_data ---------------------------------------------------------------------------------------------------------


IN_PROCESSES = """
import sys
sys.path.insert(0, {tools!r})
import prepare_data

if __name__ == "__main__":
    for files, output in {jobs!r}:
        flags = ["--target", "toy", "--max-document-tokens", "120", "--processes", "3", "--output", output]
        try:
            prepare_data.main(["--train-data", *files, *flags])
        except prepare_data.UserError as error:
            print("refused:", error)
"""


def test_any_number_of_processes_gives_the_bytes_and_the_refusals_of_a_run(chats, tmp_path):
    broken = tmp_path / "x.jsonl"
    broken.write_text('{"prompt": "a", "response": "b"}\n' * 600 + "{broken\n")
    jobs = [([chats], str(tmp_path / "three.safetensors")), ([chats, str(broken)], str(tmp_path / "no.safetensors"))]
    script = tmp_path / "script.py"
    script.write_text(IN_PROCESSES.format(tools=str(REPOSITORY / "tools"), jobs=jobs))
    job = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert job.returncode == 0, job.stderr
    assert re.search(r"refused: .*x.jsonl, line 601: not valid JSON", job.stdout)
    assert not (tmp_path / "no.safetensors").exists()

    one = prepare(chats, tmp_path / "one.safetensors")
    assert (tmp_path / "three.safetensors").read_bytes() == one.read_bytes()
    args = arguments(max_document_tokens=120, output_dir=str(tmp_path / "run"))
    cache = pipeline.settle_documents([chats], args, pipeline.byte_tokenizer(), show_progress=False)
    assert cache.read_bytes() == one.read_bytes()
    assert pipeline.settle_documents([str(one)], args, pipeline.byte_tokenizer(), show_progress=False) == one


def killed(chats, output, die) -> None:
    """Prepare in a child process that `die` kills at some point, perhaps not at all."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            die()
            prepare(chats, output)
        finally:
            os._exit(0)
    if die is at_any_time:
        time.sleep(random.random() * 0.8)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def at_any_time():
    pass


def while_writing():
    pipeline.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)


def in_the_second_chunk():
    right, calls = pipeline.ChatTokenizer.tokenise_lines, []

    def tokenise_lines(self, lines):
        calls.append(1)
        return os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 2 else right(self, lines)

    pipeline.ChatTokenizer.tokenise_lines = tokenise_lines


def test_killed_at_any_point_and_started_again_gives_the_same_bytes(chats, tmp_path):
    expected = prepare(chats, tmp_path / "undisturbed.safetensors").read_bytes()
    output = tmp_path / "killed.safetensors"
    for die in (in_the_second_chunk, while_writing):
        killed(chats, output, die)
        assert not output.exists()
    for _ in range(5):
        killed(chats, output, at_any_time)
        assert not output.exists() or output.read_bytes() == expected
    prepare(chats, output)
    assert output.read_bytes() == expected
    assert {path.name for path in tmp_path.iterdir()} == {"undisturbed.safetensors", "killed.safetensors"}


def test_report_against_counting_by_hand(chats, tmp_path, capsys):
    output = prepare(chats, tmp_path / "x.safetensors", "--json", str(tmp_path / "x.json"), "--block-size", "12")
    rows, kept, dropped = pipeline.read_rows([chats]), [], {}
    tokenizer = pipeline.byte_tokenizer()
    for row in rows:
        documents, reasons = pipeline.ChatTokenizer(tokenizer, 120).documents(row)
        kept += documents
        for reason in reasons:
            dropped[reason] = dropped.get(reason, 0) + 1
    lengths, supervised = sorted(len(mask) for _, mask in kept), sorted(int(mask.sum()) for _, mask in kept)
    runs = [max(len(list(g)) for on, g in groupby(mask.tolist()) if on) for _, mask in kept]

    def percentiles(ordered):
        return {f"p{p}": ordered[-(-len(ordered) * p // 100) - 1] for p in (50, 90, 99)} | {"max": ordered[-1]}

    assert set(dropped) == {"without a conversation", "over 120 tokens", "without an assistant turn"}
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "rows": 700, "documents": len(kept), "tokens": sum(lengths), "supervised_tokens": sum(supervised),
        "supervised_share": sum(supervised) / sum(lengths), "tokens_per_document": percentiles(lengths),
        "supervised_tokens_per_document": percentiles(supervised), "block_size": 12,
        "documents_without_full_block": sum(run < 12 for run in runs), "documents_without_anchor": 0,
        "dropped": dropped, "fingerprint": pipeline.open_documents(output)[0].fingerprint,
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert all(f"{count:,}  {reason}" in shown for reason, count in dropped.items()) and f"{len(kept):,}" in shown


@pytest.mark.parametrize("at_once", [1, 7, 1 << 24])
def test_longest_runs_stay_within_their_document(at_once):
    documents = make_documents([5, 1, 1, 30, 12, 3], seed=4)
    documents.loss_mask[[4, 5, 6, 7]] = True, True, False, True
    expected = []
    for start, end in zip(documents.offsets, documents.offsets[1:]):
        stretches = "".join("x" if on else " " for on in documents.loss_mask[start:end]).split()
        expected.append(max(map(len, stretches), default=0))
    assert prepare_data.longest_runs(documents, at_once).tolist() == expected


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32])
def test_short_answers_are_kept_and_their_blocks_end_with_them(length, tmp_path):
    """Rule: all are kept; a block has as many trained slots as supervised tokens follow its anchor (DA7)."""
    row = {"prompt": "q", "response": "a" * (length - 1)}
    row = row if length > 1 else {"prompt": "q", "response": "a", "finish_reason": "length"}  # no end of turn
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    prepare(str(tmp_path / "x.jsonl"), tmp_path / "x.safetensors", "--json", str(tmp_path / "x.json"))
    figures = json.loads((tmp_path / "x.json").read_text())
    assert figures["documents"] == 1 and figures["supervised_tokens"] == length and figures["dropped"] == {}
    assert figures["documents_without_full_block"] == (length < 16)
    assert figures["documents_without_anchor"] == (length < 2)
    documents, _ = pipeline.open_documents(tmp_path / "x.safetensors")
    plan = pipeline.Planner(documents, arguments(tokens_per_micro_batch=128, block_size=16), num_drafters=1).plan(0)
    assert plan.num_anchors == length - 1
    trained = sorted((plan.weights > 0).sum(1)[: plan.num_anchors].tolist())
    assert trained == sorted(min(15, length - 1 - a) for a in range(length - 1)) and np.isfinite(plan.weights).all()
    assert not plan.weights[plan.num_anchors :].any()


@pytest.mark.parametrize("flags, complaint", [
    (["--output", "x.bin"], "must end in .safetensors"),
    (["--processes", "0"], "--processes 0: must be at least 1"),
    (["--max-document-tokens", "1"], "--max-document-tokens 1: must be at least 2"),
    (["--chat-template-kwargs", "[]"], "expected a JSON object"),
    (["--train-data", "none.jsonl"], "none.jsonl: no such file"),
    (["--json", "nowhere/x.json"], "--json nowhere/x.json: no such folder"),
    (["--output", "nowhere/x.safetensors"], "--output nowhere/x.safetensors: no such folder"),
])  # fmt: skip
def test_mistakes_are_named_before_anything_is_read(chats, tmp_path, flags, complaint):
    with pytest.raises(UserError, match=complaint):
        prepare(chats, tmp_path / "x.safetensors", *flags)


def test_a_prepared_file_is_not_prepared_again(chats, tmp_path):
    prepared = prepare(chats, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="is prepared already"):
        prepare(str(prepared), tmp_path / "y.safetensors")


# show_loss_mask -------------------------------------------------------------------------------------------------------

ROWS = [
    {"prompt": "Hi \U0001f600", "response": "Oh\x1b[31m, ä\n\tyes"},
    {"messages": []},
    CUT,
    {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"},
                  {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]},
]  # fmt: skip
SHOWN = [
    "--- row 0: 44 tokens, 17 supervised\n<|im_start|>user\nHi \U0001f600<|im_end|>\n<|im_start|>assistant\n"
    "⟦Oh\\x1b[31m, ä\n\tyes<|im_end|>⟧\n\n",
    "--- row 1: left out: without a conversation\n",
    "--- row 2: 29 tokens, 5 supervised\n<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\n⟦1 2 3⟧\n",
    "--- row 3: 46 tokens, 4 supervised\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧\n"
    "<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n\n",
]


@pytest.fixture
def rows_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(tmp_path / "rows.jsonl")


class Terminal:
    """Standard output as the tool sees it, a terminal or not."""

    def __init__(self, is_terminal):
        self.text, self.is_terminal = "", is_terminal

    def write(self, text):
        self.text += text

    def isatty(self):
        return self.is_terminal

    def reconfigure(self, errors):
        pass

    def flush(self):
        pass


def shown(monkeypatch, *flags, terminal=False) -> str:
    out = Terminal(terminal)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        show_loss_mask.main([*flags, "--target", "toy"])
    return out.text


def test_supervised_stretches_stand_in_brackets_and_drops_show_their_reason(rows_file, monkeypatch):
    assert shown(monkeypatch, rows_file) == "".join(SHOWN[:3])
    assert shown(monkeypatch, rows_file, "--num-rows", "9") == "".join(SHOWN)
    assert shown(monkeypatch, rows_file, "--row", "3", "1") == SHOWN[1] + SHOWN[3]
    assert shown(monkeypatch, rows_file, "--row", "2", "--cut-off-answers", "drop") == (
        "--- row 2: left out: cut off by a length limit\n"
    )  # fmt: skip
    assert shown(monkeypatch, rows_file, "--row", "0", "--max-document-tokens", "43") == (
        "--- row 0: left out: over 43 tokens\n"
    )  # fmt: skip


def test_colours_on_a_terminal_unless_no_color_is_set(rows_file, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = shown(monkeypatch, rows_file, "--row", "2", terminal=True)
    assert "\x1b[32m1 2 3\x1b[0m" in coloured and "\x1b[1m<|im_start|>\x1b[0m\x1b[2muser\n" in coloured
    assert "⟦" not in coloured and re.sub(r"\x1b\[\d+m", "", coloured) == re.sub("[⟦⟧]", "", SHOWN[2])
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(monkeypatch, rows_file, "--row", "2", terminal=True) == SHOWN[2]


def test_a_prepared_file_shows_the_same(rows_file, tmp_path, monkeypatch):
    prepared = str(prepare(rows_file, tmp_path / "p.safetensors"))
    left_out = "--- row 1: left out: when the file was prepared\n"
    assert shown(monkeypatch, prepared, "--num-rows", "9") == SHOWN[0] + left_out + SHOWN[2] + SHOWN[3]
    other = pipeline.byte_tokenizer()
    other.add_tokens(["count"])
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="p.safetensors was prepared with another tokenizer"):
        show_loss_mask.main([prepared, "--tokenizer", str(tmp_path / "other")])


def test_a_row_that_is_not_there_is_named(rows_file, tmp_path, monkeypatch):
    for path in (rows_file, str(prepare(rows_file, tmp_path / "p.safetensors"))):
        with pytest.raises(UserError, match="there is no row 4"):
            shown(monkeypatch, path, "--row", "0", "4")
