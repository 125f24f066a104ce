"""Measure a drafter by decoding with it: acceptance length, target forwards saved, speed, exactness.

    # a run's newest checkpoint, on chat prompts
    python tools/eval_acceptance.py runs/quickstart --prompts launch/demo_heldout.jsonl

    # beside the same drafter before training; prompts split over two processes
    torchrun --nproc_per_node 2 tools/eval_acceptance.py runs/quickstart --prompts launch/demo_heldout.jsonl --untrained

    # a drafter folder (config.json, model.safetensors) for a target of your choice, exactness checked in fp32
    python tools/eval_acceptance.py my-drafter --target Qwen/Qwen3-8B --target-dtype float32 --prompts prompts.jsonl

Greedy speculative decoding, one prompt at a time, key-value caches on both sides: the drafter proposes B-1 tokens after
the last known one, the target checks them in one forward pass and adds a token of its own (the bonus token). In fp32 the
text equals plain greedy decoding token by token; in bf16 a few per cent of texts part where two logits nearly tie.

The acceptance length counts the bonus token: 1.0 means that no proposal was ever right, B that all always were. Per-slot
acceptance is the share of blocks whose first k proposals were all right.
"""

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import UserError

# transformers is renaming the argument; the old name serves every supported version
warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")


@dataclass
class Decoded:
    """One prompt, decoded with or without a drafter."""

    tokens: list[int] = field(default_factory=list)  # the answer, its end of turn included
    forwards: int = 0  # target forwards after the prompt's
    accepted: list[int] = field(default_factory=list)  # right proposals per block, without the bonus token
    seconds: float = 0.0  # decoding, without the prompt's forward


class SpeculativeDecoder:
    """A target with its LM head, and the pieces of a drafter around it."""

    def __init__(self, model, ends, drafter, stop_ids: set[int]):
        self.model, self.ends, self.drafter, self.stop_ids = model, ends, drafter, stop_ids
        self.device = ends.embedding.device

    def target(self, ids: list[int], cache) -> Tensor:
        """Greedy next token after each of `ids`, [len(ids)]; the cache grows."""
        out = self.model(input_ids=torch.tensor([ids], device=self.device), past_key_values=cache, use_cache=True)
        return out.logits[0].argmax(-1)

    def cut(self, tokens: list[int], limit: int) -> tuple[list[int], bool]:
        """The answer up to its end of turn or the limit, and whether it is over."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.stop_ids), None)
        return (tokens[:end], True) if end is not None else (tokens[:limit], len(tokens) >= limit)

    @torch.no_grad()
    def plain(self, prompt: list[int], limit: int) -> Decoded:
        """One token per target forward."""
        from transformers import DynamicCache

        cache, out, done = DynamicCache(), Decoded(), False
        out.tokens = [int(self.target(prompt, cache)[-1])]
        started = time.perf_counter()
        while not done:
            out.tokens.append(int(self.target(out.tokens[-1:], cache)[-1]))
            out.forwards += 1
            out.tokens, done = self.cut(out.tokens, limit)
        out.seconds = time.perf_counter() - started
        return out

    @torch.no_grad()
    def speculative(self, prompt: list[int], limit: int) -> Decoded:
        """One block per target forward."""
        from transformers import DynamicCache

        capture = pipeline.HookCapture(self.model, self.drafter.config.target_layer_ids)
        try:
            cache, context, out, done = DynamicCache(), DraftContext(self.drafter), Decoded(), False
            out.tokens = [int(self.target(prompt, cache)[-1])]
            started = time.perf_counter()
            context.append(capture.take().get_hidden_states_packed([len(prompt)])[0][0])
            while not done:
                proposals = self.propose(out.tokens[-1], context)
                answers = self.target([out.tokens[-1], *proposals], cache).tolist()
                right = next((i for i, (a, b) in enumerate(zip(proposals, answers)) if a != b), len(proposals))
                features = capture.take().get_hidden_states_packed([1 + len(proposals)])[0][0]
                context.append(features[: right + 1])
                if wrong := len(proposals) - right:
                    cache.crop(-wrong)
                known = len(out.tokens)
                out.tokens, done = self.cut(out.tokens + proposals[:right] + answers[right : right + 1], limit)
                out.accepted.append(min(right, len(out.tokens) - known))
                out.forwards += 1
            out.seconds = time.perf_counter() - started
            return out
        finally:
            capture.remove()

    def propose(self, token: int, context: "DraftContext") -> list[int]:
        """The drafter's B-1 greedy proposals after `token`."""
        config = self.drafter.config
        ids = torch.tensor([token] + [config.mask_token_id] * (config.block_size - 1), device=self.device)
        states = context.draft(self.ends.embed(ids))
        return self.ends.logits(states[1:]).argmax(-1).tolist()


class DraftContext:
    """The drafter's side of decoding: keys and values of the text so far, one pair per layer."""

    def __init__(self, drafter: pipeline.DFlashDrafter):
        self.drafter, self.length = drafter, 0
        self.keys_values: list[tuple[Tensor, Tensor]] = []

    def append(self, features: Tensor) -> None:
        """Captured states [n, K*H] of the tokens that follow."""
        rows = self.drafter.context(features)
        rope = self.drafter.rope(torch.arange(self.length, self.length + len(rows), device=rows.device))
        new = [layer.self_attn.keys_values(rows, rope) for layer in self.drafter.layers]
        if self.keys_values:
            new = [tuple(torch.cat(pair) for pair in zip(old, add)) for old, add in zip(self.keys_values, new)]
        self.keys_values, self.length = new, self.length + len(rows)

    def draft(self, slots: Tensor) -> Tensor:
        """Hidden states [B, H] of one block whose anchor follows the text so far."""
        config = self.drafter.config
        rope = self.drafter.rope(torch.arange(self.length, self.length + len(slots), device=slots.device))
        slots = slots.to(rope[0].dtype)
        block = SimpleNamespace(
            token_ids=range(self.length), position_ids=np.arange(self.length + 1),
            anchor_rows=np.array([self.length]), num_anchors=1,
        )  # fmt: skip
        for layer, kind, kv in zip(self.drafter.layers, config.layer_types, self.keys_values):
            mask = None
            if kind == "sliding_attention":
                ranges = pipeline.visibility(block, config.block_size, config.sliding_window)
                mask = pipeline.dense_mask(ranges, self.length + len(slots)).to(slots.device)
            slots = layer.block(slots, rope, kv, mask)
        return self.drafter.norm(slots)


def find_drafter(path: Path) -> tuple[Path, dict]:
    """(drafter folder, arguments of the run that made it, empty if unknown) of a run, a checkpoint or a drafter."""
    if (path / "config.json").is_file():
        saved = path.parent / "state.json"
        return path, json.loads(saved.read_text())["arguments"] if saved.is_file() else {}
    checkpoint = pipeline.find_checkpoint(pipeline.RunArguments(resume=str(path)))
    return checkpoint / "drafter", json.loads((checkpoint / "state.json").read_text())["arguments"]


def read_prompts(path: str, count: int) -> list[list[dict]]:
    """The chats of a JSONL file up to their first assistant turn: `messages`, or the first of `turns`."""
    prompts, rows = [], pipeline.read_rows([path])
    for number, row in enumerate(itertools.islice(rows, count or None), 1):
        messages = row.get("messages") or [{"role": "user", "content": turn} for turn in row.get("turns", [])[:1]]
        answer = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
        if not messages[:answer]:
            raise UserError(f"{path}, row {number}: no prompt in it (messages or turns)")
        prompts.append(messages[:answer])
    if not prompts:
        raise UserError(f"{path}: no prompts")
    return prompts


def untrained_drafter(config, saved: dict) -> pipeline.DFlashDrafter:
    """The drafter as the run started it: a function of its configuration and the seed."""
    groups = [G(**{f.name: saved[f.name] for f in fields(G)}) for G in pipeline.ARGUMENT_GROUPS]
    return pipeline.build_drafter(config, pipeline.Arguments(*groups))


def summary(decoded: list[Decoded], plain: list[Decoded], block_size: int) -> dict:
    """The figures of one drafter over all prompts."""
    accepted = np.array([a for d in decoded for a in d.accepted])
    forwards, plain_forwards = sum(d.forwards for d in decoded), sum(d.forwards for d in plain)
    tokens = sum(len(d.tokens) for d in plain)
    equal = sum(sum(a == b for a, b in zip(d.tokens, p.tokens)) for d, p in zip(decoded, plain))
    return {
        "prompts": len(plain),
        "tokens": tokens,
        "acceptance_length_with_bonus": round(float(1 + accepted.mean()), 4),
        "slot_acceptance": [round(float((accepted >= k).mean()), 4) for k in range(1, block_size)],
        "target_forwards": forwards,
        "target_forwards_saved": round(1 - forwards / plain_forwards, 4),
        "seconds": round(sum(d.seconds for d in decoded), 2),
        "plain_seconds": round(sum(d.seconds for d in plain), 2),
        "speed_up": round(sum(p.seconds for p in plain) / sum(d.seconds for d in decoded), 3),
        "texts_equal_to_plain_greedy": sum(d.tokens == p.tokens for d, p in zip(decoded, plain)),
        "tokens_equal_to_plain_greedy": equal,
    }


def show(name: str, result: dict) -> None:
    print(f"{name}: acceptance length {result['acceptance_length_with_bonus']:.3f} (with the bonus token)")
    print("  share of blocks with the first k proposals right: " + " ".join(f"{x:.2f}" for x in result["slot_acceptance"]))
    print(
        f"  target forwards saved {result['target_forwards_saved']:.0%}; {result['seconds']:.1f} s against "
        f"{result['plain_seconds']:.1f} s plain (x{result['speed_up']:.2f})"
    )
    print(
        f"  equal to plain greedy decoding: {result['texts_equal_to_plain_greedy']} of {result['prompts']} texts, "
        f"{result['tokens_equal_to_plain_greedy']} of {result['tokens']} tokens",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path, help="a run's output folder, a checkpoint, or a drafter folder")
    parser.add_argument("--prompts", required=True, help="JSONL with `messages` (up to the first answer) or `turns`")
    parser.add_argument("--num-prompts", type=int, default=0, help="take the first so many (0: all)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="length limit of an answer")
    parser.add_argument("--target", help="folder or hub id; default: the target of the run that made the drafter")
    parser.add_argument("--tokenizer", help="folder or hub id; default: the run's, else the target's own")
    parser.add_argument("--target-dtype", choices=["auto", "bfloat16", "float16", "float32"], help="default: the run's")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code shipped with the target")
    parser.add_argument("--untrained", action="store_true", help="measure the run's drafter before training, too")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="auto: CUDA if there is one")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    folder, saved = find_drafter(args.drafter)
    if args.target is None and "target" not in saved:
        raise UserError(f"{args.drafter} does not say which target it is for: name it with --target")
    if args.untrained and not saved:
        raise UserError("--untrained needs a run or one of its checkpoints: only those say how the drafter began")
    target = pipeline.TargetArguments(
        target=args.target or saved["target"],
        tokenizer=args.tokenizer or saved.get("tokenizer"),
        target_dtype=args.target_dtype or saved.get("target_dtype", "auto"),
        trust_remote_code=args.trust_remote_code,
    )
    prompts = read_prompts(args.prompts, args.num_prompts)
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if world > 1:
        dist.init_process_group("gloo")

    config, tokenizer = pipeline.load_target_config(target), pipeline.load_tokenizer(target)
    pipeline.settle_target_dtype(target, config, device)
    model = pipeline.load_target(target, config, device)
    # the drafter computes in the target's dtype on a GPU, in fp32 on the CPU, as in training
    dtype = config.dtype if on_gpu else torch.float32
    ends = pipeline.load_frozen_ends(target, config, device, dtype)
    trained = pipeline.load_drafter(folder, device, dtype)
    drafters = {"trained": trained}
    if args.untrained:
        drafters = {"untrained": untrained_drafter(trained.config, saved).to(device, dtype), **drafters}
    eos = model.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    results = {name: {} for name in ("plain", *drafters)}
    bar = tqdm(range(rank, len(prompts), world), desc="decoding", unit="prompt", disable=rank != 0)
    for i in bar:
        text = tokenizer.apply_chat_template(prompts[i], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        results["plain"][i] = SpeculativeDecoder(model, ends, trained, stop_ids).plain(ids, args.max_new_tokens)
        for name, drafter in drafters.items():
            decoder = SpeculativeDecoder(model, ends, drafter, stop_ids)
            results[name][i] = decoder.speculative(ids, args.max_new_tokens)
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, results)
        results = {name: {i: d for part in parts for i, d in part[name].items()} for name in results}
        dist.destroy_process_group()
    if rank == 0:
        ordered = {name: [by_prompt[i] for i in sorted(by_prompt)] for name, by_prompt in results.items()}
        figures = {name: summary(ordered[name], ordered["plain"], trained.config.block_size) for name in drafters}
        for name, result in figures.items():
            show(name, result)
        if args.json:
            pipeline.write_json(args.json, figures)
        if args.untrained:
            before, after = (figures[name]["acceptance_length_with_bonus"] for name in ("untrained", "trained"))
            print(f"held-out acceptance length: {before:.2f} -> {after:.2f}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
