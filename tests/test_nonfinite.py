"""Numbers that are not finite, and faults on purpose: named at the first stage that holds them, skipped alike by all.

One start of three ranks (one target, two drafters) serves nearly all; each case is a real run with one injected fault.
"""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import train_dflash_pipeline as pipeline
from helpers import arguments
from pipeline_runner import REPOSITORY, SMALL, Case, run_cases
from test_pipeline_runs import make_planner, plain_reference

import replay_dump
from check_pipeline_equiv import last_weights, write_small_data

NAN, INF = math.nan, math.inf

# The gradient of micro-batch 3 becomes infinite in the backward pass; its loss stays as it is.
BAD_GRADIENT = """
right = pipeline.DrafterTrainer.micro_batch
def micro_batch(self, plan, spans):
    batch = right(self, plan, spans)
    if plan.m == 3:
        batch.loss.register_hook(lambda grad: grad * float("inf"))
    return batch
pipeline.DrafterTrainer.micro_batch = micro_batch
"""


@pytest.fixture(scope="session")
def flags(tmp_path_factory):
    """A run of 4 steps of two micro-batches, with noise."""
    data = write_small_data(tmp_path_factory.mktemp("nonfinite") / "train.jsonl")
    return [*SMALL, "--train-data", str(data), "--num-target-ranks", "1", "--max-steps", "4"]


def zero(stage: int) -> list[str]:
    return ["--deepspeed", str(REPOSITORY / "ds_configs" / f"zero{stage}.json")]


@pytest.fixture(scope="session")
def runs(tmp_path_factory, flags):
    held_out = str(write_small_data(tmp_path_factory.mktemp("held-out") / "eval.jsonl", rows=20))
    skip, poison = ["--on-nonfinite", "skip"], ["--poison-slots"]
    other_side = ["--no-split-fc-layers", "--no-async-postprocess"]

    def fault(text, *more):
        return [*flags, "--inject-fault", text, *more]

    soon = ["--transport-timeout", "4"]
    cases = [
        Case("nan-layer", fault("nan-layer@2")),
        Case("nan-layer-skip", fault("nan-layer@3", *skip, *poison, *other_side)),
        Case("nan-layer-skip-zero3", fault("nan-layer@3", *skip, *zero(3), "--loss", "kl", "--no-split-fc-layers")),
        Case("nan-layer-eval", fault("nan-layer@5", *skip, "--eval-data", held_out, "--eval-every", "2")),
        Case("nan-weight", fault("nan-weight@3")),
        Case("nan-weight-skip", fault("nan-weight@3", *skip, "--max-skips", "2", "--save-every", "2")),
        Case("early-release", fault("early-release@3", *poison)),
        Case("early-release-skip", fault("early-release@3", *poison, *skip)),
        Case("early-release-target", fault("early-release@2:0", *poison)),
        Case("short-payload", fault("short-payload@2")),
        *[Case(f"bad-gradient-zero{stage}", [*flags, *skip, *zero(stage)], BAD_GRADIENT) for stage in (0, 2, 3)],
        Case("bad-gradient", flags, BAD_GRADIENT),
        Case("stall", fault("stall@2", *soon)),
        Case("die", fault("die@3:2")),
        Case("oom", fault("oom@2")),
        Case("slow-save", fault("slow-save@2", *soon, "--save-every", "2")),
    ]  # fmt: skip
    return run_cases(3, cases, tmp_path_factory.mktemp("runs") / "cases")


def check_ended(result, pattern: str) -> None:
    """Exit 1 on every rank that still was there, the same first cause as the last line of each; nothing was saved."""
    assert all(code in (1, -9) for code in result.codes), f"{result.codes}\n" + "\n".join(result.err)
    for code, text, line in zip(result.codes, result.err, result.last_lines()):
        assert code == -9 or re.search(pattern, line), text
    assert not list(result.output_dir.glob("checkpoints/step-??????"))


def replayed(result, m: int, capsys, *more: str) -> str:
    """The verdict that tools/replay_dump.py ends with on a dump."""
    folder = result.output_dir / "nonfinite" / f"m-{m:08d}"
    replay_dump.sys.argv = ["replay_dump.py", str(folder), "--device", "cpu", *more]
    replay_dump.main()
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith("verdict: "), text
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Named: the first stage, document, token, row, layer, element
# ---------------------------------------------------------------------------------------------------------------------


def test_a_bad_captured_layer_is_named_and_kept(runs, flags, capsys):
    result = runs["nan-layer"]
    _, planner = make_planner(flags)
    plan = planner.plan(2)
    document, token = plan.documents[0], plan.lengths[0] - 1  # the injector: last token of the longest document
    where = rf"nan at document {document}, token {token}, element 3, source row {document} \(from 0\) of .*train.jsonl"
    line = rf"micro-batch 2 \(step 2\): captured layer 3 is not finite on target 0 \(rank 0\): {where}; kept in "
    check_ended(result, line)
    assert "Traceback" not in "".join(result.err)
    folder = result.output_dir / "nonfinite" / "m-00000002"
    assert sorted(p.name for p in folder.iterdir()) == ["dump.json", "tensors.safetensors"]
    finding = json.loads((folder / "dump.json").read_text())["finding"]
    assert (finding["layer"], finding["token"], finding["count"]) == (3, token, 1)
    text = replayed(result, 2, capsys)
    assert "verdict: the target's forward pass: captured layer 3 held it on target 0 (rank 0)" in text
    place = f"document {document}, token {token}, element 3"
    assert re.search(rf"captured layer 3 .* differs at {place}: nan in the run", text)
    assert len(re.findall(r"captured layer \d +[\d.e-]+ +equal\n", text)) == 4


def test_a_bad_drafter_weight_is_named(runs, capsys):
    result = runs["nan-weight"]
    check_ended(result, r"micro-batch 3 \(step 2\): drafter output is not finite on drafter 1 \(rank 2\): nan at doc")
    assert "verdict: the drafter: its weight fc.weight was not finite" in replayed(result, 3, capsys)


def test_a_slot_freed_too_early_is_named(runs, capsys):
    result = runs["early-release"]
    check_ended(result, r"micro-batch 3 \(step 2\): drafter input is not finite on drafter 1 \(rank 2\): nan")
    text = replayed(result, 3, capsys)
    assert "verdict: transport or slot lifetime: " in text
    assert "captured layer 3" in text and "in the run" in text


def test_a_targets_slot_freed_too_early_is_named(runs, capsys):
    result = runs["early-release-target"]
    check_ended(result, r"micro-batch 2 \(step 2\): received is not finite on drafter 0 \(rank 1\): nan at document")
    assert "verdict: transport or slot lifetime: the states that drafter 0" in replayed(result, 2, capsys)


def test_a_short_payload_is_named(runs):
    check_ended(runs["short-payload"], r"micro-batch 2 from target 0 \(rank 0\): the payload does not end with .* mark: shorter")


def test_a_bad_gradient_is_named_and_kept_without_states(runs, capsys):
    """The dump holds the plan alone; the replay shows that forward, loss and gradient are finite without the fault."""
    result = runs["bad-gradient"]
    check_ended(result, r"micro-batch \d \(step 2\): gradient is not finite on drafter \d \(rank \d\): norm (inf|nan)")
    kept = sorted(p.name for p in (result.output_dir / "nonfinite").iterdir())
    assert set(kept) <= {"m-00000002", "m-00000003"} and kept
    text = replayed(result, int(kept[0][2:]), capsys)
    assert "the drafter, by the run's own finding (gradient); nothing repeats here" in text


@pytest.mark.parametrize("name, pattern", [
    ("stall", r"forward pass of micro-batch 2"),
    ("die", r"drafter 1 \(rank 2\)"),
    ("oom", r"\[target 0 \(rank 0\)\] .*(memory|allocate)"),
])  # fmt: skip
def test_other_faults_end_every_rank(runs, name, pattern):
    check_ended(runs[name], pattern)


def test_a_slow_save_ends_nothing(runs):
    result = runs["slow-save"].check_ok()
    assert [m["step"] for m in result.metrics] == [1, 2, 3, 4]


# ---------------------------------------------------------------------------------------------------------------------
# Skipped: what is left is trained exactly as if the rest had never been there
# ---------------------------------------------------------------------------------------------------------------------


def check_equal(result, reference) -> None:
    """Within fp32 rounding, see `compare_with_reference` of test_pipeline_runs.py for the limits."""
    metrics = result.check_ok().metrics
    losses, norms = ([m[key] for m in metrics] for key in ("loss", "grad_norm"))
    np.testing.assert_allclose(losses, reference.losses, rtol=1e-6)
    assert [norm is None for norm in norms] == [norm is None for norm in reference.norms]
    np.testing.assert_allclose(*([x for x in each if x is not None] for each in (norms, reference.norms)), rtol=1e-5)
    weights = last_weights(result.output_dir)
    for name, tensor in reference.weights.items():
        assert float((weights[name] - tensor).abs().max()) < 5e-5, name


def test_a_bad_micro_batch_counts_for_nothing(runs, flags):
    """And poisoned slots change nothing."""
    result = runs["nan-layer-skip"]
    check_equal(result, plain_reference(flags, skipped_m={3}))
    assert [m["skipped_micro_batches"] for m in result.metrics] == [0, 1, 1, 1]
    assert [m["skipped_steps"] for m in result.metrics] == [0, 0, 0, 0]
    assert result.out[0].count("skipped: micro-batch 3 (step 2): captured layer 3 is not finite") == 1
    assert "skipped 1 micro-batches, 0 steps" in "".join(result.out + result.err)


def test_a_bad_micro_batch_under_zero_3(runs):
    metrics = runs["nan-layer-skip-zero3"].check_ok().metrics
    assert [m["skipped_micro_batches"] for m in metrics] == [0, 1, 1, 1]
    assert all(math.isfinite(m["loss"]) and m["grad_norm"] > 0 for m in metrics)


def test_a_bad_micro_batch_of_an_evaluation(runs, flags):
    """Micro-batches 4 and following are held out; training is as without the fault."""
    result = runs["nan-layer-eval"]
    check_equal(result, plain_reference(flags))
    assert [m.get("held_out_skipped_micro_batches") for m in result.metrics] == [None, 1, None, 0]
    assert all(math.isfinite(m["held_out_loss"]) for m in result.metrics[1::2])
    assert result.metrics[-1]["skipped_micro_batches"] == 0


def test_a_bad_drafter_input_counts_for_nothing(runs, flags):
    result = runs["early-release-skip"]
    check_equal(result, plain_reference(flags, skipped_m={3}))
    assert [m["skipped_micro_batches"] for m in result.metrics] == [0, 1, 1, 1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_bad_gradient_moves_neither_weights_nor_schedule(runs, flags, stage):
    result = runs[f"bad-gradient-zero{stage}"]
    check_equal(result, plain_reference(flags, skipped_steps={1}))
    assert [m["skipped_steps"] for m in result.metrics] == [0, 1, 1, 1]
    assert [m["skipped_micro_batches"] for m in result.metrics] == [0, 0, 0, 0]
    args, _ = make_planner(flags)
    rates = [pipeline.learning_rate_at(step, 4, args.optimization) for step in (0, 1, 1, 2)]
    assert [m["learning_rate"] for m in result.metrics] == rates
    for m in (2, 3):
        assert f"micro-batch {m} (step 2): gradient is not finite on drafter {m - 2}" in "".join(result.out)


def test_too_many_skips_in_a_row_end_the_run(runs):
    """The broken drafter's micro-batches are bad from number 3 on: no step after the first is taken, none saved."""
    result = runs["nan-weight-skip"]
    assert set(result.codes) == {1}
    skipped = r"2 steps in a row were not finite and skipped \(--max-skips 2\)"
    unsaved = r"drafter weight fc.weight is not finite: not saved"
    assert all(re.search(f"{skipped}|{unsaved}", text) for text in result.last_lines()), result.err
    assert not list(result.output_dir.glob("checkpoints/step-??????"))
    assert result.metrics[0]["skipped_steps"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# The guard's parts, in this process
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", pipeline.DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_norm_tells_what_is_not_finite(dtype, value):
    clean = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert float(pipeline.largest(clean)) == float(clean.abs().max())
    assert pipeline.first_nonfinite(clean) is None
    for row, element in ((0, 0), (3, 2), (6, 4)):
        bad = clean.clone()
        bad[row, element:] = value
        assert not math.isfinite(pipeline.largest(clean, bad)) and not math.isfinite(pipeline.largest(bad, None, clean))
        assert pipeline.first_nonfinite(bad) == (row, element, 5 - element)


def make_guard(flags, **run):
    args, planner = make_planner(flags)
    for key, value in run.items():
        setattr(args.run, key, value)
    config = SimpleNamespace(target_layer_ids=(1, 3), num_target_layers=8, hidden_size=4, block_size=16, to_json=dict)
    return pipeline.Guard(args, pipeline.Topology(0, 3, 0, 3, 1), planner, config)


def test_the_first_layer_then_the_first_row_is_found(flags):
    guard = make_guard(flags)
    plan = guard.planner.plan(0)
    layers = [torch.zeros(plan.num_tokens, 4) for _ in range(2)]
    assert guard.find("received", plan, guard.named(layers, None)) is None
    row = int(plan.lengths[0]) + 2  # the second document's third token
    layers[1][0, 0] = INF
    layers[0][row, 3] = -INF
    layers[0][row + 1, 1] = NAN
    found = guard.find("received", plan, guard.named(layers, None))
    assert (found.layer, found.document, found.token, found.element) == (1, plan.documents[1], 2, 3)
    assert (found.value, found.count) == ("-inf", 2)
    last = torch.full((plan.num_tokens, 4), NAN)
    assert guard.find("received", plan, guard.named([torch.zeros(1, 4)] * 2, last)).layer == 7


def test_what_is_gone_when_searched_is_still_named(flags):
    guard = make_guard(flags)
    plan = guard.planner.plan(0)
    found = guard.find_on_drafter("drafter input", plan, [torch.zeros(len(plan.token_ids), 8), None])
    assert "drafter input is not finite" in found.line() and "written to in between" in found.line()


def test_padding_rows_are_not_looked_at(flags):
    """A captured layer may hold anything behind its documents' ends."""
    guard = make_guard(flags)
    plan = guard.planner.plan(0)
    capture = pipeline.HookCapture.__new__(pipeline.HookCapture)
    capture.fc_layer_ids, capture.verifier_last_layer = (1, 3), None
    longest = int(plan.lengths[0])
    capture.captured = {layer: torch.full((len(plan.lengths), longest + 3, 4), NAN) for layer in (1, 3)}
    for tensor in capture.captured.values():
        for i, length in enumerate(plan.lengths):
            tensor[i, :length] = 1.0
    capture.captured[3][len(plan.lengths) - 1, 0, 2] = NAN
    layers = [torch.ones(plan.num_tokens, 4) for _ in range(2)]
    found = guard.find_on_target(plan, [(capture, slice(0, len(plan.lengths)))], layers, None)
    assert (found.stage, found.document, found.token, found.element) == ("captured layer 3", plan.documents[-1], 0, 2)
    capture.captured[3][len(plan.lengths) - 1, 0, 2] = 1.0
    layers[0][5, 1] = INF
    assert guard.find_on_target(plan, [(capture, slice(0, len(plan.lengths)))], layers, None).stage == "packed"


def test_dumps_are_bounded_and_a_full_disk_hides_no_finding(flags, tmp_path, capsys, monkeypatch):
    guard = make_guard(flags, on_nonfinite="skip", output_dir=str(tmp_path))
    plan = guard.planner.plan(0)
    finding = pipeline.Finding("loss", guard.rank, 0, 0, "nan")
    for _ in range(guard.MAX_DUMPS + 1):
        guard.report(finding, plan)
    lines = capsys.readouterr().out.splitlines()
    assert [("not kept" in line) for line in lines] == [False] * guard.MAX_DUMPS + [True]
    guard.dumps = 0

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pipeline, "write_json", full_disk)
    guard.skips = False
    with pytest.raises(pipeline.NonFiniteError, match="loss is not finite on target 0 .*not kept .*No space left"):
        guard.report(finding, plan)


def test_a_bad_weight_is_never_saved():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    trainer = pipeline.DrafterTrainer.__new__(pipeline.DrafterTrainer)
    trainer.engine = SimpleNamespace(module=module)
    trainer.check_weights()
    with torch.no_grad():
        module[1].weight[1, 0] = -INF
    with pytest.raises(pipeline.NonFiniteError, match="drafter weight 1.weight is not finite: not saved"):
        trainer.check_weights()


def test_skips_are_counted_in_a_row():
    trainer = pipeline.DrafterTrainer.__new__(pipeline.DrafterTrainer)
    trainer.args = SimpleNamespace(run=SimpleNamespace(max_skips=3))
    assert trainer.count_in_a_row("steps", [True, False, True, True], start=2 - 1) == 2
    assert trainer.count_in_a_row("steps", [], start=2) == 2
    with pytest.raises(pipeline.NonFiniteError, match=r"3 steps in a row .* \(--max-skips 3\)"):
        trainer.count_in_a_row("steps", [True], start=2)


def test_figures_of_what_was_not_skipped():
    """Block size 2: [loss sum, accepted, blocks, right, trained], then a flag for each of three micro-batches."""
    stats = torch.tensor([6.0, 3.0, 4.0, 3.0, 4.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    figures, skipped = pipeline.trained_figures(stats, [1.0, 5.0, 2.0])
    assert figures["loss"] == 2.0 and figures["acceptance_length"] == 1.75 and skipped == [False, True, False]
    stats[:5] = 0.0
    assert pipeline.trained_figures(stats, [0.0, 5.0, 0.0])[0]["loss"] is None
    stats[6] = 0.0
    assert pipeline.trained_figures(stats, [0.0, 0.0, 0.0])[0]["loss"] == 0.0


def test_poisoned_slots_are_nan_whenever_they_are_free():
    ring = pipeline.SlotRing(1, poison=True, tokens=4, num_layers=2, hidden_size=3, with_last=True,
                             dtype=torch.bfloat16, device="cpu")  # fmt: skip
    slot = ring.acquire("filling")
    assert slot.hidden.isnan().all() and slot.last.isnan().all()
    slot.hidden.zero_()
    ring.hand_over(slot, "filling", "sending")
    assert not slot.hidden.isnan().any()
    ring.hand_over(slot, "sending", "free")
    assert slot.hidden.isnan().all() and slot.last.isnan().all()


@pytest.mark.parametrize("text", ["nan-layer", "nan-layer@", "nan-layer@x", "die@-1", "shrug@3", "die@3:x", "die@3:"])
def test_a_fault_that_cannot_be_read_is_refused(text):
    with pytest.raises(pipeline.UserError, match=re.escape(f"--inject-fault {text}: expected KIND@M")):
        pipeline.parse_fault(text)


def test_faults_strike_where_they_make_sense():
    def ranks(text):
        args = pipeline.PipelineArguments(inject_fault=text)
        injectors = [pipeline.FaultInjector(args, pipeline.Topology(r, 5, r, 5, 3)) for r in range(5)]
        kind, m, _ = pipeline.parse_fault(text)
        return [r for r, injector in enumerate(injectors) if injector.due(kind, m)]

    alone = pipeline.FaultInjector(pipeline.PipelineArguments(inject_fault="die@5"), pipeline.Topology(0, 2, 0, 2, 1))
    alone.check_end(6)
    with pytest.raises(pipeline.UserError, match="the run ends with micro-batch 4"):
        alone.check_end(5)
    assert ranks("nan-layer@4") == [1] and ranks("nan-weight@4") == [3] and ranks("early-release@5") == [4]
    assert ranks("die@5") == [2] and ranks("die@5:4") == [4] and ranks("early-release@5:2") == [2]
    for text in ("die@5:3", "die@5:9", "nan-weight@5:2", "nan-layer@5:4"):
        with pytest.raises(pipeline.UserError, match="on this run it can strike rank"):
            ranks(text)


# ---------------------------------------------------------------------------------------------------------------------
# The replay tool on dumps that cannot be read
# ---------------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_dump_is_one_line(tmp_path):
    (tmp_path / "dump.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(pipeline.UserError, match="is no dump of a run"):
            replay_dump.read_dump(folder)


def test_states_are_compared_row_by_row(flags):
    guard = make_guard(flags)
    plan = guard.planner.plan(0)
    here = torch.randn(plan.num_tokens, 4, generator=torch.Generator().manual_seed(1))
    assert replay_dump.compare(here.clone(), here, plan) == (False, "equal")
    wrong, text = replay_dump.compare(here * 1.001, here, plan)
    assert not wrong and text.startswith("equal but for rounding")
    other = here.clone()
    row = int(plan.lengths[0]) + 1
    other[row, 2] += 50.0
    wrong, text = replay_dump.compare(other, here, plan)
    assert wrong and text.startswith(f"differs at document {plan.documents[1]}, token 1, element 2: ")
    other[row - 1, 1] = NAN
    assert "token 0, element 1: nan in the run" in replay_dump.compare(other, here, plan)[1]


def test_a_range_too_small_shows_in_fp32():
    """The verdict names the run's precision when the forward pass is finite in fp32 alone."""
    dump = SimpleNamespace(finding={"stage": "captured layer 3", "rank": "target 0 (rank 0)"})
    half = replay_dump.Replay("float16", bad=["captured layer 3", "packed, split"])
    text = replay_dump.verdict(dump, [half, replay_dump.Replay("float32")], False, None)
    assert text.startswith("the target's forward pass: captured layer 3 is not finite here")
    assert text.endswith("so it is the range of float16")
    text = replay_dump.verdict(dump, [half, replay_dump.Replay("float32", bad=["loss, split"])], False, None)
    assert text.endswith("in fp32, too")


def test_replaying_with_a_drafter_of_another_shape_is_refused(tmp_path):
    args = arguments(target="toy", num_draft_layers=2)
    text = pipeline.load_target_config(args.target).get_text_config()
    config = pipeline.DrafterConfig.for_target(text, args.drafter, (1, 3), 300)
    dump = SimpleNamespace(config=config, args=args, weights=None, checkpoint=None)

    def folder(name, **changes) -> str:
        drafter = pipeline.DFlashDrafter(dataclasses.replace(config, **changes), seed=1)
        (tmp_path / name).mkdir()
        pipeline.write_json(tmp_path / name / "config.json", drafter.config.to_json())
        pipeline.write_tensors(tmp_path / name / "model.safetensors", drafter.state_dict(), {"format": "pt"})
        return str(tmp_path / name)

    weights, source = replay_dump.load_weights(dump, folder("same"))
    assert source.endswith("same") and torch.equal(weights["fc.weight"], pipeline.DFlashDrafter(config, 1).fc.weight)
    with pytest.raises(pipeline.UserError, match=r"layers.1.input_layernorm.weight is not there, in the drafter that was kept"):
        replay_dump.load_weights(dump, folder("shallow", num_hidden_layers=1, layer_types=config.layer_types[:1]))
    with pytest.raises(pipeline.UserError, match=r"fc.weight is \[64, 192\], in the drafter that was kept it is \[64, 128\]"):
        replay_dump.load_weights(dump, folder("wide", target_layer_ids=(1, 2, 3)))
