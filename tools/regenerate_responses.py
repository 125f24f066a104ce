#!/usr/bin/env python3
"""Let the target answer prompts itself: a drafter is trained on its target's own words.

    # greedy answers of a local model; every process takes its share of the batches and GPUs may be shared
    torchrun --nproc_per_node 4 tools/regenerate_responses.py prompts.jsonl answers.jsonl.gz --target Qwen/Qwen3-8B \\
        --max-new-tokens 2048 --batch-size 256

    # sampled, one process; a .txt file holds one prompt a line
    python tools/regenerate_responses.py prompts.txt answers.jsonl --target Qwen/Qwen3-8B --temperature 0.7 --top-p 0.95

    # answers of a model that is served already (vLLM, SGLang, any OpenAI-compatible server)
    python tools/regenerate_responses.py prompts.jsonl answers.jsonl --base-url http://localhost:8000/v1 \\
        --model Qwen/Qwen3-8B --concurrency 128 --max-new-tokens 2048

In: JSONL (.gz too) with `messages`, ShareGPT `conversations` or `prompt`, cut before the first answer; or `turns`,
several questions that are answered one after the other, each with the earlier answers in context. Out: rows in the
order of the input, as the pipeline's --train-data takes them:

    {"id": as in the input, "messages": [..., {"role": "assistant", ...}], "finish_reason": "stop" | "length"}

An answer that reached --max-new-tokens ends there, is marked "length", and no end of turn is made up for it: turns
after it are not asked. A local answer is kept only if its row, read the way training reads it, gives exactly the token
ids that the target wrote; the others are counted and left out, as are empty answers. A server sends no token ids, so
with --base-url this cannot be checked: how the text tokenises is up to the tokenizer alone.

A local model decodes plainly: of the target's generation settings only the stop tokens are used, no penalties. Sampling
draws its random numbers from --seed, the row and the turn, not from the batch around it.

A killed run goes on where it was: start the same command again. Finished batches (with a server: rows) lie in
OUTPUT.parts until all are there; the result has the same bytes as that of an undisturbed run (with a server: if it
gives the same answers again). On several machines OUTPUT must be on a shared file system.
"""

import argparse
import concurrent.futures
import email.utils
import gzip
import hashlib
import http.client
import itertools
import json
import os
import random
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Iterable, Iterator, Optional

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import RowError, UserError

# ======================================================================================================================
# Prompts in: rows of a file -> conversations that wait for an answer
# ======================================================================================================================


@dataclass
class Conversation:
    """A chat that the target continues. It waits for an answer, is complete, or was dropped for a reason."""

    number: int  # row of the prompts file, from 0
    messages: list[dict]
    questions: list[str]  # user turns still to come
    extra: dict  # `id` and `tools` of the row, where it has them
    prompt_ids: Optional[np.ndarray] = None  # int32, of the first question (local model only)
    turn: int = 0  # answers so far
    tokens: int = 0  # generated so far
    finish_reason: Optional[str] = None
    dropped: Optional[str] = None
    turns_not_asked: int = 0

    @property
    def waits(self) -> bool:
        return self.dropped is None and self.messages[-1]["role"] != "assistant"

    def add_answer(self, message: dict, finish_reason: str) -> None:
        """Append an assistant message, and the next question if the answer came to its end."""
        self.messages, self.finish_reason, self.turn = [*self.messages, message], finish_reason, self.turn + 1
        if finish_reason == "length":
            self.turns_not_asked, self.questions = len(self.questions), []
        elif self.questions:
            question, *self.questions = self.questions
            self.messages = [*self.messages, {"role": "user", "content": question}]

    def withdraw_question(self) -> None:
        """The last question cannot be asked: end with the answer before it."""
        self.turns_not_asked, self.questions = 1 + len(self.questions), []
        self.messages = self.messages[:-1]

    def outcome(self) -> dict:
        """What a part stores of a finished conversation."""
        row = {"id": self.extra.get("id"), "messages": self.messages, "tools": self.extra.get("tools"),
               "finish_reason": self.finish_reason}  # fmt: skip
        answered = None if self.dropped else {key: value for key, value in row.items() if value is not None}
        return {"row": self.number, "tokens": self.tokens, "turns_not_asked": self.turns_not_asked,
                "dropped": self.dropped, "answered": answered}  # fmt: skip


def read_prompt_rows(path: str) -> Iterator[dict]:
    """The rows of a JSONL file, or {"prompt": line} of each line of a .txt file; .gz too. Blank lines do not count."""
    if not path.removesuffix(".gz").endswith(".txt"):
        yield from pipeline.read_rows([path])
        return
    for _, number, line in pipeline.read_lines([path]):
        try:
            yield {"prompt": line.decode()}
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number}: not valid Unicode ({pipeline.first_line(error)})") from None


def row_questions(row: dict) -> tuple[list[dict], list[str]]:
    """(chat up to its first question, later questions) of a row. Raises RowError if it asks nothing."""
    if isinstance(turns := row.get("turns"), list):
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise RowError("whose turns are not texts")
        return [{"role": "user", "content": turns[0]}], turns[1:]
    # The pipeline's reader wants an answer: it gets one, so that the formats are told apart in one place.
    row = dict(row)
    if [] in (row.get("messages"), row.get("conversations")):
        raise RowError("without a conversation")
    if isinstance(row.get("conversations"), list):
        row["conversations"] = [*row["conversations"], {"from": "gpt", "value": "-"}]
    pair = isinstance(row.get("prompt"), str) and isinstance(row.get("response"), str)
    if isinstance(row.get("messages"), list) and not pair:
        row["messages"] = [*row["messages"], {"role": "assistant", "content": "-"}]
    else:
        row["response"] = "-"
    messages = pipeline.row_messages(row)
    answer = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    if answer == 0:
        raise RowError("that begin with an answer")
    if not any(m["role"] == "user" and m.get("content", "").strip() for m in messages[:answer]):
        raise RowError("without a question")
    return messages[:answer], []


def read_conversations(path: str, system: Optional[str], keep_repeats: bool) -> tuple[list[Conversation], Counter]:
    """(conversations that wait for their first answer, rows left out by reason).

    `system` is put before chats that have no system message. A prompt that an earlier row holds already is left out
    unless `keep_repeats`. Raises UserError when the file cannot be read.
    """
    conversations, dropped, seen = [], Counter(), set()
    for number, row in enumerate(read_prompt_rows(path)):
        try:
            messages, questions = row_questions(row)
            if system is not None and messages[0]["role"] not in ("system", "developer"):
                messages = [{"role": "system", "content": system}, *messages]
            extra = {k: row[k] for k in ("id", "tools") if row.get(k) not in (None, [])}
            asked = hashlib.sha256(json.dumps([messages, questions, extra.get("tools")]).encode()).digest()
            if asked in seen and not keep_repeats:
                raise RowError("that repeat an earlier prompt")
        except RowError as reason:
            dropped[str(reason)] += 1
            continue
        seen.add(asked)
        conversations.append(Conversation(number, messages, questions, extra))
    if not conversations:
        raise UserError(f"no prompt in {path}: {pipeline.by_reason(dropped) or 'the file is empty'}")
    return conversations, dropped


# ======================================================================================================================
# Rows out: finished work in OUTPUT.parts, joined at the end
# ======================================================================================================================


def write_atomically(path: Path, data: bytes) -> None:
    """The file has all of `data` or does not change, whenever the process or the machine stops."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    # opened before the file appears: rank 0 may move the folder away once it sees the last part
    folder = os.open(path.parent, os.O_RDONLY)
    os.replace(partial, path)
    os.fsync(folder)
    os.close(folder)


def write_jsonl(path: Path, rows: Iterable[dict], partial: Path) -> None:
    """A JSONL file, compressed if its name ends in .gz, by way of `partial`: the same rows give the same bytes."""
    with open(partial, "wb") as file:
        lines = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if path.suffix == ".gz" else file
        for row in rows:
            lines.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
        if lines is not file:
            lines.close()
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


class Parts:
    """OUTPUT.parts: manifest.json with the settings, and the outcomes of each finished unit of work in NUMBER.jsonl."""

    def __init__(self, output: Path, settings: dict):
        self.output, self.settings = output, settings | {"parts": "JSONL"}
        self.folder = output.with_name(output.name + ".parts")
        self.old = output.with_name(output.name + ".parts.old")
        self.manifest = self.folder / "manifest.json"

    def check(self) -> None:
        """Raises UserError when the output is there already, or was begun with other settings."""
        if not self.manifest.exists():
            if self.output.exists():
                raise UserError(f"{self.output} exists already: remove it or choose another name")
            return
        begun = json.loads(self.manifest.read_text())
        for name in begun | self.settings:
            if begun.get(name) != self.settings.get(name):
                change = f"with {name} {begun.get(name)!r}, not {self.settings.get(name)!r}"
                raise UserError(f"{self.folder} was begun {change}: keep to the settings or remove the folder")

    def open(self) -> None:
        """Begin, or go on."""
        self.check()
        shutil.rmtree(self.old, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.manifest, json.dumps(self.settings, indent=2).encode())

    def finished(self) -> set[int]:
        return {int(path.stem) for path in self.folder.glob("*.jsonl") if path.stem.isdigit()}

    def path(self, number: int) -> Path:
        return self.folder / f"{number}.jsonl"

    def save(self, number: int, conversations: list[Conversation]) -> None:
        lines = [json.dumps(conversation.outcome()) + "\n" for conversation in conversations]
        write_atomically(self.path(number), "".join(lines).encode())

    def outcomes(self, number: int) -> Iterator[tuple[int, dict]]:
        """(where it begins in the file, outcome) of all in a part."""
        with open(self.path(number), "rb") as file:
            offset = 0
            for line in file:
                yield offset, json.loads(line)
                offset += len(line)

    def answered(self, number: int, offset: int) -> dict:
        """The answered row whose outcome begins there."""
        with open(self.path(number), "rb") as file:
            file.seek(offset)
            return json.loads(file.readline())["answered"]

    def join(self) -> "Totals":
        """Write the output, a row at a time in the order of the input. Raises UserError when no row was answered."""
        places, totals = [], Totals()
        for number in self.finished():
            for offset, outcome in self.outcomes(number):
                totals.add(outcome)
                if outcome["answered"]:
                    places.append((outcome["row"], number, offset))
        if not places:
            raise UserError(f"no row was answered: {pipeline.by_reason(totals.dropped)}")
        rows = (self.answered(number, offset) for _, number, offset in sorted(places))
        write_jsonl(self.output, rows, self.folder / "joined")
        os.rename(self.folder, self.old)  # at once: a folder that lost some of its files would count as begun
        shutil.rmtree(self.old, ignore_errors=True)
        return totals


@dataclass
class Totals:
    """What became of all rows that were asked."""

    rows: int = 0
    answered: int = 0
    cut_off: int = 0
    turns_not_asked: int = 0
    tokens: int = 0
    dropped: Counter = field(default_factory=Counter)  # by reason

    def add(self, outcome: dict) -> None:
        self.rows += 1
        self.tokens += outcome["tokens"]
        self.turns_not_asked += outcome["turns_not_asked"]
        if outcome["dropped"]:
            self.dropped[outcome["dropped"]] += 1
        if outcome["answered"]:
            self.answered += 1
            self.cut_off += outcome["answered"]["finish_reason"] == "length"


class Progress:
    """A bar of rows with tokens/s and the time left, over all processes: it looks which parts are there."""

    def __init__(self, parts: Parts, sizes: list[int], show: bool):
        self.parts, self.sizes, self.seen = parts, sizes, parts.finished()
        self.tokens, self.started = 0, time.monotonic()
        done = sum(sizes[number] for number in self.seen)
        self.bar = tqdm(total=sum(sizes), initial=done, desc="answering", unit=" rows", disable=not show)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def update(self) -> None:
        for number in sorted(self.parts.finished() - self.seen):
            self.add(number, sum(outcome["tokens"] for _, outcome in self.parts.outcomes(number)))

    def add(self, number: int, tokens: int) -> None:
        self.seen.add(number)
        self.tokens += tokens
        self.bar.set_postfix_str(f"{self.tokens / self.seconds:,.0f} tokens/s", refresh=False)
        self.bar.update(self.sizes[number])

    def wait_for_all(self) -> None:
        """Until every process has written its parts; torchrun ends this one if another fails."""
        while len(self.seen) < len(self.sizes):
            time.sleep(0.2)
            self.update()


def show_summary(totals: Totals, left_out: Counter, progress: Progress, output: Path) -> None:
    of = totals.rows + left_out.total()
    print(f"answered {totals.answered:,} of {of:,} rows, {totals.cut_off:,} cut off by the limit")
    print(f"rows left out: {pipeline.by_reason(left_out + totals.dropped) or 'none'}")
    if count := totals.turns_not_asked:
        print(f"turns not asked, since the chat could not go on after the answer before: {count:,}")
    tokens, earlier = progress.tokens, totals.tokens - progress.tokens
    speed = f"{tokens:,} tokens in {progress.seconds:.1f} s: {tokens / progress.seconds:,.0f} tokens/s"
    print(speed + (f"; {earlier:,} tokens before this start" if earlier else ""))
    print(f"wrote {output}", flush=True)


# ======================================================================================================================
# A local model
# ======================================================================================================================


class MostStopped:
    """Stopping criterion: ends the batch when three quarters of its rows have ended, so that the rest go on alone."""

    def __init__(self, rows: int, stop_ids: Tensor):
        self.stop_ids, self.stopped = stop_ids, torch.zeros(rows, dtype=torch.bool, device=stop_ids.device)

    def __call__(self, input_ids: Tensor, scores, **_) -> Tensor:
        self.stopped = self.stopped | torch.isin(input_ids[:, -1], self.stop_ids)
        return self.stopped | (4 * self.stopped.sum() >= 3 * len(self.stopped))


class KeyedSampling:
    """Logits processor: leaves one token a row, chosen by that row's own random number for this step.

    `draws` [rows, steps] in [0, 1), fp64; step 0 is the token at column `width` of the input.
    """

    def __init__(self, draws: Tensor, width: int):
        self.draws, self.width = draws, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        draw = self.draws[:, input_ids.shape[1] - self.width, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, draw, right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


class LocalTarget:
    """A model that answers batches of token ids, with the tokenizer that training reads the answers with."""

    def __init__(self, model, chat: pipeline.ChatTokenizer, args: argparse.Namespace):
        from transformers import GenerationConfig

        tokenizer = chat.tokenizer
        self.model, self.tokenizer, self.chat, self.args = model, tokenizer, chat, args
        self.stop_ids = pipeline.stop_token_ids(model, tokenizer)
        if not self.stop_ids:
            raise UserError(f"neither the tokenizer nor the generation config of {args.target} names a stop token")
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.stop_ids)
        model.generation_config = GenerationConfig()  # what the target's own adds (sampling, penalties) stays out

    def answer(self, prompts: list[list[int]], keys: list[tuple[int, int]]) -> list[list[int]]:
        """The answers' ids, each with its stop token unless the limit came first. `keys`: (row, turn) of each prompt.

        Rows that are still being written when most have ended go on in a smaller batch, with what they have so far.
        """
        limit, answers, alive = self.args.max_new_tokens, [[] for _ in prompts], list(range(len(prompts)))
        draws = None
        if self.args.temperature > 0:
            streams = [np.random.default_rng([self.args.seed, *key]) for key in keys]
            draws = torch.from_numpy(np.stack([stream.random(limit) for stream in streams])).to(self.model.device)
        done = 0
        while alive:
            texts = [[*prompts[i], *answers[i]] for i in alive]
            new = self.generate(texts, limit - done, draws[alive, done:] if draws is not None else None)
            done += len(new[0])
            open_rows = []
            for i, ids in zip(alive, new):
                end = next((n for n, token in enumerate(ids) if token in self.stop_ids), None)
                answers[i] += ids if end is None else ids[: end + 1]
                if end is None and done < limit:
                    open_rows.append(i)
            alive = open_rows
        return answers

    def generate(self, texts: list[list[int]], limit: int, draws: Optional[Tensor]) -> list[list[int]]:
        """Up to `limit` tokens after each text, all equally many; whatever follows a stop token is padding."""
        from transformers import (
            GenerationConfig, LogitsProcessorList, StoppingCriteriaList, TemperatureLogitsWarper, TopKLogitsWarper,
            TopPLogitsWarper,
        )  # fmt: skip

        width, device = max(map(len, texts)), self.model.device
        ids = np.full((len(texts), width), self.pad_id)
        real = np.zeros((len(texts), width), np.int64)
        for i, text in enumerate(texts):
            ids[i, width - len(text) :], real[i, width - len(text) :] = text, 1
        processors = LogitsProcessorList()
        if draws is not None:
            processors.append(TemperatureLogitsWarper(self.args.temperature))
            processors += [TopKLogitsWarper(self.args.top_k)] if self.args.top_k else []
            processors += [TopPLogitsWarper(self.args.top_p)] if self.args.top_p < 1 else []
            processors.append(KeyedSampling(draws, width))
        stop_ids = sorted(self.stop_ids)
        output = self.model.generate(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(real).to(device),
            generation_config=GenerationConfig(
                max_new_tokens=limit, do_sample=False, eos_token_id=stop_ids, pad_token_id=self.pad_id
            ),
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([MostStopped(len(texts), torch.tensor(stop_ids, device=device))]),
        )
        return output[:, width:].tolist()

    def record(self, conversation: Conversation, prompt: list[int], ids: list[int]) -> None:
        """Add an answer to its conversation, or drop the conversation."""
        conversation.tokens += len(ids)
        stopped = ids[-1] in self.stop_ids
        # decoded behind the prompt: some tokenizers drop a space at the start of a text
        before = self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        text = self.tokenizer.decode([*prompt, *ids[: len(ids) - stopped]], clean_up_tokenization_spaces=False)
        text = text[len(before) :]
        if not text.strip():
            conversation.dropped = "with an empty answer"
            return
        messages = [*conversation.messages, {"role": "assistant", "content": text}]
        finish_reason = "stop" if stopped else "length"
        if not self.args.keep_inexact:
            conversation.dropped = self.inexact(messages, conversation.extra, finish_reason, prompt, ids)
        if conversation.dropped is None:
            conversation.add_answer(messages[-1], finish_reason)

    def inexact(self, messages, extra: dict, finish_reason: str, prompt: list[int], ids: list[int]) -> Optional[str]:
        """Why training would read other tokens than the prompt and the answer; None if it reads exactly them."""
        documents, why = self.chat.documents({**extra, "messages": messages, "finish_reason": finish_reason})
        if not documents:
            return why[0]
        read, mask = documents[-1]
        end = len(prompt) + len(ids)
        same = read[:end].tolist() == [*prompt, *ids] and not mask[end:].any()
        return None if same else "whose answer tokenises differently"

    def answer_batch(self, batch: list[Conversation]) -> None:
        """Answer every conversation to its end, turn by turn."""
        room = context_room(self.model.config, self.args.max_new_tokens)
        while waiting := [c for c in batch if c.waits]:
            asked = []
            for conversation in waiting:
                if conversation.turn == 0:
                    ids = conversation.prompt_ids.tolist()
                else:
                    text = render_prompt(self.chat, conversation)
                    ids = None if text is None else self.tokenizer(text, add_special_tokens=False)["input_ids"]
                if ids is None or len(ids) > room:
                    conversation.withdraw_question()
                else:
                    asked.append((conversation, ids))
            if asked:
                answers = self.answer([ids for _, ids in asked], [(c.number, c.turn) for c, _ in asked])
                for (conversation, prompt), ids in zip(asked, answers):
                    self.record(conversation, prompt, ids)


def context_room(config, max_new_tokens: int) -> int:
    """The longest prompt that leaves room for an answer in the target's context."""
    room = (config.get_text_config().max_position_embeddings or sys.maxsize) - max_new_tokens
    if room < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens} leaves no room in the target's context for a prompt")
    return room


def render_prompt(chat: pipeline.ChatTokenizer, conversation: Conversation) -> Optional[str]:
    """The chat up to where the answer begins; None if the chat template refuses it."""
    try:
        return chat.tokenizer.apply_chat_template(
            conversation.messages, tools=conversation.extra.get("tools"), tokenize=False, add_generation_prompt=True,
            **chat.template_kwargs,
        )  # fmt: skip
    except Exception:  # templates raise what they like
        return None


def plan_batches(conversations: list[Conversation], chat: pipeline.ChatTokenizer, room: int, batch_size: int):
    """(batches of similar length, rows left out by reason). Depends on the prompts and the batch size alone."""
    ready, dropped = [], Counter()
    for start in range(0, len(conversations), 1000):
        chunk = conversations[start : start + 1000]
        texts = [render_prompt(chat, conversation) for conversation in chunk]
        encoded = iter(chat.tokenizer([t for t in texts if t] or [""], add_special_tokens=False)["input_ids"])
        for conversation, text in zip(chunk, texts):
            if not text:
                dropped["refused by the chat template"] += 1
                continue
            ids = next(encoded)
            conversation.prompt_ids = np.array(ids, np.int32)
            if len(ids) <= room:
                ready.append(conversation)
            else:
                dropped[f"over {room:,} prompt tokens (context less --max-new-tokens)"] += 1
    ready.sort(key=lambda c: (len(c.questions), len(c.prompt_ids), c.number))
    return [ready[i : i + batch_size] for i in range(0, len(ready), batch_size)], dropped


def choose_device(requested: str) -> torch.device:
    """`--device`: processes share the GPUs when there are more of them than GPUs."""
    gpus = torch.cuda.device_count() if requested != "cpu" else 0
    if requested == "cuda" and not gpus:
        raise UserError("--device cuda: there is no GPU")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus) if gpus else torch.device("cpu")


def opened_on_all_ranks(parts: Parts, rank: int, world: int) -> set[int]:
    """Open the parts on rank 0; all ranks learn which are finished, or get the same UserError."""
    error, finished = None, None
    if rank == 0:
        try:
            parts.open()
            finished = parts.finished()
        except UserError as problem:
            error = str(problem)
    if world > 1:
        dist.init_process_group("gloo")
        told = [error, finished]
        dist.broadcast_object_list(told, 0)
        dist.destroy_process_group()
        error, finished = told
    if error:
        raise UserError(error)
    return finished


def answer_locally(args: argparse.Namespace, rank: int, world: int) -> None:
    """Answer all prompts with a local model; this process takes every `world`-th of the batches still to do."""
    conversations, left_out = read_conversations(args.prompts, args.system, args.keep_repeats)
    target = pipeline.TargetArguments(
        target=args.target, tokenizer=args.tokenizer, target_dtype=args.target_dtype,
        trust_remote_code=args.trust_remote_code,
    )  # fmt: skip
    device = choose_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config, tokenizer = pipeline.load_target_config(target), pipeline.load_tokenizer(target)
    if config.get_text_config().model_type == "gpt_oss":
        raise UserError(f"{args.target} answers in channels, which only a server takes apart: serve it, and use --base-url")
    pipeline.settle_target_dtype(target, config, device)
    room = context_room(config, args.max_new_tokens)
    chat = pipeline.ChatTokenizer(tokenizer, template_kwargs=pipeline.parse_template_kwargs(args.chat_template_kwargs))
    batches, refused = plan_batches(conversations, chat, room, args.batch_size)
    left_out += refused
    if not batches:
        raise UserError(f"no prompt in {args.prompts} can be asked: {pipeline.by_reason(left_out)}")
    del conversations  # each is let go once it is answered
    tokens = hashlib.sha256(chat.describe()["chat template"].encode())
    for conversation in itertools.chain(*batches):
        tokens.update(conversation.prompt_ids.tobytes())
    chosen = {"target": args.target, "tokenizer": args.tokenizer, "target-dtype": target.target_dtype,
              "batch-size": args.batch_size, "keep-inexact": args.keep_inexact,
              "chat template and prompt tokens of hash": tokens.hexdigest()}  # fmt: skip
    parts = Parts(args.output, common_settings(args) | chosen)
    finished = opened_on_all_ranks(parts, rank, world)
    sizes = [len(batch) for batch in batches]
    # the longest first: they show at once whether memory suffices, and short ones even out the end
    mine = [number for number in reversed(range(len(batches))) if number not in finished][rank::world]
    for number in set(range(len(batches))).difference(mine):
        batches[number].clear()
    if mine:
        local = LocalTarget(pipeline.load_target(target, config, device), chat, args)
    progress = Progress(parts, sizes, show=rank == 0)
    for number in mine:
        try:
            local.answer_batch(batches[number])
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                f"out of GPU memory with {len(batches[number])} prompts of up to {len(batches[number][-1].prompt_ids)} "
                f"tokens: remove {parts.folder} and use a smaller --batch-size than {args.batch_size}"
            ) from None
        parts.save(number, batches[number])
        batches[number].clear()
        if rank == 0:
            progress.update()
    if rank == 0:
        progress.wait_for_all()
        progress.bar.close()
        show_summary(parts.join(), left_out, progress, args.output)


# ======================================================================================================================
# A server
# ======================================================================================================================

BACK_OFF_S = 0.5  # the first wait; it doubles up to the longest
LONGEST_BACK_OFF_S = 60.0


class NotAnswered(Exception):
    """The server gave no answer to one request, and why."""


class Refused(NotAnswered):
    """Asking again will not help."""


class Server:
    """An OpenAI-compatible chat completions server."""

    def __init__(self, args: argparse.Namespace, stop: threading.Event):
        self.args, self.stop = args, stop
        self.url = args.base_url.rstrip("/") + "/chat/completions"
        self.retries = 0

    def request(self, conversation: Conversation) -> urllib.request.Request:
        args = self.args
        body = {"model": args.model, "messages": conversation.messages, "max_tokens": args.max_new_tokens,
                "temperature": args.temperature}  # fmt: skip
        if args.temperature > 0:
            body |= {"top_p": args.top_p} | ({"top_k": args.top_k} if args.top_k else {})
            key = hashlib.sha256(f"{args.seed} {conversation.number} {conversation.turn}".encode()).digest()
            body["seed"] = int.from_bytes(key[:4], "big") >> 1
        if kwargs := pipeline.parse_template_kwargs(args.chat_template_kwargs):
            body["chat_template_kwargs"] = kwargs
        if "tools" in conversation.extra:
            body["tools"] = conversation.extra["tools"]
        headers = {"Content-Type": "application/json"}
        if args.api_key:
            headers["Authorization"] = f"Bearer {args.api_key}"
        return urllib.request.Request(self.url, json.dumps(body).encode(), headers)

    def ask(self, conversation: Conversation) -> dict:
        """The server's reply. NotAnswered: after the last attempt. Refused: at once. UserError: for all rows alike."""
        for attempt in range(self.args.max_retries + 1):
            wait = 0.0
            try:
                with urllib.request.urlopen(self.request(conversation), timeout=self.args.request_timeout) as response:
                    return check_reply(json.loads(response.read()))
            except urllib.error.HTTPError as error:
                detail = error_text(error)
                problem = f"HTTP {error.code}{detail and ': ' + detail}"
                if error.code in (401, 403, 404):
                    raise UserError(f"{self.url} answers {problem}") from None
                if error.code < 500 and error.code not in (408, 429):
                    raise Refused(problem) from None
                wait = retry_after(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:
                problem = pipeline.first_line(error)
            except (ValueError, LookupError, TypeError, AttributeError):
                problem = "the reply is not a chat completion"
            if attempt < self.args.max_retries:
                self.retries += 1
                back_off = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2**attempt) * random.uniform(0.5, 1.0)
                if self.stop.wait(max(wait, back_off)):
                    break
        raise NotAnswered(problem)

    def answer(self, conversation: Conversation) -> None:
        """Answer one conversation to its end, turn by turn."""
        while conversation.waits and not self.stop.is_set():
            try:
                reply = self.ask(conversation)
            except Refused:
                if conversation.turn == 0:
                    raise
                conversation.withdraw_question()  # what it answered before is kept
                break
            choice = reply["choices"][0]
            conversation.tokens += (reply.get("usage") or {}).get("completion_tokens") or 0
            message = {"role": "assistant", "content": choice["message"].get("content") or ""}
            reasoning = choice["message"].get("reasoning_content") or choice["message"].get("reasoning")
            if reasoning:  # a part of what the target wrote: templates put it back before the answer
                message["reasoning_content"] = reasoning
            if choice["finish_reason"] not in ("stop", "length"):
                conversation.dropped = f"that ended with {choice['finish_reason']!r}"
            elif not message["content"].strip():
                conversation.dropped = "with an empty answer"
            else:
                conversation.add_answer(message, choice["finish_reason"])


def check_reply(reply: dict) -> dict:
    """The reply. Raises ValueError, LookupError, TypeError or AttributeError where it is no chat completion in text."""
    choice = reply["choices"][0]
    if not isinstance(choice["message"].get("content"), (str, type(None))) or "finish_reason" not in choice:
        raise ValueError
    return reply


def error_text(error: urllib.error.HTTPError) -> str:
    """The message of an error reply, on one line."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
    try:
        value = json.loads(text)
        text = value.get("message") or value["error"]["message"]
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return " ".join(str(text).split())[:200]


def retry_after(header: Optional[str]) -> float:
    """Seconds that a Retry-After header (seconds or a date) asks to wait."""
    try:
        return max(0.0, float(header))
    except (TypeError, ValueError):
        pass
    try:
        return max(0.0, (email.utils.parsedate_to_datetime(header) - datetime.now(timezone.utc)).total_seconds())
    except (TypeError, ValueError):
        return 0.0


@dataclass
class Failures:
    """Rows of this start that got no answer."""

    refused: Counter = field(default_factory=Counter)  # by reason
    failed: int = 0
    in_a_row: int = 0
    last: str = ""


def answer_by_server(args: argparse.Namespace) -> None:
    """Answer all prompts through a server, every row a part of its own.

    Rows that the server refuses are left out and counted. Rows that failed after the last retry stay open: the output
    is not written, and UserError says that the same command tries them again.
    """
    conversations, left_out = read_conversations(args.prompts, args.system, args.keep_repeats)
    parts = Parts(args.output, common_settings(args) | {"model": args.model})
    parts.open()
    finished, stop, failures = parts.finished(), threading.Event(), Failures()
    progress, server = Progress(parts, [1] * len(conversations), show=True), Server(args, stop)
    with concurrent.futures.ThreadPoolExecutor(args.concurrency) as pool:
        try:
            todo = (number for number in range(len(conversations)) if number not in finished)
            jobs = {}
            # the server may be gone, and not every row needs to learn it
            while failures.in_a_row <= max(10, args.concurrency):
                for number in itertools.islice(todo, 2 * args.concurrency - len(jobs)):
                    jobs[pool.submit(server.answer, conversations[number])] = number
                if not jobs:
                    break
                done, _ = concurrent.futures.wait(jobs, return_when=concurrent.futures.FIRST_COMPLETED)
                for job in done:
                    collect(job, jobs.pop(job), conversations, parts, progress, failures)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    progress.bar.close()
    done = len(parts.finished())
    if failures.failed:
        tried_not = len(conversations) - done - failures.failed - failures.refused.total()
        raise UserError(
            f"{failures.failed:,} rows failed (the last: {failures.last}), {tried_not:,} were not tried, {done:,} are "
            f"done: the same command tries the others again"
        )
    if failures.refused and not done:
        raise UserError(f"no row was answered: {failures.refused.total():,} refused by the server ({failures.last})")
    for reason, count in failures.refused.items():
        left_out[reason] += count
    if failures.refused:
        print(f"refused by the server, the last with {failures.last}")
    show_summary(parts.join(), left_out, progress, args.output)
    if server.retries:
        print(f"requests repeated after an error: {server.retries:,}", flush=True)


def collect(job, number: int, conversations, parts: Parts, progress: Progress, failures: Failures) -> None:
    """Save what came of one row."""
    conversation = conversations[number]
    try:
        job.result()
    except Refused as refusal:
        failures.refused["refused by the server"] += 1
        failures.in_a_row, failures.last = 0, str(refusal)
        progress.bar.update(1)
    except NotAnswered as problem:
        failures.failed += 1
        failures.in_a_row, failures.last = failures.in_a_row + 1, str(problem)
    else:
        failures.in_a_row = 0
        parts.save(number, [conversation])
        progress.add(number, conversation.tokens)
        conversations[number] = None


# ======================================================================================================================
# Main
# ======================================================================================================================


def common_settings(args: argparse.Namespace) -> dict:
    """What decides the answers, for the manifest: a run goes on only with the same."""
    digest = hashlib.sha256()
    with open(args.prompts, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    names = ("system", "chat_template_kwargs", "keep_repeats", "max_new_tokens")
    names += ("temperature", "top_p", "top_k", "seed")
    return {"prompts of hash": digest.hexdigest()} | {name.replace("_", "-"): getattr(args, name) for name in names}


def parse_arguments(argv: Optional[list[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="JSONL with messages, conversations, prompt or turns; or .txt; .gz too")
    parser.add_argument("output", type=Path, help="JSONL to write; .gz compresses it")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="cut answers here (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: sampled (default: 0, greedy)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from this share of the mass (default: 1)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from so many tokens; 0: from all (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: %(default)s)")
    parser.add_argument("--system", metavar="PROMPT", help="system message for chats that have none")
    parser.add_argument(
        "--chat-template-kwargs", metavar="JSON",
        help="variables for the chat template, such as '{\"enable_thinking\": false}'; train with the same",
    )  # fmt: skip
    parser.add_argument("--keep-repeats", action="store_true", help="also answer prompts that stand in an earlier row")
    local = parser.add_argument_group("local model")
    local.add_argument("--target", help="folder or hub id of the model")
    local.add_argument("--tokenizer", help="folder or hub id of the tokenizer (default: the target's own)")
    local.add_argument(
        "--target-dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto",
        help="auto: as in the checkpoint; float32 on a CPU without bf16 instructions",
    )  # fmt: skip
    local.add_argument("--trust-remote-code", action="store_true", help="run Python code shipped with the target")
    local.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="auto: CUDA if there is one")
    local.add_argument(
        "--batch-size", type=int, default=64,
        help="prompts decoded together; small models on a GPU like 256 to 1024 (default: %(default)s)",
    )  # fmt: skip
    local.add_argument(
        "--keep-inexact", action="store_true", help="keep answers whose text does not give the same tokens again"
    )
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", help="of an OpenAI-compatible server, with /v1: asked in place of a local model")
    server.add_argument("--model", help="the name by which the server knows the model")
    server.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    server.add_argument("--concurrency", type=int, default=64, help="requests at a time (default: %(default)s)")
    server.add_argument("--max-retries", type=int, default=8, help="attempts after the first (default: %(default)s)")
    server.add_argument("--request-timeout", type=float, default=600, help="seconds per reply (default: %(default)s)")
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace, world: int) -> None:
    """Raises UserError for settings that do not go together; nothing was loaded yet."""
    for name, least in {"max_new_tokens": 1, "batch_size": 1, "concurrency": 1, "max_retries": 0, "top_k": 0, "seed": 0,
                        "temperature": 0}.items():  # fmt: skip
        if getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}")
    if not 0 < args.top_p <= 1 or args.request_timeout <= 0:
        raise UserError("--top-p must lie in (0, 1] and --request-timeout above 0")
    if args.temperature == 0 and (args.top_p < 1 or args.top_k):
        raise UserError("--top-p and --top-k shape samples: set --temperature too")
    if (args.base_url is None) == (args.target is None):
        raise UserError("name either a local model with --target or a server with --base-url and --model")
    if args.base_url and not args.model:
        raise UserError("--base-url needs --model, the name by which the server knows the model")
    if args.base_url and not args.base_url.startswith(("http://", "https://")):
        raise UserError(f"--base-url {args.base_url}: expected http://... or https://...")
    if args.base_url and world > 1:
        raise UserError("--base-url needs no torchrun: one process asks with --concurrency requests at a time")
    pipeline.parse_template_kwargs(args.chat_template_kwargs)
    if not Path(args.prompts).is_file():
        raise UserError(f"{args.prompts}: no such file")


def main(argv: Optional[list[str]] = None) -> None:
    """Answer all prompts. Under torchrun, rank 0 returns when the output is there; the others may return before."""
    args = parse_arguments(argv)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    check_arguments(args, world)
    if args.base_url:
        answer_by_server(args)
    else:
        answer_locally(args, rank, world)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
