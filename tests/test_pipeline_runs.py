"""The real script, many processes, gloo. Small toy jobs; every job has a time limit of its own.

Bit-identical where DESIGN.md says so (exact equality); against the plain single-process reference within rounding.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
import train_dflash_pipeline as pipeline
from pipeline_runner import REPOSITORY, SLOW_STEPS, SMALL, Case, read_metrics, run, run_cases, wait_until

from check_pipeline_equiv import first_weight_difference, last_weights, write_small_data, write_wrapper  # isort: skip

# ---------------------------------------------------------------------------------------------------------------------
# Data and the plain reference
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="session")
def data(work):
    return ["--train-data", str(write_small_data(work / "train.jsonl"))]


def write_sparse_data(path):
    """Chats of one micro-batch each; in half of them the answer is a single token that was cut off: no valid anchor."""
    with path.open("w") as file:
        for number in range(24):
            row = {"prompt": f"Number {number:02d}, please? " + "x" * 60, "response": "yes, of course"}
            if number % 2:
                row |= {"response": "y", "finish_reason": "length"}
            file.write(json.dumps(row) + "\n")
    return path


SPARSE = ["--device", "cpu", "--target", "toy", "--tokens-per-micro-batch", "192", "--anchors-per-micro-batch", "8",
          "--num-draft-layers", "2", "--max-steps", "6", "--num-target-ranks", "1"]  # fmt: skip


def make_planner(flags, num_drafters=2):
    args = pipeline.parse_arguments(flags)
    limit = args.data.max_document_tokens or args.data.tokens_per_micro_batch
    chat = pipeline.ChatTokenizer(pipeline.byte_tokenizer(), limit)
    if pipeline.is_prepared(args.data.train_data):
        documents = pipeline.open_documents(args.data.train_data[0])[0]
    else:
        documents = pipeline.tokenise_rows(args.data.train_data, chat, show_progress=False)
    held_out = None
    if args.data.eval_data:
        held_out = pipeline.tokenise_rows(args.data.eval_data, chat, show_progress=False)
    return args, pipeline.Planner(documents, args, num_drafters, held_out)


@pytest.fixture(scope="session")
def sparse_flags(work):
    """Flags whose run has a step with one micro-batch without anchor, and one in which both are: the seed is searched."""
    data = ["--train-data", str(write_sparse_data(work / "sparse.jsonl"))]
    for seed in itertools.count():
        flags = [*SPARSE, *data, "--seed", str(seed)]
        _, planner = make_planner(flags)
        empty = [sum(planner.plan(m).num_anchors == 0 for m in planner.micro_batches(step)) for step in range(6)]
        if {0, 1, 2} <= set(empty) and empty[0] == 0 and empty[-1] == 0:
            return flags


@pytest.fixture(scope="session")
def short_flags(work):
    """Flags of a run on a prepared file in which most documents have one token, among them whole micro-batches."""
    rng, flags = np.random.default_rng(0), [*SPARSE, "--tokens-per-micro-batch", "64"]
    lengths = [1] * 1500 + [2] * 12 + [60] * 8
    rng.shuffle(lengths)
    total = sum(lengths)
    documents = pipeline.Documents(
        rng.integers(0, 255, total).astype(np.int32), np.ones(total, bool), np.append(0, np.cumsum(lengths)),
        np.arange(len(lengths)), {}, len(lengths),
    )  # fmt: skip
    path = work / "short.safetensors"
    pipeline.write_documents(documents, path, pipeline.ChatTokenizer(pipeline.byte_tokenizer(), 64).describe())
    for seed in itertools.count():
        seeded = [*flags, "--train-data", str(path), "--seed", str(seed)]
        _, planner = make_planner(seeded)
        longest = [[planner.plan(m).lengths[0] for m in planner.micro_batches(step)] for step in range(6)]
        if longest[0][0] == 60 and [1, 1] in longest[1:] and any(1 in pair and pair != [1, 1] for pair in longest):
            return seeded


@dataclasses.dataclass
class Reference:
    losses: list
    norms: list
    weights: dict


def plain_reference(flags, num_drafters=2, skipped_m=(), skipped_steps=()) -> Reference:
    """The same training in one process with torch alone: no transport, no DeepSpeed, dense logits, autograd.

    skipped_m: micro-batches that count for nothing; the gradient is still divided by the plan's weight, the loss by that
    of the others. skipped_steps: steps that are not taken and do not move the learning rate on; their norm is None.
    """
    args, planner = make_planner(flags, num_drafters)
    target_config = pipeline.load_target_config(args.target)
    text = target_config.get_text_config()
    config = pipeline.choose_drafter_config(args, text, pipeline.byte_tokenizer())
    layer_ids = config.target_layer_ids
    device = torch.device("cpu")
    runner = pipeline.TargetRunner(pipeline.load_target(args.target, target_config, device), layer_ids, False, device)
    ends = pipeline.load_frozen_ends(args.target, target_config, device, torch.float32)
    drafter = pipeline.build_drafter(config, args)
    optim = args.optimization
    adam = torch.optim.AdamW(
        drafter.parameters(), lr=optim.learning_rate, betas=(optim.adam_beta1, optim.adam_beta2),
        weight_decay=optim.weight_decay,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(planner.total_steps):
        for group in adam.param_groups:
            taken = step - sum(skipped < step for skipped in skipped_steps)
            group["lr"] = pipeline.learning_rate_at(taken, planner.total_steps, optim)
        numbers = planner.micro_batches(step)
        total_weight, loss = sum(planner.plan(m).weight_sum for m in numbers), torch.zeros(())
        rest = sum(planner.plan(m).weight_sum for m in numbers if m not in skipped_m)
        for m in numbers:
            if m in skipped_m:
                continue
            plan = planner.plan(m)
            features = torch.zeros(len(plan.token_ids), len(layer_ids) * text.hidden_size)
            hidden = [shot.get_hidden_states_packed(plan.lengths[docs])[0][0] for shot, docs in runner.forward(plan)]
            features[: plan.num_tokens] = torch.cat(hidden)
            pipeline.add_noise_(features[: plan.num_tokens], plan.noise_std, plan.noise_seed)
            batch = pipeline.DrafterBatch.from_plan(plan, config, device)
            slots = ends.embed(batch.slot_ids)
            out = drafter(features, batch.context_positions, slots, batch.slot_positions, batch.masks)
            logits = ends.logits(out.view(-1, config.block_size, out.shape[-1])[:, 1:])
            each = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none").view_as(batch.labels)
            weights = batch.weights
            if args.data.loss_weights == "dpace":  # block by block: see test_drafter.py for the formula
                weights = torch.zeros_like(weights)
                for i, supervised in enumerate((batch.weights > 0).sum(1).tolist()):
                    confidence = torch.exp(-each[i, :supervised].detach())
                    reach = torch.cumprod(0.5 * confidence + 0.5, 0)
                    weights[i, :supervised] = reach.sum() - torch.cumsum(reach, 0) + reach
            loss = loss + (each * weights).sum()
        loss = loss / total_weight if total_weight else loss * 0
        adam.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(drafter.parameters(), optim.max_grad_norm))
        norms.append(None if step in skipped_steps else norm)
        if step not in skipped_steps:
            adam.step()
        losses.append(loss.item() * total_weight / rest if rest else loss.item())
    return Reference(losses, norms, {k: v.detach() for k, v in drafter.state_dict().items()})


def plain_evaluation(flags, held_out, weights, step, num_drafters=2) -> tuple[float, float]:
    """(loss, acceptance length) on held-out documents, with given drafter weights, slot by slot in one process."""
    args, planner = make_planner([*flags, "--eval-data", str(held_out)], num_drafters)
    target_config = pipeline.load_target_config(args.target)
    text, device = target_config.get_text_config(), torch.device("cpu")
    config = pipeline.choose_drafter_config(args, text, pipeline.byte_tokenizer())
    layer_ids = config.target_layer_ids
    model = pipeline.load_target(args.target, target_config, device)
    ends = pipeline.load_frozen_ends(args.target, target_config, device, torch.float32)
    drafter = pipeline.build_drafter(config, args)
    drafter.load_state_dict(weights)
    total, weight, lengths = 0.0, 0.0, []
    for m in planner.evaluation_after(step):
        plan, row = planner.plan(m), 0
        features = torch.zeros(len(plan.token_ids), len(layer_ids) * text.hidden_size)
        for length in plan.lengths:
            ids = torch.from_numpy(plan.token_ids[row : row + length])[None]
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
            features[row : row + length] = torch.cat([states[i + 1][0] for i in layer_ids], dim=1)
            row += length
        batch = pipeline.DrafterBatch.from_plan(plan, config, device)
        with torch.no_grad():
            slots = ends.embed(batch.slot_ids)
            out = drafter(features, batch.context_positions, slots, batch.slot_positions, batch.masks)
            logits = ends.logits(out).view(-1, config.block_size, ends.head_weight.shape[0])
        for block in range(plan.num_anchors):
            accepted = 0
            for k in range(1, config.block_size):
                if plan.weights[block, k] == 0:
                    break
                label = int(plan.labels[block, k])
                total -= float(logits[block, k].log_softmax(-1)[label]) * float(plan.weights[block, k])
                weight += float(plan.weights[block, k])
                accepted += int(accepted == k - 1 and int(logits[block, k].argmax()) == label)
            lengths.append(1 + accepted)
    return total / weight, sum(lengths) / len(lengths)


def compare_with_reference(result, reference: Reference) -> None:
    """Within fp32 rounding: sums run in another order (head by chunks, gradients over two ranks, fused Adam, clipping).

    Adam divides by the root of a squared gradient, so rounding in entries near zero may move a weight by a part of one
    update (6e-4): weights get 5e-5 in the worst entry (seen: 2e-6), losses 1e-6 relative (6e-8), norms 1e-5 (3e-7).
    """
    assert [m["step"] for m in result.metrics] == list(range(1, len(reference.losses) + 1))
    np.testing.assert_allclose([m["loss"] for m in result.metrics], reference.losses, rtol=1e-6)
    np.testing.assert_allclose([m["grad_norm"] for m in result.metrics], reference.norms, rtol=1e-5, atol=1e-7)
    weights = last_weights(result.output_dir)
    assert weights.keys() == reference.weights.keys()
    for name, tensor in weights.items():
        off = float((tensor - reference.weights[name]).abs().max())
        assert off < 5e-5, f"{name} is {off} off"


# ---------------------------------------------------------------------------------------------------------------------
# The command as users type it
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def straight(work, data):
    """Two ranks, six steps, a checkpoint half-way: what resumed and interrupted runs are compared with."""
    return run(2, [*SMALL, *data, "--max-steps", "6", "--save-every", "3"], work / "straight")


def check_logged_once(result, steps: int) -> None:
    assert result.code == 0, result.log
    assert [m["step"] for m in result.metrics] == list(range(1, steps + 1))
    for m in result.metrics:
        assert math.isfinite(m["loss"]) and math.isfinite(m["grad_norm"]) and m["skipped_steps"] == 0
        assert m["learning_rate"] > 0
    shown = [int(step) for step in re.findall(r"step (\d+) loss \d", result.log)]
    assert shown == list(range(1, steps + 1))
    assert len(re.findall(r"settings: ", result.log)) == 1


def test_eight_ranks_with_nothing_but_data(work, data):
    result = run(8, ["--target", "toy", *data], work / "eight", limit_s=400)
    check_logged_once(result, 20)
    assert "5 target + 3 drafter on" in result.log
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]


def test_two_ranks(straight):
    check_logged_once(straight, 6)
    assert "1 target + 1 drafter on cpu" in straight.log


def run_tool(name, *flags, limit_s=600):
    command = [sys.executable, str(REPOSITORY / "tools" / name), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s)


def test_all_switches_change_nothing():
    done = run_tool("check_pipeline_equiv.py", "--steps", "3", "--target-ranks", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: 4 runs of 3 steps" in done.stdout


@pytest.mark.slow
def test_target_ranks_change_nothing():
    done = run_tool("check_pipeline_equiv.py", "--steps", "3", "--target-ranks", "1", "2", "3", "--full")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: 12 runs of 3 steps" in done.stdout


def test_pipeline_check_can_fail():
    done = run_tool("check_pipeline_equiv.py", "--steps", "2", "--target-ranks", "1", "--inject-fault", "noise-seed")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"FAIL: .* differ at step 1: loss is", done.stdout)


def test_pack_check_passes():
    done = run_tool("check_pack_equiv.py", "--cases", "40")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("PASS: 123 cases"), done.stdout


@pytest.mark.parametrize("fault", ["off-by-one", "noise-seed", "swap-layers"])
def test_pack_check_can_fail(fault):
    done = run_tool("check_pack_equiv.py", "--cases", "0", "--dtypes", "fp32", "--inject-fault", fault)
    assert done.returncode == 1, done.stdout
    assert re.search(r"FAIL .*layer \d+, document 0, token 0", done.stdout.splitlines()[-1]), done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Resume and stop
# ---------------------------------------------------------------------------------------------------------------------


def check_same_run(metrics, output_dir, straight) -> None:
    """Losses of the steps both have, and the final weights, bit for bit."""
    expected = {m["step"]: m for m in straight.metrics}
    for m in metrics:
        for key in ("loss", "grad_norm", "acceptance_length", "learning_rate", "tokens"):
            assert m[key] == expected[m["step"]][key], f"step {m['step']}: {key}"
    assert metrics[-1]["step"] == 6
    assert first_weight_difference(last_weights(output_dir), last_weights(straight.output_dir), "the runs") is None


def test_resume_equals_straight(work, data, straight):
    checkpoint = straight.output_dir / "checkpoints" / "step-000003"
    result = run(2, [*SMALL, *data, "--max-steps", "6", "--resume", str(checkpoint)], work / "resumed")
    assert result.code == 0, result.log
    assert [m["step"] for m in result.metrics] == [4, 5, 6]
    check_same_run(result.metrics, result.output_dir, straight)


def test_resume_with_more_targets_equals_straight(trained, straight):
    result = trained["resumed-2-targets"].check_ok()
    assert [m["step"] for m in result.metrics] == [4, 5, 6]
    check_same_run(result.metrics, result.output_dir, straight)


@pytest.mark.parametrize(
    "what, name", [("seed", "seed was 0 and is 1"), ("data", "data was "), ("drafters", "drafter_ranks was 1 and is 2")]
)
def test_resume_of_a_changed_run_is_refused(trained, what, name):
    check_refused(trained[f"resumed-other-{what}"], name)
    assert all("cannot resume" in line for line in trained[f"resumed-other-{what}"].last_lines())


def test_sigterm_saves_and_the_same_command_goes_on(work, data, straight):
    output_dir, flags = work / "interrupted", [*SMALL, *data, "--max-steps", "6"]
    slow = write_wrapper(work / "slow.py", SLOW_STEPS)

    def interrupt(process):
        wait_until(lambda: len(read_metrics(output_dir)) >= 1, process, 120)
        process.send_signal(signal.SIGTERM)

    stopped = run(2, flags, output_dir, script=slow, during=interrupt)
    assert stopped.code is not None, f"no end after SIGTERM\n{stopped.log}"
    reached = int((output_dir / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert 1 <= reached < 6 and f"stopped by a signal after step {reached} of 6" in stopped.log
    assert [m["step"] for m in stopped.metrics] == list(range(1, reached + 1))
    went_on = run(2, flags, output_dir)
    assert went_on.code == 0 and f"6 steps from step {reached}" in went_on.log, went_on.log
    assert [m["step"] for m in went_on.metrics] == [1, 2, 3, 4, 5, 6]
    check_same_run(went_on.metrics, output_dir, straight)


@pytest.mark.slow
def test_killed_target_ends_every_rank(work, data):
    output_dir = work / "killed"
    slow = write_wrapper(work / "slow_killed.py", SLOW_STEPS)
    ranks = []

    def kill_target(process):
        wait_until(lambda: len(read_metrics(output_dir)) >= 1, process, 120)
        ranks.extend(psutil.Process(process.pid).children())
        by_rank = {int(rank.environ()["RANK"]): rank for rank in ranks if "RANK" in rank.environ()}
        assert len(by_rank) == 3
        by_rank[0].kill()

    flags = [*SMALL, *data, "--max-steps", "60", "--num-target-ranks", "1"]
    result = run(3, flags, output_dir, script=slow, during=kill_target, limit_s=150)
    assert result.code not in (0, None), result.log
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    for rank in (1, 2):
        line = rf"\[drafter {rank - 1} \(rank {rank}\)\] (error|stopping): .*target 0 \(rank 0\)"
        assert re.search(line, result.log), result.log


# ---------------------------------------------------------------------------------------------------------------------
# Many short jobs on one target and two drafters (or two and one)
# ---------------------------------------------------------------------------------------------------------------------

ZERO = {  # DeepSpeed configuration -> accumulation
    "zero0": 2, "zero1": 1, "zero2": 2, "zero3": 1, "zero2_offload": 1, "zero3_offload": 2,
}  # fmt: skip

CHANGED_HEADER = """
right_pack = pipeline.HiddenStateSender._pack
def wrong_pack(self, job):
    header = right_pack(self, job)
    if header.m == 2:
        header.{field} += {change}
    return header
pipeline.HiddenStateSender._pack = wrong_pack
"""
FLIPPED_BYTE = """
right_pack = pipeline.HiddenStateSender._pack
def wrong_pack(self, job):
    header = right_pack(self, job)
    if header.m == 2:
        job.slot.messages(job.plan.num_tokens)[0][1001] ^= 1
    return header
pipeline.HiddenStateSender._pack = wrong_pack
"""
# What half a payload may look like over NCCL: finite numbers in place of the rest, say an earlier message's.
STALE_END = """
right_post, sent = pipeline.post, []
def stale_post(transfer, message, link, m, what):
    if what == "sending the payload":
        if m == 2:
            half = len(message) // 2
            message[-half:] = sent[-1][-half:]
        sent.append(message.clone())
    right_post(transfer, message, link, m, what)
pipeline.post = stale_post
"""


def zero_flags(name, data):
    config = str(REPOSITORY / "ds_configs" / f"{name}.json")
    accumulation = ["--gradient-accumulation-steps", str(ZERO[name])]
    return [*SMALL, *data, "--num-target-ranks", "1", "--max-steps", "4", "--deepspeed", config, *accumulation]


@pytest.fixture(scope="session")
def trained(work, data, straight, sparse_flags, short_flags):
    """All jobs that share one start of three ranks."""
    half = ["--max-steps", "6", "--resume", str(straight.output_dir / "checkpoints" / "step-000003")]
    other_data = ["--train-data", str(write_small_data(work / "other.jsonl", rows=50))]
    two_targets, one_target = ["--num-target-ranks", "2"], ["--num-target-ranks", "1"]
    zero3 = ["--deepspeed", str(REPOSITORY / "ds_configs" / "zero3.json")]
    few = [*SMALL, *data, *one_target, "--max-steps", "4"]
    folder = work / "trained"
    cases = [
        *[Case(name, zero_flags(name, data) + ["--save-every", "2", "--verify-transfers"]) for name in ZERO],
        Case("zero3-resumed", [*zero_flags("zero3", data), "--resume", f"{folder}/zero3/run/checkpoints/step-000002"]),
        Case("held-out", [*zero_flags("zero2", data), "--eval-data", other_data[1], "--eval-every", "3"]),
        Case("held-out-zero3", [*zero_flags("zero3", data), "--eval-data", other_data[1], "--eval-every", "3"]),
        Case("packed", [*zero_flags("zero2", data), "--target-layout", "packed"]),
        Case("fp8", [*zero_flags("zero2", data), "--target-fp8", *two_targets]),
        Case("dpace", [*zero_flags("zero1", data), "--loss-weights", "dpace"]),
        Case("init-from", [*few, "--init-from", f"{folder}/zero1/run", "--max-steps", "1", "--learning-rate", "0"]),
        Case("sparse", sparse_flags),
        *[Case(f"sparse-{name}", [*sparse_flags, "--deepspeed", str(REPOSITORY / "ds_configs" / f"{name}.json")])
          for name in ("zero0", "zero1", "zero3")],
        Case("short", short_flags),
        Case("short-zero3", short_flags + zero3),
        Case("one-epoch", [*SMALL, *data, *one_target, "--num-epochs", "1", "--gradient-accumulation-steps", "4"]),
        Case("resumed-2-targets", [*SMALL, *data, *half, *two_targets]),
        Case("resumed-other-seed", [*SMALL, *data, *half, *two_targets, "--seed", "1"]),
        Case("resumed-other-data", [*SMALL, *other_data, *half, *two_targets]),
        Case("resumed-other-drafters", [*SMALL, *data, *half, *one_target]),
        Case("tokens-plus", few, CHANGED_HEADER.format(field="tokens", change=1)),
        Case("tokens-minus", few, CHANGED_HEADER.format(field="tokens", change=-1)),
        Case("magic", few, CHANGED_HEADER.format(field="magic", change=1)),
        Case("sequence", [*few, "--no-async-postprocess"], CHANGED_HEADER.format(field="m", change=1)),
        Case("flipped-byte", [*few, "--verify-transfers"], FLIPPED_BYTE),
        Case("stale-end", few, STALE_END),
    ]
    return run_cases(3, cases, folder)


@pytest.fixture(scope="session")
def references(data):
    """One plain reference per accumulation."""
    return {ZERO[name]: plain_reference(zero_flags(name, data)) for name in ("zero1", "zero2")}


@pytest.mark.parametrize("name", ZERO)
def test_every_zero_stage_equals_plain_torch(trained, references, name):
    compare_with_reference(trained[name].check_ok(), references[ZERO[name]])


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_held_out_documents_are_measured_and_change_nothing(work, trained, data, stage):
    name = "held-out" if stage == "zero2" else "held-out-zero3"
    result, without = trained[name].check_ok(), trained[stage]
    for m, expected in zip(result.metrics, without.metrics, strict=True):
        assert (m["loss"], m["grad_norm"], m["tokens"]) == (expected["loss"], expected["grad_norm"], expected["tokens"])
    assert ["held_out_loss" in m for m in result.metrics] == [False, False, True, True]
    flags = [*zero_flags(stage, data), "--eval-every", "3"]
    weights = last_weights(result.output_dir)
    loss, acceptance = plain_evaluation(flags, work / "other.jsonl", weights, step=4)
    assert result.metrics[-1]["held_out_loss"] == pytest.approx(loss, rel=1e-5)
    assert result.metrics[-1]["held_out_acceptance_length"] == pytest.approx(acceptance, abs=1e-9)
    assert len(result.metrics[-1]["held_out_slot_accuracy"]) == 15


def test_target_with_its_documents_in_one_row_equals_a_padded_one(trained, references):
    compare_with_reference(trained["packed"].check_ok(), references[ZERO["zero2"]])
    assert "target: 6 layers; documents end to end\n" in trained["packed"].out[0]
    assert "target: 6 layers; documents padded (" in trained["zero2"].out[0]


def test_target_in_fp8_trains_on_other_states_and_says_so(trained):
    fp8, plain = trained["fp8"].check_ok(), trained["zero2"]
    moved = re.search(r"42 linear layers in fp8; fp8 moves its captured states by (\d+\.\d)% \(of random tokens\)", fp8.out[0])
    assert 2 < float(moved[1]) < 20
    for ours, theirs in zip(fp8.metrics, plain.metrics, strict=True):
        assert ours["loss"] != theirs["loss"] and ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    state = json.loads((fp8.output_dir / "checkpoints" / "step-000004" / pipeline.STATE).read_text())
    assert state["identity"]["target_dtype"] == "float32 with linear layers in fp8"  # a resume without it is refused by name


def test_dpace_equals_plain_torch(trained, data):
    flags = [*zero_flags("zero1", data), "--loss-weights", "dpace"]
    compare_with_reference(trained["dpace"].check_ok(), plain_reference(flags))


def test_a_run_starts_from_the_drafter_it_is_given(trained):
    """With a learning rate of 0 the saved drafter is the given one, bit for bit."""
    started, given = trained["init-from"].check_ok(), trained["zero1"]
    mine, theirs = last_weights(started.output_dir), last_weights(given.output_dir)
    assert first_weight_difference(mine, theirs, "the drafters") is None
    assert started.metrics[0]["loss"] < given.metrics[0]["loss"]


def test_zero3_resume_equals_straight(trained):
    resumed, straight = trained["zero3-resumed"].check_ok(), trained["zero3"]
    assert [(m["step"], m["loss"], m["grad_norm"]) for m in resumed.metrics] == [
        (m["step"], m["loss"], m["grad_norm"]) for m in straight.metrics[2:]
    ]
    mine, theirs = last_weights(resumed.output_dir), last_weights(straight.output_dir)
    assert first_weight_difference(mine, theirs, "the runs") is None


@pytest.mark.parametrize("name", ["short", "short-zero3"])
def test_documents_of_one_token(trained, short_flags, name):
    """They give context to nobody and train nothing, alone in a micro-batch or not."""
    compare_with_reference(trained[name].check_ok(), plain_reference(short_flags))


@pytest.mark.parametrize("name", ["sparse", "sparse-zero0", "sparse-zero1", "sparse-zero3"])
def test_micro_batches_without_supervision(trained, sparse_flags, name):
    result = trained[name].check_ok()
    compare_with_reference(result, plain_reference(sparse_flags))
    _, planner = make_planner(sparse_flags)
    empty = [sum(planner.plan(m).num_anchors == 0 for m in planner.micro_batches(step)) for step in range(6)]
    counted = [m["unsupervised_micro_batches"] for m in result.metrics]
    assert counted == list(itertools.accumulate(empty)) and counted[-1] >= 3
    nothing = [m for m, count in zip(result.metrics, empty) if count == 2]
    assert nothing and all(m["loss"] == 0 and m["grad_norm"] == 0 for m in nothing)


def test_one_epoch_with_a_ragged_end(trained, data):
    result = trained["one-epoch"].check_ok()
    _, planner = make_planner([*SMALL, *data, "--num-epochs", "1", "--gradient-accumulation-steps", "4"])
    packs = planner.epoch(0)
    assert len(packs) % 8 != 0, "the end must be ragged for this test to say anything"
    assert sorted(np.concatenate(packs)) == list(range(len(planner.documents)))
    assert [m["step"] for m in result.metrics] == list(range(1, -(-len(packs) // 8) + 1))
    assert sum(m["tokens"] for m in result.metrics) >= planner.documents.lengths.sum()


def check_refused(result, phrase: str) -> None:
    """Exit 1 on every rank, one line about the cause on each, and no traceback of ours."""
    assert set(result.codes) == {1}, f"exit codes {result.codes}\n" + "\n".join(result.err)
    for text, line in zip(result.err, result.last_lines()):
        assert phrase in line, text
        assert "Traceback" not in text, text
        assert len(re.findall(r"\b(?:error|stopping): ", text)) == 1, text


@pytest.mark.parametrize("name, phrase", [
    ("tokens-plus", "header of micro-batch 2 from target 0 (rank 0): tokens is"),
    ("tokens-minus", "header of micro-batch 2 from target 0 (rank 0): tokens is"),
    ("magic", "target 0 (rank 0) sent no valid header"),
    ("sequence", "header of micro-batch 2 from target 0 (rank 0): m is 3, expected 2"),
    ("flipped-byte", "micro-batch 2 from target 0 (rank 0): checksum differs"),
    ("stale-end", "micro-batch 2 from target 0 (rank 0): the payload does not end with this micro-batch's mark"),
])  # fmt: skip
def test_a_wrong_transfer_stops_every_rank(trained, name, phrase):
    check_refused(trained[name], phrase)
    assert not (trained[name].output_dir / "checkpoints").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes of users
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def mistakes(work, data):
    broken = work / "broken.jsonl"
    broken.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a", "respon\n')
    tokenizer = pipeline.byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(work / "no_template")


    def deepspeed(name: str, changes: dict) -> str:
        config = json.loads((REPOSITORY / "ds_configs" / "zero2.json").read_text())
        (work / f"{name}.json").write_text(json.dumps(config | changes))
        return str(work / f"{name}.json")

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    few = [*SMALL, *data]
    cases = [
        Case("unknown flag", [*few, "--max-step", "3"]),
        Case("wrong type", [*few, "--max-steps", "many"]),
        Case("missing file", [*SMALL, "--train-data", str(work / "nowhere.jsonl")]),
        Case("no drafters", [*few, "--num-target-ranks", "2"]),
        Case("one rank", few, environment=alone),
        Case("no GPU", [*few, "--device", "cuda"], environment={"CUDA_VISIBLE_DEVICES": ""}),
        Case("mask token", [*few, "--mask-token-id", "320"]),
        Case("broken line", [*SMALL, "--train-data", str(broken)]),
        Case("no template", [*few, "--tokenizer", str(work / "no_template")]),
        Case("no checkpoint", [*few, "--resume", str(work / "nowhere")]),
        Case("output folder", [*few, "--output-dir", str(broken / "run")]),
        Case("batch size", [*few, "--deepspeed", deepspeed("batch", {"train_batch_size": 64})]),
        Case("unknown key", [*few, "--deepspeed", deepspeed("key", {"zero_optimization": {"stage": 2, "overlap": 1}})]),
        Case("no torchrun", few, environment={"LOCAL_WORLD_SIZE": ""}, patch="import os; del os.environ['LOCAL_WORLD_SIZE']"),
    ]
    return run_cases(2, cases, work / "mistakes")


@pytest.mark.parametrize("name, phrase", [
    ("unknown flag", "--max-step"),
    ("wrong type", "--max-steps"),
    ("missing file", "nowhere.jsonl: no such file"),
    ("no drafters", "--num-target-ranks 2 of 2 ranks leaves 0 drafter ranks"),
    ("one rank", "one rank cannot hold both roles"),
    ("no GPU", "--device cuda: 1 ranks of one role on this host, but 0 GPUs"),
    ("mask token", "--mask-token-id 320: the target's embedding has rows 0 to 319"),
    ("broken line", "broken.jsonl, line 2: not valid JSON"),
    ("no template", "has no chat template"),
    ("no checkpoint", "no checkpoint there"),
    ("output folder", "broken.jsonl/run: NotADirectoryError"),
    ("batch size", "batch.json: Check batch related parameters"),
    ("unknown key", "key.json: 1 validation error for DeepSpeedZeroConfig overlap"),
    ("no torchrun", "start with torchrun"),
])  # fmt: skip
def test_a_mistake_is_one_clear_line_on_every_rank(mistakes, name, phrase):
    check_refused(mistakes[name], phrase)


# ---------------------------------------------------------------------------------------------------------------------
# The transport's parts, in this process
# ---------------------------------------------------------------------------------------------------------------------


def make_ring(count=1):
    return pipeline.SlotRing(count, tokens=4, num_layers=2, hidden_size=3, with_last=True,
                             dtype=torch.float32, device="cpu")  # fmt: skip


def test_a_slot_has_one_owner():
    ring = make_ring(2)
    first, second = ring.acquire("filling"), ring.acquire("filling")
    assert first is not second and [slot.owner for slot in ring.slots] == ["filling", "filling"]
    with pytest.raises(RuntimeError, match="slot 0 belongs to filling, not to sending"):
        ring.hand_over(first, "sending", "free")
    ring.hand_over(first, "filling", "sending")
    with pytest.raises(RuntimeError, match="belongs to sending, not to filling"):
        ring.hand_over(first, "filling", "free")
    ring.hand_over(first, "sending", "free")
    assert ring.acquire("filling") is first


def test_waiting_for_a_slot_ends():
    ring = make_ring()
    slot = ring.acquire("filling")
    for wake, expected in (
        (lambda: ring.hand_over(slot, "filling", "free"), slot),
        (ring.close, None),
    ):
        got, waiting = [], threading.Thread(target=lambda: got.append(ring.acquire("filling")))
        waiting.start()
        wake()
        waiting.join(30)
        assert not waiting.is_alive() and got == [expected]


def test_an_error_reaches_who_waits_for_a_slot():
    ring = make_ring()
    ring.acquire("filling")
    caught = []

    def wait():
        try:
            ring.acquire("filling")
        except ValueError as error:
            caught.append(error)

    waiting, cause = threading.Thread(target=wait), ValueError("the other thread failed")
    waiting.start()
    ring.fail(cause)
    waiting.join(30)
    assert caught == [cause]


def test_split_and_joined_views_share_a_slots_memory():
    slot = make_ring().slots[0]
    slot.hidden.copy_(torch.arange(24.0))
    assert torch.equal(torch.cat(slot.layers(3, split=True)), torch.arange(18.0).view(6, 3))
    assert torch.equal(torch.cat(slot.layers(3, split=False), dim=1), torch.arange(18.0).view(3, 6))
    assert [message.nbytes for message in slot.messages(3)] == [18 * 4 + 8, 9 * 4 + 4 + 8]  # whole marks, the end mark
    before = slot.checksum(3)
    slot.hidden[[0, 1]] = slot.hidden[[1, 0]]  # same sum, other places
    assert slot.checksum(3) != before
    slot.hidden[[0, 1]] = slot.hidden[[1, 0]]
    slot.hidden[20] = 7  # beyond the payload
    assert slot.checksum(3) == before


@pytest.mark.parametrize("staged", [True, False])
def test_a_payload_crosses_through_host_memory_or_directly(staged):
    """What a target packed is what a drafter reads, and nothing beyond the announced tokens is touched."""
    shape = dict(num_layers=2, hidden_size=3, with_last=True, dtype=torch.bfloat16, device="cpu", staged=staged)
    sent, received = (pipeline.Slot(0, 5, **shape) for _ in range(2))
    for number, part in enumerate((sent.hidden, sent.last)):
        part.copy_(torch.arange(len(part)) + 100 * number)
    received.poison()
    sent.stage_out(4)
    for there, here in zip(received.wire(4), sent.wire(4), strict=True):
        assert (there.data_ptr() != received.hidden.data_ptr()) or not staged
        there.copy_(here)
    received.stage_in(4)
    for mine, theirs in zip(received.payload(4), sent.payload(4), strict=True):
        assert torch.equal(mine, theirs)
    untouched = [memory[len(message) :] for memory, message in zip(received.memory, received.messages(4))]
    assert [part.nbytes for part in untouched] == [8 + 2 * 6 - 8 + 4, 8]


def test_two_threads_plan_at_once(data):
    """A drafter plans on its main thread and on its receiver's: both see the epochs of a planner used alone."""
    _, alone = make_planner([*SMALL, *data])
    numbers = range(5 * len(alone.epoch(0)))
    expected = [alone.locate_pack(m) for m in numbers]
    _, shared = make_planner([*SMALL, *data])
    right_epoch, seen = shared.epoch, []

    def slow_epoch(epoch):
        threading.Event().wait(0.02)  # the other thread comes in here
        return right_epoch(epoch)

    shared.epoch = slow_epoch
    threads = [threading.Thread(target=lambda: seen.append([shared.locate_pack(m) for m in numbers])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [expected] * 3


def test_header_round_trip():
    header = pipeline.Header(m=2**40, tokens=7, width=320, dtype=1, split=1, last=1, checksum=2**61, forward_us=5)
    words = header.to_tensor()
    assert words.shape == pipeline.Header.empty_tensor().shape and words.dtype == torch.int64
    assert pipeline.Header(*words.tolist()) == header
    assert pipeline.Header(*pipeline.Header.empty_tensor().tolist()).magic != pipeline.MAGIC


def test_target_times_are_those_of_the_micro_batches_taken():
    """What was received ahead belongs to a later step."""
    receiver = object.__new__(pipeline.HiddenStateReceiver)
    receiver.thread, receiver.ready, receiver.target_times = threading.current_thread(), queue.Queue(), defaultdict(float)
    receiver.fabric = SimpleNamespace(board=SimpleNamespace(doing=lambda *_: contextlib.nullcontext()))
    for m, ms in enumerate((3.0, 5.0, 7.0)):
        receiver.ready.put((m, None, {"forward": ms, "micro_batches": 1}))
    for m, forward in ((0, 3.0), (1, 8.0)):
        assert receiver.get(m) is None
        assert receiver.target_times == {"forward": forward, "micro_batches": m + 1}
