"""Run the real pipeline with random delays on every stage and random configurations, and compare it bit for bit.

    # five minutes of toy targets on the CPU
    python tools/soak.py --minutes 5

    # the case that printed "seed 1234", again
    python tools/soak.py --seed 1234 --runs 1

    # two GPUs, a target whose copies overlap its forward passes; what follows -- goes to the pipeline
    python tools/soak.py --device cuda --minutes 60 --steps 100 -- --target qwen3-8b-shape \\
        --tokens-per-micro-batch 8192 --anchors-per-micro-batch 512

Each case draws a configuration from its seed: ranks of both roles, switches, slots in flight, packed length, anchors,
block, captured layers, noise, loss, accumulation, evaluation, and documents of any length. It runs it once as the
plainest path (one target rank, --no-async-postprocess, --no-split-fc-layers, no delays), then with other target ranks,
switches and slots, while every stage (target forward, pack, send, credit, receive, train, release) sleeps at random, on
CUDA also on the device's streams. Loss, gradient norm and acceptance length of every step and the final weights must be
the same in every bit. A line per run; the last line counts runs, steps and differences. Exit code 1 on any difference
or failed run.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import train_dflash_pipeline as pipeline
from check_pipeline_equiv import Run

# Sleeps of 0 to `longest` ms, mostly short ones, drawn from (seed, rank); on CUDA as often on the stream in use.
DELAYS = """
import os, random, time
import torch
draw = random.Random("{seed}/" + os.environ["RANK"])
def delay():
    if draw.random() < {share}:
        time.sleep(draw.random() ** 3 * {longest} / 1e3)
    if torch.cuda.is_available() and torch.cuda.is_initialized() and draw.random() < {share}:
        torch.cuda._sleep(int(draw.random() ** 3 * {longest} * 1.5e6))
def slowed(place, name):
    right = getattr(place, name)
    def slow(*args, **kwargs):
        delay()
        result = right(*args, **kwargs)
        delay()
        return result
    setattr(place, name, slow)
slowed(pipeline.TargetRunner, "forward")
slowed(pipeline.HiddenStateSender, "_pack")
slowed(pipeline, "post")  # headers, credits and payloads, on both sides
slowed(pipeline.HiddenStateReceiver, "get")
slowed(pipeline, "micro_batch_loss")
slowed(pipeline.HiddenStateReceiver, "release")
"""


def write_data(path: Path, draw: random.Random, rows: int) -> Path:
    """Chats whose answers have 0 to 200 characters, most of them short; some are cut off and have no end of turn."""
    with path.open("w") as file:
        for _ in range(rows):
            row = {"prompt": "p" * draw.randint(0, 40), "response": "r" * int(200 * draw.random() ** 3)}
            if draw.random() < 0.2:
                row["finish_reason"] = "length"
            file.write(json.dumps(row) + "\n")
    return path


def draw_flags(draw: random.Random, folder: Path, device: str) -> list[str]:
    """Flags of one configuration, the same for all its runs. On CUDA slots come in whole tiles."""
    block, layers = draw.choice([2, 4, 8, 16]), draw.randint(1, 3)
    anchors = pipeline.TILE // block if device == "cuda" else 1
    flags = {
        "target": "toy",
        "train-data": write_data(folder / "train.jsonl", draw, rows=draw.choice([20, 60, 200])),
        "tokens-per-micro-batch": draw.choice([128, 256, 512]),
        "max-document-tokens": 128,
        "anchors-per-micro-batch": draw.choice([1, 3, 8, 32]) * anchors,
        "block-size": block,
        "num-fc-layers": draw.randint(1, 4),
        "num-draft-layers": layers,
        "num-full-attention-layers": draw.randint(0, layers),
        "sliding-window": draw.choice([1, 16, 2048]),
        "noise-std": draw.choice([0, 0.05]),
        "noise-schedule": draw.choice(["constant", "linear", "cosine"]),
        "loss": draw.choice(["ce", "kl"]),
        "gradient-accumulation-steps": draw.randint(1, 3),
        "seed": draw.randint(0, 10**6),
    }
    if draw.random() < 0.3:
        flags["eval-data"] = write_data(folder / "eval.jsonl", draw, rows=10)
        flags["eval-every"] = draw.randint(1, 5)
    return [f"--{name}={value}" for name, value in flags.items()]


def draw_case(seed: int, folder: Path, variants: int, max_ranks: tuple[int, int], device: str):
    """(flags of all runs, the plain run and its variants, the further flags of each run).

    max_ranks: of targets and of drafters.
    """
    draw = random.Random(f"case {seed}")
    flags, drafters = draw_flags(draw, folder, device), draw.randint(1, max_ranks[1])
    runs, own_flags = [Run(1, drafters, asynchronous=False, split=False)], [[]]
    for variant in range(variants):
        delays = {"share": draw.choice([0.1, 0.3, 1.0]), "longest": draw.choice([2, 10, 50])}
        targets, asynchronous, split = draw.randint(1, max_ranks[0]), draw.random() < 0.75, draw.random() < 0.5
        patch = DELAYS.format(seed=f"{seed}/{variant}", **delays)
        runs.append(Run(targets, drafters, asynchronous, split, patch=patch))
        checked = ["--verify-transfers"] if draw.random() < 0.3 else []
        own_flags.append([f"--prefetch-depth={draw.randint(1, 4)}", *checked])
    return flags, runs, own_flags


def run_case(seed: int, folder: Path, args, passed_on: list[str], max_ranks: tuple[int, int], say):
    """Run one case; returns (runs compared, steps compared, differences and failures)."""
    flags, runs, own_flags = draw_case(seed, folder, args.variants, max_ranks, args.device)
    flags = [*flags, f"--device={args.device}", f"--max-steps={args.steps}"]
    compared = steps = bad = 0
    for number, (run, own) in enumerate(zip(runs, own_flags)):
        try:
            run.execute(folder / f"run-{number}", [*flags, *own, *passed_on], args.timeout)
            difference = runs[0].difference(run)
        except RuntimeError as error:
            difference = str(error)
        if difference:
            bad += 1
            say(f"seed {seed}: DIFFERENT: {difference}\n  {' '.join([*flags, *own, *passed_on])}")
            if number == 0:
                return compared, steps, bad
        elif number > 0:
            compared, steps = compared + 1, steps + len(run.metrics)
            say(f"seed {seed}: {run.name} {' '.join(own)}: {len(run.metrics)} steps equal")
    return compared, steps, bad


def count_ranks(device: str) -> tuple[int, int]:
    """The most target and drafter ranks that a case may have here."""
    if device == "cpu":
        return 3, 2
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise SystemExit(f"--device cuda: two GPUs are needed, found {gpus}")
    drafters = max(1, gpus // 3)
    return gpus - drafters, drafters


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- pipeline flags]",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, help="Start no case after so many minutes (5, without --runs).")
    parser.add_argument("--runs", type=int, help="Cases; with --minutes, at most so many.")
    parser.add_argument("--variants", type=int, default=2, help="Delayed runs of a case beside the plain one (2).")
    parser.add_argument("--steps", type=int, default=30, help="Optimizer steps of a run (30).")
    parser.add_argument("--seed", type=int, help="Of the first case; the others count up. Default: a random one.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU per rank (cpu).")
    parser.add_argument("--timeout", type=float, default=900.0, help="Seconds a run may take (900).")
    parser.add_argument("--keep", type=Path, help="New folder for logs and outputs; else a temporary one.")
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    args, passed_on = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    given = [x for x in (args.variants, args.steps, args.runs, args.minutes) if x is not None]
    if min(given) <= 0:
        parser.error("--runs, --variants, --steps and --minutes must be above 0")
    if args.keep and args.keep.exists():
        parser.error(f"--keep {args.keep} exists already")

    minutes = args.minutes or (5 if args.runs is None else float("inf"))
    seed = random.randrange(10**6) if args.seed is None else args.seed
    max_ranks, until = count_ranks(args.device), time.monotonic() + 60 * minutes
    cases, totals = 0, [0, 0, 0]
    with contextlib.ExitStack() as stack:
        root = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        bar = stack.enter_context(tqdm(total=args.runs, desc="soak", unit=" cases"))

        def say(line: str) -> None:
            bar.write(line, sys.stdout)

        while cases != args.runs and time.monotonic() < until:
            folder = root / f"seed-{seed + cases}"
            folder.mkdir(parents=True)
            try:
                result = run_case(seed + cases, folder, args, passed_on, max_ranks, say)
            except KeyboardInterrupt:
                break
            if not args.keep:
                shutil.rmtree(folder)
            totals, cases = [a + b for a, b in zip(totals, result)], cases + 1
            bar.update()
    runs, steps, bad = totals
    print(f"seeds {seed} to {seed + cases - 1}: {runs} runs, {steps} steps compared, {bad} differences")
    return 1 if bad or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
