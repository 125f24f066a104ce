"""The layout of eight ranks, five target and three drafter, with the toy target on gloo: other numbers of target ranks
and another ZeRO stage give the same training, and a run that lost a target goes on as if nothing had been."""

import pytest
from pipeline_runner import REPOSITORY, SMALL, Case, run_cases

from check_pipeline_equiv import first_weight_difference, last_weights, write_small_data  # isort: skip

TARGETS = (3, 4, 5)
COMPARED = ("step", "loss", "grad_norm", "acceptance_length")
KILL_TARGET = """
import os, signal, sys, time
latest = os.path.join(sys.argv[sys.argv.index("--output-dir") + 1], "checkpoints", "latest")
right_forward = pipeline.TargetRunner.forward
def forward(self, plan):
    if plan.m >= 9:  # of step 4: three steps go without it
        while not os.path.exists(latest):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return right_forward(self, plan)
if os.environ["RANK"] == "1":
    pipeline.TargetRunner.forward = forward
"""


def fewer(ranks: int) -> tuple[str, dict]:
    """(patch, environment) of a case that leaves ranks of the eight out."""
    leave = f"import os\nif int(os.environ['RANK']) >= {ranks}: os._exit(0)\n"
    return leave, {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    work = tmp_path_factory.mktemp("eight")
    flags = [*SMALL, "--train-data", str(write_small_data(work / "train.jsonl")), "--max-steps", "5",
             "--save-every", "1", "--tokens-per-micro-batch", "192", "--transport-timeout", "8"]  # fmt: skip
    five = [*flags, "--num-target-ranks", "5"]
    killed = work / "runs" / "killed" / "run"
    cases = [
        *[Case(f"{t}+3", [*flags, "--num-target-ranks", str(t)], *fewer(t + 3)) for t in TARGETS],
        Case("zero3", [*five, "--deepspeed", str(REPOSITORY / "ds_configs" / "zero3.json")]),
        Case("killed", five, KILL_TARGET),
        Case("resumed", [*five, "--output-dir", str(killed)]),
    ]
    results = run_cases(8, cases, work / "runs")
    results["resumed"].output_dir = killed
    return results


def trained(result) -> list[list]:
    return [[m[name] for name in COMPARED] for m in result.metrics]


@pytest.mark.parametrize("name", ["3+3", "4+3"])
def test_the_number_of_targets_changes_nothing(eight, name):
    assert len(trained(eight["5+3"].check_ok())) == 5
    assert trained(eight[name].check_ok()) == trained(eight["5+3"])
    weights = [last_weights(eight[which].output_dir) for which in (name, "5+3")]
    assert first_weight_difference(*weights, f"{name} and 5+3") is None


def test_zero_3_trains_the_same_within_rounding(eight):
    for mine, theirs in zip(eight["zero3"].check_ok().metrics, eight["5+3"].metrics, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_a_lost_target_ends_all_and_the_run_goes_on(eight):
    killed, resumed = eight["killed"], eight["resumed"].check_ok()
    assert killed.codes == [1, -9, 1, 1, 1, 1, 1, 1]
    for rank, line in enumerate(killed.last_lines()):
        assert rank == 1 or "target 1 (rank 1)" in line, line
    assert trained(resumed) == trained(eight["5+3"])
    assert any(f"run: 5 steps from step {step} " in text for step in (1, 2, 3) for text in resumed.out), resumed.out
    weights = [last_weights(eight[which].output_dir) for which in ("resumed", "5+3")]
    assert first_weight_difference(*weights, "resumed and straight") is None
