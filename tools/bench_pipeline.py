"""Measure the whole pipeline beside what bounds it and what others do: each side alone, in line, and colocated.

    # a toy on the CPU
    python tools/bench_pipeline.py

    # two GPUs, Qwen3-8B's shape, random weights and documents; any flag of the pipeline is understood
    python tools/bench_pipeline.py --device cuda --target qwen3-8b-shape --tokens-per-micro-batch 8192 \\
        --anchors-per-micro-batch 512 --steps 40 --warm-up 15 --json pipeline.json

    # only some of it; documents of one length; five target and three drafter ranks
    python tools/bench_pipeline.py --only target drafter --document-tokens 1024 1024
    python tools/bench_pipeline.py --device cuda --target-ranks 5 --drafter-ranks 3 --only pipeline

The measurements, one after the other, each in processes of its own:

    target      one target rank alone: the forward pass, and with capture and packing on top, nothing sent
    drafter     one drafter rank alone: the pipeline's training steps on states that are already in memory
    pipeline    the real script under torchrun, --async-postprocess --split-fc-layers
    sync        the same with --no-async-postprocess --no-split-fc-layers
    colocated   every GPU does the target's forward pass and the drafter's step in turn; gradients are averaged over all
    plain       the target as transformers runs it: all layers, eager, documents padded to the longest, nothing captured

All use the pipeline's own code and the same documents. Tokens per second are those of the steps after --warm-up. The
pipeline's two sides bound it: ranks times what one rank does alone. The ceiling is a matrix product, measured on each
side's own device. No checkpoint is written. A failed measurement does not stop the others; exit code 1 then.
"""

import argparse
import contextlib
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace
from typing import Optional

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS.parent), str(TOOLS)]
import train_dflash_pipeline as pipeline
from bench_drafter_step import compiled_graphs, matrix_ceiling, show, step_flops
from check_pipeline_equiv import flag_given, started, torchrun_command, write_wrapper
from train_dflash_pipeline import UserError

MEASUREMENTS = ("target", "drafter", "pipeline", "sync", "colocated", "plain")
SWITCHES = {
    "pipeline": ["--async-postprocess", "--split-fc-layers"],
    "sync": ["--no-async-postprocess", "--no-split-fc-layers"],
}
# The pipeline's last steps are not measured: when its stream ended, one step took 130 to 170 ms longer than the others, once a
# run (two H200s, Qwen3-8B's shape, asynchronous).
ENDING = 3
# Without a --target: small enough for a slow CPU.
TOY = ["--target=toy", "--tokens-per-micro-batch=512", "--anchors-per-micro-batch=16", "--num-draft-layers=2"]


def with_toy(flags: list[str]) -> list[str]:
    """Flags of the pipeline, of a toy on the CPU where they name no target; on the CPU unless they say otherwise."""
    device, target = flag_given(flags, "--device"), flag_given(flags, "--target")
    return [*([] if device else ["--device=cpu"]), *([] if target else TOY), *flags]


# What is written while a measurement runs, and read afterwards


class Ticks:
    """A file with one line for every finished unit of work: [its end in seconds, its tokens]."""

    def __init__(self, path: Path):
        self.file = path.open("w")

    def tick(self, tokens: int) -> None:
        self.file.write(json.dumps([time.perf_counter(), int(tokens)]) + "\n")
        self.file.flush()


def read_lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def throughput(ticks: list[list], warm_up: int) -> float:
    """Tokens per second after the first `warm_up` (at least 1) units of work."""
    return sum(tokens for _, tokens in ticks[warm_up:]) / (ticks[-1][0] - ticks[warm_up - 1][0])


def peak_memory_gb(device: torch.device) -> float:
    """The most that this process had allocated on its GPU; on the CPU, that it held."""
    on_gpu = device.type == "cuda"
    return (torch.cuda.max_memory_allocated(device) if on_gpu else 1024 * getrusage(RUSAGE_SELF).ru_maxrss) / 1e9


def mean(values) -> float:
    return statistics.fmean(values)


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": mean(values), "median": statistics.median(values), "most": max(values)}


def stages(metrics: list[dict], warm_up: int, micro_batches: int) -> dict[str, float]:
    """Milliseconds a micro-batch, by stage, after the warm-up; `micro_batches`: of one drafter rank in a step."""
    rest = metrics[warm_up:]
    return {name: mean(m["ms"][name] for m in rest) / micro_batches for name in rest[0]["ms"]}


# One rank of one role, without the other


class NoBoard:
    """Stands in for the FailureBoard where there is nobody to tell."""

    def now(self, what: str, awaits=(), may_last: bool = False) -> None:
        pass

    def doing(self, what: str, awaits=(), may_last: bool = False):
        return contextlib.nullcontext()


class Rank:
    """What a rank of the pipeline has before its role begins, with `num_drafters` drafters on the global batch."""

    def __init__(self, args: pipeline.Arguments, topology: pipeline.Topology, device: torch.device):
        self.args, self.topology, self.device = args, topology, device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.target_config = pipeline.load_target_config(args.target)
        pipeline.settle_target_dtype(args.target, self.target_config, device)
        self.text_config, tokenizer = self.target_config.get_text_config(), pipeline.load_tokenizer(args.target)
        self.config = pipeline.choose_drafter_config(args, self.text_config, tokenizer)
        pipeline.check_tiles(args, device)
        documents, _ = pipeline.open_documents(pipeline.settle_documents(args.data.train_data, args, tokenizer, False))
        self.planner = pipeline.Planner(documents, args, topology.num_drafters)
        self.guard = pipeline.Guard(args, topology, self.planner, self.config)
        self.faults = pipeline.FaultInjector(args.pipeline, topology)
        self.fabric = SimpleNamespace(
            topology=topology, device=device, board=NoBoard(), role_control=None
        )
        self.with_last = args.data.loss == "kl"
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # of the drafter

    def ring(self, slots: int) -> pipeline.SlotRing:
        return pipeline.SlotRing(
            slots, tokens=self.planner.tokens, num_layers=len(self.config.target_layer_ids),
            hidden_size=self.text_config.hidden_size, with_last=self.with_last, dtype=self.target_config.dtype,
            device=self.device,
        )  # fmt: skip

    def runner(self) -> tuple[pipeline.TargetRunner, nn.ModuleList]:
        """The target with its hooks, and the layers that it computes."""
        args = self.args
        model = pipeline.load_target(args.target, self.target_config, self.device)
        runner = pipeline.TargetRunner(
            model, self.config.target_layer_ids, self.with_last, self.device, args.target.target_layout, args.pipeline.compile,
            args.target.target_fp8,
        )  # fmt: skip
        return runner, runner.layers

    def trainer(self, receiver) -> pipeline.DrafterTrainer:
        """The drafter under DeepSpeed, on all ranks of the default group."""
        args, device = self.args, self.device
        ends = pipeline.load_frozen_ends(args.target, self.target_config, device, self.dtype)
        engine = pipeline.build_engine(pipeline.build_drafter(self.config, args), ends, args, self.fabric)
        pipeline.warm_up_drafter(engine, ends, self.planner.plan(0), receiver.ring.slots[0], self.config, args)
        return pipeline.DrafterTrainer(
            args, self.fabric, self.planner, engine, ends, receiver, self.config, threading.Event(), self.guard, self.faults
        )

    def train(self, trainer: pipeline.DrafterTrainer, ticks: Ticks, warm_up: int) -> tuple[list[dict], int]:
        """All steps of the run. (Their figures, graphs compiled after the warm-up.)"""
        metrics, pending, graphs = [], None, 0
        pipeline.freeze_objects()
        for step in range(self.planner.total_steps):
            if step == warm_up:
                graphs = compiled_graphs()
            record = trainer.train_step(step)
            ticks.tick(record.tokens)
            if pending is not None:
                metrics.append(pending.figures())  # a step later, as the pipeline's monitor does
            pending = record
        return [*metrics, pending.figures()], compiled_graphs() - graphs


class PackOnly(pipeline.HiddenStateSender):
    """The target's sender without a drafter: packs as the pipeline does, then frees the slot."""

    ticks: Ticks
    headers: list[pipeline.Header] = []

    def end_stream(self, m: int) -> None:
        pass

    def send(self, job) -> None:
        header = self._pack(job)
        self.ring.hand_over(job.slot, "sending", "free")
        self.headers.append(header)
        self.ticks.tick(header.tokens)


class StatesInMemory:
    """The drafter's receiver without a target: every micro-batch is there already, as random states."""

    def __init__(self, ring: pipeline.SlotRing):
        self.ring, self.ready, self.target_times = ring, queue.Queue(), defaultdict(float)
        for memory in ring.slots[0].payload(ring.slots[0].tokens):
            memory.normal_()

    def get(self, m: int) -> pipeline.Slot:
        return self.ring.slots[0]

    def release(self, slot: pipeline.Slot) -> None:
        pass


class TargetInTurn(StatesInMemory):
    """The receiver of a colocated rank: computes the micro-batch itself when it is asked for. The states need not leave
    the device or the stream, so they are packed in joined form, which saves the drafter a copy."""

    def __init__(self, ring: pipeline.SlotRing, runner: pipeline.TargetRunner, planner: pipeline.Planner):
        super().__init__(ring)
        self.runner, self.planner, self.spans = runner, planner, defaultdict(list)

    def get(self, m: int) -> pipeline.Slot:
        plan, slot = self.planner.plan(m), self.ring.slots[0]
        n, forward = plan.num_tokens, pipeline.Span(self.runner.device)
        shots = self.runner.forward(plan)
        self.spans["target_forward"].append(forward.end())
        pack = pipeline.Span(self.runner.device)
        pipeline.pack_shots(plan, shots, slot.layers(n, split=False), slot.verifier_last(n))
        pipeline.add_noise_(slot.joined(n), plan.noise_std, plan.noise_seed)
        self.spans["pack"].append(pack.end())
        return slot


def causal_pairs(lengths, window: Optional[int]) -> int:
    """(query, key) pairs of causal attention over documents of these lengths."""
    window = window or max(lengths)
    full = [min(int(length), window) for length in lengths]
    return sum(w * (w + 1) // 2 + (int(length) - w) * w for length, w in zip(lengths, full))


def target_flops(layers: nn.ModuleList, config, lengths) -> Optional[float]:
    """Operations of the target's layers on documents of these lengths, no padding: linear layers and causal attention.

    What linear attention does beside its projections is left out. None where a layer has other matrices (experts).
    """
    kinds_of_linear = (nn.Linear, pipeline.Float8Linear)
    linear = {id(m.weight): m.weight.numel() for m in layers.modules() if isinstance(m, kinds_of_linear)}
    weights = sum(linear.values())
    others = sum(p.numel() for p in layers.parameters() if p.dim() > 1 and id(p) not in linear)
    if others > 0.01 * weights:
        return None
    pairs = sum(causal_pairs(lengths, window) for window in pipeline.expected_windows(config, len(layers)))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2.0 * weights * int(sum(lengths)) + 4.0 * pairs * config.num_attention_heads * head_dim


def time_forward(forward, layers: nn.ModuleList, rank: Rank, options, path: Path) -> dict:
    """The figures of --warm-up + --steps forward passes, one after the other: a micro-batch each, nothing sent."""
    device, warm_up, plans = rank.device, options.warm_up, [rank.planner.plan(m) for m in range(rank.planner.end_m)]
    ceiling, ticks = matrix_ceiling(device, rank.target_config.dtype), Ticks(path)
    pipeline.freeze_objects()
    for number, plan in enumerate(plans, 1):
        forward(plan)
        if device.type == "cuda" and number in (warm_up, len(plans)):
            torch.cuda.synchronize()  # the ticks that are read are ends on the device
        ticks.tick(plan.num_tokens)
    speed, timed = throughput(read_lines(path), warm_up), plans[warm_up:]
    tokens = mean(plan.num_tokens for plan in timed)
    flops = [target_flops(layers, rank.text_config, plan.lengths) for plan in timed]
    tflops = None if None in flops else mean(flops) * speed / tokens / 1e12
    return {
        "forward_tokens_per_s": speed,
        "forward_ms": 1e3 * tokens / speed,
        "useful_tflops": tflops,
        "ceiling_tflops": ceiling / 1e12,
        "share_of_ceiling": tflops and tflops * 1e12 / ceiling,
        "tokens_per_micro_batch": tokens,
    }


def measure_target(rank: Rank, options, folder: Path) -> dict:
    """The forward pass alone, then the target rank's loop with capture and packing."""
    planner, warm_up = rank.planner, options.warm_up
    runner, layers = rank.runner()
    runner.warm_up(planner, 0)
    alone = time_forward(runner.forward, layers, rank, options, folder / "forward.jsonl")
    graphs = compiled_graphs()
    PackOnly.ticks, pipeline.HiddenStateSender = Ticks(folder / "packed.jsonl"), PackOnly
    ring = rank.ring(rank.args.pipeline.prefetch_depth)
    stop = threading.Event()
    pipeline.run_target_rank(rank.args, rank.fabric, planner, runner, ring, 0, stop, rank.guard, rank.faults)
    headers = PackOnly.headers[warm_up:]
    return {
        "target": runner.describe(),
        "tokens_per_s": throughput(read_lines(folder / "packed.jsonl"), warm_up),
        **alone,
        "stages_ms": {name: mean(getattr(h, f"{name}_us") for h in headers) / 1e3 for name in ("forward", "pack", "wait")},
        "graphs_compiled_when_packing": compiled_graphs() - graphs,
        "peak_memory_gb": peak_memory_gb(rank.device),
    }


@torch.no_grad()
def measure_plain(rank: Rank, options, folder: Path) -> dict:
    """Forward passes by transformers' own code. Padding on the right changes nothing before it, so no mask slows them."""
    model = pipeline.load_target(rank.args.target, rank.target_config, rank.device)

    def forward(plan: pipeline.BatchPlan) -> None:
        documents = torch.from_numpy(plan.token_ids[: plan.num_tokens]).split(plan.lengths.tolist())
        padded = nn.utils.rnn.pad_sequence(documents, batch_first=True)
        model.get_decoder()(input_ids=padded.to(rank.device), use_cache=False)

    alone = time_forward(forward, pipeline.decoder_layers(model), rank, options, folder / "forward.jsonl")
    return {"tokens_per_s": alone["forward_tokens_per_s"], **alone, "peak_memory_gb": peak_memory_gb(rank.device)}


def measure_drafter(rank: Rank, options, folder: Path) -> dict:
    """Training steps on states in memory."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(rank.device.index or 0)}
    backend = "nccl" if rank.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    ceiling = matrix_ceiling(rank.device, rank.dtype)
    trainer = rank.trainer(StatesInMemory(rank.ring(1)))
    result = train_and_sum_up(rank, trainer, options, folder)
    floors = [step_flops(rank.planner.plan(m), rank.config) for m in range(rank.planner.end_m)]
    result["ceiling_tflops"] = ceiling / 1e12
    result["floor_ms"] = 1e3 * mean(floors) / ceiling  # forward and backward of a micro-batch
    result["share_of_ceiling"] = result["floor_ms"] / sum(result["stages_ms"][s] for s in ("forward", "backward"))
    return result


def measure_colocated(rank: Rank, options, folder: Path) -> Optional[dict]:
    """Target and drafter in turn on every rank; the result on rank 0."""
    cuda = rank.device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", device_id=rank.device if cuda else None)
    rank.args.pipeline.split_fc_layers = False
    runner, _ = rank.runner()
    receiver = TargetInTurn(rank.ring(1), runner, rank.planner)
    result = train_and_sum_up(rank, rank.trainer(receiver), options, folder)
    skipped = options.warm_up * rank.args.optimization.gradient_accumulation_steps
    own = {name: mean(span.ms() for span in spans[skipped:]) for name, spans in receiver.spans.items()}
    result["stages_ms"] = own | result["stages_ms"]
    return result if rank.topology.rank == 0 else None


def train_and_sum_up(rank: Rank, trainer, options, folder: Path) -> dict:
    """Run all steps of a rank that trains; `stages_ms` is a micro-batch's."""
    path = folder / f"ticks-{rank.topology.role_rank}.jsonl"
    metrics, graphs = rank.train(trainer, Ticks(path), options.warm_up)
    accumulation = rank.args.optimization.gradient_accumulation_steps
    by_stage = stages(metrics, options.warm_up, accumulation)
    return {
        "tokens_per_s": throughput(read_lines(path), options.warm_up),
        "tokens_per_micro_batch": mean(m["tokens"] for m in metrics) / rank.planner.micro_batches_per_step,
        "stages_ms": {name: by_stage[name] for name in ("forward", "backward", "step")},
        "last_loss": metrics[-1]["loss"],
        "graphs_compiled_after_warm_up": graphs,
        "peak_memory_gb": peak_memory_gb(rank.device),
    }


# The real pipeline


def ms_between(before: pipeline.Span, after: pipeline.Span) -> float:
    """From the end of one stage to the beginning of a later one; both are over."""
    (_, end), (start, _) = before.marks, after.marks
    return end.elapsed_time(start) if before.cuda else (start - end) * 1e3


def record(folder: str) -> None:
    """In every rank of a pipeline job, before main(): note the ends of steps, the gaps between a target's forward passes
    and peaks of memory, write no checkpoint."""
    train_step, run_role, places = pipeline.DrafterTrainer.train_step, pipeline.run_role, Path(folder)
    send, ticks, passes = pipeline.HiddenStateSender.send, {}, []

    def ticking_train_step(self, step: int):
        rank = self.fabric.topology.role_rank
        if rank not in ticks:
            ticks[rank] = Ticks(places / f"ticks-{rank}.jsonl")
        result = train_step(self, step)
        ticks[rank].tick(result.tokens)
        return result

    def noting_send(self, job) -> None:
        passes.append(job.forward)
        send(self, job)

    def remembering_run_role(args, topology, fabric, stop_requested) -> None:
        run_role(args, topology, fabric, stop_requested)
        if topology.role == "target":
            gaps = [ms_between(before, after) for before, after in itertools.pairwise(passes)]
            pipeline.write_json(places / f"gaps-{topology.role_rank}.json", gaps)
        (places / f"peak-{topology.role}-{topology.role_rank}").write_text(str(peak_memory_gb(fabric.device)))

    pipeline.DrafterTrainer.train_step, pipeline.run_role = ticking_train_step, remembering_run_role
    pipeline.HiddenStateSender.send = noting_send
    pipeline.save_checkpoint = lambda *_, **__: "none, this is a measurement"


def pipeline_result(folder: Path, options, accumulation: int) -> dict:
    """The figures of a pipeline job, of the steps between its warm-up and its end."""
    metrics, warm_up, stop = read_lines(folder / "out" / "metrics.jsonl"), options.warm_up, options.warm_up + options.steps
    rest = metrics[warm_up:stop]
    ranks = {"target": options.target_ranks, "drafter": options.drafter_ranks}
    first, last = (n * accumulation * options.drafter_ranks // options.target_ranks for n in (warm_up, stop))
    before_each = slice(max(first - 1, 0), last - 1)
    found = [json.loads((folder / f"gaps-{t}.json").read_text())[before_each] for t in range(options.target_ranks)]
    gaps = [gap for rank in found for gap in rank]
    ticks = read_lines(folder / "ticks-0.jsonl")[:stop]
    steps = [1e3 * (after - before) for (before, _), (after, _) in itertools.pairwise(ticks[warm_up - 1 :])]
    peaks = {role: [float((folder / f"peak-{role}-{r}").read_text()) for r in range(n)] for role, n in ranks.items()}
    return {
        "tokens_per_s": throughput(ticks, warm_up),
        "tokens_per_micro_batch": mean(m["tokens"] for m in metrics) / (accumulation * options.drafter_ranks),
        "target_wait_share": mean(m["target_wait_share"] for m in rest),
        "drafter_wait_share": mean(m["drafter_wait_share"] for m in rest),
        "stages_ms": stages(metrics[:stop], warm_up, accumulation),
        "ms_between_forward_passes": gaps and spread(gaps),  # of a target, on its device
        "ms_between_steps": spread(steps),  # ends of a drafter's steps, on its host: a hitch there shows in `most`
        "last_loss": rest[-1]["loss"],
        "peak_memory_gb": {role: max(values) for role, values in peaks.items()},
    }


def ratios(results: dict[str, dict], target_ranks: int, drafter_ranks: int) -> dict[str, float]:
    """What the measurements say of each other, as far as they are there."""
    done = {name: result for name, result in results.items() if "tokens_per_s" in result}
    speed = {name: result["tokens_per_s"] for name, result in done.items()}
    found = {}
    if "target" in done and "drafter" in done:
        sides = {"target": target_ranks * speed["target"], "drafter": drafter_ranks * speed["drafter"]}
        found["slower_side"] = min(sides, key=sides.get)
        for name in ("pipeline", "sync", "colocated"):
            if name in done:
                found[f"{name}_to_slower_side"] = speed[name] / min(sides.values())
    for name in ("sync", "colocated"):
        if name in done and "pipeline" in done:
            found[f"pipeline_to_{name}"] = speed["pipeline"] / speed[name]
    if "target" in done:
        forward_ms = done["target"]["forward_ms"]
        found["pack_to_forward"] = done["target"]["forward_tokens_per_s"] / speed["target"] - 1
        if "pipeline" in done:
            found["forward_slowdown_in_pipeline"] = done["pipeline"]["stages_ms"]["target_forward"] / forward_ms - 1
        if "plain" in done:
            found["forward_to_plain"] = done["target"]["forward_tokens_per_s"] / speed["plain"]
    return found


# The measurements, one after the other


def mixed_lengths(args: pipeline.Arguments) -> tuple[int, int]:
    """From 1/32 to 1/4 of a micro-batch."""
    tokens = args.data.tokens_per_micro_batch
    return max(2, tokens // 32), max(2, tokens // 4)


def write_random_documents(args: pipeline.Arguments, micro_batches: int, lengths_between, path: Path) -> Path:
    """Documents of random tokens, all supervised, lengths uniform between two, enough for so many micro-batches."""
    shortest, longest = lengths_between
    total = args.data.tokens_per_micro_batch * micro_batches
    rng, lengths = np.random.default_rng(args.data.seed), []
    while sum(lengths) < total:
        lengths += rng.integers(shortest, longest + 1, size=256).tolist()
    offsets = np.cumsum([0, *lengths])
    ids = rng.integers(0, 256, offsets[-1]).astype(np.int32)
    documents = pipeline.Documents(ids, np.ones(len(ids), bool), offsets, np.arange(len(lengths)), {})
    data = args.data
    chat = pipeline.ChatTokenizer(
        pipeline.load_tokenizer(args.target), data.max_document_tokens or data.tokens_per_micro_batch,
        data.cut_off_answers, pipeline.parse_template_kwargs(data.chat_template_kwargs),
    )  # fmt: skip
    pipeline.write_documents(documents, path, chat.describe())
    return path


def colocated_ranks(options, device: str) -> int:
    """As many as the pipeline has ranks; on CUDA, as it has GPUs."""
    ranks = options.target_ranks + options.drafter_ranks
    return min(ranks, torch.cuda.device_count()) if device == "cuda" else ranks


def command_of(name: str, options, flags: list[str], folder: Path, device: str) -> list[str]:
    """The command that makes a measurement."""
    if name in SWITCHES:
        patch = f"sys.path.insert(0, {str(TOOLS)!r})\nimport bench_pipeline\nbench_pipeline.record({str(folder)!r})"
        script = write_wrapper(folder / "measured.py", patch)
        steps = options.warm_up + options.steps + ENDING
        own = [*SWITCHES[name], f"--num-target-ranks={options.target_ranks}", f"--output-dir={folder / 'out'}",
               f"--max-steps={steps}"]  # fmt: skip
        return torchrun_command(options.target_ranks + options.drafter_ranks, script, [*flags, *own])
    own = ["--worker", name, "--folder", str(folder), "--warm-up", str(options.warm_up),
           "--target-ranks", str(options.target_ranks), "--drafter-ranks", str(options.drafter_ranks)]  # fmt: skip
    if name == "colocated":
        return torchrun_command(colocated_ranks(options, device), Path(__file__).resolve(), [*own, *flags])
    return [sys.executable, str(Path(__file__).resolve()), *own, *flags]


def run_measurement(name: str, options, flags: list[str], folder: Path, device: str) -> None:
    """Run one measurement to its end, with a bar over its steps. Raises RuntimeError with the end of its log."""
    folder.mkdir(parents=True)
    command, log = command_of(name, options, flags, folder, device), folder / "log.txt"
    steps = options.warm_up + options.steps
    total = 2 * steps if name == "target" else steps + ENDING if name in SWITCHES else steps
    deadline = time.monotonic() + options.timeout
    with started(command, log) as process, tqdm(total=total, desc=name, unit="step") as bar:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            files = [folder / f"{file}.jsonl" for file in ("forward", "packed", "ticks-0")]
            if (done := sum(file.read_text().count("\n") for file in files if file.exists())) > bar.n:
                bar.update(done - bar.n)
    if process.returncode != 0:
        late = f"no end within {options.timeout:.0f} s" if time.monotonic() >= deadline else f"exit {process.returncode}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{name}: {late}\n{tail}")


def work(options, flags: list[str]) -> None:
    """A process of a measurement other than the pipeline's."""
    args = pipeline.parse_arguments(flags)
    targets, drafters = options.target_ranks, options.drafter_ranks
    if options.worker == "colocated":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        topology = pipeline.Topology(*(int(os.environ[name]) for name in names), num_targets=0)
        device, _ = pipeline.choose_device(args.pipeline.device, topology)
    else:
        first = targets if options.worker == "drafter" else 0  # its place among all ranks gives its GPU
        whole = pipeline.Topology(first, targets + drafters, first, targets + drafters, targets)
        device, _ = pipeline.choose_device(args.pipeline.device, whole)
        topology = pipeline.Topology(int(options.worker == "drafter"), 2, 0, 1, num_targets=1)
    if options.worker in ("target", "plain"):  # their steps are single micro-batches
        args.optimization.gradient_accumulation_steps = 1
    measures = {"target": measure_target, "drafter": measure_drafter, "colocated": measure_colocated, "plain": measure_plain}
    result = measures[options.worker](Rank(args, topology, device), options, options.folder)
    if result is not None:
        (options.folder / "result.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), metavar="NAME",
                        help="measurements to make, of " + ", ".join(MEASUREMENTS) + " (default: all)")  # fmt: skip
    parser.add_argument("--target-ranks", type=int, default=1, help="of the pipeline (default: %(default)s)")
    parser.add_argument("--drafter-ranks", type=int, default=1, help="of the pipeline (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed optimizer steps; micro-batches of the target alone "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them (default: %(default)s)")
    parser.add_argument("--document-tokens", type=int, nargs=2, metavar=("MIN", "MAX"),
                        help="lengths of the random documents (default: from 1/32 to 1/4 of a micro-batch); "
                        "--train-data takes their place")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds a measurement may take (%(default)s)")
    parser.add_argument("--keep", type=Path, help="new folder for logs and metrics; else a temporary one")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--worker", choices=set(MEASUREMENTS) - set(SWITCHES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args()


def check_options(options, args: pipeline.Arguments) -> None:
    """Fill in defaults that depend on the flags; raise UserError for what cannot work."""
    tokens = args.data.tokens_per_micro_batch
    options.document_tokens = options.document_tokens or mixed_lengths(args)
    if min(options.target_ranks, options.drafter_ranks, options.steps, options.warm_up) < 1:
        raise UserError("--target-ranks, --drafter-ranks, --steps and --warm-up must be at least 1")
    shortest, longest = options.document_tokens
    if not 2 <= shortest <= longest <= (args.data.max_document_tokens or tokens):
        raise UserError(f"--document-tokens {shortest} {longest}: 2 to a micro-batch's tokens, the lower one first")
    if args.data.eval_data or args.optimization.num_epochs is not None:
        raise UserError("--eval-data and --num-epochs have no place here: --steps says how long to measure")
    if args.pipeline.target_tp > 1:
        raise UserError("--target-tp: only targets of one rank are measured")
    if options.json and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: no such folder")
    if options.keep and options.keep.exists():
        raise UserError(f"--keep {options.keep} exists already")
    gpus = torch.cuda.device_count()
    if args.pipeline.device == "cuda" and gpus < max(options.target_ranks, options.drafter_ranks):
        raise UserError(f"--device cuda: {options.target_ranks} + {options.drafter_ranks} ranks, but {gpus} GPUs")


def main() -> int:
    options, user_flags = parse_options()
    flags = with_toy(user_flags)
    if options.worker:
        work(options, flags)
        return 0
    args = pipeline.parse_arguments(flags)
    pipeline.choose_target(args.target)
    check_options(options, args)
    device = args.pipeline.device
    if device == "auto":
        raise UserError("--device auto: say cpu or cuda, so that all measurements run on the same")
    results, failed = {}, False
    with contextlib.ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-pipeline-")))
        root.mkdir(parents=True, exist_ok=True)
        flags += [f"--max-steps={options.warm_up + options.steps}", f"--target={args.target.target}"]
        flags += [f"--output-dir={root / 'data'}"]  # where given text is tokenised once; the pipeline's own comes later
        accumulation = args.optimization.gradient_accumulation_steps
        if args.data.train_data is None:
            per_step = (options.target_ranks + options.drafter_ranks) * accumulation  # the colocated loop's
            total, path = per_step * (options.warm_up + options.steps), root / "documents.safetensors"
            flags += ["--train-data", str(write_random_documents(args, total, options.document_tokens, path))]
        for name in options.only:
            try:
                run_measurement(name, options, flags, root / name, device)
                whole = root / name / "result.json"
                results[name] = (json.loads(whole.read_text()) if name not in SWITCHES
                                 else pipeline_result(root / name, options, accumulation))  # fmt: skip
                show({name: results[name]})
            except RuntimeError as error:
                failed, results[name] = True, {"error": str(error)}
                print(f"FAILED: {error}", flush=True)
    ranks = {"target": options.target_ranks, "drafter": options.drafter_ranks,
             "colocated": colocated_ranks(options, device)}  # fmt: skip
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    settings = {"device": name, "ranks": ranks, "flags": with_toy(user_flags),
                "steps": options.steps, "warm_up": options.warm_up,
                "document_tokens": None if args.data.train_data else options.document_tokens}  # fmt: skip
    results |= {"ratios": ratios(results, options.target_ranks, options.drafter_ranks), "settings": settings}
    show({"ratios": results["ratios"]})
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
