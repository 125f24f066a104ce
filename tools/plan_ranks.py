r"""Say how to lay out a run before it starts: which ranks, which micro-batch, how fast, how much memory.

    # 8 H200s, Qwen3-8B: split, ZeRO stage, micro-batch and accumulation, and the command to start
    python tools/plan_ranks.py --target Qwen/Qwen3-8B --gpu h200 --gpus 8

    # 1,024 H100s, about 4 million tokens a step, drafter of 8 layers, figures to a file
    python tools/plan_ranks.py --target Qwen/Qwen3-8B --gpu h100 --gpus 1024 --tokens-per-step 4194304 \
        --num-draft-layers 8 --json plan.json

    # what would one split do?
    python tools/plan_ranks.py --target Qwen/Qwen3-8B --gpus 8 --num-target-ranks 5

    # by the times of a real run (its output folder or metrics.jsonl), or of a bench
    python tools/plan_ranks.py --rates runs/qwen3-8b --gpus 64
    python tools/bench_pipeline.py --device cuda --target Qwen/Qwen3-8B --json pipeline.json
    python tools/plan_ranks.py --rates pipeline.json --gpus 64

Every flag of the pipeline is understood; those that the tool chooses (below) are fixed where given. Nothing is loaded:
parameters are counted on the meta device, so only the target's config must be there.

Times are those given by --rates, else estimates: operations and bytes counted from the target's and the drafter's
shapes (documents of 1,024 tokens, no padding), divided by the data sheet's rates times the shares of them that were
measured on H200s. Estimates can be far off, for other documents or another attention: measure before you buy.

The prediction is a simulation of the pipeline's own schedule, micro-batch by micro-batch: targets compute theirs in
order until their slots are full, each sends in order once its drafter grants a slot, drafters train in order, and an
optimizer step is taken by all of them together. Evaluations, checkpoints and collisions on shared links are left out.
A target that needs several GPUs has them on one node.
"""

import argparse
import dataclasses
import functools
import json
import math
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import torch
import yaml
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import train_dflash_pipeline as pipeline
from bench_drafter_step import step_flops
from train_dflash_pipeline import UserError, rank_splits

GB = 1e9


# ---- Hardware ----


@dataclass(frozen=True)
class GPU:
    """Published rates of one GPU in its vendor's node of 8. Links: one direction of one GPU."""

    matrix_tflops: float  # bf16, dense
    memory_gb: float
    memory_tb_per_s: float
    link_gb_per_s: float  # NVLink
    node_link_gb_per_s: float  # network adapter between nodes
    fp8: bool = True


GPUS = {
    # H200 SXM data sheet: 1,979 TFLOPS bf16 with sparsity, 141 GB, 4.8 TB/s, NVLink 900 GB/s in both directions.
    # DGX H200 data sheet: 8 ConnectX-7 of 400 Gb/s for 8 GPUs.
    "h200": GPU(989, 141, 4.8, 450, 50),
    # H100 SXM data sheet: 1,979 TFLOPS bf16 with sparsity, 80 GB, 3.35 TB/s, NVLink 900 GB/s in both directions.
    # DGX H100 data sheet: 8 ConnectX-7 of 400 Gb/s for 8 GPUs.
    "h100": GPU(989, 80, 3.35, 450, 50),
    # A100 SXM 80 GB data sheet: 312 TFLOPS bf16 dense, 80 GB, 2,039 GB/s, NVLink 600 GB/s in both directions.
    # DGX A100 data sheet: 8 adapters of 200 Gb/s for 8 GPUs.
    "a100": GPU(312, 80, 2.039, 300, 25, fp8=False),
    # DGX B200 data sheet, for 8 GPUs: 72 PFLOPS FP8 with sparsity (a quarter of it in dense bf16), 1,440 GB, 64 TB/s,
    # NVLink 14.4 TB/s in both directions, 8 ConnectX-7 of 400 Gb/s.
    "b200": GPU(2250, 180, 8.0, 900, 50),
}

# Shares of the published rates that were reached on H200s; taken for the other kinds, too.
TARGET_SHARE = {True: 590 / 989, False: 455 / 989}  # Qwen3-8B-shaped target, layers compiled or not, TFLOP/s
LINEAR_ATTENTION_SHARE = {True: 571 / 989, False: 438 / 989}  # Qwen3.6-27B-shaped target, flash-linear-attention 0.6
FP8_GAIN = 189 / 130  # forward pass of the Qwen3-8B-shaped target, without --target-fp8 and with it
DRAFTER_SHARE = 70.9 / 0.127 / 989  # its drafter, compiled, forward and backward: 70.9 TFLOP in 127 ms
UNCOMPILED = 190 / 158  # a drafter step without compiled layers (ZeRO 3, --no-compile) to one with (SpecForge's)
LINK_SHARE = 234 / 450  # a payload of 335 MB with its header and credit: 234 GB/s
MEMORY_SHARE = 0.24  # optimizer step of 1.05 G parameters: 28 ms for STEP_BYTES of each
LAUNCH_MS = 139 / 36  # to start one decoder layer from Python, not compiled; compiled ones are taken for free
PACK_MS = 2.2 / 0.168  # for a GB of payload, at 4.8 TB/s of memory

STEP_BYTES = 30  # read and written per parameter: masters and two moments both ways (24), gradient (4), bf16 weight (2)
RESERVED_GB = 3.0  # CUDA context, NCCL buffers, workspaces: an allowance, not measured
MICRO_BATCH_TOKENS = (2048, 4096, 8192, 16384)
TOKENS_PER_ANCHOR = 8


# ---- The schedule ----


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of each stage of one micro-batch, on one rank: a number, or an array by m (`step`: by step) that
    repeats itself."""

    forward: object
    pack: object
    transfer: object
    draft_forward: object
    draft_backward: object
    step: object


@dataclass
class Trace:
    """When everything happened, in ms. Arrays by m, but for `step_end`, by step."""

    forward_start: np.ndarray
    forward_end: np.ndarray
    target_free: np.ndarray  # the target goes on to its next micro-batch
    granted: np.ndarray  # the transfer begins
    arrived: np.ndarray
    draft_ready: np.ndarray  # the drafter could begin, were the micro-batch there
    draft_start: np.ndarray
    draft_end: np.ndarray  # without the wait for other drafters
    round_end: np.ndarray  # with it
    step_end: np.ndarray


def simulate(topology: pipeline.Topology, accumulation: int, depth: int, times: StageTimes, num_steps: int,
             in_line: bool = False, zero_stage: int = 2, cuda: bool = True) -> Trace:  # fmt: skip
    """The pipeline's schedule, exactly, for given stage times.

    Every event of micro-batch m depends on events of smaller numbers alone, since all ranks follow one order; so it is
    computed by going through m once. depth: slots per rank. From ZeRO 2 on drafters wait for each other in the backward
    pass of every micro-batch (gradients are reduced there), below it in the last one of a step.
    cuda: the host may receive, in line, while the backward pass still runs.
    """
    drafters = topology.num_drafters
    total = num_steps * drafters * accumulation
    forward, pack, transfer, draft_forward, draft_backward = (
        np.resize(x, total).tolist()
        for x in (times.forward, times.pack, times.transfer, times.draft_forward, times.draft_backward)
    )
    step_ms = np.resize(times.step, num_steps).tolist()
    rows: list[tuple] = []
    round_ends, step_ends = [], []
    target_free, sender_free = [0.0] * topology.num_targets, [0.0] * topology.num_targets
    target_slots = [[0.0] * depth for _ in range(topology.num_targets)]  # when each goes free; taken in turn
    target_jobs = [0] * topology.num_targets
    drafter_free, drafter_receives = [0.0] * drafters, [0.0] * drafters
    host_free, release = [0.0] * drafters, [[0.0] * depth for _ in range(drafters)]
    ends = [0.0] * drafters
    pairs = [(topology.target_of(m), topology.drafter_of(m)) for m in range(total)]
    for m, (t, d) in enumerate(pairs):
        this_round = m // drafters
        j, k = this_round % depth, target_jobs[t] % depth
        target_jobs[t] += 1
        start = target_free[t]
        end = start + forward[m]
        acquired = max(end, target_slots[t][k])
        packed = max(acquired, sender_free[t]) + pack[m]
        granted = max(packed, drafter_receives[d], release[d][j])
        if in_line:
            granted = max(granted, host_free[d])
        arrived = granted + transfer[m]
        target_slots[t][k] = sender_free[t] = drafter_receives[d] = arrived
        target_free[t] = arrived if in_line else acquired
        ready = drafter_free[d]
        draft_start = max(arrived, ready)
        ends[d] = draft_start + draft_forward[m] + draft_backward[m]
        host_free[d] = draft_start + draft_forward[m]
        rows.append((start, end, target_free[t], granted, arrived, ready, draft_start, ends[d]))
        if (m + 1) % drafters:
            continue
        last = (this_round + 1) % accumulation == 0
        together = max(ends) if last or zero_stage >= 2 else None
        for d in range(drafters):
            own = ends[d] if together is None else together
            release[d][j] = drafter_free[d] = own
            round_ends.append(own)
        if last:
            step_ends.append(together + step_ms[len(step_ends)])
            drafter_free = [step_ends[-1]] * drafters
        if last or not cuda:
            host_free = list(drafter_free)
    return Trace(*np.array(rows).T, np.array(round_ends), np.array(step_ends))


@dataclass(frozen=True)
class Throughput:
    """A schedule in its steady state. Shares are of the time that all ranks of a role have."""

    micro_batches_per_s: float
    step_s: float
    target_wait: float
    drafter_wait_data: float
    drafter_wait_others: float


def steady_state(
    topology: pipeline.Topology, accumulation: int, depth: int, times: StageTimes, **switches
) -> Throughput:
    """Rates of a schedule with constant stage times, once the start is forgotten.

    With constant times it repeats itself after lcm(targets, micro-batches of a step) numbers: whole periods are counted
    where they are short, else a stretch so long that its ends hardly matter.
    """
    targets, drafters = topology.num_targets, topology.num_drafters
    batch = drafters * accumulation
    period, enough = math.lcm(targets, batch), 12 * max(targets, batch)
    stretch = period * -(-enough // period) if period < 4 * enough else batch * -(-4 * enough // batch)
    steps = stretch // batch
    trace = simulate(topology, accumulation, depth, times, 2 * steps, **switches)
    span_ms = trace.step_end[-1] - trace.step_end[steps - 1]
    second = slice(stretch, None)
    data = np.maximum(0, trace.draft_start - trace.draft_ready)[second].sum() / drafters
    others = (trace.round_end - trace.draft_end)[second].sum() / drafters
    forward_ms = stretch * float(np.mean(times.forward)) / targets
    target_wait = max(0.0, 1 - forward_ms / span_ms)
    return Throughput(1e3 * stretch / span_ms, span_ms / steps / 1e3, target_wait, data / span_ms, others / span_ms)



# ---- What the ranks hold and compute ----


@dataclass(frozen=True)
class Shapes:
    """Target and drafter of a run, in numbers."""

    text: object  # the target's text config
    drafter: pipeline.DrafterConfig
    element_bytes: int  # of the target's dtype
    layer_element_bytes: int  # of its decoder layers' weights, once it runs
    with_last: bool
    layers: int  # of the target, that run: up to the last captured one, all for the KL loss
    layer_weights: int  # in them
    active_weights: float  # of these, that one token meets: of experts only those that are chosen
    all_weights: int  # of the whole target, as it is loaded
    attention_width: int  # query heads x head size
    attending_layers: int  # of those that run, without linear attention
    drafter_weights: int

    def payload_bytes(self, tokens: int) -> int:
        width = (len(self.drafter.target_layer_ids) + self.with_last) * self.drafter.hidden_size
        return tokens * width * self.element_bytes


def read_shapes(args: pipeline.Arguments) -> Shapes:
    """Count parameters on the meta device; nothing is loaded but the config."""
    config = pipeline.load_target_config(args.target)
    text = config.get_text_config()
    ids = pipeline.choose_fc_layer_ids(text.num_hidden_layers, args.target)
    drafter = pipeline.DrafterConfig.for_target(text, args.drafter, ids, mask_token_id=0)
    if args.drafter.init_from is not None:
        drafter = pipeline.choose_drafter_config(args, text, pipeline.load_tokenizer(args.target))
    with torch.device("meta"):
        model = pipeline.target_class(config).from_config(config, trust_remote_code=args.target.trust_remote_code)
    with_last = args.data.loss == "kl"
    layers = pipeline.decoder_layers(model)
    layers = layers if with_last else layers[: ids[-1] + 1]
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    chosen = getattr(text, "num_experts_per_tok", None) or 1

    def active(name: str, weight: torch.Tensor) -> float:
        routed = ".experts." in f".{name}." and experts > 1
        return weight.numel() * (chosen / experts if routed else 1)

    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shapes(
        text, drafter, config.dtype.itemsize, 1 if args.target.target_fp8 else config.dtype.itemsize, with_last, len(layers),
        sum(p.numel() for p in layers.parameters()), sum(active(n, p) for n, p in layers.named_parameters()),
        sum(p.numel() for p in model.parameters()), text.num_attention_heads * head_dim,
        len(pipeline.expected_windows(text, len(layers))),
        drafter_weights(drafter),
    )  # fmt: skip


def drafter_weights(c: pipeline.DrafterConfig) -> int:
    """Parameters of `DFlashDrafter`, counted without making them."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size + 2) + 2 * c.head_dim
    return c.num_hidden_layers * layer + len(c.target_layer_ids) * c.hidden_size**2 + 2 * c.hidden_size


def target_memory(shapes: Shapes, tokens: int, depth: int, tp: int) -> dict[str, float]:
    """GB on a target rank, once it runs. While it loads, the whole target is there: see `target_peak`."""
    text, b = shapes.text, shapes.element_bytes
    intermediate = getattr(text, "intermediate_size", None) or 0
    width = 6 * shapes.drafter.hidden_size + 2 * shapes.attention_width + 3 * intermediate
    ends = shapes.drafter.vocab_size * shapes.drafter.hidden_size
    captured = shapes.payload_bytes(tokens) * (depth + 1)  # those of the passes whose packing is still to come
    return {
        "weights": (shapes.layer_weights / tp * shapes.layer_element_bytes + ends * b) / GB,
        "activations": (1.25 * tokens * width * b + captured) / GB,  # a quarter more for padding
        "slots": depth * shapes.payload_bytes(tokens) / GB,
        "reserved": RESERVED_GB,
    }


def target_peak(shapes: Shapes, tokens: int, depth: int, tp: int) -> float:
    """GB that a target rank needs at most: loading, or running."""
    return max(shapes.all_weights / tp * shapes.element_bytes / GB + RESERVED_GB,
               sum(target_memory(shapes, tokens, depth, tp).values()))  # fmt: skip


def drafter_memory(
    shapes: Shapes, tokens: int, anchors: int, depth: int, drafters: int, stage: int
) -> dict[str, float]:
    """GB on a drafter rank, by what holds it: bf16 with fp32 masters, Adam and accumulated gradients."""
    c, weights = shapes.drafter, shapes.drafter_weights
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    slots = anchors * c.block_size
    per_slot = 6 * c.hidden_size + 3 * (q + 2 * kv) + 3 * c.intermediate_size  # kept for the backward pass, by layer
    context = tokens * (len(c.target_layer_ids) * c.hidden_size + 3 * c.hidden_size + 4 * kv * c.num_hidden_layers)
    chunk = min(pipeline.LOSS_CHUNK, slots) * c.vocab_size
    bucket = 2 * 4 * min(weights, 5e8)  # two buckets of the reduction, fp32: DeepSpeed's default size

    def shared_from(least: int) -> int:
        return drafters if stage >= least else 1

    return {
        "weights": 2 * weights / shared_from(3) / GB,
        "frozen ends": 2 * 2 * c.vocab_size * c.hidden_size / GB,
        "masters": 4 * weights / shared_from(1) / GB,
        "adam": 8 * weights / shared_from(1) / GB,
        "gradients": (2 * weights + 4 * weights / shared_from(2) + bucket) / GB,
        "activations": 2 * (slots * per_slot * c.num_hidden_layers + context) / GB,
        "logits": (3 * 4 + 2) * chunk / GB,  # logits, their log-softmax and a copy in fp32; the gradient in bf16
        "slots": depth * shapes.payload_bytes(tokens) / GB,
        "reserved": RESERVED_GB,
    }


# ---- Stage times ----


@dataclass(frozen=True)
class Layout:
    """One way to lay out a run."""

    targets: int
    tp: int
    drafters: int
    tokens: int
    anchors: int
    accumulation: int
    zero_stage: int


def lay_out(layout: Layout, per_node: int, placement: str) -> pipeline.Topology:
    """The pipeline's own topology on nodes of so many GPUs. Raises UserError where the targets cannot be laid out."""
    nodes = tuple(rank // per_node for rank in range(layout.targets * layout.tp + layout.drafters))
    return pipeline.Topology(
        rank=0, world_size=len(nodes), local_rank=0, local_world_size=min(per_node, len(nodes)),
        num_targets=layout.targets, nodes=nodes, target_tp=layout.tp,
        target_ranks=pipeline.place_sharded_targets(nodes, layout.targets, placement, layout.tp),
    )  # fmt: skip


def example_plan(args: pipeline.Arguments, tokens: int, anchors: int) -> pipeline.BatchPlan:
    """A full micro-batch of supervised documents of 1,024 tokens."""
    data = dataclasses.replace(args.data, tokens_per_micro_batch=tokens, anchors_per_micro_batch=anchors)
    offsets = np.array([*range(0, tokens, 1024), tokens])
    documents = pipeline.Documents(
        np.zeros(tokens, np.int32), np.ones(tokens, bool), offsets, np.arange(len(offsets) - 1), {}
    )
    return pipeline.Planner(documents, dataclasses.replace(args, data=data), num_drafters=1).plan(0)


class Estimate:
    """Stage times from shapes and data sheets."""

    def __init__(self, gpu: GPU, per_node: int, shapes: Shapes, args: pipeline.Arguments):
        self.gpu, self.per_node, self.shapes, self.args = gpu, per_node, shapes, args
        self.plan = functools.cache(functools.partial(example_plan, args))

    def target_ms(self, tokens: int, anchors: int, tp: int) -> float:
        """One target's forward pass over a micro-batch."""
        s, compiled = self.shapes, self.args.pipeline.compile
        pairs = float((self.plan(tokens, anchors).lengths ** 2).sum()) / 2
        flops = 2 * s.active_weights * tokens + 4 * pairs * s.attention_width * s.attending_layers
        share = (TARGET_SHARE if s.attending_layers == s.layers else LINEAR_ATTENTION_SHARE)[compiled]
        compute = flops / (self.gpu.matrix_tflops * 1e12 * share * tp)
        compute /= FP8_GAIN if self.args.target.target_fp8 else 1.0
        # tensor parallelism: two all-reduces a layer, each rank sends its part twice
        reduced = 2 * s.layers * tokens * s.drafter.hidden_size * s.element_bytes * 2 * (tp - 1) / tp
        compute += reduced / (self.gpu.link_gb_per_s * GB * LINK_SHARE)
        return max(1e3 * compute, 0.0 if compiled else LAUNCH_MS * s.layers)

    def reduce_ms(self, drafters: int, bytes_per_weight: int) -> float:
        """A ring's pass over the drafter's parameters (reduce-scatter or all-gather)."""
        inside = min(drafters, self.per_node)
        link = self.gpu.link_gb_per_s
        if drafters > self.per_node:  # every GPU of a node has a ring through its own adapter
            link = min(link, inside * self.gpu.node_link_gb_per_s)
        moved = bytes_per_weight * self.shapes.drafter_weights * (drafters - 1) / drafters
        return 1e3 * moved / (link * GB * LINK_SHARE)

    def drafter_ms(self, layout: Layout) -> tuple[float, float, float]:
        """(forward, backward, step) of a drafter. Gradients travel in fp32 during the backward pass; what does not fit
        behind it is added. Forward is taken as a third."""
        plan = self.plan(layout.tokens, layout.anchors)
        compute = 1e3 * step_flops(plan, self.shapes.drafter) / (self.gpu.matrix_tflops * 1e12 * DRAFTER_SHARE)
        compute *= 1.0 if self.args.pipeline.compile and layout.zero_stage < 3 else UNCOMPILED
        forward, backward = compute / 3, compute * 2 / 3
        reduce, gather = (self.reduce_ms(layout.drafters, b) for b in (4, 2))
        update = STEP_BYTES * self.shapes.drafter_weights / layout.drafters
        step = 1e3 * update / (self.gpu.memory_tb_per_s * 1e12 * MEMORY_SHARE)
        if layout.zero_stage == 3:  # weights are gathered for each pass
            return max(forward, gather), max(backward, reduce + gather), step
        if layout.zero_stage == 2:
            return forward, max(backward, reduce), step + gather
        late = max(0.0, reduce - backward)  # below ZeRO 2 only the last backward pass of a step reduces
        return forward, backward, step + gather + late

    def times(self, layout: Layout) -> StageTimes:
        """With a transfer inside a node."""
        payload = self.shapes.payload_bytes(layout.tokens) / GB
        pack = PACK_MS * payload * 4.8 / self.gpu.memory_tb_per_s
        transfer = 1e3 * payload / (self.gpu.link_gb_per_s * LINK_SHARE)
        return StageTimes(self.target_ms(layout.tokens, layout.anchors, layout.tp), pack, transfer,
                          *self.drafter_ms(layout))  # fmt: skip


def transfer_ms(crossing: np.ndarray, payload_gb: float, gpu: GPU) -> np.ndarray:
    """By m over a period: inside a node, or between two."""
    links = np.where(crossing, min(gpu.link_gb_per_s, gpu.node_link_gb_per_s), gpu.link_gb_per_s)
    return 1e3 * payload_gb / (links * LINK_SHARE)


# ---- Measured times ----

# What a run's config.yaml says about the shapes: taken over unless flags say otherwise.
TAKEN_OVER = ("target", "tokenizer", "target_dtype", "target_fp8", "trust_remote_code", "num_fc_layers", "fc_layer_ids",
              "block_size", "num_draft_layers", "sliding_window", "num_full_attention_layers", "loss", "async_postprocess",
              "split_fc_layers", "prefetch_depth")  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Stage times in ms of a real run or a bench, and the layout that they were measured with."""

    forward: float
    pack: float
    draft_forward: float
    draft_backward: float
    step: float  # with all that a drafter does beside the stages
    tokens: float  # in a micro-batch, without padding
    tokens_per_s: Optional[float]  # of the whole pipeline; None: not measured
    tokens_per_micro_batch: int
    anchors: int
    accumulation: int
    zero_stage: int
    targets: Optional[int]  # None: unknown
    tp: int  # ranks of one
    drafters: int
    drafters_waited: bool  # the drafter's times hold waits for other drafters
    flags: tuple[str, ...]  # shapes


def read_rates(path: Path) -> Measured:
    """See --rates. Raises UserError where a file is missing, too short or of another kind."""
    try:
        if path.suffix == ".json":
            return measured_by_bench(json.loads(path.read_text()))
        metrics = path / "metrics.jsonl" if path.is_dir() else path
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return measured_in_run(records, yaml.safe_load((metrics.parent / "config.yaml").read_text()))
    except (UserError, OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"--rates {path}: {pipeline.first_line(error)}") from None


def measured_in_run(records: list[dict], config: dict) -> Measured:
    """Stage times out of metrics.jsonl and config.yaml: means over the steps after the first two fifths."""
    if len(records) < 5:
        raise UserError(f"{len(records)} steps are too few, at least 5 are needed")
    records = records[2 * len(records) // 5 :]
    accumulation = config["gradient_accumulation_steps"]

    def mean(name: str) -> float:
        return statistics.fmean(r["ms"][name] for r in records)

    spans = {name: mean(name) for name in ("forward", "backward", "step")}
    wall_ms = statistics.fmean(1e3 * r["tokens"] / r["tokens_per_s"] for r in records)
    own_tokens = sum(r["drafter_tokens_per_s"] * sum(r["ms"][name] for name in spans) / 1e3 for r in records)
    drafters, tp = round(sum(r["tokens"] for r in records) / own_tokens), config.get("target_tp", 1)
    tokens = statistics.fmean(r["tokens"] for r in records)
    return Measured(
        forward=mean("target_forward") / accumulation, pack=mean("pack") / accumulation,
        draft_forward=spans["forward"] / accumulation, draft_backward=spans["backward"] / accumulation,
        step=spans["step"] + max(0.0, wall_ms - mean("receive_wait") - sum(spans.values())),
        tokens=tokens / drafters / accumulation, tokens_per_s=1e3 * tokens / wall_ms,
        tokens_per_micro_batch=config["tokens_per_micro_batch"], anchors=config["anchors_per_micro_batch"],
        accumulation=accumulation, zero_stage=zero_stage_of(config["deepspeed"]),
        targets=targets_of(str(config["num_target_ranks"]), drafters, tp), tp=tp, drafters=drafters,
        drafters_waited=drafters > 1,
        flags=tuple(shape_flags(config)),
    )  # fmt: skip


def measured_by_bench(results: dict) -> Measured:
    """Stage times out of tools/bench_pipeline.py --json: what one target and one drafter rank do alone."""
    if missing := [name for name in ("target", "drafter") if "tokens_per_s" not in results.get(name, {})]:
        raise UserError(f"it holds no measurement of the {' and the '.join(missing)} alone")
    target, drafter, settings = results["target"], results["drafter"], results["settings"]
    args = pipeline.parse_arguments(["--target=toy", *settings["flags"]])
    accumulation, stages = args.optimization.gradient_accumulation_steps, drafter["stages_ms"]
    run = "pipeline" if args.pipeline.async_postprocess else "sync"  # in line, the target alone packs between its passes
    wall_ms = 1e3 * drafter["tokens_per_micro_batch"] / drafter["tokens_per_s"]
    rest = max(0.0, wall_ms - sum(stages[name] for name in ("forward", "backward", "step")))
    return Measured(
        forward=1e3 * target["tokens_per_micro_batch"] / target["tokens_per_s"] if run == "pipeline" else target["forward_ms"],
        pack=target["stages_ms"]["pack"],
        draft_forward=stages["forward"], draft_backward=stages["backward"], step=accumulation * (stages["step"] + rest),
        tokens=target["tokens_per_micro_batch"], tokens_per_s=results.get(run, {}).get("tokens_per_s"),
        tokens_per_micro_batch=args.data.tokens_per_micro_batch, anchors=args.data.anchors_per_micro_batch,
        accumulation=accumulation, zero_stage=zero_stage_of(args.optimization.deepspeed),
        targets=settings["ranks"]["target"], tp=1, drafters=settings["ranks"]["drafter"], drafters_waited=False,
        flags=tuple(shape_flags(args.flat())),
    )  # fmt: skip


def shape_flags(config: dict) -> list[str]:
    """The settings that TAKEN_OVER names, as flags; defaults are left out."""
    known, flags = pipeline.parse_arguments(["--target=toy"]).flat(), []
    for key in TAKEN_OVER:
        name, value = "--" + key.replace("_", "-"), config.get(key)
        if isinstance(value, list):
            flags += [name, *map(str, value)]
        elif isinstance(value, bool) and value != known[key]:
            flags.append(name if value else name.replace("--", "--no-", 1))
        elif not isinstance(value, bool) and value is not None and (value != known[key] or key == "target"):
            flags += [name, str(value)]
    return flags


def zero_stage_of(path: str) -> int:
    """The ZeRO stage of a DeepSpeed JSON; 2, the default, where the file is not there."""
    try:
        return json.loads(Path(path).read_text()).get("zero_optimization", {}).get("stage", 0)
    except (OSError, ValueError):
        return 2


def targets_of(num_target_ranks: str, drafters: int, tp: int) -> Optional[int]:
    """Targets of a run, each of `tp` ranks, where the flag and the number of drafters say it."""
    if num_target_ranks.isdecimal():
        return int(num_target_ranks) // tp
    worlds = [w for w in range(2, 3 * drafters + 3 * tp) if w - max(1, w * 5 // 8 // tp) * tp == drafters]
    return (worlds[0] - drafters) // tp if len(worlds) == 1 else None


# ---- The plan ----


@dataclass(frozen=True)
class Prediction:
    """What a layout would do."""

    layout: Layout
    throughput: Throughput
    tokens: float  # of a micro-batch
    target_ms: float
    drafter_ms: float  # a micro-batch, forward and backward
    step_ms: float
    target_gb: dict[str, float]
    target_peak_gb: float
    drafter_gb: dict[str, float]
    payload_gb: float
    crossing: float  # share of micro-batches whose states go to another node
    zero_gb_per_step: float  # gradients and weights that all drafters send, in one step
    zero_between_nodes: bool

    @property
    def tokens_per_s(self) -> float:
        return self.throughput.micro_batches_per_s * self.tokens

    @property
    def batch(self) -> int:
        return self.layout.drafters * self.layout.accumulation

    def figures(self) -> dict:
        """Everything as plain numbers, for --json."""
        layout, flow = dataclasses.asdict(self.layout), dataclasses.asdict(self.throughput)
        states = self.throughput.micro_batches_per_s * self.payload_gb
        return layout | flow | {
            "tokens_per_step": self.batch * self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "target_tokens_per_s": self.layout.targets * 1e3 * self.tokens / self.target_ms,
            "drafter_tokens_per_s": self.batch * 1e3 * self.tokens
            / (self.layout.accumulation * self.drafter_ms + self.step_ms),
            "ms": {"target": self.target_ms, "drafter": self.drafter_ms, "step": self.step_ms},
            "target_memory_gb": self.target_gb | {"all": sum(self.target_gb.values()), "peak": self.target_peak_gb},
            "drafter_memory_gb": self.drafter_gb | {"all": sum(self.drafter_gb.values())},
            "states_gb_per_s": {"inside nodes": states * (1 - self.crossing), "between nodes": states * self.crossing},
            "states_gb_per_step": self.batch * self.payload_gb,
            "zero_gb_per_step": self.zero_gb_per_step,
            "zero_gb_per_s": self.zero_gb_per_step / self.throughput.step_s,
            "zero_between_nodes": self.zero_between_nodes,
        }  # fmt: skip


class Planning:
    """All that layouts are made of and judged by."""

    def __init__(self, options: argparse.Namespace, args: pipeline.Arguments, measured: Optional[Measured]):
        self.options, self.args, self.measured = options, args, measured
        self.gpu, self.depth = GPUS[options.gpu], args.pipeline.prefetch_depth
        if options.node_link_gb_per_s is not None:
            self.gpu = dataclasses.replace(self.gpu, node_link_gb_per_s=options.node_link_gb_per_s)
        for tokens, anchors in self.micro_batches() if measured is None else ():
            data = dataclasses.replace(args.data, tokens_per_micro_batch=tokens, anchors_per_micro_batch=anchors)
            pipeline.check_tiles(dataclasses.replace(args, data=data), torch.device("cuda"))
        if args.target.target_fp8 and not self.gpu.fp8:
            raise UserError(f"--target-fp8: an {options.gpu.upper()} does not compute in fp8")
        self.shapes = read_shapes(args)
        self.estimate = Estimate(self.gpu, options.gpus_per_node, self.shapes, args)
        self.limit_gb = self.gpu.memory_gb * options.memory_share
        self.tp = self.choose_tp()
        self.left_out: dict[str, float] = {}  # what did not fit -> the GB that it needs at most

    def choose_tp(self) -> int:
        """The smallest K that lets a target fit into K GPUs of one node, or the given one. Raises UserError."""
        smallest = min(self.micro_batches())[0]
        most = 1 if self.args.target.target_fp8 else self.options.gpus_per_node  # the two exclude each other
        possible = [k for k in pipeline.target_tp_degrees(self.shapes.text) if k <= most]
        needs = {k: target_peak(self.shapes, smallest, self.depth, k) for k in possible}
        fitting = [k for k in possible if needs[k] <= self.limit_gb]
        given = self.options.target_tp
        what = f"a target rank may take {self.limit_gb:.0f} GB of a GPU"
        if not fitting:
            least = needs[possible[-1]]
            raise UserError(f"{what}, but needs {least:.0f} GB even as one of {possible[-1]} that share the target")
        if given is not None and given not in fitting:
            raise UserError(f"{what}; --target-tp {given} will not do: choose from {', '.join(map(str, fitting))}")
        pipeline.check_target_tp(self.shapes.text, given or fitting[0])
        return given or fitting[0]

    def micro_batches(self) -> list[tuple[int, int]]:
        """(tokens, anchors) to try."""
        tokens, anchors = self.options.tokens_per_micro_batch, self.options.anchors_per_micro_batch
        sizes = MICRO_BATCH_TOKENS if tokens is None else (tokens,)
        return [(n, max(1, n // TOKENS_PER_ANCHOR) if anchors is None else anchors) for n in sizes]

    def times(self, layout: Layout) -> StageTimes:
        """With a transfer inside a node."""
        estimate, m = self.estimate.times(layout), self.measured
        if m is None:
            return estimate
        return StageTimes(m.forward, m.pack, estimate.transfer, m.draft_forward, m.draft_backward, m.step)

    def layouts(self, tokens: int, anchors: int, stage: int) -> list[Layout]:
        """Layouts with one micro-batch and ZeRO stage, the most balanced first, then its neighbours."""
        options, ranks = self.options, self.options.gpus
        batch = max(1, round(options.tokens_per_step / tokens))
        drafters = max(1, (ranks - self.tp) * 3 // 8)
        accumulation = options.gradient_accumulation_steps
        usual = Layout(1, self.tp, drafters, tokens, anchors, accumulation or max(1, batch // drafters), stage)
        times = self.times(usual)
        micro_ms, step_ms = times.draft_forward + times.draft_backward, times.step
        target_ms = times.forward + (0.0 if self.args.pipeline.async_postprocess else times.pack)
        splits = rank_splits(ranks, batch, target_ms, micro_ms, step_ms, self.tp)
        splits = [split for split in splits if self.has_room(split.num_targets)]
        if accumulation is not None:
            splits.sort(key=lambda s: -min(s.target_rate, s.num_drafters * 1e3 / (micro_ms + step_ms / accumulation)))
        if not splits:
            raise UserError(f"{ranks} GPUs cannot hold a target of {self.tp} ranks and a drafter")
        by_targets = {split.num_targets: split for split in splits}
        best = splits[0].num_targets
        near = [best + sign * max(1, round(far * best)) for far in (0.002, 0.02, 0.05) for sign in (1, -1)]
        nodes = -(-ranks // options.gpus_per_node)
        even = [best // nodes * nodes, -(-best // nodes) * nodes] if nodes > 1 else []  # the same on every node
        chosen = dict.fromkeys([*even, best, *near])
        if options.num_target_ranks is not None:
            wanted, rest = divmod(options.num_target_ranks, self.tp)
            if rest:
                raise UserError(f"--num-target-ranks {options.num_target_ranks}: no multiple of --target-tp {self.tp}")
            if wanted not in by_targets:
                raise UserError(
                    f"--num-target-ranks {options.num_target_ranks} of {ranks} GPUs leaves no drafter, or no node for a target"
                )
            chosen = [wanted]
        return [
            Layout(t, self.tp, s.num_drafters, tokens, anchors, accumulation or s.accumulation, stage)
            for t in chosen if (s := by_targets.get(t)) is not None
        ]  # fmt: skip

    def has_room(self, targets: int) -> bool:
        """Whether every one of so many targets finds a node for all its ranks."""
        whole, rest = divmod(self.options.gpus, self.options.gpus_per_node)
        return targets <= whole * (self.options.gpus_per_node // self.tp) + rest // self.tp

    def fits(self, layout: Layout) -> bool:
        target = target_peak(self.shapes, layout.tokens, self.depth, layout.tp)
        drafter = sum(self.drafter_memory(layout).values())
        if max(target, drafter) <= self.limit_gb:
            return True
        who = "targets" if target > self.limit_gb else f"drafters under ZeRO {layout.zero_stage}"
        what = f"{who} with micro-batches of {layout.tokens} tokens"
        self.left_out[what] = max(self.left_out.get(what, 0.0), target, drafter)
        return False

    def drafter_memory(self, layout: Layout) -> dict[str, float]:
        return drafter_memory(
            self.shapes, layout.tokens, layout.anchors, self.depth, layout.drafters, layout.zero_stage
        )

    def predict(self, layout: Layout) -> Prediction:
        times, shapes, drafters = self.times(layout), self.shapes, layout.drafters
        topology = lay_out(layout, self.options.gpus_per_node, self.args.pipeline.placement)
        crossing, payload = topology.crossings(), shapes.payload_bytes(layout.tokens) / GB
        throughput = steady_state(
            topology, layout.accumulation, self.depth,
            dataclasses.replace(times, transfer=transfer_ms(crossing, payload, self.gpu)),
            in_line=not self.args.pipeline.async_postprocess, zero_stage=layout.zero_stage,
        )  # fmt: skip
        tokens = self.measured.tokens if self.measured else self.estimate.plan(layout.tokens, layout.anchors).num_tokens
        reduced = layout.accumulation if layout.zero_stage >= 2 else 1
        gathered = 2 * layout.accumulation if layout.zero_stage == 3 else 1
        zero_gb = (drafters - 1) * shapes.drafter_weights * (4 * reduced + 2 * gathered) / GB
        drafter_nodes = {topology.node_of("drafter", d) for d in range(drafters)}
        return Prediction(
            layout, throughput, tokens, times.forward, times.draft_forward + times.draft_backward, times.step,
            target_memory(shapes, layout.tokens, self.depth, layout.tp),
            target_peak(shapes, layout.tokens, self.depth, layout.tp), self.drafter_memory(layout),
            payload, float(crossing.mean()), zero_gb, len(drafter_nodes) > 1,
        )  # fmt: skip

    def search(self) -> list[Prediction]:
        """Predictions, the layout to take first. Raises UserError where nothing fits."""
        stages = [2, 1, 3] if self.options.zero_stage is None else [self.options.zero_stage]
        combinations = []
        for tokens, anchors in tqdm(self.micro_batches(), desc="micro-batches", leave=False):
            for stage in stages:
                if layouts := [x for x in self.layouts(tokens, anchors, stage) if self.fits(x)]:
                    combinations.append((self.predict(layouts[0]), layouts[1:]))
        if not combinations:
            needs = ", ".join(f"{what} {gb:.0f} GB" for what, gb in self.left_out.items())
            raise UserError(f"nothing fits into {self.limit_gb:.0f} GB ({needs}): take fewer tokens or anchors")
        chosen = self.best([p for p, _ in combinations])
        others = next(rest for p, rest in combinations if p is chosen)
        splits = [chosen, *map(self.predict, tqdm(others, desc="splits", leave=False))]
        best = self.best(splits)
        ordered = sorted((p for p in splits if p is not best), key=lambda p: -p.tokens_per_s)
        rest = sorted((p for p, _ in combinations if p is not chosen), key=lambda p: -p.tokens_per_s)
        return [best, *ordered, *rest]

    def best(self, predictions: list[Prediction]) -> Prediction:
        """The fastest. Of those within 1 %: ZeRO 2 (the default) before 1 and 3, then a global batch within a quarter
        of the wanted one, then the largest micro-batch, which takes longer documents and fewer launches."""
        most = max(p.tokens_per_s for p in predictions)
        close = [p for p in predictions if p.tokens_per_s >= 0.99 * most]

        def order(p: Prediction):
            step = p.batch * p.layout.tokens / self.options.tokens_per_step
            stage = {2: 0, 1: 1, 3: 2}.get(p.layout.zero_stage, 3)
            return stage, not 0.75 <= step <= 1.25, -p.layout.tokens, -p.tokens_per_s

        return min(close, key=order)


# ---- Output ----


def command(layout: Layout, options: argparse.Namespace, flags: list[str]) -> str:
    """What to start, on every node."""
    nodes = -(-options.gpus // options.gpus_per_node)
    launcher = f"torchrun --nproc_per_node {options.gpus // nodes}"
    if nodes > 1:
        launcher = f"torchrun --nnodes {nodes} --nproc_per_node {options.gpus_per_node} --rdzv-backend c10d " \
                   "--rdzv-endpoint HOST:29500"  # fmt: skip
    chosen = {
        "num-target-ranks": layout.targets * layout.tp, "tokens-per-micro-batch": layout.tokens,
        "anchors-per-micro-batch": layout.anchors, "gradient-accumulation-steps": layout.accumulation,
        "deepspeed": f"ds_configs/zero{layout.zero_stage}.json",
    } | ({"target-tp": layout.tp} if layout.tp > 1 else {})  # fmt: skip
    own = " ".join(f"--{name} {value}" for name, value in chosen.items())
    return f"{launcher} train_dflash_pipeline.py {shlex.join(flags)} {own}".replace("  ", " ")


def table(predictions: list[Prediction]) -> str:
    rows = ["targets : drafters   TP  ZeRO  tokens  anchors  accumulation  tokens/step   tokens/s   "
            "waits: target  drafter (data, others)   GB: target  drafter"]  # fmt: skip
    for p in predictions:
        x, flow = p.layout, p.throughput
        rows.append(
            f"{x.targets:7d} : {x.drafters:<10d} {x.tp:2d}  {x.zero_stage:4d}  {x.tokens:6d}  {x.anchors:7d}  "
            f"{x.accumulation:12d}  {p.batch * p.tokens:11,.0f} {p.tokens_per_s:10,.0f}   {flow.target_wait:13.0%}  "
            f"{flow.drafter_wait_data:13.0%} {flow.drafter_wait_others:8.0%}   "
            f"{p.target_peak_gb:10.0f}  {sum(p.drafter_gb.values()):7.0f}"
        )
    return "\n".join(rows)


def details(p: Prediction) -> str:
    f = p.figures()

    def parts(memory: dict) -> str:
        return ", ".join(f"{name} {value:.1f}" for name, value in memory.items())

    where = "between nodes, too" if p.zero_between_nodes else "inside one node"
    return "\n".join([
        f"target:  {p.target_ms:.0f} ms a micro-batch; all of them could do {f['target_tokens_per_s']:,.0f} tokens/s",
        f"drafter: {p.drafter_ms:.0f} ms a micro-batch, {p.step_ms:.1f} ms a step; all of them could do "
        f"{f['drafter_tokens_per_s']:,.0f} tokens/s",
        f"together: {p.tokens_per_s:,.0f} tokens/s, {f['tokens_per_step']:,.0f} tokens a step of {f['step_s']:.2f} s",
        f"hidden states: {f['states_gb_per_step']:.2f} GB a step; {f['states_gb_per_s']['inside nodes']:.2f} GB/s "
        f"inside nodes, {f['states_gb_per_s']['between nodes']:.2f} GB/s between them",
        f"gradients and weights of the drafter: {f['zero_gb_per_step']:.2f} GB a step, {f['zero_gb_per_s']:.2f} GB/s, "
        f"{where}",
        f"memory of a target rank, GB: {parts(f['target_memory_gb'])}",
        f"memory of a drafter rank, GB: {parts(f['drafter_memory_gb'])}",
    ])  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--gpu", choices=sorted(GPUS), default="h200", help="kind of GPU (default: %(default)s)")
    add("--gpus", type=int, default=8, help="GPUs in all, one rank on each (default: %(default)s)")
    add("--gpus-per-node", type=int, default=8, help="GPUs in one node (default: %(default)s)")
    add("--node-link-gb-per-s", type=float, help="network between nodes, GB/s per GPU and direction (by --gpu)")
    add("--rates", type=Path, help="measured stage times in place of estimates: a run's output folder or "
        "metrics.jsonl, or a JSON file of tools/bench_pipeline.py")
    add("--tokens-per-step", type=int, default=65536, help="tokens of a global batch, about (default: %(default)s)")
    add("--memory-share", type=float, default=0.92, help="usable share of a GPU's memory (default: %(default)s)")
    add("--splits", type=int, default=5, help="other layouts shown (default: %(default)s)")
    add("--json", type=Path, help="also write all figures here")
    fixed = parser.add_argument_group("chosen by the tool where not given")
    fixed.add_argument("--num-target-ranks", type=int, help="target ranks, as the pipeline counts them")
    fixed.add_argument("--target-tp", type=int, help="ranks that form one target")
    fixed.add_argument("--zero-stage", type=int, choices=[1, 2, 3], help="ZeRO stage of the drafters")
    fixed.add_argument("--tokens-per-micro-batch", type=int, help="packed length of a micro-batch")
    fixed.add_argument("--anchors-per-micro-batch", type=int, help="blocks per micro-batch (default: tokens / 8)")
    fixed.add_argument("--gradient-accumulation-steps", type=int, help="micro-batches per drafter and step")
    return parser


def check_options(options: argparse.Namespace) -> None:
    if options.gpus < 2 or options.gpus_per_node < 1:
        raise UserError("at least 2 GPUs are needed, one for each role")
    if options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        raise UserError(f"--gpus {options.gpus} is no multiple of --gpus-per-node {options.gpus_per_node}")
    least = {"tokens_per_step": 1, "memory_share": 0.01, "splits": 0, "target_tp": 1, "num_target_ranks": 1,
             "tokens_per_micro_batch": 128, "anchors_per_micro_batch": 8, "gradient_accumulation_steps": 1,
             "node_link_gb_per_s": 0.001}  # fmt: skip
    for name, value in least.items():
        if (given := getattr(options, name)) is not None and given < value:
            raise UserError(f"--{name.replace('_', '-')} {given}: must be at least {value}")
    if options.json and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: no such folder")
    if options.memory_share > 1:
        raise UserError(f"--memory-share {options.memory_share}: must not exceed 1")


def main() -> None:
    options, flags = make_parser().parse_known_args()
    check_options(options)
    measured = None if options.rates is None else read_rates(options.rates)
    if measured is not None:  # its times hold for its own micro-batch, ZeRO stage and tensor parallelism alone
        own = {"tokens_per_micro_batch": measured.tokens_per_micro_batch, "anchors_per_micro_batch": measured.anchors,
               "zero_stage": measured.zero_stage, "target_tp": measured.tp}  # fmt: skip
        for name, value in own.items():
            if getattr(options, name) not in (None, value):
                raise UserError(f"--{name.replace('_', '-')}: the times of --rates are of {value}")
            setattr(options, name, value)
    args = pipeline.parse_arguments([*(measured.flags if measured else ()), *flags])
    pipeline.choose_target(args.target)
    planning = Planning(options, args, measured)
    if measured is not None:
        compare_with_run(planning, measured)
    predictions = planning.search()
    best, source = predictions[0], f"times measured in {options.rates}" if measured else "estimated times"
    print(f"{options.gpus} {options.gpu.upper()}, {options.gpus_per_node} a node; {source}\n")
    print(table(predictions[: 1 + options.splits]))
    for what, needed in planning.left_out.items():
        print(f"left out: {what} need up to {needed:.0f} GB, and may take {planning.limit_gb:.0f}")
    print(f"\nthe first one:\n{details(best)}")
    start = command(best.layout, options, [*(measured.flags if measured else ()), *flags])
    print(f"\n{start}")
    if options.json:
        figures = {"gpu": options.gpu, "gpus": options.gpus, "rates": source, "command": start,
                   "layouts": [p.figures() for p in predictions]}  # fmt: skip
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def compare_with_run(planning: Planning, m: Measured) -> None:
    """Say what the simulation makes of the layout that was measured."""
    if m.drafters_waited:
        print("note: the drafter's times hold its waits for the other drafters, so they may be shorter than they seem")
    if m.targets is None or m.tokens_per_s is None:
        print("note: how many target ranks it had, or its speed, is not known: no comparison with the prediction")
        return
    layout = Layout(
        m.targets, planning.tp, m.drafters, m.tokens_per_micro_batch, m.anchors, m.accumulation, m.zero_stage
    )
    predicted = planning.predict(layout).tokens_per_s
    print(
        f"{m.targets} : {m.drafters} as measured: {m.tokens_per_s:,.0f} tokens/s; predicted from the stage times: "
        f"{predicted:,.0f} ({predicted / m.tokens_per_s - 1:+.1%})"
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
