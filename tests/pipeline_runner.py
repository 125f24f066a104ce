"""Start the real pipeline from tests: under torchrun, or many short jobs under one torchrun.

`run` is a plain torchrun job. `run_cases` starts torchrun once; its workers import everything once and then fork one
child per case and rank, which calls the pipeline's main() with that case's flags. So a case costs seconds, a failing
one does not end the others, and every rank's exit code and error output are seen apart. Cases are told from each other
on the rendezvous store by TORCHELASTIC_RESTART_COUNT, as restarts are.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tools")]
from check_pipeline_equiv import started, torchrun_command

PIPELINE = REPOSITORY / "train_dflash_pipeline.py"
# The smallest toy job: a step takes a fraction of a second.
SMALL = ["--device", "cpu", "--target", "toy", "--tokens-per-micro-batch", "256", "--anchors-per-micro-batch", "8",
         "--num-draft-layers", "2", "--noise-std", "0.05"]  # fmt: skip

SLOW_STEPS = """
import time
right_step = pipeline.DrafterTrainer.train_step
def slow_step(self, step):
    time.sleep(0.7)
    return right_step(self, step)
pipeline.DrafterTrainer.train_step = slow_step
"""


@dataclass
class Result:
    """A torchrun job that ended, by itself or killed after its time limit (code None)."""

    code: int | None
    log: str
    output_dir: Path

    @property
    def metrics(self) -> list[dict]:
        return read_metrics(self.output_dir)


def read_metrics(output_dir: Path) -> list[dict]:
    """metrics.jsonl; empty while there is none. A line still being written is left out."""
    path = output_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_until(condition, process: subprocess.Popen, limit_s: float) -> None:
    """Wait for a condition of a running job; fails when the job ends first or the limit passes."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, f"the job ended with {process.returncode} before"
        assert time.monotonic() < deadline, f"nothing within {limit_s} s"
        time.sleep(0.05)


def run(ranks: int, flags: list[str], output_dir: Path, limit_s: float = 240, script: Path = PIPELINE, during=None):
    """One torchrun job; `during(process)` runs beside it. Every process it started is gone afterwards."""
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    log = output_dir.parent / f"{output_dir.name}.log"
    code = None
    with started(torchrun_command(ranks, script, [*flags, "--output-dir", str(output_dir)]), log) as process:
        try:
            if during is not None:
                during(process)
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log.read_text()}") from None
    return Result(code, log.read_text(), output_dir)


@dataclass
class Case:
    """One job among those of `run_cases`. `patch`: Python over the name `pipeline`, run before main()."""

    name: str
    flags: list[str]
    patch: str = ""
    environment: dict = field(default_factory=dict)
    limit_s: float = 120


@dataclass
class CaseResult:
    """What each rank of a case left behind. A code is None where the rank was killed after the time limit."""

    codes: list
    out: list[str]
    err: list[str]
    output_dir: Path

    @property
    def metrics(self) -> list[dict]:
        return read_metrics(self.output_dir)

    def last_lines(self) -> list[str]:
        return [text.strip().splitlines()[-1] if text.strip() else "" for text in self.err]

    def check_ok(self) -> "CaseResult":
        assert set(self.codes) == {0}, f"exit codes {self.codes}\n" + "\n".join(self.err)
        return self


def run_cases(ranks: int, cases: list[Case], folder: Path) -> dict[str, CaseResult]:
    """Run the cases one after the other on the given number of ranks."""
    server, log = write_cases(cases, folder), folder / "torchrun.log"
    with started(torchrun_command(ranks, *server), log) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120 + sum(case.limit_s for case in cases))
    assert process.returncode == 0, log.read_text()
    return read_cases(ranks, cases, folder)


def write_cases(cases: list[Case], folder: Path) -> tuple[Path, list[str]]:
    """What torchrun is to start for these cases: (script, flags)."""
    folder.mkdir(parents=True)
    for case in cases:
        (folder / case.name).mkdir()
    listing = folder / "cases.json"
    listing.write_text(json.dumps([vars(case) for case in cases]))
    return Path(__file__).resolve(), [str(listing)]


def read_cases(ranks: int, cases: list[Case], folder: Path) -> dict[str, CaseResult]:
    """What the cases left behind, by name."""
    results = {}
    for case in cases:
        place = folder / case.name
        codes = [json.loads((place / f"{rank}.code").read_text()) for rank in range(ranks)]
        out, err = ([(place / f"{rank}.{kind}").read_text() for rank in range(ranks)] for kind in ("out", "err"))
        results[case.name] = CaseResult(codes, out, err, place / "run")
    return results


def serve_cases(listing: Path) -> None:
    """A worker of `run_cases`: import once, then fork a child per case."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a look for GPUs must not start CUDA before the fork
    cases = json.loads(listing.read_text())
    if not any("cuda" in case["flags"] for case in cases):
        os.environ["DS_ACCELERATOR"] = "cpu"  # as the pipeline itself sets it, before the import
    import deepspeed  # noqa: F401  (0.19 reads RANK and WORLD_SIZE when it is initialised, not here)
    import torch._dynamo  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import train_dflash_pipeline as pipeline
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from transformers import AutoModelForCausalLM, HfArgumentParser, PreTrainedTokenizerFast  # noqa: F401

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pipeline.ROUND_S = 0.5  # failures are noticed sooner
    rank = os.environ["RANK"]
    for number, case in enumerate(cases):
        place = listing.parent / case["name"]
        child = os.fork()
        if child == 0:
            for kind, descriptor in (("out", 1), ("err", 2)):
                os.dup2(os.open(place / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            os.environ |= {"TORCHELASTIC_RESTART_COUNT": str(number)} | case["environment"]
            sys.argv = ["train_dflash_pipeline.py", "--output-dir", str(place / "run"), *case["flags"]]
            code = 1
            try:
                exec(case["patch"], {"pipeline": pipeline})
                code = pipeline.main()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        deadline = time.monotonic() + case["limit_s"]
        ended, status = os.waitpid(child, os.WNOHANG)
        while not ended and time.monotonic() < deadline:
            time.sleep(0.02)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status) if ended else None
        (place / f"{rank}.code").write_text(json.dumps(code))
        while not all((place / f"{other}.code").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
            time.sleep(0.02)  # the next case starts on all ranks at once


if __name__ == "__main__":
    serve_cases(Path(sys.argv[1]))
