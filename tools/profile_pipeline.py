"""Trace chosen steps of the real pipeline on every rank, as one timeline with named stages.

    # a toy on the CPU: steps 10, 11 and 12
    python tools/profile_pipeline.py --steps 10:13 --output-dir trace

    # two GPUs; what follows -- goes to the pipeline
    python tools/profile_pipeline.py --steps 20:24 --output-dir trace -- --device cuda --target qwen3-8b-shape \\
        --tokens-per-micro-batch 8192 --anchors-per-micro-batch 512

Writes trace.json.gz: open it in ui.perfetto.dev or chrome://tracing. Every rank is one process there, with its threads
and its GPU's streams. Each has two tracks: the stages (plan, target forward, pack, send, credit, receive, drafter, loss,
backward, step, ...) and what ran within them (operators, kernels). A stream's stages are those in which its kernels were
launched. Time 0 is the moment in which drafter 0 begins the first traced step.

Prints for every rank the share of the traced time in which nothing ran (CUDA: no kernel or copy on any stream; CPU: every
thread waited for another rank or thread, or had nothing to do), and what its threads awaited the most. Without
--train-data the documents are random; no checkpoint is written.
"""

import argparse
import bisect
import contextlib
import functools
import gzip
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Iterable, NamedTuple, Optional

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [str(TOOLS.parent), str(TOOLS)]
import train_dflash_pipeline as pipeline
from bench_pipeline import mixed_lengths, with_toy, write_random_documents
from check_pipeline_equiv import started, torchrun_command, write_wrapper
from train_dflash_pipeline import UserError

# Functions of the pipeline that are stages, beside those that its FailureBoard is told of: stage, class or None, name.
FUNCTIONS = (
    ("plan", "Planner", "_plan"),
    ("target forward", "TargetRunner", "forward"),
    ("pack", "HiddenStateSender", "_pack"),
    ("masks and copies", "DrafterBatch", "from_plan"),
    ("drafter input", None, "drafter_features"),
    ("drafter forward", None, "micro_batch_loss"),
    ("loss", "FrozenHeadLoss", "forward"),
    ("settle", "DrafterTrainer", "settle"),
    ("step", "DrafterTrainer", "apply_step"),
    ("metrics", "Monitor", "write"),
)
HOOKS = (("FailureBoard", "now"), ("FailureBoard", "doing"), ("DrafterTrainer", "train_step"), (None, "run_target_rank"),
         (None, "save_checkpoint"))  # fmt: skip
MARK = "profile_pipeline: clock mark"
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


# In every rank of the job


class Stage(NamedTuple):
    """What a thread did, from start to end, in ns of the wall clock. `waits`: for another rank or thread."""

    thread: int  # its number at the operating system
    what: str
    start: int
    end: int
    waits: bool

    @property
    def label(self) -> str:
        """Its kind: without the numbers of micro-batch and step."""
        return re.sub(r"(micro-batch|step) \d+", r"\1", self.what)


class Recorder:
    """The stages of this process, and the profiler's trace of the chosen ones."""

    def __init__(self, folder: Path, first: int):
        self.folder, self.first = folder, first
        self.stages: list[Stage] = []
        self.steps: list[Stage] = []
        self.now: dict[int, tuple[str, int]] = {}  # by thread: the stage that lasts until the next one
        self.threads: dict[int, dict] = {}
        self.profiler: Optional[profile] = None
        self.tracing, self.mark_ns = False, None
        self.window: Optional[list[int]] = None  # of a drafter: from its first traced step to the end of its last one
        self.planner = self.topology = None  # of a target, from its first micro-batch on

    def add(self, what: str, start: int, waits: bool = False) -> None:
        thread = threading.current_thread()
        self.threads.setdefault(thread.native_id, {"name": thread.name, "ident": thread.ident})
        self.stages.append(Stage(thread.native_id, what, start, time.time_ns(), waits))

    def switch(self, what: str) -> None:
        """The FailureBoard was told of a stage that lasts until it is told of the next."""
        thread, now = threading.get_native_id(), time.time_ns()
        if thread in self.now:
            self.add(*self.now[thread])
        self.now[thread] = (what, now)

    def follow(self, step: int, device: torch.device) -> None:
        """Step `step` (from 1) begins: prepare the trace one step ahead, then start it."""
        if self.profiler is None and step >= self.first - 1:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
            self.profiler = profile(activities=activities)
            self.profiler.prepare_trace()
        if not self.tracing and self.mark_ns is None and step >= self.first:
            self.profiler.start_trace()
            self.tracing, self.mark_ns = True, time.time_ns()
            with record_function(MARK):
                pass

    def stop(self, topology: pipeline.Topology) -> None:
        """End the trace and write it, once."""
        if not self.tracing:
            return
        self.tracing = False
        self.profiler.stop_trace()
        self.profiler.export_chrome_trace(str(self.folder / f"rank-{topology.rank}.trace.json"))
        main = threading.main_thread().native_id
        if main in self.now:
            self.add(*self.now[main])
            self.now[main] = (self.now[main][0], time.time_ns())
        about = {"rank": topology.rank, "name": str(topology), "pid": os.getpid(), "main": main, "threads": self.threads,
                 "mark_ns": self.mark_ns, "window": self.window, "stages": self.stages, "steps": self.steps}  # fmt: skip
        (self.folder / f"rank-{topology.rank}.json").write_text(json.dumps(about))


def find(place: Optional[str], name: str):
    """(where a function of the pipeline lives, the function as it stands there). Raises UserError where it is gone."""
    holder = pipeline if place is None else getattr(pipeline, place, None)
    if holder is None or name not in vars(holder):
        full = name if place is None else f"{place}.{name}"
        raise UserError(f"the pipeline has no {full} any more: tools/profile_pipeline.py must follow it")
    return holder, vars(holder)[name]


def check_names() -> None:
    for _, place, name in FUNCTIONS:
        find(place, name)
    for place, name in HOOKS:
        find(place, name)


def make_stage(recorder: Recorder, stage: str, place: Optional[str], name: str) -> None:
    """Have a function of the pipeline recorded."""
    holder, found = find(place, name)
    kind = type(found) if isinstance(found, (classmethod, staticmethod)) else lambda function: function
    right = getattr(found, "__func__", found)

    @functools.wraps(right)
    def recorded(*args, **kwargs):
        start = time.time_ns()
        try:
            return right(*args, **kwargs)
        finally:
            recorder.add(stage, start)

    setattr(holder, name, kind(recorded))


def follow_board(recorder: Recorder) -> None:
    """Every stage that the FailureBoard is told of; one that awaits somebody within a `with` block is a wait."""
    (board, now), (_, doing) = find("FailureBoard", "now"), find("FailureBoard", "doing")

    def recorded_now(self, what: str, *args, **kwargs):
        recorder.switch(what)
        return now(self, what, *args, **kwargs)

    @contextlib.contextmanager
    def recorded_doing(self, what: str, awaits=(), may_last: bool = False):
        start = time.time_ns()
        try:
            with doing(self, what, awaits, may_last):
                yield
        finally:
            recorder.add(what, start, waits=bool(awaits))

    board.now, board.doing = recorded_now, recorded_doing


def install(folder: str, first: int, end: int) -> None:
    """In every rank, before main(): record stages and, from step `first` up to but without `end`, a trace."""
    recorder, over = Recorder(Path(folder), first), Path(folder) / "over"
    follow_board(recorder)
    for stage, place, name in FUNCTIONS:
        make_stage(recorder, stage, place, name)
    train_step, run_target_rank = pipeline.DrafterTrainer.train_step, pipeline.run_target_rank
    forward = pipeline.TargetRunner.forward

    def traced_train_step(self, step: int):
        topology, device = self.fabric.topology, self.fabric.device
        recorder.follow(step + 1, device)
        start = time.time_ns()
        if recorder.tracing and recorder.window is None:
            recorder.window = [start, 0]
        result = train_step(self, step)
        last = recorder.tracing and step + 2 >= end
        if last and device.type == "cuda":
            torch.cuda.synchronize(device)
        recorder.steps.append(Stage(threading.get_native_id(), f"step {step + 1}", start, time.time_ns(), False))
        if last:
            recorder.window[1] = time.time_ns()
            if topology.role_rank == 0:
                over.touch()  # the targets trace until drafter 0 is done with the last step
            recorder.stop(topology)
        return result

    def traced_run_target_rank(args, fabric, planner, *rest):
        recorder.planner, recorder.topology = planner, fabric.topology
        run_target_rank(args, fabric, planner, *rest)
        recorder.stop(fabric.topology)

    def traced_forward(self, plan):
        if recorder.planner is not None:  # not the warm-up
            if over.exists():
                recorder.stop(recorder.topology)
            recorder.follow(recorder.planner.locate(plan.m)[0] + 1, self.device)
        return forward(self, plan)

    pipeline.DrafterTrainer.train_step, pipeline.run_target_rank = traced_train_step, traced_run_target_rank
    pipeline.TargetRunner.forward = traced_forward
    pipeline.save_checkpoint = lambda *_, **__: "none, this is a trace"


# Afterwards: the ranks' traces as one


def overlap(intervals: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """The length of the union of intervals within a window."""
    covered, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            covered, reached = covered + end - start, end
    return covered


def innermost(stages: list[Stage]) -> tuple[list[int], list[Optional[Stage]]]:
    """(times, the innermost open stage from each time on) of one thread, whose stages are nested."""
    times, tops, open_stages = [], [], []

    def close(until: float) -> None:
        while open_stages and open_stages[-1].end <= until:
            times.append(open_stages.pop().end)
            tops.append(open_stages[-1] if open_stages else None)

    for stage in sorted(stages, key=lambda s: (s.start, -s.end)):
        close(stage.start)
        times.append(stage.start)
        tops.append(stage)
        open_stages.append(stage)
    close(math.inf)
    return times, tops


class RankTrace:
    """One rank's stages and profiler trace, in microseconds since `zero_ns` of the wall clock.

    about: what `Recorder.stop` wrote · trace: the profiler's Chrome trace, which holds MARK; begun at about["mark_ns"]
    """

    def __init__(self, about: dict, trace: dict, zero_ns: int):
        self.rank, self.name, self.pid, self.main = about["rank"], about["name"], about["pid"], about["main"]
        self.threads = {int(native): thread for native, thread in about["threads"].items()}
        self.zero_ns, self.events = zero_ns, trace["traceEvents"]
        mark = next(event for event in self.events if event.get("name") == MARK)
        self.shift_us = (about["mark_ns"] - zero_ns) / 1e3 - float(mark["ts"])
        self.stages = [Stage(*stage) for stage in about["stages"]]
        self.steps = [Stage(*step) for step in about["steps"]]
        by_thread = defaultdict(list)
        for stage in self.stages:
            by_thread[stage.thread].append(stage)
        self.timelines = {thread: innermost(stages) for thread, stages in by_thread.items()}
        # the profiler names threads by the system's number, or by the last 32 bits of pthread's
        self.natives = {native: native for native in self.threads}
        for native, thread in self.threads.items():
            low = thread["ident"] & 0xFFFFFFFF
            self.natives |= {low: native, low - 2**32 if low >= 2**31 else low: native}
        self.work = [event for event in self.events if event.get("cat") in DEVICE_WORK and event["ph"] == "X"]
        self.launches = {event["args"]["correlation"]: event for event in self.events
                         if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})}  # fmt: skip

    def us(self, ns: int) -> float:
        return (ns - self.zero_ns) / 1e3

    def stage_at(self, tid: int, ts: float) -> Optional[Stage]:
        """The innermost stage of a thread at a time of the trace; of the main thread where that one has none, as
        autograd's threads."""
        ns = self.zero_ns + round((ts + self.shift_us) * 1e3)
        for thread in (self.natives.get(tid), self.main):
            times, tops = self.timelines.get(thread, ([], []))
            place = bisect.bisect_right(times, ns) - 1
            if place >= 0 and tops[place] is not None:
                return tops[place]
        return None

    def busy(self) -> list[tuple[float, float]]:
        """Intervals in which something ran: on the device where there is one, else a stage that does not wait."""
        if self.work:
            return [(start := event["ts"] + self.shift_us, start + event["dur"]) for event in self.work]
        intervals = []
        for times, tops in self.timelines.values():
            for start, end, stage in zip(times, times[1:], tops):
                if stage is not None and not stage.waits:
                    intervals.append((self.us(start), self.us(end)))
        return intervals

    def awaited(self, window: tuple[float, float]) -> dict[tuple[str, str], float]:
        """Microseconds within the window by (thread, kind of wait), the longest first."""
        sums = defaultdict(float)
        for stage in self.stages:
            if stage.waits:
                spent = overlap([(self.us(stage.start), self.us(stage.end))], window)
                sums[self.threads[stage.thread]["name"], stage.label] += spent
        return dict(sorted(((k, v) for k, v in sums.items() if v > 0), key=lambda item: -item[1]))

    def stream_stages(self) -> list[tuple[int, Stage, float, float]]:
        """(stream, stage, start, end): from the first to the last of the kernels in a row that a stage launched."""
        ranges, last = [], {}
        for event in sorted(self.work, key=lambda e: e["ts"]):
            launch = self.launches.get(event.get("args", {}).get("correlation"))
            stage = launch and self.stage_at(launch["tid"], launch["ts"])
            stream, start = event["tid"], event["ts"] + self.shift_us
            if stage is None:
                last.pop(stream, None)
            elif stream in last and ranges[last[stream]][1] is stage:
                ranges[last[stream]] = (*ranges[last[stream]][:3], start + event["dur"])
            else:
                last[stream] = len(ranges)
                ranges.append((stream, stage, start, start + event["dur"]))
        return ranges

    def chrome_events(self) -> list[dict]:
        """Everything under one process, the rank."""
        tracks: dict[str, int] = {}

        def put(track: str, **event) -> dict:
            return event | {"pid": self.rank, "tid": tracks.setdefault(track, len(tracks))}

        def put_stage(track: str, stage: Stage, start: float, end: float) -> dict:
            return put(track, ph="X", cat="stage", name=stage.label, ts=start, dur=end - start, args={"what": stage.what})

        thread_name = {native: thread["name"] for native, thread in self.threads.items()}
        events = [put_stage("steps", step, self.us(step.start), self.us(step.end)) for step in self.steps]
        for stage in sorted(self.stages, key=lambda s: (s.thread != self.main, s.start)):
            track = f"{thread_name[stage.thread]}: stages"
            events.append(put_stage(track, stage, self.us(stage.start), self.us(stage.end)))
        events += [put_stage(f"stream {stream}: stages", *rest) for stream, *rest in self.stream_stages()]
        for event in self.events:
            on_device = event.get("cat") in DEVICE_WORK or (event["ph"] in "stf" and event.get("pid") != self.pid)
            if event["ph"] not in "Xstf" or event.get("cat") == "gpu_user_annotation":
                continue
            if on_device:
                track = f"stream {event['tid']}: kernels"
            elif event.get("pid") == self.pid:
                native = self.natives.get(event["tid"], event["tid"])
                track = f"{thread_name.get(native, f'thread {native}')}: operators"
            else:
                continue
            moved = put(track, **event) | {"ts": float(event["ts"]) + self.shift_us}
            if "id" in moved:
                moved["id"] = f"{self.rank}/{moved['id']}"
            events.append(moved)
        names = [put(track, ph="M", name="thread_name", args={"name": track}) for track in tracks]
        order = [put(track, ph="M", name="thread_sort_index", args={"sort_index": n}) for track, n in tracks.items()]
        process = [{"ph": "M", "pid": self.rank, "name": "process_name", "args": {"name": self.name}},
                   {"ph": "M", "pid": self.rank, "name": "process_sort_index", "args": {"sort_index": self.rank}}]  # fmt: skip
        return [*process, *names, *order, *events]


def merge(parts: list[tuple[dict, dict]]) -> tuple[dict, list[dict]]:
    """(one Chrome trace, a summary of every rank) of [(what a rank wrote of itself, its profiler trace)].

    A summary: rank, name, idle_share, awaited {(thread, kind of wait): share of the window}. The window is the one of
    the first drafter.
    """
    parts = sorted(parts, key=lambda part: part[0]["rank"])
    window_ns = next(about["window"] for about, _ in parts if about["window"] is not None)
    ranks = [RankTrace(about, trace, window_ns[0]) for about, trace in parts]
    window, length = (0.0, (window_ns[1] - window_ns[0]) / 1e3), (window_ns[1] - window_ns[0]) / 1e3
    summaries = [{
        "rank": rank.rank, "name": rank.name, "idle_share": 1 - overlap(rank.busy(), window) / length,
        "awaited": {what: us / length for what, us in rank.awaited(window).items()},
    } for rank in ranks]  # fmt: skip
    whole = {"traceEvents": [event for rank in ranks for event in rank.chrome_events()], "displayTimeUnit": "ms"}
    return whole, summaries


def read_part(folder: Path, rank: int) -> tuple[dict, dict]:
    about, trace = folder / f"rank-{rank}.json", folder / f"rank-{rank}.trace.json"
    if not about.exists():
        raise UserError(f"rank {rank} left no trace: see log.txt")
    return json.loads(about.read_text()), json.loads(trace.read_text())


def parse_steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or not 1 <= int(found[1]) < int(found[2]):
        raise UserError(f"--steps {text}: expected FIRST:END, counted from 1, the last one being END - 1")
    return int(found[1]), int(found[2])


def run_traced(command: list[str], log: Path, last_step: int, metrics: Path, timeout_s: float) -> None:
    """Run the job, with a bar over its steps. Raises UserError with the end of its log."""
    deadline = time.monotonic() + timeout_s
    with started(command, log) as process, tqdm(total=last_step, desc="tracing", unit="step") as bar:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            if metrics.exists() and (done := metrics.read_text().count("\n")) > bar.n:
                bar.update(done - bar.n)
    if process.returncode != 0:
        late = time.monotonic() >= deadline
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        print(tail, file=sys.stderr)
        raise UserError(f"no end within {timeout_s:.0f} s" if late else f"the job ended with {process.returncode}, see {log}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --steps FIRST:END --output-dir DIR [options] [-- pipeline flags]",
    )  # fmt: skip
    parser.add_argument("--steps", required=True, help="traced steps, counted from 1: FIRST:END, without END")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for trace.json.gz and log.txt")
    parser.add_argument("--target-ranks", type=int, default=1, help="of the pipeline (default: %(default)s)")
    parser.add_argument("--drafter-ranks", type=int, default=1, help="of the pipeline (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds the job may take (%(default)s)")
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    options, flags = parser.parse_args(argv[:cut]), with_toy(argv[cut + 1 :])
    first, end = parse_steps(options.steps)
    if min(options.target_ranks, options.drafter_ranks) < 1:
        raise UserError("--target-ranks and --drafter-ranks must be at least 1")
    check_names()
    args, ranks = pipeline.parse_arguments(flags), options.target_ranks + options.drafter_ranks
    if args.pipeline.target_tp > 1:
        raise UserError("--target-tp: only targets of one rank are traced")
    per_step = options.drafter_ranks * args.optimization.gradient_accumulation_steps
    ahead = options.target_ranks * (2 * args.pipeline.prefetch_depth + 3)  # how far targets may be, in micro-batches
    last_step = end + math.ceil(ahead / per_step)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="profile-pipeline-") as name:
        folder = Path(name)
        if args.data.train_data is None:
            path = write_random_documents(args, last_step * per_step, mixed_lengths(args), folder / "documents.safetensors")
            flags += ["--train-data", str(path)]
        patch = (f"sys.path.insert(0, {str(TOOLS)!r})\nimport profile_pipeline\n"
                 f"profile_pipeline.install({name!r}, {first}, {end})")  # fmt: skip
        flags += [f"--max-steps={last_step}", f"--num-target-ranks={options.target_ranks}", f"--output-dir={folder / 'out'}"]
        command = torchrun_command(ranks, write_wrapper(folder / "traced.py", patch), flags)
        log = options.output_dir / "log.txt"
        run_traced(command, log, last_step, folder / "out" / "metrics.jsonl", options.timeout)
        whole, summaries = merge([read_part(folder, rank) for rank in range(ranks)])
    with gzip.open(options.output_dir / "trace.json.gz", "wt") as file:
        json.dump(whole, file)
    for summary in summaries:
        print(f"{summary['name']}: nothing ran for {summary['idle_share']:.1%} of the time")
        for (thread, wait), share in list(summary["awaited"].items())[:3]:
            print(f"    {thread}: {share:.1%} {wait}")
    print(f"wrote {options.output_dir / 'trace.json.gz'}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
