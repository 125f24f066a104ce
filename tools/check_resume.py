"""Check that interrupted runs give the losses and weights of an undisturbed one, bit for bit.

    # 20 interruptions of a toy run on 2 target and 2 drafter ranks, on the CPU
    python tools/check_resume.py

    # three of them; the seed of an earlier run gives the same settings and moments
    python tools/check_resume.py --points 3 --seed 12

    # only kills in the middle of a save; keep outputs and logs
    python tools/check_resume.py --points 10 --kinds save --keep runs/resume

Starts the real pipeline under torchrun, disturbs it at a random moment, and starts the same command again until the run
is done. Then every line of metrics.jsonl (losses, norms, counters, held-out figures, as exact floats; times aside) and
the drafter's weights in the last checkpoint are compared with those of a run that nothing disturbed. Kinds:

    kill       SIGKILL of one rank: in a forward pass, a transfer, at start, wherever it is
    save       SIGKILL of one rank while a checkpoint is being written (made slower, so that every part of it is hit)
    term, int  SIGTERM or Ctrl-C to torchrun, which passes it on
    usr1       SIGUSR1 to one rank
    agent      SIGKILL of torchrun itself

Half of the kills strike under torchrun --max-restarts, which starts the workers again by itself. ZeRO stage,
accumulation, switches and save interval are drawn anew for every few points. Ends with a table and PASS, or FAIL and
the first difference; exit code 0 or 1.
"""

import argparse
import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import psutil
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from check_pipeline_equiv import end_processes, first_weight_difference, last_weights, started, torchrun_command
from check_pipeline_equiv import write_small_data, write_wrapper
from train_dflash_pipeline import REPOSITORY

SCRIPT = REPOSITORY / "train_dflash_pipeline.py"
KINDS = ("kill", "save", "term", "kill", "usr1", "save", "int", "kill", "agent", "save")  # in turn
SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1}
# A toy's checkpoint is written in milliseconds: every part of it gets a pause before it.
SLOW_SAVES = """
import time
def slow(name, pause_s):
    right = getattr(pipeline, name)
    def slowly(*args, **kwargs):
        time.sleep(pause_s)
        return right(*args, **kwargs)
    setattr(pipeline, name, slowly)
for name, pause_s in (("write_files", 0.2), ("file_records", 0.2), ("publish", 0.1), ("sync_to_disk", 0.02),
                      ("remove_leftovers", 0.1)):
    slow(name, pause_s)
"""
SLOWEST_S = 600  # for one start of the toy to end, on a loaded machine


@dataclass
class Job:
    """One run: its flags, and where it writes."""

    ranks: int
    flags: list[str]
    output_dir: Path
    steps: int
    script: Path = SCRIPT
    max_restarts: int = 0

    def command(self) -> list[str]:
        command = torchrun_command(self.ranks, self.script, [*self.flags, "--output-dir", str(self.output_dir)])
        return [*command[:3], f"--max-restarts={self.max_restarts}", *command[3:]]

    def logged_steps(self) -> int:
        path = self.output_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def is_done(self) -> bool:
        pointer = self.output_dir / "checkpoints" / "latest"
        return pointer.exists() and pointer.read_text() == f"step-{self.steps:06d}"

    def finish(self, log: Path) -> int:
        """Start the command until the run is done; returns how often. Raises RuntimeError where it ends badly."""
        for start in itertools.count(1):
            with started(self.command(), log) as process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SLOWEST_S)
            if process.returncode != 0 or start > 3:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                raise RuntimeError(f"start {start} ended with {process.returncode}\n{tail}")
            if self.is_done():
                return start

    def results(self) -> tuple[list[dict], dict]:
        """(what metrics.jsonl says that does not depend on the clock, the final weights)."""
        lines = [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]
        timed = {"tokens_per_s", "target_tokens_per_s", "drafter_tokens_per_s", "target_wait_share",
                 "drafter_wait_share", "queue_depth", "ms", "memory_gb"}  # fmt: skip
        return [{k: v for k, v in line.items() if k not in timed} for line in lines], last_weights(self.output_dir)


def difference(job: Job, undisturbed: tuple[list[dict], dict]) -> Optional[str]:
    """The first line of the metrics, then the first weight, in which a run differs from the undisturbed one."""
    metrics, weights = job.results()
    for mine, theirs in itertools.zip_longest(metrics, undisturbed[0], fillvalue={}):
        for key in [*theirs, *mine]:
            if mine.get(key) != theirs.get(key):
                step = theirs.get("step", mine.get("step"))
                return f"step {step}: {key} is {mine.get(key)!r}, undisturbed {theirs.get(key)!r}"
    return first_weight_difference(weights, undisturbed[1], "disturbed and undisturbed run")


@dataclass
class Point:
    """One interruption: what, of which rank, and when: after so many logged steps, and so many seconds."""

    number: int
    kind: str
    rank: int
    after_steps: int
    delay_s: float
    restarts: bool = False  # torchrun starts the workers again
    struck_at: str = "-"  # what had been reached
    starts: int = 0  # until the run was done
    verdict: str = ""

    def strike(self, process: subprocess.Popen, job: Job) -> None:
        """Wait for the moment in a running job, and interrupt it."""

        def due() -> bool:
            if job.logged_steps() < self.after_steps or len(workers(process)) < job.ranks:
                return False
            return self.kind != "save" or any(job.output_dir.glob("checkpoints/step-*.partial"))

        deadline = time.monotonic() + SLOWEST_S
        while not due():
            if process.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.01)
        time.sleep(self.delay_s)
        if process.poll() is not None:
            return
        rank = workers(process).get(self.rank)
        if rank is None and self.kind not in ("term", "int", "agent"):
            return  # it has ended meanwhile
        left = sorted(path.name for path in job.output_dir.glob("checkpoints/*.partial"))
        self.struck_at = f"step {job.logged_steps()}" + (f", {left[0]}" if left else "")
        if self.kind in ("term", "int"):
            process.send_signal(SIGNALS[self.kind])
        elif self.kind == "agent":
            process.kill()
        else:
            rank.send_signal(SIGNALS.get(self.kind, signal.SIGKILL))

    def run(self, job: Job, folder: Path, undisturbed: tuple[list[dict], dict]) -> None:
        ranks = []
        try:
            with started(job.command(), folder / "disturbed.log") as process:
                self.strike(process, job)
                ranks = list(workers(process).values())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SLOWEST_S)
                over = process.poll() is not None
            _, alive = psutil.wait_procs(ranks, timeout=60)  # without torchrun they end by themselves
            for rank in alive:
                end_processes(rank.pid)
            if not over or alive:
                self.verdict = f"{len(alive)} ranks did not end" if over else "torchrun did not end"
                return
            self.starts = 1 + (0 if job.is_done() else job.finish(folder / "resumed.log"))
            self.verdict = difference(job, undisturbed) or ("came too late" if self.struck_at == "-" else "identical")
        except (RuntimeError, OSError, ValueError) as error:
            self.verdict = str(error)

    def row(self) -> str:
        what = self.kind if self.kind in ("term", "int", "agent") else f"{self.kind} rank {self.rank}"
        what += ", restart" if self.restarts else ""
        moment = f"{self.after_steps} steps + {self.delay_s:.2f} s"
        return f"{self.number:>3}  {what:<21} {moment:<18} {self.struck_at:<30} {self.starts:>6}  {self.verdict}"


def workers(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """torchrun's workers by global rank."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
                found[int(child.environ()["RANK"])] = child
    return found


def draw_settings(rng: random.Random) -> list[str]:
    """Flags of a random small run."""
    flags = ["--deepspeed", str(REPOSITORY / "ds_configs" / f"zero{rng.choice((0, 1, 2, 2, 3))}.json")]
    flags += ["--gradient-accumulation-steps", str(rng.choice((1, 2))), "--seed", str(rng.randrange(1000))]
    flags += ["--save-every", str(rng.choice((1, 2, 3))), "--keep-checkpoints", str(rng.choice((1, 2)))]
    flags += ["--noise-std", rng.choice(("0", "0.05")), "--prefetch-depth", str(rng.choice((1, 2, 3)))]
    flags += [f"--{rng.choice(('', 'no-'))}{switch}" for switch in ("async-postprocess", "split-fc-layers")]
    return flags + ["--loss", rng.choice(("ce", "ce", "kl")), "--eval-every", str(rng.choice((2, 3, 100)))]


def parse_arguments() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=20, help="Interruptions, one run each (20).")
    parser.add_argument("--seed", type=int, help="Of settings and moments; drawn and printed by default.")
    parser.add_argument("--kinds", nargs="+", choices=sorted(set(KINDS)), default=KINDS, help="In turn (all).")
    parser.add_argument("--points-per-setting", type=int, default=5, help="Points with the same random settings (5).")
    parser.add_argument("--steps", type=int, default=8, help="Optimizer steps of a run (8).")
    parser.add_argument("--num-target-ranks", type=int, default=2, help="Target ranks (2).")
    parser.add_argument("--num-drafter-ranks", type=int, default=2, help="Drafter ranks (2).")
    parser.add_argument("--keep", type=Path, help="New folder for outputs and logs; else a temporary one.")
    return parser.parse_args(), parser


def run_points(args: argparse.Namespace, folder: Path) -> list[Point]:
    """All points, in order; the undisturbed run of each setting first. Raises RuntimeError where that one fails."""
    rng, points = random.Random(args.seed), []
    ranks = args.num_target_ranks + args.num_drafter_ranks
    data, held_out = (str(write_small_data(folder / f"{name}.jsonl", n)) for name, n in (("train", 96), ("eval", 12)))
    common = ["--device", "cpu", "--target", "toy", "--tokens-per-micro-batch", "256", "--anchors-per-micro-batch", "8",
              "--num-draft-layers", "2", "--max-steps", str(args.steps), "--train-data", data, "--eval-data", held_out,
              "--num-target-ranks", str(args.num_target_ranks)]  # fmt: skip
    slow = write_wrapper(folder / "slow_saves.py", SLOW_SAVES)
    for number in tqdm(range(args.points), "interruptions", unit="point", disable=None):
        if number % args.points_per_setting == 0:
            flags = [*common, *draw_settings(rng)]
            tqdm.write(f"settings: {' '.join(flags[len(common) :])}")
            straight = Job(ranks, flags, folder / f"undisturbed-{number}", args.steps)
            straight.finish(folder / f"undisturbed-{number}.log")
            undisturbed = straight.results()
        kind = args.kinds[number % len(args.kinds)]
        delay_s = rng.uniform(0, 1.5 if kind == "save" else 0.5)
        restarts = kind in ("kill", "save") and rng.random() < 0.5
        point = Point(number, kind, rng.randrange(ranks), rng.randrange(args.steps), delay_s, restarts)
        place = folder / f"point-{number}"
        place.mkdir()
        script = slow if kind == "save" else SCRIPT
        point.run(Job(ranks, flags, place / "out", args.steps, script, int(restarts)), place, undisturbed)
        tqdm.write(point.row())
        points.append(point)
    return points


def main() -> int:
    args, parser = parse_arguments()
    if min(args.points, args.points_per_setting, args.steps, args.num_target_ranks, args.num_drafter_ranks) < 1:
        parser.error("counts must be at least 1")
    if args.keep and args.keep.exists():
        parser.error(f"--keep {args.keep} exists already")
    args.seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f"seed {args.seed}", flush=True)
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="check-resume-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            points = run_points(args, folder)
        except RuntimeError as error:
            print(f"FAIL: the undisturbed run: {error}")
            return 1
    print(f"\n{'no':>3}  {'interruption':<21} {'moment':<18} {'struck at':<30} starts  result")
    print("\n".join(point.row() for point in points))
    good, late = (sum(point.verdict == verdict for point in points) for verdict in ("identical", "came too late"))
    passed = good > 0 and good + late == len(points)
    too_late = f", {late} came too late" if late else ""
    print(f"{'PASS' if passed else 'FAIL'}: {good} of {len(points)} identical{too_late} (seed {args.seed})")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
