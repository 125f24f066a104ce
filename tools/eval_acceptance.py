r"""Measure drafters by decoding with them: acceptance length, target forwards saved, speed, exactness.

    # a run's newest checkpoint, on chat prompts
    python tools/eval_acceptance.py runs/quickstart --prompts launch/demo_heldout.jsonl

    # beside the same drafter before training; prompts shared out to two processes
    torchrun --nproc_per_node 2 tools/eval_acceptance.py runs/quickstart --prompts launch/demo_heldout.jsonl --untrained

    # two drafters on the same prompts of two sets, with figures and a plot to quote
    python tools/eval_acceptance.py runs/a runs/b --prompts gsm8k.jsonl mt_bench.jsonl --json eval.json --plot eval.png

    # a drafter folder (config.json, model.safetensors) for a target of your choice, exactness checked in fp32
    python tools/eval_acceptance.py my-drafter --target Qwen/Qwen3-8B --target-dtype float32 --prompts prompts.jsonl

    # sampled at temperature 0.7, thinking off; exit code 1 below an acceptance length of 2
    python tools/eval_acceptance.py runs/a --prompts p.jsonl --temperature 0.7 \
        --chat-template-kwargs '{"enable_thinking": false}' --expect-acceptance 2

A prompt file holds `messages` (one that ends with an answer is cut before its first answer) or `turns`, user messages
that are asked in turn with the target's own plain answers in between, the same ones for every drafter. `category` gives
rows of their own in the table. A prompt that stands there twice is used once, and counted.

One prompt at a time, key-value caches on both sides: the drafter proposes B-1 tokens after the last known one, the
target checks them in one forward pass and adds a token of its own (the bonus token).
- Greedy: a proposal is accepted where the target would have said it. In fp32 the text equals plain greedy decoding
  token by token; in bf16 many texts part where two logits nearly tie.
- Sampled: proposals x are drawn from the drafter's distribution q, accepted with probability min(1, p(x) / q(x)), and
  the first refused one is replaced by a draw from the positive part of p - q. Texts follow the target's distribution.

The acceptance length is a mean over blocks, given with the bonus token (1 when no proposal is ever right, B when all
are) and without it (0 to B-1). An answer's last block counts the proposals accepted up to the end of turn or the length
limit. Slot acceptance is the share of blocks whose first k proposals were all accepted. Equal tokens are those before
the first difference. Seconds are sums over prompts, without the prompts' own forward passes.

The training estimate runs the training path (whole text captured at once, attention masks) on the plain greedy answers
and counts the leading right slots: `estimate` over blocks at every position, which is what training logs, and `walk`
over those positions alone where decoding would place its blocks. In fp32 the walk is the decoder's own block sequence;
where it is not, training and decoding differ.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import sys
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Iterator, Optional

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import train_dflash_pipeline as pipeline
from export_drafter import absolute, read_origin
from train_dflash_pipeline import UserError

# transformers is renaming the argument; the old name serves every supported version
warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")

ESTIMATE_ANCHORS = 32  # blocks per forward pass of the training estimate: bounds its memory
ALL_SETS = "all sets"
STATEFUL_LAYERS = {"linear_attention", "conv", "mamba", "hybrid"}  # a cache that cannot take tokens back


# ---- Decoding ----


@dataclass
class Decoded:
    """One answer, decoded with or without a drafter."""

    tokens: list[int] = field(default_factory=list)  # the answer, its end of turn included
    forwards: int = 0  # target forwards after the prompt's
    accepted: list[int] = field(default_factory=list)  # accepted proposals per block, without the bonus token
    seconds: float = 0.0  # decoding, without the prompt's forward
    estimated: list[int] = field(default_factory=list)  # the training path's count at each position of the plain answer


@dataclass
class Turn:
    """One prompt, answered by plain decoding and with every drafter."""

    prompt: list[int]
    plain: Decoded
    drafted: dict[str, Decoded] = field(default_factory=dict)  # by the drafter's name


class Rule:
    """How tokens are drawn and proposals accepted: greedily at temperature 0, else by speculative sampling."""

    def __init__(self, temperature: float, generator: Optional[torch.Generator] = None):
        self.temperature, self.generator = temperature, generator

    def __str__(self) -> str:
        return f"speculative sampling at temperature {self.temperature:g}" if self.temperature else "greedy"

    def draw(self, logits: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """Logits [n, V] -> (tokens int64 [n], the distributions [n, V] they were drawn from; None if greedy)."""
        if not self.temperature:
            return logits.argmax(-1), None
        p = (logits.float() / self.temperature).softmax(-1)
        return torch.multinomial(p, 1, generator=self.generator)[:, 0], p

    def verify(self, logits: Tensor, proposals: Tensor, q: Optional[Tensor]) -> Tensor:
        """(number of accepted proposals, the token after them), int64 [2] on the device.

        logits [B, V]: the target's, after the last known token and each proposal; proposals [B-1], drawn from q.
        """
        if not self.temperature:
            best = logits.argmax(-1)
            accepted = (best[:-1] == proposals).long().cumprod(0).sum(0, keepdim=True)
            return torch.cat([accepted, best[accepted]])
        p = (logits.float() / self.temperature).softmax(-1)
        p_x, q_x = (x.gather(1, proposals[:, None])[:, 0] for x in (p[:-1], q))
        chance = torch.rand(q_x.shape, generator=self.generator, device=q_x.device)
        accepted = (chance * q_x < p_x).long().cumprod(0).sum(0, keepdim=True)
        rest = torch.cat([(p[:-1] - q).clamp(min=0), p[-1:]])[accepted]
        rest = torch.where(rest.sum() > 0, rest, p[accepted])  # p = q but for rounding
        return torch.cat([accepted, torch.multinomial(rest, 1, generator=self.generator)[0]])


class Decoder:
    """A target with its ends, decoding one prompt at a time up to `limit` tokens, by itself or with a drafter."""

    def __init__(self, model, ends: pipeline.FrozenEnds, stop_ids: set[int], limit: int):
        self.model, self.ends, self.stop_ids, self.limit = model, ends, stop_ids, limit
        self.device = ends.embedding.device

    def target(self, ids: Tensor, cache, logits_to_keep: int = 0) -> Tensor:
        """Logits after each of `ids` [n] (0), or after the last ones alone; the cache grows by n."""
        ids = ids[None]
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=logits_to_keep)
        return out.logits[0]

    def extend(self, out: Decoded, tokens: list[int]) -> bool:
        """Append tokens up to the end of turn or the limit. Is the answer over?"""
        tokens = tokens[: self.limit - len(out.tokens)]
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.stop_ids), None)
        out.tokens += tokens[:end]
        return end is not None or len(out.tokens) == self.limit

    @torch.no_grad()
    def plain(self, prompt: list[int], rule: Rule) -> Decoded:
        """One token per target forward."""
        from transformers import DynamicCache

        cache, out = DynamicCache(), Decoded()
        token, _ = rule.draw(self.target(torch.tensor(prompt, device=self.device), cache, 1))
        done = self.extend(out, token.tolist())
        started = time.perf_counter()
        while not done:
            token, _ = rule.draw(self.target(token, cache))
            done = self.extend(out, token.tolist())
            out.forwards += 1
        out.seconds = time.perf_counter() - started
        return out

    @torch.no_grad()
    def speculative(self, prompt: list[int], rule: Rule, drafter: pipeline.DFlashDrafter) -> Decoded:
        """One block per target forward."""
        from transformers import DynamicCache

        config, cache, out = drafter.config, DynamicCache(), Decoded()
        context = DraftContext(drafter, len(prompt) + self.limit)
        mask_ids = torch.full((config.block_size - 1,), config.mask_token_id, device=self.device)
        capture = pipeline.HookCapture(self.model, config.target_layer_ids)
        try:
            token, _ = rule.draw(self.target(torch.tensor(prompt, device=self.device), cache, 1))
            done, fresh, wrong = self.extend(out, token.tolist()), len(prompt), 0
            started = time.perf_counter()
            while not done:
                context.append(joined_states(capture, fresh))
                if wrong:
                    cache.crop(-wrong)
                slots = context.draft(self.ends.embed(torch.cat([token, mask_ids])))
                proposals, q = rule.draw(self.ends.logits(slots[1:]))
                verdict = rule.verify(self.target(torch.cat([token, proposals]), cache), proposals, q)
                accepted, bonus, *proposed = torch.cat([verdict, proposals]).tolist()  # the block's only wait
                known, fresh, wrong = len(out.tokens), accepted + 1, len(proposed) - accepted
                done = self.extend(out, proposed[:accepted] + [bonus])
                out.accepted.append(min(accepted, len(out.tokens) - known))
                out.forwards += 1
                token = verdict[1:]
            out.seconds = time.perf_counter() - started
            return out
        finally:
            capture.remove()


def joined_states(capture: pipeline.HookCapture, count: int) -> Tensor:
    """The captured layers of the first `count` tokens of one text, side by side: [count, K*H]."""
    captured = capture.take().captured
    return torch.cat([captured[i][0, :count] for i in capture.fc_layer_ids], dim=-1)


class DraftContext:
    """The drafter's side of decoding: keys and values of the text so far, for each layer."""

    def __init__(self, drafter: pipeline.DFlashDrafter, capacity: int):
        c = drafter.config
        self.drafter, self.length = drafter, 0
        shape = (c.num_hidden_layers, 2, capacity, c.num_key_value_heads, c.head_dim)
        self.keys_values = drafter.hidden_norm.weight.new_empty(shape)

    def append(self, features: Tensor) -> None:
        """Captured states [n, K*H] of the tokens that follow."""
        rows = self.drafter.context(features)
        start, self.length = self.length, self.length + len(rows)
        rope = self.drafter.rope(torch.arange(start, self.length, device=rows.device))
        for layer, (keys, values) in zip(self.drafter.layers, self.keys_values):
            keys[start : self.length], values[start : self.length] = layer.self_attn.keys_values(rows, rope)

    def draft(self, slots: Tensor) -> Tensor:
        """Hidden states [B, H] of one block whose anchor follows the text so far."""
        config, end = self.drafter.config, self.length
        rope = self.drafter.rope(torch.arange(end, end + len(slots), device=slots.device))
        slots = slots.to(rope[0].dtype)
        for layer, kind, (keys, values) in zip(self.drafter.layers, config.layer_types, self.keys_values):
            start, mask = 0, None
            if kind == "sliding_attention":
                start = max(0, end - config.sliding_window + 1)
                mask = sliding_mask(end - start, config.block_size, config.sliding_window, slots.device)
            slots = layer.block(slots, rope, (keys[start:end], values[start:end]), mask)
        return self.drafter.norm(slots)


@functools.lru_cache(maxsize=4)
def sliding_mask(seen: int, block_size: int, window: int, device: torch.device) -> Tensor:
    """Bool [B, seen + B]: what a sliding layer shows a block after `seen` rows of context."""
    block = SimpleNamespace(
        token_ids=range(seen), position_ids=np.arange(seen + 1), anchor_rows=np.array([seen]), num_anchors=1
    )
    return pipeline.dense_mask(pipeline.visibility(block, block_size, window), seen + block_size).to(device)


# ---- Training estimate ----


def every_anchor(prompt: list[int], answer: list[int], block_size: int) -> pipeline.BatchPlan:
    """The training plan of one document with a block at every position that training could draw."""
    args = pipeline.Arguments(*(group() for group in pipeline.ARGUMENT_GROUPS))
    args.drafter.block_size = block_size
    ids = np.array(prompt + answer, np.int32)
    args.data.tokens_per_micro_batch = args.data.anchors_per_micro_batch = len(ids)
    supervised = np.arange(len(ids)) >= len(prompt)
    document = pipeline.Documents(ids, supervised, np.array([0, len(ids)]), np.array([0]), {})
    return pipeline.Planner(document, args, num_drafters=1).plan(0)


@torch.no_grad()
def training_estimate(model, ends, drafter, prompt: list[int], answer: list[int]) -> list[int]:
    """Leading right slots of the training path's block at each position of the answer but the last."""
    config, device = drafter.config, ends.embedding.device
    plan = every_anchor(prompt, answer, config.block_size)
    capture = pipeline.HookCapture(model, config.target_layer_ids)
    try:
        model.get_decoder()(input_ids=torch.tensor([prompt + answer], device=device), use_cache=False)
        features = capture.take().get_hidden_states_packed([plan.num_tokens])[0][0]
    finally:
        capture.remove()
    accepted = []
    for start in range(0, plan.num_anchors, ESTIMATE_ANCHORS):
        rows = slice(start, min(start + ESTIMATE_ANCHORS, plan.num_anchors))
        part = dataclasses.replace(
            plan, anchor_rows=plan.anchor_rows[rows], num_anchors=rows.stop - start,
            labels=plan.labels[rows], weights=plan.weights[rows],
        )  # fmt: skip
        # made on the CPU, where masks are dense: block masks would compile anew for every length
        batch = pipeline.DrafterBatch.from_plan(part, config, torch.device("cpu"))
        masks = {kind: mask.to(device) for kind, mask in batch.masks.items()}
        positions, slot_positions = batch.context_positions.to(device), batch.slot_positions.to(device)
        slots = drafter(features, positions, ends.embed(batch.slot_ids.to(device)), slot_positions, masks)
        best = ends.logits(slots.view(part.num_anchors, config.block_size, -1)[:, 1:]).argmax(-1).cpu()
        right = (best == batch.labels) & (batch.weights > 0)
        accepted += right.long().cumprod(1).sum(1).tolist()
    return accepted


def walk(estimated: list[int]) -> list[int]:
    """The counts at those positions where decoding would place its blocks: a <- a + accepted + 1."""
    accepted, position = [], 0
    while position < len(estimated):
        accepted.append(estimated[position])
        position += estimated[position] + 1
    return accepted


# ---- Prompts ----


@dataclass
class Conversation:
    """A row of a prompt file: the chat up to the first answer wanted, and the user messages that follow."""

    set: str
    category: str
    place: str  # file and row, for messages
    opening: list[dict]
    later: list[str]
    tools: Optional[list]


def read_conversation(row: dict, set_name: str, place: str) -> Conversation:
    """Raises UserError when the row holds no prompt."""
    messages, turns = row.get("messages"), row.get("turns") or ([row["prompt"]] if row.get("prompt") else [])
    if not messages and isinstance(turns, list) and all(isinstance(turn, str) and turn.strip() for turn in turns):
        messages, turns = [{"role": "user", "content": turn} for turn in turns[:1]], turns[1:]
    elif isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        if messages and messages[-1].get("role") == "assistant":
            messages = list(itertools.takewhile(lambda message: message.get("role") != "assistant", messages))
        turns = []
    else:
        messages = None
    if not messages:
        raise UserError(f"{place}: no prompt in it (messages, a list of chat messages; turns, a list of texts; prompt, a text)")
    category = row.get("category")
    return Conversation(set_name, "" if category is None else str(category), place, messages, turns, row.get("tools"))


def read_prompts(paths: list[str], count: int) -> tuple[list[Conversation], dict[str, dict]]:
    """(conversations, {set: its file and counts}): of each file the first `count` prompts, 0 for all.

    A prompt that stood in an earlier row of any file is counted as a duplicate and not used again. Raises UserError.
    """
    conversations, sets, known = [], {}, set()
    stems = [Path(path).name.removesuffix(".gz").removesuffix(".jsonl") for path in paths]
    names = stems if len(set(stems)) == len(stems) else paths
    for name, path in zip(names, paths):
        if not Path(path).is_file():
            raise UserError(f"--prompts {path}: no such file")
        counts = sets.setdefault(name, {"file": path, "rows": 0, "used": 0, "duplicates": 0})
        for number, row in enumerate(pipeline.read_rows([path]), 1):
            if count and counts["used"] == count:
                break
            conversation = read_conversation(row, name, f"{path}, row {number}")
            key = json.dumps([conversation.opening, conversation.later, conversation.tools], sort_keys=True)
            counts["rows"] += 1
            counts["duplicates" if key in known else "used"] += 1
            if key not in known:
                known.add(key)
                conversations.append(conversation)
        if not counts["used"]:
            raise UserError(f"{path}: no prompts" + (", all are in earlier files" if counts["rows"] else ""))
    return conversations, sets


def render(tokenizer, messages: list[dict], conversation: Conversation, template: dict) -> str:
    """The prompt as the target reads it, or UserError where the chat template refuses it."""
    try:
        return tokenizer.apply_chat_template(
            messages, tools=conversation.tools, tokenize=False, add_generation_prompt=True, **template
        )
    except Exception as error:  # templates raise what they like
        raise UserError(f"{conversation.place}: refused by the chat template ({pipeline.first_line(error)})") from None


def thinking_mode(chat_template, template: dict, prompt: str) -> str:
    """What is known about the thinking mode of the prompts, in words."""
    switches = sorted(set(re.findall(r"\b(?:enable_thinking|thinking|reasoning_effort)\b", str(chat_template))))
    words = [f"{name}={json.dumps(template[name])}" for name in switches if name in template]
    if not words:
        words = [f"the template's default ({', '.join(switches)} not given)" if switches else "the template has none"]
    if prompt.rstrip().endswith("<think>"):
        words.append("the prompt opens a think block")
    if prompt.rstrip().endswith("</think>"):
        words.append("the prompt closes the think block")
    return "; ".join(words)


# ---- Drafters ----


def find_drafter(name: str) -> tuple[Path, dict]:
    """(drafter folder, how it was made, see `read_origin`) of a run, checkpoint, folder or hub id."""
    folder = pipeline.find_drafter_folder(name)
    return folder, {key: value for key, value in read_origin(folder).items() if value is not None}


def untrained_drafter(config, saved: dict) -> pipeline.DFlashDrafter:
    """The drafter as the run started it: a function of its configuration and the seed."""
    groups = [
        group(**{f.name: saved[f.name] for f in dataclasses.fields(group) if f.name in saved})
        for group in pipeline.ARGUMENT_GROUPS
    ]
    return pipeline.build_drafter(config, pipeline.Arguments(*groups))


def choose_target(args: argparse.Namespace, runs: dict[str, dict]) -> pipeline.TargetArguments:
    """The target that the flags name, else that of the runs; UserError where they name none, or several."""
    chosen = {}
    for name in ("target", "tokenizer", "target_dtype"):
        known = {origin[name] for origin in runs.values() if name in origin}
        if name == "target" and len(known) > 1:  # a run may name a folder by another path than an export
            known = set(map(absolute, known))
        chosen[name] = getattr(args, name)
        if chosen[name] is None and len(known) > 1:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"the drafters were trained with {name} {', '.join(map(str, known))}: choose with {flag}")
        chosen[name] = chosen[name] or next(iter(known), None)
    if chosen["target"] is None:
        raise UserError(f"{next(iter(runs))} does not say which target it is for: name it with --target")
    chosen["target_dtype"] = chosen["target_dtype"] or "auto"
    return pipeline.TargetArguments(**chosen, trust_remote_code=args.trust_remote_code)


def choose_template_kwargs(given: Optional[str], saved: dict[str, dict]) -> dict:
    """The chat template's variables: those given, else those that the runs trained with. saved: run -> its settings.

    Raises UserError where runs differ and none are given.
    """
    known = {run: flags["chat_template_kwargs"] for run, flags in saved.items() if "chat_template_kwargs" in flags}
    trained = {run: pipeline.parse_template_kwargs(text) for run, text in known.items()}
    if given is None:
        values = list(trained.values()) or [{}]
        if any(value != values[0] for value in values):
            raise UserError("the runs trained with different --chat-template-kwargs: say which to use")
        return values[0]
    chosen = pipeline.parse_template_kwargs(given)
    for run, value in trained.items():
        if value != chosen:
            warn(f"{run} was trained with --chat-template-kwargs {json.dumps(value)}, not {json.dumps(chosen)}")
    return chosen


def load_drafters(args, runs: dict[str, tuple[Path, dict]], config, target: pipeline.TargetArguments) -> dict:
    """{name: drafter in fp32 on the CPU}, each before training too if wanted; UserError where one does not fit."""
    text, drafters = config.get_text_config(), {}
    known = target.target not in pipeline.RANDOM_TARGETS and any("hashes" in saved for _, saved in runs.values())
    hashes = pipeline.target_hashes(target.target) if known else {}
    for name, (folder, saved) in runs.items():
        drafter = pipeline.load_drafter(folder, torch.device("cpu"), torch.float32, text.num_hidden_layers)
        if (own := drafter.config.hidden_size) != text.hidden_size:
            raise UserError(f"{name} is not for this target: its hidden size is {own}, not {text.hidden_size}")
        if (mask := drafter.config.mask_token_id) >= text.vocab_size:
            raise UserError(f"{name} is not for this target: it has no row for the mask token {mask}")
        if saved.get("target_dtype", target.target_dtype) != target.target_dtype:
            warn(f"{name} was trained on a target in {saved['target_dtype']}, this one is in {target.target_dtype}")
        others = (saved.get("hashes", {}).get(key, own) != own for key, own in hashes.items() if key != "config_sha256")
        if any(others):
            warn(f"{name} was trained on, or exported for, a target with other weights than {target.target}")
        if args.untrained:
            drafters[f"{name} (untrained)"] = untrained_drafter(drafter.config, saved)
        drafters[name] = drafter
    return drafters


def warn(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {text}", file=sys.stderr, flush=True)


# ---- Evaluation ----


class Evaluation:
    """All that answering a conversation needs, the same for all drafters."""

    def __init__(self, args, decoder: Decoder, tokenizer, drafters: dict):
        self.args, self.decoder, self.tokenizer, self.drafters = args, decoder, tokenizer, drafters
        block = max(drafter.config.block_size for drafter in drafters.values())
        positions = getattr(decoder.model.config.get_text_config(), "max_position_embeddings", math.inf)
        self.max_prompt_tokens = positions - args.max_new_tokens - block

    def rule(self, *key: int) -> Rule:
        """The rule with random numbers of its own, so that the number of processes changes nothing."""
        seed = int(pipeline.random_stream(self.args.seed, *key).integers(2**62))
        return Rule(self.args.temperature, torch.Generator(self.decoder.device).manual_seed(seed))

    def converse(self, index: int, conversation: Conversation) -> list[Turn]:
        """Every turn of a conversation; it ends before a prompt that leaves the target no room for an answer."""
        messages, turns = conversation.opening, []
        for number in range(1 + len(conversation.later)):
            if number:
                answer = self.tokenizer.decode(turns[-1].plain.tokens, skip_special_tokens=True)
                question = conversation.later[number - 1]
                messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
            text = render(self.tokenizer, messages, conversation, self.args.chat_template_kwargs)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) > self.max_prompt_tokens:
                break
            turns.append(self.answer(ids, index, number))
        return turns

    def answer(self, ids: list[int], *key: int) -> Turn:
        turn = Turn(ids, self.decoder.plain(ids, self.rule(*key, 0)))
        names = list(self.drafters)
        first = key[0] % len(names)  # each comes first in its turn: that one fills pools for the others
        for name in names[first:] + names[:first]:
            drafter = self.drafters[name]
            turn.drafted[name] = self.decoder.speculative(ids, self.rule(*key, 1), drafter)
            if self.args.estimate:
                model, ends = self.decoder.model, self.decoder.ends
                turn.drafted[name].estimated = training_estimate(model, ends, drafter, ids, turn.plain.tokens)
        return turn

    def warm_up(self, ids: list[int]) -> None:
        """What a process does once (loading kernels, filling pools) would count against whatever is timed first."""
        limit, self.decoder.limit = self.decoder.limit, 3
        self.answer(ids, 0, 0)
        self.decoder.limit = limit


def shared_out(conversations: list[Conversation], store) -> Iterator[int]:
    """The conversations that fall to this process: whoever is free takes the next, those with most text first."""
    size = [len(c.later) * 10**6 + sum(len(str(m.get("content"))) for m in c.opening) for c in conversations]
    order = sorted(range(len(conversations)), key=lambda i: -size[i])
    bar = tqdm(total=len(order), desc="decoding", unit="prompt", disable=os.environ.get("RANK", "0") != "0")
    numbers = itertools.count() if store is None else iter(lambda: store.add("next conversation", 1) - 1, None)
    for number in itertools.takewhile(lambda n: n < len(order), numbers):
        bar.update(number - bar.n)  # what all processes have taken
        yield order[number]
    bar.update(len(order) - bar.n)
    bar.close()


# ---- Figures ----


def ratio(a: float, b: float) -> Optional[float]:
    return round(a / b, 6) if b else None


def block_figures(accepted: list[int], block_size: int) -> dict:
    """Means over blocks of the accepted proposals; None where there is no block."""
    histogram = np.bincount(np.array(accepted, int), minlength=block_size)
    at_least = histogram[::-1].cumsum()[::-1]
    return {
        "blocks": len(accepted),
        "acceptance_length_with_bonus": ratio(sum(accepted) + len(accepted), len(accepted)),
        "acceptance_length_without_bonus": ratio(sum(accepted), len(accepted)),
        "slot_acceptance": [ratio(int(count), len(accepted)) for count in at_least[1:]],
        "accepted_histogram": histogram.tolist(),
    }


def equal_tokens(a: list[int], b: list[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def figures(turns: list[Turn], name: str, block_size: int, greedy: bool, estimate: bool) -> dict:
    """The figures of one drafter over some turns: sums over all of them, divided last."""
    drafted, plain = [turn.drafted[name] for turn in turns], [turn.plain for turn in turns]
    tokens, plain_tokens = (sum(len(d.tokens) for d in arm) for arm in (drafted, plain))
    seconds, plain_seconds = (sum(d.seconds for d in arm) for arm in (drafted, plain))
    # an answer's first token comes with the prompt's forward pass; compared per token: sampled answers differ in length
    steps, plain_steps = tokens - len(turns), plain_tokens - len(turns)
    forwards = sum(d.forwards for d in drafted)
    result = {"turns": len(turns), "tokens": tokens, "plain_tokens": plain_tokens}
    result |= block_figures([a for d in drafted for a in d.accepted], block_size)
    result |= {
        "target_forwards": forwards,
        "plain_target_forwards": sum(d.forwards for d in plain),
        "target_forwards_saved": ratio(steps - forwards, steps),
        "seconds": round(seconds, 3),
        "plain_seconds": round(plain_seconds, 3),
        "speed_up": ratio(steps * plain_seconds, plain_steps * seconds),
    }
    if greedy:
        equal = [equal_tokens(d.tokens, p.tokens) for d, p in zip(drafted, plain)]
        result["texts_equal_to_plain_greedy"] = sum(d.tokens == p.tokens for d, p in zip(drafted, plain))
        result["tokens_equal_to_plain_greedy"] = sum(equal)
        result["first_differences"] = [e for e, d, p in zip(equal, drafted, plain) if d.tokens != p.tokens]
    if estimate:
        walks = [walk(d.estimated) for d in drafted]
        result["training_estimate"] = block_figures([a for d in drafted for a in d.estimated], block_size)
        result["training_walk"] = block_figures([a for w in walks for a in w], block_size)
        result["training_walk"]["answers_equal_to_decoded"] = sum(w == d.accepted for w, d in zip(walks, drafted))
    return result


def group_turns(conversations: list[Conversation], answers: dict[int, list[Turn]]) -> dict[str, list[Turn]]:
    """Turns by row of the table: each set, its categories where they divide it, and all sets if there are several."""
    groups, sets = {}, list(dict.fromkeys(c.set for c in conversations))
    for name in sets:
        own = [(c.category, answers[i]) for i, c in enumerate(conversations) if c.set == name]
        categories = sorted({category for category, _ in own})
        groups[name] = [turn for _, turns in own for turn in turns]
        for wanted in filter(None, categories if len(categories) > 1 else ()):
            groups[f"{name}: {wanted}"] = [turn for category, turns in own if category == wanted for turn in turns]
    if len(sets) > 1:
        groups[ALL_SETS] = [turn for name in sets for turn in groups[name]]
    return groups


# ---- Output ----


def overall(sets: dict[str, dict]) -> dict:
    """The figures over all prompts."""
    return sets.get(ALL_SETS) or next(iter(sets.values()))


def shown(value, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown that reads well on a console too: two columns of names, then figures."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    align = [str.ljust if i < 2 else str.rjust for i in range(len(header))]
    lines = [[a(text, width) for a, text, width in zip(align, row, widths)] for row in (header, *rows)]
    lines.insert(1, ["-" * width if i < 2 else "-" * (width - 1) + ":" for i, width in enumerate(widths)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table_row(f: dict) -> dict[str, str]:
    """Column -> text, of one drafter on one set."""
    row = {
        "turns": str(f["turns"]),
        "tokens": str(f["tokens"]),
        "with bonus": shown(f["acceptance_length_with_bonus"]),
        "without": shown(f["acceptance_length_without_bonus"]),
        "forwards saved": shown(f["target_forwards_saved"], "{:.0%}"),
        "seconds": f"{f['seconds']:.1f}",
        "plain": f"{f['plain_seconds']:.1f}",
        "speed-up": shown(f["speed_up"], "x{:.2f}"),
    }
    if "texts_equal_to_plain_greedy" in f:
        row["equal texts"] = f"{f['texts_equal_to_plain_greedy']}/{f['turns']}"
        row["equal tokens"] = f"{f['tokens_equal_to_plain_greedy']}/{f['plain_tokens']}"
    for key in ("training_estimate", "training_walk"):
        if key in f:
            row[key.removeprefix("training_")] = shown(f[key]["acceptance_length_with_bonus"])
    return row


def show(report: dict) -> None:
    """The figures on the console: a table over sets and drafters, then each drafter's slots over all prompts."""
    names = [(group, name) for group in report["sets"] for name in report["drafters"]]
    rows = [table_row(report["drafters"][name]["sets"][group]) for group, name in names]
    cells = [[group, name, *row.values()] for (group, name), row in zip(names, rows)]
    print(f"acceptance length, {report['rule']}, with and without the bonus token:")
    print(table(["prompts", "drafter", *rows[0]], cells))
    for name, drafter in report["drafters"].items():
        f = overall(drafter["sets"])
        print(f"{name}: share of blocks whose first 1, 2, ... proposals were accepted")
        for kind in ("decoded", "estimate", "walk"):
            if blocks := f if kind == "decoded" else f.get(f"training_{kind}"):
                print(f"  {kind:9}" + " ".join(shown(x, "{:.2f}") for x in blocks["slot_acceptance"]))
        print(f"  blocks with 0, 1, ... accepted: {' '.join(map(str, f['accepted_histogram']))}")
        if "training_walk" in f and (other := f["turns"] - f["training_walk"]["answers_equal_to_decoded"]):
            print(f"  in {other} of {f['turns']} answers the walk's blocks are not the decoded ones")
    sys.stdout.flush()


def import_pyplot():
    """matplotlib.pyplot without a display; UserError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib, which the requirements leave out: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(report: dict, path: Path) -> None:
    """Slot acceptance per drafter (the training estimate dashed) and the histogram of accepted lengths."""
    figure, (left, right) = import_pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained")
    width = 0.8 / len(report["drafters"])
    for number, (name, drafter) in enumerate(report["drafters"].items()):
        f = overall(drafter["sets"])
        slots, color = range(1, drafter["block_size"]), f"C{number}"
        label = f"{name}: {shown(f['acceptance_length_with_bonus'], '{:.2f}')}"
        left.plot(slots, [x or 0 for x in f["slot_acceptance"]], "o-", color=color, label=label)
        if "training_estimate" in f:
            left.plot(slots, [x or 0 for x in f["training_estimate"]["slot_acceptance"]], "--", color=color)
        places = np.arange(drafter["block_size"]) + (number + 0.5) * width - 0.4
        right.bar(places, np.array(f["accepted_histogram"]) / max(1, f["blocks"]), width, color=color, label=name)
    left.set(xlabel="first k proposals accepted", ylabel="share of blocks", ylim=(0, 1), xticks=slots)
    title = f"{report['rule']}; acceptance length with the bonus token"
    left.set_title(title + "; dashed: training estimate" * report["estimate"], fontsize=9)
    left.legend(fontsize=8)
    right.set(xlabel="accepted proposals, without the bonus token", ylabel="share of blocks")
    figure.savefig(path, dpi=150)


# ---- Command line ----


def parse_arguments(argv: Optional[list[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("drafters", nargs="+", metavar="drafter", help="runs' output folders, checkpoints, drafter folders, hub ids")
    add("--prompts", nargs="+", required=True, metavar="FILE", help="JSONL files, each a set in the table (.gz too)")
    add("--num-prompts", type=int, default=0, help="take the first so many of each file (0: all)")
    add("--max-new-tokens", type=int, default=128, help="length limit of an answer")
    add("--temperature", type=float, default=0.0, help="0: greedy; above: speculative sampling at this temperature")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--chat-template-kwargs", metavar="JSON",
        help="variables for the chat template, as '{\"enable_thinking\": false}'; default: those of the runs")
    add("--target", help="folder or hub id; default: the target of the run that made the drafter")
    add("--tokenizer", help="folder or hub id; default: the run's, else the target's own")
    add("--target-dtype", choices=["auto", "bfloat16", "float16", "float32"], help="default: the run's")
    add("--trust-remote-code", action="store_true", help="run Python code shipped with the target")
    add("--untrained", action="store_true", help="measure each run's drafter before training, too")
    add("--estimate", action=argparse.BooleanOptionalAction,
        help="the training path's acceptance on the plain answers, beside the decoded one; default: on if greedy")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto", help="auto: CUDA if there is one. Under torchrun "
        "processes share GPUs: with a small target, whose decoding is bound by the host, start 8 to 16 on one; their "
        "speed-ups compare like with like, but are not the speed of a GPU that is free")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    add("--plot", type=Path, metavar="FILE.png", help="also plot slot acceptance and accepted lengths "
        "(needs matplotlib, which the requirements leave out)")
    add("--expect-acceptance", type=float, metavar="X",
        help="exit with 1 when a (trained) drafter's acceptance length with bonus over all prompts is below")
    args = parser.parse_args(argv)
    if args.estimate is None:
        args.estimate = not args.temperature
    return args


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UserError for what no evaluation could use, before anything is loaded."""
    least = (("--num-prompts", args.num_prompts, 0), ("--max-new-tokens", args.max_new_tokens, 2),
             ("--temperature", args.temperature, 0), ("--seed", args.seed, 0))  # fmt: skip
    for flag, value, minimum in least:
        if not minimum <= value < math.inf:
            raise UserError(f"{flag} {value}: must be at least {minimum}")
    if args.estimate and args.temperature:
        raise UserError("--estimate is for greedy decoding: training counts the drafter's likeliest tokens")
    if len(set(args.drafters)) < len(args.drafters):
        raise UserError("a drafter is named twice")
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{flag} {path}: no such folder")
    if args.plot is not None:
        import_pyplot()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is none")


def check_target(config) -> None:
    if stateful := STATEFUL_LAYERS.intersection(getattr(config.get_text_config(), "layer_types", None) or ()):
        raise UserError(
            f"the target has layers with a running state ({', '.join(sorted(stateful))}), which cannot take refused "
            "proposals back; measure such a target in the server that will run it"
        )


def choose_device(args: argparse.Namespace) -> torch.device:
    """The CPU, or this process's GPU; with more processes than GPUs they share."""
    if args.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
        warn("processes share a GPU: speed-ups compare like with like, but are not the speed of a free GPU")
    return device


def join_processes():
    """(store, rank, world size) under torchrun, else (None, 0, 1)."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None, 0, 1
    store, rank, world = next(dist.rendezvous("env://"))
    # a restarted torchrun job meets the store of the attempt before
    store = dist.PrefixStore(f"evaluation {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(days=1))
    return store, rank, world


def gather(answers: dict[int, list[Turn]], rank: int, world: int) -> dict[int, list[Turn]]:
    """The answers of all processes, on rank 0."""
    if world == 1:
        return answers
    parts = [None] * world if rank == 0 else None
    dist.gather_object(answers, parts)
    dist.destroy_process_group()
    return {index: turns for part in parts or [] for index, turns in part.items()}


def describe(args, target, tokenizer, prompts: list[str], sets: dict, world: int) -> dict:
    """What is measured, and how: the head of the report."""
    return {
        "target": target.target,
        "target_dtype": target.target_dtype,
        "rule": str(Rule(args.temperature)),
        "temperature": args.temperature,
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "estimate": args.estimate,
        "processes": world,
        "prompt_files": sets,
        "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
        "first_prompt": prompts[0],
        "chat_template_kwargs": args.chat_template_kwargs,
        "thinking_mode": thinking_mode(tokenizer.chat_template, args.chat_template_kwargs, prompts[0]),
    }


def announce(head: dict, chat_template) -> None:
    print(f"target: {head['target']} in {head['target_dtype']}; {head['rule']}, up to {head['max_new_tokens']} tokens")
    for name, counts in head["prompt_files"].items():
        print(f"{name}: {counts['used']} prompts, {counts['duplicates']} duplicates left out")
    text = head["first_prompt"]
    print(f"first prompt: {text!r}" if len(text) <= 600 else f"first prompt: {text[:400]!r} ... {text[-200:]!r}")
    print(f"thinking mode: {head['thinking_mode']}", flush=True)
    if unread := [name for name in head["chat_template_kwargs"] if name not in str(chat_template)]:
        warn(f"the chat template does not read {', '.join(unread)}")


def make_report(head: dict, drafters: dict, conversations: list[Conversation], answers: dict[int, list[Turn]]) -> dict:
    """Everything that `--json` writes."""
    groups = group_turns(conversations, answers)
    for counts in head["prompt_files"].values():
        counts["turns_without_room"] = 0
    for i, c in enumerate(conversations):
        head["prompt_files"][c.set]["turns_without_room"] += 1 + len(c.later) - len(answers[i])
    report = head | {"sets": list(groups), "drafters": {}}
    for name, drafter in drafters.items():
        block, greedy = drafter.config.block_size, not head["temperature"]
        sets = {group: figures(turns, name, block, greedy, head["estimate"]) for group, turns in groups.items()}
        report["drafters"][name] = {"block_size": block, "sets": sets}
    return report


def finish(args, report: dict) -> None:
    """Show and write the report, and hold it against `--expect-acceptance`."""
    show(report)
    for name, counts in report["prompt_files"].items():
        if counts["turns_without_room"]:
            warn(f"{name}: {counts['turns_without_room']} turns left out, too long for the target with their answer")
    if args.json:
        pipeline.write_json(args.json, report)
    if args.plot:
        plot(report, args.plot)
    lengths = {name: overall(d["sets"])["acceptance_length_with_bonus"] for name, d in report["drafters"].items()}
    for name in args.drafters:
        if args.expect_acceptance is not None and (lengths[name] or 0) < args.expect_acceptance:
            raise UserError(f"{name}: acceptance length {shown(lengths[name])}, expected {args.expect_acceptance:g}")
    for name in args.drafters if args.untrained else ():
        which = "" if len(args.drafters) == 1 else f" of {name}"
        before, after = (shown(lengths[key], "{:.2f}") for key in (f"{name} (untrained)", name))
        print(f"held-out acceptance length{which}: {before} -> {after}", flush=True)


def main() -> None:
    args = parse_arguments()
    check_arguments(args)
    runs = {name: find_drafter(name) for name in args.drafters}
    saved = {name: origin for name, (_, origin) in runs.items()}
    args.chat_template_kwargs = choose_template_kwargs(args.chat_template_kwargs, saved)
    if args.untrained and not all("seed" in origin for origin in saved.values()):
        raise UserError("--untrained needs runs or their checkpoints: only those say how the drafter began")
    target = choose_target(args, saved)
    conversations, sets = read_prompts(args.prompts, args.num_prompts)
    device = choose_device(args)
    config, tokenizer = pipeline.load_target_config(target), pipeline.load_tokenizer(target)
    check_target(config)
    if config.get_text_config().model_type == "gpt_oss" and any(conversation.later for conversation in conversations):
        raise UserError("a gpt_oss answers in channels, which no later turn can be built from: give prompts of one turn")
    pipeline.settle_target_dtype(target, config, device)
    drafters = load_drafters(args, runs, config, target)
    # the drafter computes in the target's dtype on a GPU, in fp32 on the CPU, as in training
    dtype = config.dtype if device.type == "cuda" else torch.float32
    drafters = {name: drafter.to(device, dtype) for name, drafter in drafters.items()}
    prompts = [render(tokenizer, c.opening, c, args.chat_template_kwargs) for c in conversations]
    store, rank, world = join_processes()
    head = describe(args, target, tokenizer, prompts, sets, world)
    if rank == 0:
        announce(head, tokenizer.chat_template)
    model = pipeline.load_target(target, config, device)
    ends = pipeline.load_frozen_ends(target, config, device, dtype)
    decoder = Decoder(model, ends, pipeline.stop_token_ids(model, tokenizer), args.max_new_tokens)
    evaluation = Evaluation(args, decoder, tokenizer, drafters)
    evaluation.warm_up(tokenizer("Hello")["input_ids"])
    answers = {i: evaluation.converse(i, conversations[i]) for i in shared_out(conversations, store)}
    answers = gather(answers, rank, world)
    if rank == 0:
        finish(args, make_report(head, drafters, conversations, answers))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
