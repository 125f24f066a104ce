"""Check that the real pipeline gives the same losses and weights, bit for bit, whatever the switches and target ranks.

    # the toy target, a few steps: four combinations of the two switches, and 1, 2 and 3 target ranks
    python tools/check_pipeline_equiv.py

    # two GPUs, your own target; what follows -- goes to the pipeline
    python tools/check_pipeline_equiv.py --device cuda --steps 10 -- --target Qwen/Qwen3-8B --train-data chats.jsonl

    # every combination at every number of target ranks; keep the outputs
    python tools/check_pipeline_equiv.py --full --target-ranks 1 2 3 5 --num-drafter-ranks 2 --keep runs/equiv

    # see it fail
    python tools/check_pipeline_equiv.py --inject-fault noise-seed

Starts the pipeline under torchrun once per row of the table, with noise on, and compares metrics.jsonl (loss, gradient
norm and acceptance length of every step, as exact floats) and the drafter's weights in the last checkpoint. The two
switches are --async-postprocess and --split-fc-layers. All four combinations run at the first number of target ranks;
each further number runs one of them in turn (--full: all four). Ends with PASS, or with FAIL and the first difference;
exit code 0 or 1. Drafter ranks are the same in all runs, since they belong to the global batch.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

import psutil
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_dflash_pipeline import REPOSITORY

FAULTS = {
    "noise-seed": "right = pipeline.add_noise_\n"
    "pipeline.add_noise_ = lambda hidden, std, seed: right(hidden, std, seed + 1)",
    "off-by-one": "right = pipeline.packed_index\n"
    "pipeline.packed_index = lambda lengths, longest: (right(lengths, longest) + 1) % (len(lengths) * longest)",
}
COMPARED = ("step", "loss", "grad_norm", "acceptance_length")


def torchrun_command(ranks: int, script: Path, flags: list[str]) -> list[str]:
    """torchrun of this interpreter, on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, str(script), *flags]


def flag_given(flags: list[str], *known: str) -> bool:
    """Whether flags of the pipeline set one of `known`, by themselves or in a --config file."""
    given = {flag.split("=", 1)[0] for flag in flags}
    return not given.isdisjoint({"--config", *known})


def write_wrapper(path: Path, patch: str) -> Path:
    """A script that is the pipeline with `patch` (Python over the name `pipeline`) applied before main()."""
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\nimport train_dflash_pipeline as pipeline\n\n"
        f"{patch}\n\nif __name__ == '__main__':\n    sys.exit(pipeline.main())\n"
    )
    return path


def end_processes(pid: int) -> None:
    """Kill a process and all it started: torchrun puts its workers into sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """A running command whose output goes to `log`; whatever is left of it at the end is killed."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            if process.poll() is None:
                end_processes(process.pid)
            process.wait()


@dataclass
class Run:
    """One row of the table: a configuration, and its results once it ran."""

    targets: int
    drafters: int
    asynchronous: bool
    split: bool
    fault: Optional[str] = None
    patch: str = ""  # Python over the name `pipeline`, see `write_wrapper`
    metrics: tuple = ()
    weights: Optional[dict] = None

    @property
    def name(self) -> str:
        fault = f", fault {self.fault}" if self.fault else ""
        return (
            f"{self.targets}+{self.drafters} {'async' if self.asynchronous else 'in line'} "
            f"{'split' if self.split else 'joined'}{fault}"
        )

    def execute(self, folder: Path, flags: list[str], timeout_s: float) -> None:
        """Run the pipeline and read what it wrote; raises RuntimeError with the end of its log if it fails."""
        folder.mkdir(parents=True)
        script = REPOSITORY / "train_dflash_pipeline.py"
        if patch := self.patch + FAULTS.get(self.fault, ""):
            script = write_wrapper(folder / "patched.py", patch)
        switches = [f"--{flag}" if on else f"--no-{flag}" for flag, on in
                    (("async-postprocess", self.asynchronous), ("split-fc-layers", self.split))]  # fmt: skip
        flags = [*flags, *switches, "--num-target-ranks", str(self.targets), "--output-dir", str(folder / "out")]
        log = folder / "log.txt"
        with started(torchrun_command(self.targets + self.drafters, script, flags), log) as process:
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = f"no end within {timeout_s:.0f} s"
        if code != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            raise RuntimeError(f"{self.name}: exit {code}\n{tail}")
        self.metrics = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
        self.weights = last_weights(folder / "out")

    def row(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights.items()):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        rest = self.metrics[1:] or self.metrics  # the first step warms up
        speed = sum(m["tokens"] for m in rest) / sum(m["tokens"] / m["tokens_per_s"] for m in rest)
        return f"{self.name:<44} {self.metrics[-1]['loss']:<20.16g} {speed:>9.0f}  {digest.hexdigest()[:16]}"

    def difference(self, other: "Run") -> Optional[str]:
        """The first step, then the first weight, in which two runs differ."""
        who = f"'{self.name}' and '{other.name}'"
        if len(self.metrics) != len(other.metrics):
            return f"{who} logged {len(self.metrics)} and {len(other.metrics)} steps"
        for mine, theirs in zip(self.metrics, other.metrics):
            for key in COMPARED:
                if mine[key] != theirs[key]:
                    return f"{who} differ at step {mine['step']}: {key} is {mine[key]!r} and {theirs[key]!r}"
        return first_weight_difference(self.weights, other.weights, who)


def last_weights(output_dir: Path) -> dict:
    """The drafter's weights in the newest checkpoint of a run."""
    root = output_dir / "checkpoints"
    return load_file(root / (root / "latest").read_text().strip() / "drafter" / "model.safetensors")


def first_weight_difference(mine: dict, theirs: dict, who: str) -> Optional[str]:
    """The first tensor and place where two state dicts differ in any bit."""
    if mine.keys() != theirs.keys():
        return f"{who} have other weights: {sorted(mine.keys() ^ theirs.keys())[0]}"
    for name in sorted(mine):
        a, b = mine[name], theirs[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{who} differ in the shape or dtype of {name}"
        bits = a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)
        if bits.any():
            place = torch.unravel_index(bits.flatten().nonzero()[0] // a.element_size(), a.shape)
            place = tuple(int(i) for i in place)
            return f"{who} differ in {name}{list(place)}: {a[place].item()!r} and {b[place].item()!r}"
    return None


def write_small_data(path: Path, rows: int = 96) -> Path:
    """Short chats of mixed lengths, enough for a few toy steps."""
    rng = random.Random(0)
    words = "a block of tokens is drafted then checked and the longest right part is kept while the rest goes".split()
    with path.open("w") as file:
        for number in range(rows):
            answer = " ".join(rng.choices(words, k=rng.randint(1, 30)))
            row = {"prompt": f"Say {rng.randint(0, 999)} in words, number {number}.", "response": answer}
            file.write(json.dumps(row) + "\n")
    return path


def plan_runs(args) -> list[Run]:
    """The rows of the table."""
    counts = args.target_ranks
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        for count in [c for c in counts if max(c, args.num_drafter_ranks) > gpus]:
            print(f"skipped: {count} target + {args.num_drafter_ranks} drafter ranks need more than {gpus} GPUs")
        counts = [c for c in counts if max(c, args.num_drafter_ranks) <= gpus]
    switches = list(itertools.product((True, False), repeat=2))
    runs = [Run(counts[0], args.num_drafter_ranks, *pair) for pair in switches] if counts else []
    for number, count in enumerate(counts[1:]):
        pairs = switches if args.full else [switches[-(number % 4)]]
        runs += [Run(count, args.num_drafter_ranks, *pair) for pair in pairs]
    if args.inject_fault and runs:
        runs = [runs[0], runs[-1]]
        runs[-1].fault = args.inject_fault
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- pipeline flags]",
    )  # fmt: skip
    parser.add_argument("--target-ranks", type=int, nargs="+", default=[1, 2, 3], help="How many, in turn (1 2 3).")
    parser.add_argument("--num-drafter-ranks", type=int, default=1, help="Drafter ranks of every run (1).")
    parser.add_argument("--steps", type=int, default=4, help="Optimizer steps of a run (4).")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU per rank (cpu).")
    parser.add_argument("--full", action="store_true", help="All four combinations at every number of target ranks.")
    parser.add_argument("--timeout", type=float, default=600.0, help="Seconds a run may take (600).")
    parser.add_argument("--keep", type=Path, help="New folder for logs and outputs; else a temporary one.")
    parser.add_argument(
        "--inject-fault", choices=FAULTS,
        help="Run the first and the last row only, the last with this fault patched in, to see the check fail.",
    )  # fmt: skip
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    args, passed_on = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    if min(*args.target_ranks, args.num_drafter_ranks, args.steps) < 1:
        parser.error("--target-ranks, --num-drafter-ranks and --steps must be at least 1")
    if args.keep and args.keep.exists():
        parser.error(f"--keep {args.keep} exists already")

    runs = plan_runs(args)
    if not runs:
        print("FAIL: nothing to run")
        return 1
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeline-equiv-")))
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["--device", args.device, "--max-steps", str(args.steps), "--noise-std", "0.05"]
        if not flag_given(passed_on, "--target"):
            flags += ["--target", "toy", "--tokens-per-micro-batch", "256", "--anchors-per-micro-batch", "8",
                      "--num-draft-layers", "2"]  # fmt: skip
        if not flag_given(passed_on, "--train-data"):
            flags += ["--train-data", str(write_small_data(folder / "train.jsonl"))]
        print(f"{'run (target+drafter ranks)':<44} {'last loss':<20} {'tokens/s':>9}  weights", flush=True)
        for number, run in enumerate(runs):
            try:
                run.execute(folder / f"run-{number}", flags + passed_on, args.timeout)
            except RuntimeError as error:
                print(f"FAIL: {error}")
                return 1
            print(run.row(), flush=True)
            if difference := runs[0].difference(run):
                print(f"FAIL: {difference}")
                return 1
    print(f"PASS: {len(runs)} runs of {len(runs[0].metrics)} steps, losses and weights equal bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
