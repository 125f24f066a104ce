"""Regenerated answers against a slow greedy loop; kills at every write and of the real script; a failing server."""

import contextlib
import functools
import gzip
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest
import torch

import train_dflash_pipeline as pipeline
from pipeline_runner import wait_until
from train_dflash_pipeline import REPOSITORY, UserError, byte_tokenizer

sys.path.insert(0, str(REPOSITORY / "tools"))
import make_demo_data
import regenerate_responses as regenerate
from check_pipeline_equiv import started, torchrun_command

SCRIPT = REPOSITORY / "tools" / "regenerate_responses.py"


@pytest.fixture(scope="session")
def target(target_folder, tmp_path_factory) -> str:
    """A random target that writes letters, dots and, in most answers, an end of turn; with settings to ignore."""
    from transformers import AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(target_folder("qwen3"))
    head = model.lm_head.weight.data
    written = [tokenizer.encode(symbol)[0] for symbol in "abcdefghijklmnopqrstuvwxyz .!?"]
    head[[i for i in range(len(head)) if i not in (*written, tokenizer.eos_token_id)]] = 0
    head[tokenizer.eos_token_id] *= 2
    model.generation_config.update(eos_token_id=[1, tokenizer.eos_token_id], repetition_penalty=5.0)
    folder = str(tmp_path_factory.mktemp("letters"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdefg hij"), rng.integers(2, 40))) + str(i) for i in range(count)]


def answer(prompts: Path, output: Path, *flags) -> list[dict]:
    regenerate.main([str(prompts), str(output), *map(str, flags)])
    return list(pipeline.read_rows([str(output)]))


@functools.cache
def loaded_model(folder: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def slow_greedy(folder: str, messages: list[dict], limit: int) -> tuple[str, str]:
    """(answer, finish reason): one full forward per token, no cache, no batch."""
    tokenizer, model = byte_tokenizer(), loaded_model(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    new = []
    while len(new) < limit:
        new.append(model(torch.tensor([ids + new])).logits[0, -1].argmax().item())
        if new[-1] in (1, tokenizer.eos_token_id):
            return tokenizer.decode(new[:-1]), "stop"
    return tokenizer.decode(new), "length"


# ---- prompts in


@pytest.mark.parametrize(
    "row, messages, later",
    [
        ({"prompt": "q"}, [("user", "q")], []),
        ({"prompt": "q", "response": "r", "messages": [{"role": "user", "content": "m"}]}, [("user", "q")], []),
        ({"prompt": "q", "response": ""}, [("user", "q")], []),
        ({"messages": [{"role": "user", "content": "q"}]}, [("user", "q")], []),
        ({"messages": [{"role": "user", "content": "q"}], "response": "r"}, [("user", "q")], []),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
                       {"role": "assistant", "content": "r"}, {"role": "user", "content": "x"}]},
         [("system", "s"), ("user", "q")], []),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}, [("user", "q")], []),
        ({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                            {"from": "gpt", "value": "r"}]}, [("system", "s"), ("user", "q")], []),
        ({"conversations": [{"from": "human", "value": "q"}]}, [("user", "q")], []),
        ({"turns": ["q"]}, [("user", "q")], []),
        ({"turns": ["q", "r", "s"]}, [("user", "q")], ["r", "s"]),
    ],
)  # fmt: skip
def test_every_format_is_cut_before_its_first_answer(row, messages, later):
    found, rest = regenerate.row_questions(row)
    assert [(m["role"], m["content"]) for m in found] == messages and rest == later


def test_rows_without_a_prompt_and_repeats_are_counted_by_reason(tmp_path):
    user, bot = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}
    rows = [
        {"messages": []}, {"messages": [{"role": "system", "content": "s"}]}, {"messages": [bot, user]}, {},
        {"messages": [user]}, {"prompt": "q", "id": 7}, {"prompt": " \n"}, {"turns": []}, {"turns": ["q", 3]},
        {"messages": ["q"]}, {"conversations": [{"from": ["human"], "value": "q"}]}, {"conversations": []},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {"turns": ["q", "q"]},
        {"messages": [user], "tools": [{"name": "f"}]}, {"prompt": None}, {"messages": [user, bot, user]},
    ]  # fmt: skip
    path = write_rows(tmp_path / "prompts.jsonl", rows)
    kept, dropped = regenerate.read_conversations(str(path), None, False)
    assert [c.number for c in kept] == [4, 13, 14]
    assert dropped == {
        "without a conversation": 5, "without a question": 2, "that begin with an answer": 1,
        "that repeat an earlier prompt": 2, "whose turns are not texts": 2, "with content that is not text": 1,
        "with a turn without a role": 1,
    }  # fmt: skip
    kept, dropped = regenerate.read_conversations(str(path), None, True)
    assert [c.number for c in kept] == [4, 5, 13, 14, 16] and "that repeat an earlier prompt" not in dropped


def test_text_lines_system_prompt_and_unreadable_files(tmp_path):
    text = "\ufefferste\r\n\r\n  zweite Ä\r\nerste\r\n".encode()
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    for name in ("a.txt", "a.txt.gz"):
        kept, dropped = regenerate.read_conversations(str(tmp_path / name), "be brief", False)
        assert [c.messages for c in kept] == [
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": q}] for q in ("erste", "zweite Ä")
        ]
        assert dropped == {"that repeat an earlier prompt": 1}
    chat = [{"role": "system", "content": "mine"}, {"role": "user", "content": "q"}]
    own = write_rows(tmp_path / "own.jsonl", [{"messages": chat}])
    assert regenerate.read_conversations(str(own), "be brief", False)[0][0].messages == chat
    for name, data, message in (
        ("b.jsonl", b'{"prompt": "q"}\n{"prompt": \n', "b.jsonl, line 2: not valid JSON"),
        ("b.txt", b"fine\n\xff\xfe\n", "b.txt, line 2: not valid Unicode"),
        ("b.jsonl.gz", gzip.compress(b'{"prompt": "q"}\n' * 99)[:-12], "cannot read .*b.jsonl.gz"),
        ("c.jsonl", b'{"messages": []}\n', "no prompt in .*c.jsonl: 1 without a conversation"),
        ("d.txt", b"\n\n", "no prompt in .*d.txt: the file is empty"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=message):
            regenerate.read_conversations(str(tmp_path / name), None, False)


# ---- a local model


def test_answers_equal_a_slow_greedy_loop_and_train_on_exactly_the_targets_tokens(target, tmp_path, capsys):
    texts = questions(14)
    rows = [{"id": f"r{i}", "prompt": text} for i, text in enumerate(texts[:9])]
    rows += [{"turns": texts[i : i + 3]} for i in range(9, 12)] + [{"messages": []}]
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    found = answer(prompts, tmp_path / "o.jsonl", "--target", target, "--max-new-tokens", 20, "--batch-size", 8)
    expected, counts = [], Counter()
    for row in rows[:-1]:
        turns = row.get("turns") or [row["prompt"]]
        messages, reason = [], "stop"
        for number, turn in enumerate(turns):
            if reason == "length":
                counts["not asked"] += len(turns) - number
                break
            messages.append({"role": "user", "content": turn})
            text, reason = slow_greedy(target, messages, 20)
            messages.append({"role": "assistant", "content": text})
        if any(not m["content"].strip() for m in messages):
            counts["empty"] += 1
        else:
            own_id = {"id": row["id"]} if "id" in row else {}
            expected.append(own_id | {"messages": messages, "finish_reason": reason})
            counts[reason] += 1
    assert found == expected and [list(row) for row in found] == [list(row) for row in expected]
    assert counts["stop"] and counts["length"] and counts["not asked"]
    assert any(len(row["messages"]) >= 4 for row in found)
    shown = capsys.readouterr().out
    assert f"answered {len(found)} of 13 rows, {counts['length']} cut off by the limit" in shown
    empty = f"{counts['empty']} with an empty answer, " if counts["empty"] else ""
    assert f"rows left out: {empty}1 without a conversation\n" in shown
    assert f"turns not asked, since the chat could not go on after the answer before: {counts['not asked']}\n" in shown
    assert os.listdir(tmp_path) in (["p.jsonl", "o.jsonl"], ["o.jsonl", "p.jsonl"])
    chat, tokenizer = pipeline.ChatTokenizer(byte_tokenizer()), byte_tokenizer()
    for row in found:  # what training supervises is what the target wrote, and no end of turn after a cut
        [(ids, mask)], _ = chat.documents(row)
        texts = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        end = ["<|im_end|>" if i + 1 < len(texts) or row["finish_reason"] == "stop" else "" for i in range(len(texts))]
        assert tokenizer.decode(ids[mask]) == "".join(map("".join, zip(texts, end)))


@pytest.fixture(scope="session")
def loaded(target):
    """(pipeline.load_target's model, ChatTokenizer) of the target."""
    args = pipeline.TargetArguments(target=target)
    config = pipeline.load_target_config(args)
    return pipeline.load_target(args, config, torch.device("cpu")), pipeline.ChatTokenizer(byte_tokenizer())


def local_target(loaded, monkeypatch, *flags) -> regenerate.LocalTarget:
    from transformers import GenerationConfig

    model, chat = loaded
    monkeypatch.setattr(model, "generation_config", GenerationConfig(eos_token_id=[1, 256]))
    return regenerate.LocalTarget(model, chat, regenerate.parse_arguments(["p", "o", "--target", "x", *flags]))


def record(local, ids: list[int], question: str = "q") -> regenerate.Conversation:
    conversation = regenerate.Conversation(0, [{"role": "user", "content": question}], [], {})
    prompt = local.tokenizer(regenerate.render_prompt(local.chat, conversation), add_special_tokens=False)["input_ids"]
    local.record(conversation, prompt, ids)
    return conversation


def test_only_answers_whose_text_gives_their_tokens_again_are_kept(loaded, monkeypatch):
    local, exact = local_target(loaded, monkeypatch), "whose answer tokenises differently"
    tokenizer = local.tokenizer
    a, euro = tokenizer.encode("a")[0], tokenizer.encode("€")
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert len(euro) == 3 and {1, end} == local.stop_ids
    for ids, dropped, text, reason in (
        ([a, a, end], None, "aa", "stop"),
        ([a, a], None, "aa", "length"),
        ([a, *euro, end], None, "a€", "stop"),
        ([a, pad, a, end], None, "a<|pad|>a", "stop"),  # a special token within the answer stays in its text
        ([a, *euro[:2]], exact, None, None),  # cut within a character
        ([a, euro[1], end], exact, None, None),  # not UTF-8
        ([a, 1], exact, None, None),  # ended by a stop token that the template does not write
        ([a, 300, end], exact, None, None),  # a token without text
        ([end], "with an empty answer", None, None),
        ([*tokenizer.encode(" \n"), end], "with an empty answer", None, None),
    ):
        found = record(local, ids)
        assert found.dropped == dropped and found.tokens == len(ids) and found.finish_reason == reason
        if text:
            assert found.messages[1:] == [{"role": "assistant", "content": text}]
    loose = local_target(loaded, monkeypatch, "--keep-inexact")
    assert record(loose, [a, 1]).messages[1]["content"] == "a"
    assert record(loose, [end]).dropped == "with an empty answer"
    # a template that trims answers
    trimming = byte_tokenizer()
    trimming.chat_template = pipeline.CHATML.replace("message.content", "message.content | trim")
    local = local_target((loaded[0], pipeline.ChatTokenizer(trimming)), monkeypatch)
    space = tokenizer.encode(" ")[0]
    assert record(local, [a, space, end]).dropped == exact and record(local, [a, space]).dropped == exact
    assert record(local, [a, space, a, end]).dropped is None


def test_a_row_samples_the_same_tokens_in_every_batch(target, tmp_path):
    prompts = write_rows(tmp_path / "p.jsonl", [{"turns": [text, "and then?"]} for text in questions(9)])
    flags = ("--target", target, "--max-new-tokens", 12, "--temperature", 1.5, "--top-k", 4, "--top-p", 0.9)
    whole, single = (answer(prompts, tmp_path / f"{n}.jsonl", *flags, "--batch-size", n) for n in (9, 2))
    other = answer(prompts, tmp_path / "s.jsonl", *flags, "--batch-size", 9, "--seed", 1)
    assert whole == single and whole != other
    answers = [m["content"] for row in whole for m in row["messages"] if m["role"] == "assistant"]
    assert len(set(answers)) > 0.8 * len(answers)


def test_sampled_tokens_follow_the_tempered_and_cut_distribution():
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -torch.inf]).expand(40_000, 5)
    draws = torch.rand(40_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws[0], draws[1] = 0.0, 1 - 1e-16  # the ends of the range
    chosen = regenerate.KeyedSampling(draws, 7)(torch.zeros(40_000, 9, dtype=torch.long), logits)
    assert (chosen == 0).sum(-1).eq(1).all() and (chosen == 0).logical_or(chosen == -torch.inf).all()
    assert chosen[:2].argmax(-1).tolist() == [0, 3]
    share = chosen.argmax(-1).bincount(minlength=5) / 40_000
    assert torch.allclose(share, logits[0].softmax(-1), atol=0.01) and share[4] == 0
    step = logits[0].softmax(-1).double().cumsum(-1)
    assert (chosen.argmax(-1)[2:] == (draws[2:, 2, None] >= step).sum(-1)).float().mean() > 0.999


def test_long_prompts_and_refusing_templates_are_counted(target, tmp_path, capsys, monkeypatch):
    tokenizer = byte_tokenizer()
    no_x = "{% if 'x' in messages[-1].content %}{{ raise_exception('no x') }}{% endif %}"
    tokenizer.chat_template = no_x + pipeline.CHATML
    monkeypatch.setattr(pipeline, "load_tokenizer", lambda args: tokenizer)
    rows = [{"prompt": "abc"}, {"prompt": "x"}, {"prompt": "a" * 600}, {"turns": ["bcd", "x", "e"]}]
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    found = answer(prompts, tmp_path / "o.jsonl", "--target", target, "--max-new-tokens", 40)
    assert [[m["role"] for m in row["messages"]] for row in found] == [["user", "assistant"]] * 2
    shown = capsys.readouterr().out
    long = "1 over 472 prompt tokens (context less --max-new-tokens)"
    assert f"rows left out: {long}, 1 refused by the chat template\n" in shown
    assert "turns not asked, since the chat could not go on after the answer before: 2\n" in shown
    only_x = write_rows(tmp_path / "x.jsonl", [{"prompt": "x"}, {"prompt": "y", "id": 1}, {}, {"prompt": "b" * 500}])
    with pytest.raises(UserError, match="no prompt in .*x.jsonl can be asked: 2 over 1 .*, 1 refused .*, 1 without"):
        answer(only_x, tmp_path / "n.jsonl", "--target", target, "--max-new-tokens", 511)
    with pytest.raises(UserError, match="--max-new-tokens 512 leaves no room"):
        answer(prompts, tmp_path / "n.jsonl", "--target", target, "--max-new-tokens", 512)


# ---- parts


def test_the_same_bytes_after_a_kill_at_any_write(loaded, target, tmp_path, monkeypatch):
    """A child process dies at its n-th file operation, for every n, the next at another, and the third gets through."""
    monkeypatch.setattr(pipeline, "load_target", lambda *_: loaded[0])

    def fake_answer(self, prompts, keys):  # some are cut off, one is empty
        end = self.tokenizer.eos_token_id
        return [([70 + row, 70 + turn] if row == 3 else [70 + row] * row + [end]) for row, turn in keys]

    monkeypatch.setattr(regenerate.LocalTarget, "answer", fake_answer)
    prompts = write_rows(tmp_path / "p.jsonl", [{"turns": [q, "more"]} for q in questions(5)])
    flags = ["--target", target, "--batch-size", "2", "--max-new-tokens", "8"]
    answer(prompts, tmp_path / "whole.jsonl.gz", *flags)
    whole = (tmp_path / "whole.jsonl.gz").read_bytes()
    assert [len(row["messages"]) for row in pipeline.read_rows([str(tmp_path / "whole.jsonl.gz")])] == [4, 4, 2, 4]
    output, command = tmp_path / "o.jsonl.gz", [str(prompts), str(tmp_path / "o.jsonl.gz"), *flags]
    for at in range(1, 60):
        killed = start_and_die(command, at)
        start_and_die(command, max(1, at // 2))
        if not output.exists() or (tmp_path / "o.jsonl.gz.parts").exists():
            assert not start_and_die(command, 0)
        assert output.read_bytes() == whole, at
        assert not (tmp_path / "o.jsonl.gz.parts").exists()
        output.unlink()
        if not killed:
            break
    assert not killed and at > 15
    answer(prompts, output, *flags)  # sweeps up what a kill within the last removal left
    assert sorted(os.listdir(tmp_path)) == ["o.jsonl.gz", "p.jsonl", "whole.jsonl.gz"]


def start_and_die(argv: list[str], at: int) -> bool:
    """Run the tool in a forked child, killed before its `at`-th file operation or within that write. Was it killed?"""
    child = os.fork()
    if child == 0:
        count = 0

        def dying(right):
            def operation(*args, **kwargs):
                nonlocal count
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return right(*args, **kwargs)

            return operation

        def torn_open(path, mode):
            file = open(path, mode)
            if "w" in mode:
                write, rest = file.write, dying(file.write)
                file.write = lambda data: (write(data[: len(data) // 2]), file.flush(), rest(data[len(data) // 2 :]))
            return file

        regenerate.open = torn_open
        for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, dying(getattr(os, name)))
        code = 1
        try:
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
                regenerate.main(argv)
            code = 0
        except UserError as error:  # killed after all was done: the output is there
            code = 3 if "exists already" in str(error) else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 3, -signal.SIGKILL), code
    return code < 0


def test_the_real_script_killed_and_started_again_with_more_processes(target, tmp_path):
    rows = [{"id": i, "turns": [q, "go on"]} for i, q in enumerate(questions(24))]
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    flags = ["--target", target, "--batch-size", "2", "--max-new-tokens", "16", "--device", "cpu"]
    answer(prompts, tmp_path / "whole.jsonl", *flags)
    output, parts = tmp_path / "o.jsonl", tmp_path / "o.jsonl.parts"
    command = [str(prompts), str(output), *flags]
    with started([sys.executable, str(SCRIPT), *command], tmp_path / "first.log") as process:  # killed on leaving
        wait_until(lambda: parts.is_dir() and len(list(parts.glob("[0-9]*.jsonl"))) >= 3, process, 120)
    assert not output.exists() and 3 <= len(list(parts.glob("[0-9]*.jsonl"))) < 12
    log = tmp_path / "last.log"
    with started(torchrun_command(2, SCRIPT, command), log) as process:
        assert process.wait(120) == 0, log.read_text()
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes() and not parts.exists()
    assert "tokens before this start" in log.read_text()


def test_other_settings_or_an_old_output_are_refused(target, tmp_path, monkeypatch):
    prompts, output = write_rows(tmp_path / "p.jsonl", [{"prompt": "abc"}, {"prompt": "bcd"}]), tmp_path / "o.jsonl"
    flags = ["--target", target, "--max-new-tokens", 8]
    monkeypatch.setattr(regenerate.Parts, "join", lambda self: sys.exit("killed"))
    with pytest.raises(SystemExit):
        answer(prompts, output, *flags)
    monkeypatch.undo()
    loads = []
    monkeypatch.setattr(pipeline, "load_target", lambda *_: loads.append(1))
    for more, difference in (
        (["--max-new-tokens", 9], "with max-new-tokens 8, not 9"),
        (["--batch-size", 5], "with batch-size 64, not 5"),
        (["--temperature", 0.5], "with temperature 0.0, not 0.5"),
        (["--system", "s"], "with system None, not 's'"),
        (["--target-dtype", "bfloat16"], "with target-dtype 'float32', not 'bfloat16'"),
        (["--keep-inexact"], "with keep-inexact False, not True"),
    ):
        with pytest.raises(UserError, match=f"o.jsonl.parts was begun {difference}: keep to the settings or remove"):
            answer(prompts, output, *flags, *more)
    write_rows(prompts, [{"prompt": "abc"}, {"prompt": "bce"}])
    with pytest.raises(UserError, match="with prompts of hash '.*', not '"):
        answer(prompts, output, *flags)
    write_rows(prompts, [{"prompt": "abc"}, {"prompt": "bcd"}])
    assert len(answer(prompts, output, *flags)) == 2 and not loads  # all was done: no model is needed
    with pytest.raises(UserError, match="o.jsonl exists already"):
        answer(prompts, output, *flags)


def test_mistakes_are_one_line_before_anything_is_loaded(tmp_path, monkeypatch):
    prompts, output = write_rows(tmp_path / "p.jsonl", [{"prompt": "abc"}]), tmp_path / "o.jsonl"
    for flags, message in (
        ([], "name either a local model"),
        (["--target", "t", "--base-url", "http://x/v1"], "name either a local model"),
        (["--base-url", "http://x/v1"], "--base-url needs --model"),
        (["--base-url", "localhost:8000/v1", "--model", "m"], "expected http"),
        (["--target", "t", "--batch-size", 0], "--batch-size must be at least 1"),
        (["--target", "t", "--temperature", -1], "--temperature must be at least 0"),
        (["--target", "t", "--top-p", 0.5], "set --temperature too"),
        (["--target", "t", "--temperature", 1, "--top-p", 0], "--top-p must lie"),
        (["--target", "t", "--chat-template-kwargs", "[1]"], "expected a JSON object"),
        (["--target", str(tmp_path)], "cannot load --target"),
    ):
        with pytest.raises(UserError, match=message):
            answer(prompts, output, *flags)
    with pytest.raises(UserError, match="nothing.jsonl: no such file"):
        answer(tmp_path / "nothing.jsonl", output, "--target", "t")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="there is no GPU"):
            answer(prompts, output, "--target", "toy", "--device", "cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="needs no torchrun"):
        answer(prompts, output, "--base-url", "http://x/v1", "--model", "m")
    shown = subprocess.run([sys.executable, SCRIPT, prompts, output], capture_output=True, text=True)
    assert shown.returncode == 1 and shown.stderr.strip().splitlines()[-1].startswith("error: name either")
    assert "Traceback" not in shown.stderr and sorted(os.listdir(tmp_path)) == ["p.jsonl"]


# ---- a server


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with what it was asked; the server's `faults` say what goes wrong first, by question."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.requests.append((self.path, self.headers, body))
            fault = self.server.faults.get(question, [])
            fault = fault.pop(0) if fault else None
        if fault == "drop":
            self.connection.close()
        elif fault == "half":
            self.send_response(200)
            self.send_header("Content-Length", "500")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif fault == "slow":
            time.sleep(1.5)
        elif isinstance(fault, tuple):
            self.reply(*fault)
        elif isinstance(fault, dict):
            self.reply(200, fault)
        else:
            history = [m["content"] for m in body["messages"]]
            message = {"role": "assistant", "content": f"answer {len(history)} to {question} after {history[:-1]}"}
            reason = "length" if "long" in question else "stop"
            choice = {"message": message, "finish_reason": reason}
            self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 5}})

    def reply(self, code, value, headers=()):
        data = json.dumps(value).encode()
        self.send_response(code)
        for name, text in [*headers, ("Content-Length", str(len(data)))]:
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)


class QuietServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):  # the client's time-outs
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(regenerate, "BACK_OFF_S", 0.001)
    server = QuietServer(("127.0.0.1", 0), Handler)
    server.lock, server.requests, server.faults = threading.Lock(), [], {}
    server.flags = ["--base-url", f"http://127.0.0.1:{server.server_address[1]}/v1/", "--model", "m"]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def spoken(turns: list[str]) -> list[dict]:
    """The chat that Handler makes of some questions."""
    messages = []
    for turn in turns:
        text = f"answer {len(messages) + 1} to {turn} after {[m['content'] for m in messages]}"
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": text}]
    return messages


def test_a_server_that_fails_sometimes_answers_every_row(server, tmp_path, capsys):
    rows = [{"id": i, "prompt": f"q{i}"} for i in range(8)] + [{"turns": ["a", "b", "long c", "d"]}, {"messages": []}]
    busy = (429, {"error": {"message": "busy"}}, [("Retry-After", "0")])
    server.faults = {
        "q0": [busy, busy, (500, {})], "q1": ["drop", "half"], "q2": ["slow"], "q3": [(503, "x"), {"choices": []}],
        "b": [(408, {}), "drop"], "q4": [{"error": "odd"}],
    }  # fmt: skip
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    flags = [*server.flags, "--concurrency", 3, "--request-timeout", 0.5, "--max-new-tokens", 99, "--api-key", "secret"]
    found = answer(prompts, tmp_path / "o.jsonl", *flags)
    assert found == [{"id": i, "messages": spoken([f"q{i}"]), "finish_reason": "stop"} for i in range(8)] + [
        {"messages": spoken(["a", "b", "long c"]), "finish_reason": "length"}
    ]
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body == {"model": "m", "messages": body["messages"], "max_tokens": 99, "temperature": 0.0}
    shown = capsys.readouterr().out
    assert "answered 9 of 10 rows, 1 cut off by the limit\nrows left out: 1 without a conversation\n" in shown
    assert "not asked, since the chat could not go on after the answer before: 1\n55 tokens" in shown
    assert "requests repeated after an error: 11\n" in shown
    assert "secret" not in shown and sorted(os.listdir(tmp_path)) == ["o.jsonl", "p.jsonl"]


def test_retry_after_is_honoured_and_back_off_grows(server):
    class Stop:
        waits, stopped = [], False

        def wait(self, seconds):
            self.waits.append(seconds)
            return False

        def is_set(self):
            return False

    args = regenerate.parse_arguments(["p", "o", *server.flags, "--max-retries", "9"])
    asked, stop = regenerate.Conversation(0, [{"role": "user", "content": "q"}], [], {}), Stop()
    waits = ["7.5", formatdate(time.time() + 600, usegmt=True), "soon"]
    server.faults["q"] = [(429, {}, [("Retry-After", wait)]) for wait in waits] + [(500, {})] * 6
    regenerate.Server(args, stop).answer(asked)
    assert asked.messages[-1]["content"].startswith("answer 1 to q")
    assert stop.waits[0] == 7.5 and 500 < stop.waits[1] <= 600
    for attempt, wait in enumerate(stop.waits[2:], 2):
        assert 0.0005 * 2**attempt <= wait <= 0.001 * 2**attempt
    assert len(stop.waits) == 9
    server.faults["q"] = [(500, {"error": {"message": "out of\nluck"}})] * 99
    args.max_retries = 2
    again = regenerate.Conversation(0, [{"role": "user", "content": "q"}], [], {})
    with pytest.raises(regenerate.NotAnswered, match="^HTTP 500: out of luck$"):
        regenerate.Server(args, stop).answer(again)
    assert len(stop.waits) == 11 and len(server.faults["q"]) == 96


def test_failed_rows_are_tried_again_by_the_same_command(server, tmp_path):
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": f"q{i}"} for i in range(12)])
    answer(prompts, tmp_path / "whole.jsonl", *server.flags)
    server.faults = {"q3": [(500, {})] * 3, "q7": ["drop"] * 3}
    server.requests.clear()
    command = [sys.executable, SCRIPT, prompts, tmp_path / "o.jsonl", *server.flags, "--max-retries", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 1 and "Traceback" not in shown.stderr
    last = shown.stderr.strip().splitlines()[-1]
    assert last.startswith("error: 2 rows failed (the last: ")
    assert last.endswith("0 were not tried, 10 are done: the same command tries the others again")
    assert not (tmp_path / "o.jsonl").exists() and len(server.requests) == 14
    with pytest.raises(UserError, match="was begun with max-new-tokens 1024, not 5"):
        answer(prompts, tmp_path / "o.jsonl", *server.flags, "--max-new-tokens", 5)
    server.requests.clear()
    answer(prompts, tmp_path / "o.jsonl", *server.flags, "--max-retries", 1)
    assert len(server.requests) == 4
    assert (tmp_path / "o.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_dead_server_and_a_wrong_key_end_the_run_early(server, tmp_path):
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": f"q{i}"} for i in range(200)])
    flags = [*server.flags, "--concurrency", 2, "--max-retries", 0]
    server.faults = {f"q{i}": [(500, {})] for i in range(200)}
    with pytest.raises(UserError, match="rows failed .* were not tried, 0 are done"):
        answer(prompts, tmp_path / "o.jsonl", *flags)
    assert len(server.requests) < 30
    server.requests.clear()
    server.faults = {f"q{i}": [(401, {"error": {"message": "no such key"}})] for i in range(200)}
    with pytest.raises(UserError, match="/v1/chat/completions answers HTTP 401: no such key"):
        answer(prompts, tmp_path / "o.jsonl", *flags, "--max-retries", 5)
    assert len(server.requests) < 30


def test_refusals_odd_ends_and_reasoning(server, tmp_path, capsys):
    def reply(reason, **message):
        return {"choices": [{"message": message, "finish_reason": reason}]}

    server.faults = {
        "q0": [(400, {"message": "too long"})], "q1": [reply("stop", content=None)],
        "q2": [reply("tool_calls", content="c")], "q3": [reply("length", content=None, reasoning_content="hm")],
        "q4": [reply("stop", content="a", reasoning="hm")], "q5": [reply("stop", content=["a", "b"])],
    }  # fmt: skip
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": f"q{i}"} for i in range(6)])
    found = answer(prompts, tmp_path / "o.jsonl", *server.flags)
    assert [row["messages"][0]["content"] for row in found] == ["q4", "q5"]  # q5 is asked again
    assert found[0]["messages"][1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    shown = capsys.readouterr().out
    assert "refused by the server, the last with HTTP 400: too long\nanswered 2 of 6 rows, 0 cut off" in shown
    assert "left out: 1 refused by the server, 1 that ended with 'tool_calls', 2 with an empty answer\n" in shown
    server.faults = {f"q{i}": [(400, {"message": "bad"})] for i in range(6)}
    with pytest.raises(UserError, match=r"no row was answered: 6 refused by the server \(HTTP 400: bad\)"):
        answer(prompts, tmp_path / "n.jsonl", *server.flags)


def test_a_refused_later_turn_keeps_the_answers_before_it(server, tmp_path, capsys):
    server.faults = {"c": [(400, {"message": "too long"})]}
    prompts = write_rows(tmp_path / "p.jsonl", [{"turns": ["a", "b", "c", "d"]}])
    found = answer(prompts, tmp_path / "o.jsonl", *server.flags)
    assert found == [{"messages": spoken(["a", "b"]), "finish_reason": "stop"}]
    assert "could not go on after the answer before: 2\n10 tokens" in capsys.readouterr().out


def test_sampling_settings_reach_the_server_with_a_seed_per_row_and_turn(server, tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = {"messages": [{"role": "user", "content": "c"}], "tools": tools}
    prompts = write_rows(tmp_path / "p.jsonl", [{"turns": ["a", "b"]}, with_tools])
    flags = ["--temperature", 0.5, "--top-p", 0.9, "--top-k", 7, "--system", "s", "--chat-template-kwargs", '{"k": 1}']
    first = answer(prompts, tmp_path / "o.jsonl", *server.flags, *flags)
    bodies = {body["messages"][-1]["content"]: body for _, _, body in server.requests}
    assert all(b["temperature"] == 0.5 and b["top_p"] == 0.9 and b["top_k"] == 7 for b in bodies.values())
    assert all(b["chat_template_kwargs"] == {"k": 1} and b["messages"][0]["content"] == "s" for b in bodies.values())
    assert len({b["seed"] for b in bodies.values()}) == 3
    assert bodies["c"]["tools"] == tools and "tools" not in bodies["a"]
    assert first[1]["tools"] == tools and list(first[1]) == ["messages", "tools", "finish_reason"]
    server.requests.clear()
    answer(prompts, tmp_path / "again.jsonl", *server.flags, *flags)
    assert {body["messages"][-1]["content"]: body for _, _, body in server.requests} == bodies


# ---- the demo's data


def test_demo_data_has_each_answer_once(target, tmp_path, monkeypatch, capsys):
    texts = questions(12)
    monkeypatch.setattr(make_demo_data, "compose", lambda: (texts, ["held", "out"]))
    monkeypatch.setattr(sys, "argv", ["make_demo_data.py", "--target", target, "--output-dir", str(tmp_path),
                                      "--max-new-tokens", "4"])  # fmt: skip
    make_demo_data.main()
    assert sorted(os.listdir(tmp_path)) == ["demo_heldout.jsonl", "demo_train.jsonl.gz"]
    expected, seen = [], set()
    for text in texts:
        messages = [{"role": "user", "content": text}]
        content, reason = slow_greedy(target, messages, 4)
        if content.strip() and content not in seen:
            messages.append({"role": "assistant", "content": content})
            expected.append({"messages": messages, "finish_reason": reason})
        seen.add(content)
    found = list(pipeline.read_rows([str(tmp_path / "demo_train.jsonl.gz")]))
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert len(expected) < 12 and "repeated answers, kept" in capsys.readouterr().out
    held = (tmp_path / "demo_heldout.jsonl").read_text()
    assert held == "".join(f'{{"messages": [{{"role": "user", "content": "{q}"}}]}}\n' for q in ("held", "out"))
    with gzip.open(tmp_path / "demo_train.jsonl.gz") as file:
        assert file.readline().decode() == json.dumps(found[0], ensure_ascii=False) + "\n"


def test_the_demo_prompts_are_unique_and_the_heldout_topics_unseen():
    train, heldout = make_demo_data.compose()
    assert len(set(train)) == len(train) and not set(train) & set(heldout)
