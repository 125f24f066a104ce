"""Time one drafter step with random weights in real shapes, against what the machine's matrix products allow.

    # Qwen3-8B's shape: 5 layers, 4,096 context tokens, 512 anchors x 16, cross-entropy, forward and backward
    python tools/bench_drafter_step.py --target qwen3-8b-shape --tokens-per-micro-batch 4096 --anchors-per-micro-batch 512

    # the optimizer step under DeepSpeed over 4 micro-batches; SpecForge's step beside it (pip install --no-deps specforge)
    python tools/bench_drafter_step.py --target qwen3-8b-shape --tokens-per-micro-batch 4096 \
        --anchors-per-micro-batch 512 --gradient-accumulation-steps 4 --specforge --json step.json

    # a toy on the CPU
    python tools/bench_drafter_step.py

Every flag of the pipeline is understood. The ceiling is a matrix product measured in the same run; the floor is the
operations that a step needs, counted from the plan (visible pairs of tokens alone for attention; no gradient for frozen
weights and inputs), at that rate. Times are medians over --repeats after --warm-up steps that compile.
"""

import argparse
import json
import os
import statistics
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import UserError


def matrix_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product: 8192^3 on a GPU, 1024^3 on a CPU."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / (1e-3 * median_ms(lambda: a @ b, device, repeats=10, warm_up=3))


def median_ms(work, device: torch.device, repeats: int, warm_up: int) -> float:
    for _ in range(warm_up):
        work()
    spans = []
    for _ in range(repeats):
        span = pipeline.Span(device)
        work()
        spans.append(span.end())
    return statistics.median(span.ms() for span in spans)


def visible_pairs(plan: pipeline.BatchPlan, config: pipeline.DrafterConfig) -> int:
    """(slot, key) pairs that attention computes, over all layers."""
    pairs = 0
    for kind in config.layer_types:
        window = config.sliding_window if kind == "sliding_attention" else None
        lo, hi, own_lo, own_hi = pipeline.visibility(plan, config.block_size, window).astype(np.int64)
        pairs += int((hi - lo).sum() + (own_hi - own_lo).sum())
    return pairs


def step_flops(plan: pipeline.BatchPlan, config: pipeline.DrafterConfig) -> float:
    """Operations of a forward and backward pass that no implementation can leave out.

    A trained matrix costs 2 FLOP a weight and row in the forward pass, as much again for its own gradient, and again for
    its input's gradient, which the context's inputs (captured states) do not need; the head has no gradient of its own.
    """
    c, n, slots = config, plan.num_tokens, plan.num_anchors * config.block_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    rows = plan.num_anchors * (config.block_size - 1)
    fc = 2 * n * len(c.target_layer_ids) * c.hidden_size**2
    context = 2 * n * c.hidden_size * 2 * kv * c.num_hidden_layers
    per_slot = c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size)
    layers = 2 * slots * per_slot * c.num_hidden_layers
    attention = 4 * visible_pairs(plan, c) * q
    head = 2 * rows * c.hidden_size * c.vocab_size
    return 2 * fc + 3 * (context + layers + attention) + 2 * head


def make_plan(args: pipeline.Arguments) -> pipeline.BatchPlan:
    """A full micro-batch of supervised documents of mixed lengths."""
    n, rng = args.data.tokens_per_micro_batch, np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, n), size=max(1, n // 1024) - 1, replace=False)) if n > 2048 else []
    offsets = np.array([0, *cuts, n])
    ids = rng.integers(0, 256, n).astype(np.int32)
    documents = pipeline.Documents(ids, np.ones(n, bool), offsets, np.arange(len(offsets) - 1), {})
    return pipeline.Planner(documents, args, num_drafters=1).plan(0)


class Bench:
    """The pieces of a drafter rank, without a target and without transport."""

    def __init__(self, args: pipeline.Arguments, device: torch.device):
        self.args, self.device = args, device
        target_config = pipeline.load_target_config(args.target)
        pipeline.settle_target_dtype(args.target, target_config, device)
        text = target_config.get_text_config()
        self.config = pipeline.choose_drafter_config(args, text, pipeline.load_tokenizer(args.target))
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.ends = pipeline.load_frozen_ends(args.target, target_config, device, self.dtype)
        self.plan = make_plan(args)
        shape = (len(self.plan.token_ids), len(self.config.target_layer_ids) * self.config.hidden_size)
        self.features = torch.randn(shape, device=device, dtype=self.dtype)
        fabric = SimpleNamespace(device=device, timeout=timedelta(minutes=30))
        self.engine = pipeline.build_engine(pipeline.build_drafter(self.config, args), args, fabric)
        self.ends.compiled = pipeline.runs_compiled(args, device, self.engine.zero_optimization_stage())

    def micro_batch(self) -> None:
        """Mask, forward, loss, backward: what a drafter rank does with received states."""
        batch = pipeline.DrafterBatch.from_plan(self.plan, self.config, self.device)
        data = self.args.data
        alpha = data.dpace_alpha if data.loss_weights == "dpace" else None
        loss, _ = pipeline.micro_batch_loss(self.engine, self.ends, self.features, batch, None, alpha)
        self.engine.backward(loss / self.plan.weight_sum, scale_wrt_gas=False)

    def step(self) -> None:
        """A whole optimizer step: every micro-batch, then the update."""
        for _ in range(self.args.optimization.gradient_accumulation_steps):
            self.micro_batch()
            self.engine.step()

    def specforge(self):
        """One forward and backward pass of SpecForge's model on the same micro-batch, or UserError."""
        try:
            from compare_specforge import Reference

            args = [self.args, self.config, self.ends, self.device, self.dtype, 1000]
            reference = Reference(*args)
        except ImportError as error:
            raise UserError(f"SpecForge is missing ({pipeline.first_line(error)}): pip install --no-deps specforge") from None
        reference.model.num_anchors = max(1, round(self.plan.num_anchors / len(self.plan.lengths)))
        if self.args.pipeline.compile and self.device.type == "cuda":
            reference.drafter.compile()

        def work():
            reference.loss(self.plan, self.features).backward()
            reference.drafter.zero_grad()

        return work


def measure(bench: Bench, options: argparse.Namespace) -> dict:
    device, accumulation = bench.device, bench.args.optimization.gradient_accumulation_steps
    times = dict(device=device, repeats=options.repeats, warm_up=options.warm_up)
    ceiling, flops = matrix_ceiling(device, bench.dtype), step_flops(bench.plan, bench.config)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    whole_ms = median_ms(bench.step, **times)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None

    def without_update():
        bench.engine.set_gradient_accumulation_boundary(False)
        bench.micro_batch()

    micro_ms = median_ms(without_update, **times)
    bench.engine.set_gradient_accumulation_boundary(True)
    result = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "ceiling_tflops": ceiling / 1e12,
        "useful_tflop": flops / 1e12,
        "floor_ms": 1e3 * flops / ceiling,
        "micro_batch_ms": micro_ms,
        "share_of_ceiling": flops / ceiling / (micro_ms / 1e3),
        "optimizer_step_ms": whole_ms,
        "update_share": max(0.0, 1 - accumulation * micro_ms / whole_ms),
        "peak_memory_gb": None if peak is None else peak / 1e9,
    }
    if options.specforge:
        result["specforge_ms"] = median_ms(bench.specforge(), **times)
        result["times_as_fast_as_specforge"] = result["specforge_ms"] / micro_ms
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--repeats", type=int, default=10, help="timed repetitions (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="repetitions before them (default: %(default)s)")
    parser.add_argument("--specforge", action="store_true", help="time SpecForge's model on the same micro-batch, too")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options, flags = parser.parse_known_args()
    args = pipeline.parse_arguments(["--target", "toy", *flags])
    device = torch.device("cuda" if args.pipeline.device != "cpu" and torch.cuda.is_available() else "cpu")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    pipeline.check_tiles(args, device)
    result = measure(Bench(args, device), options)
    for name, value in result.items():
        print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
