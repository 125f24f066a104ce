"""tools/plan_ranks.py and --num-target-ranks measure: the schedule, the sizes and the advice."""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import arguments, load
from pipeline_runner import SMALL, Case, run_cases

import plan_ranks
import train_dflash_pipeline as pipeline
from plan_ranks import GB, Layout, StageTimes, UserError, lay_out, simulate, steady_state


# The schedule, against processes that wait for each other -------------------------------------------------------------


def run_processes(processes: list) -> None:
    """Generators that yield a delay, or a condition to wait for, on one clock `now[0]`."""
    now, waiting = run_processes.now, [(0.0, p) for p in processes]
    now[0] = 0.0
    while waiting:
        moved = False
        for entry in list(waiting):
            due, process = entry
            if (due() if callable(due) else due <= now[0]):
                waiting.remove(entry)
                moved = True
                try:
                    asked = next(process)
                    waiting.append((asked if callable(asked) else now[0] + asked, process))
                except StopIteration:
                    pass
        if not moved:
            timers = [due for due, _ in waiting if not callable(due)]
            assert timers, "deadlock"
            now[0] = min(timers)


run_processes.now = [0.0]


def slow_schedule(topology, accumulation, depth, times, steps, in_line, zero_stage, cuda) -> dict:
    """Every thread of the pipeline as a process of its own, with counters in place of slots."""
    T, D, now = topology.num_targets, topology.num_drafters, run_processes.now
    total = steps * D * accumulation
    target_slots, drafter_slots = [depth] * T, [depth] * D
    jobs, at = [[] for _ in range(T)], defaultdict(dict)
    come, finished, host_ready = defaultdict(int), [0], [1] * D

    def send(t, m):
        yield times.pack[m]
        at["announced"][m] = now[0]
        yield lambda: m in at["arrived"]
        target_slots[t] += 1

    def target(t):
        for m in range(total):
            if topology.target_of(m) == t:
                at["forward_start"][m] = now[0]
                yield times.forward[m]
                at["forward_end"][m] = now[0]
                yield lambda: target_slots[t] > 0
                target_slots[t] -= 1
                if in_line:
                    yield from send(t, m)
                else:
                    jobs[t].append(m)
                at["target_free"][m] = now[0]

    def sender(t):
        for _ in range(sum(topology.target_of(m) == t for m in range(total))):
            yield lambda: jobs[t]
            yield from send(t, jobs[t].pop(0))

    def receiver(d):
        for j, m in enumerate(range(d, total, D)):
            if in_line:
                yield lambda: host_ready[d] > j
            yield lambda: m in at["announced"]
            yield lambda: drafter_slots[d] > 0
            drafter_slots[d] -= 1
            at["granted"][m] = now[0]
            yield times.transfer[m]
            at["arrived"][m] = now[0]

    def drafter(d):
        for j, m in enumerate(range(d, total, D)):
            last = j % accumulation == accumulation - 1
            at["draft_ready"][m] = now[0]
            yield lambda: m in at["arrived"]
            at["draft_start"][m] = now[0]
            yield times.draft_forward[m]
            if cuda and not last:
                host_ready[d] += 1
            yield times.draft_backward[m]
            at["draft_end"][m] = now[0]
            if zero_stage >= 2 or last:
                come[j] += 1
                yield lambda: come[j] == D
            at["round_end"][m] = now[0]
            drafter_slots[d] += 1
            if last:
                yield times.step[j // accumulation]
                at["step_end"][j // accumulation] = now[0]
            if last or not cuda:
                host_ready[d] += 1

    roles = [target(t) for t in range(T)] + [receiver(d) for d in range(D)] + [drafter(d) for d in range(D)]
    run_processes(roles + ([] if in_line else [sender(t) for t in range(T)]))
    return {name: [values[i] for i in sorted(values)] for name, values in at.items() if name != "announced"}


def random_times(rng, total: int, steps: int) -> StageTimes:
    """Whole milliseconds, so that sums are exact; sometimes one stage rules."""
    most = rng.choice([1, 5, 40], size=6)
    stages = [rng.integers(0, most[i] + 1, total).astype(float) for i in range(5)]
    return StageTimes(*stages, rng.integers(0, most[5] + 1, steps).astype(float))


@pytest.mark.parametrize("seed", range(60))
def test_the_schedule_is_that_of_threads_that_wait_for_each_other(seed):
    rng = np.random.default_rng(seed)
    T, D, accumulation, depth = (int(rng.integers(1, most)) for most in (5, 4, 4, 4))
    steps = int(rng.integers(2, 6))
    times = random_times(rng, steps * D * accumulation, steps)
    layout = Layout(T, 1, D, 128, 8, accumulation, 2)
    placement = str(rng.choice(["spread", "targets-first"]))
    topology = lay_out(layout, per_node=int(rng.integers(1, T + D + 1)), placement=placement)
    switches = dict(in_line=bool(rng.random() < 0.4), zero_stage=int(rng.integers(1, 4)), cuda=bool(rng.random() < 0.5))
    trace = simulate(topology, accumulation, depth, times, steps, **switches)
    expected = slow_schedule(topology, accumulation, depth, times, steps, **switches)
    assert expected.keys() == vars(trace).keys()
    for name, values in expected.items():
        assert getattr(trace, name).tolist() == values, name


def topology(targets: int, drafters: int) -> pipeline.Topology:
    return lay_out(Layout(targets, 1, drafters, 128, 8, 1, 2), targets + drafters, "spread")


@pytest.mark.parametrize("targets, drafters, accumulation", [(1, 1, 1), (5, 3, 2), (2, 6, 1), (13, 3, 4)])
def test_the_slower_role_sets_the_pace(targets, drafters, accumulation):
    slow_target = StageTimes(900.0, 1.0, 1.0, 3.0, 7.0, 2.0)
    flow = steady_state(topology(targets, drafters), accumulation, 2, slow_target)
    assert flow.micro_batches_per_s == pytest.approx(targets / 0.9, rel=0.01) and flow.target_wait < 0.01
    slow_drafter = StageTimes(3.0, 0.0, 0.0, 200.0, 400.0, 50.0)
    flow = steady_state(topology(targets, drafters), accumulation, 2, slow_drafter)
    step_s = accumulation * 0.6 + 0.05
    assert flow.step_s == pytest.approx(step_s)
    assert flow.micro_batches_per_s == pytest.approx(drafters * accumulation / step_s)
    assert flow.drafter_wait_data == flow.drafter_wait_others == 0
    assert flow.target_wait == pytest.approx(1 - 0.003 * flow.micro_batches_per_s / targets)


def test_one_slot_and_one_rank_of_each_by_hand():
    # with one slot the next transfer waits for the backward pass to end, then the drafter waits for the transfer;
    # the target is done long before
    flow = steady_state(topology(1, 1), 1, 1, StageTimes(10.0, 1.0, 5.0, 20.0, 40.0, 3.0))
    assert flow.step_s == pytest.approx((5 + 20 + 40 + 3 - 3) / 1e3)  # the transfer runs beside the step's 3 ms
    # in line on both sides: target 10, pack 1, transfer 5, then the same again, while the drafter trains
    flow = steady_state(topology(1, 1), 1, 2, StageTimes(50.0, 1.0, 5.0, 20.0, 10.0, 3.0), in_line=True)
    assert flow.step_s == pytest.approx(0.056)


# Two H200s, one rank of each role, N = 4,096 (4,073 tokens of text a micro-batch): README, "Measured". ms and tokens/s.
MEASURED_ON_TWO_GPUS = [
    (333, 2.2, 136, 28, False, 12_109), (385, 3.0, 130, 29, False, 10_508),
    (379, 1.0, 131, 29, True, 10_743), (372, 1.4, 131, 30, True, 10_946),
]  # fmt: skip


@pytest.mark.parametrize("forward, pack, draft, step, in_line, tokens_per_s", MEASURED_ON_TWO_GPUS)
def test_prediction_of_the_measured_two_gpu_runs(forward, pack, draft, step, in_line, tokens_per_s):
    transfer = 0.168 / 234 * 1e3
    times = StageTimes(forward, pack, transfer, draft / 3, draft * 2 / 3, step)
    flow = steady_state(topology(1, 1), 1, 2, times, in_line=in_line)
    assert 4073 * flow.micro_batches_per_s == pytest.approx(tokens_per_s, rel=0.1)


# Roles on nodes -------------------------------------------------------------------------------------------------------


def test_states_stay_inside_nodes_when_every_node_has_both_roles_in_proportion():
    even = lay_out(Layout(10, 1, 6, 128, 8, 1, 2), per_node=8, placement="spread")
    assert not even.crossings().any()
    apart = lay_out(Layout(8, 1, 8, 128, 8, 1, 2), per_node=8, placement="targets-first")
    assert apart.crossings().all()


def test_a_target_of_several_ranks_counts_once():
    pairs = lay_out(Layout(3, 2, 2, 128, 8, 1, 2), per_node=4, placement="targets-first")  # TT TT | TT D D
    assert (pairs.num_targets, pairs.num_drafters) == (3, 2)
    assert [pairs.node_of("target", t) for t in range(3)] == [0, 0, 1] and pairs.node_of("drafter", 0) == 1


def test_shared_targets_lie_as_the_pipeline_lays_them():
    layout = Layout(3, 3, 7, 128, 8, 1, 2)  # on two nodes of eight: TTT DDDDD, TTT TTT DD
    assert [lay_out(layout, 8, "spread").node_of("target", t) for t in range(3)] == [0, 1, 1]
    with pytest.raises(UserError, match="room for 2 targets, not for 3"):
        lay_out(Layout(3, 5, 1, 128, 8, 1, 2), 8, "spread")


def test_the_command_counts_target_ranks_as_the_pipeline_does():
    options = argparse.Namespace(gpus=8, gpus_per_node=8)
    command = plan_ranks.command(Layout(2, 2, 4, 128, 8, 1, 2), options, ["--target", "toy"])
    asked = {name: re.search(rf"--{name} (\d+)", command)[1] for name in ("num-target-ranks", "target-tp")}
    environment = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    with mock.patch.dict(os.environ, environment):
        topology = pipeline.read_topology(asked["num-target-ranks"], int(asked["target-tp"]))
    assert (topology.num_targets, topology.num_drafters) == (2, 4)


# Sizes ----------------------------------------------------------------------------------------------------------------


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_sizes_are_those_of_the_real_modules(target_folder):
    args = arguments(target=target_folder("qwen3"), num_draft_layers=2, block_size=8)
    shapes = plan_ranks.read_shapes(args)
    config, model = load(args.target.target)
    assert shapes.all_weights == count(model)
    runner = pipeline.TargetRunner(model, shapes.drafter.target_layer_ids, False, torch.device("cpu"))
    layers = runner.decoder.layers  # those that stay
    assert (shapes.layers, shapes.layer_weights, shapes.active_weights) == (len(layers), count(layers), count(layers))
    drafter = pipeline.DFlashDrafter(shapes.drafter)
    assert shapes.drafter_weights == count(drafter)
    moments = 2 * sum(p.nbytes for p in drafter.parameters())  # fp32, as the drafter is here
    ends = pipeline.load_frozen_ends(args.target, config, torch.device("cpu"), torch.bfloat16)
    ring = pipeline.SlotRing(
        3, tokens=256, num_layers=5, hidden_size=32, with_last=False, dtype=torch.float32, device="cpu"
    )  # fmt: skip
    for stage, adam_shares, gradient_shares, weight_shares in ((1, 4, 1, 1), (2, 4, 4, 1), (3, 4, 4, 4)):
        memory = plan_ranks.drafter_memory(shapes, 256, 16, depth=3, drafters=4, stage=stage)
        bf16 = sum(p.to(torch.bfloat16).nbytes for p in drafter.parameters())
        assert memory["weights"] * GB == pytest.approx(bf16 / weight_shares)
        assert memory["masters"] * GB == pytest.approx(2 * bf16 / adam_shares)
        assert memory["adam"] * GB == pytest.approx(moments / adam_shares)
        assert memory["gradients"] * GB == pytest.approx(bf16 + 2 * bf16 / gradient_shares + 4 * bf16)
        assert memory["frozen ends"] * GB == pytest.approx(ends.embedding.nbytes + ends.head_weight.nbytes)
        assert memory["slots"] * GB == pytest.approx(sum(slot.hidden.nbytes for slot in ring.slots))
    target = plan_ranks.target_memory(shapes, 256, depth=3, tp=1)
    assert target["slots"] == memory["slots"]
    embedding = runner.decoder.get_input_embeddings().weight.numel()
    assert target["weights"] * GB == pytest.approx(4 * (count(layers) + embedding))


def test_only_chosen_experts_count_as_work(tmp_path):
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        dtype="bfloat16",
    ).save_pretrained(tmp_path)  # fmt: skip
    shapes = plan_ranks.read_shapes(arguments(target=str(tmp_path)))
    experts = shapes.layers * 8 * 3 * 32 * 16
    assert shapes.layer_weights - shapes.active_weights == experts * 6 / 8


def planning(target: str, fp8=False, **options) -> plan_ranks.Planning:
    defaults = vars(plan_ranks.make_parser().parse_args([])) | {"tokens_per_step": 4096}
    args = arguments(target=target, num_draft_layers=2, target_fp8=fp8)
    return plan_ranks.Planning(argparse.Namespace(**defaults | options), args, None)


def test_a_target_too_large_for_one_gpu_gets_the_smallest_number_of_ranks(monkeypatch, target_folder):
    folder = target_folder("qwen3")
    shapes = planning(folder).shapes
    monkeypatch.setattr(plan_ranks, "RESERVED_GB", 0.0)
    fits_two = plan_ranks.target_peak(shapes, 2048, 2, tp=2)
    monkeypatch.setitem(plan_ranks.GPUS, "h200", dataclasses.replace(plan_ranks.GPUS["h200"], memory_gb=fits_two))
    assert planning(folder, memory_share=1.0).tp == 2
    with pytest.raises(UserError, match="--target-tp 1 will not do: choose from 2"):
        planning(folder, memory_share=1.0, target_tp=1)
    with pytest.raises(UserError, match="even as one of 2"):  # its 2 key-value heads cannot be shared further
        planning(folder, memory_share=0.01)


def test_a_target_in_fp8(target_folder):
    """Faster, its layers' weights a byte each; alone on its GPU, and not on one that cannot."""
    folder = target_folder("qwen3")
    plain, fp8 = planning(folder), planning(folder, fp8=True)
    assert plain.estimate.target_ms(1024, 64, 1) == pytest.approx(plan_ranks.FP8_GAIN * fp8.estimate.target_ms(1024, 64, 1))
    weights = [plan_ranks.target_memory(x.shapes, 1024, 2, 1)["weights"] * GB for x in (plain, fp8)]
    assert weights[0] - weights[1] == pytest.approx((plain.shapes.element_bytes - 1) * plain.shapes.layer_weights)
    with pytest.raises(UserError, match="--target-tp 2 will not do: choose from 1"):
        planning(folder, fp8=True, target_tp=2)
    with pytest.raises(UserError, match="--target-fp8: an A100 does not"):
        planning(folder, fp8=True, gpu="a100")


def test_the_plan_uses_every_gpu_and_what_is_fixed_stays(target_folder):
    fixed = planning(target_folder("qwen3"), gpus=8, num_target_ranks=2, tokens_per_micro_batch=512, zero_stage=1)
    chosen = {(p.layout.targets, p.layout.drafters, p.layout.tokens, p.layout.zero_stage) for p in fixed.search()}
    assert chosen == {(2, 6, 512, 1)}
    free = planning(target_folder("qwen3"), gpus=8).search()
    assert all(p.layout.targets + p.layout.drafters == 8 for p in free)
    assert free[0].tokens_per_s >= 0.99 * max(p.tokens_per_s for p in free)
    shared = planning(target_folder("qwen3"), gpus=9, gpus_per_node=3, target_tp=2)  # a node has room for one target
    assert [t for t in range(1, 5) if shared.has_room(t)] == [1, 2, 3]
    assert all(p.layout.targets <= 3 for p in shared.search())
    with pytest.raises(UserError, match="--tokens-per-micro-batch is 3000: on CUDA it must be a multiple of 128"):
        planning(target_folder("qwen3"), tokens_per_micro_batch=3000)
    with pytest.raises(UserError, match="--num-target-ranks 3: no multiple of --target-tp 2"):
        planning(target_folder("qwen3"), gpus=8, num_target_ranks=3, target_tp=2).search()
    with pytest.raises(UserError, match="8 of 8 GPUs leaves no drafter"):
        planning(target_folder("qwen3"), gpus=8, num_target_ranks=8).search()


# The better split -----------------------------------------------------------------------------------------------------


def test_every_split_with_its_nearest_accumulation():
    splits = pipeline.rank_splits(8, 12, target_ms=100.0, micro_ms=60.0, step_ms=30.0)
    assert sorted(s.num_targets for s in splits) == [*range(1, 8)]
    for s in splits:
        assert s.num_drafters == 8 - s.num_targets
        assert s.accumulation == {1: 2, 2: 2, 3: 2, 4: 3, 5: 4, 6: 6, 7: 12}[s.num_targets]
        assert s.target_rate == pytest.approx(10 * s.num_targets)
        assert s.drafter_rate == pytest.approx(s.num_drafters * s.accumulation / (0.06 * s.accumulation + 0.03))
    assert [s.rate for s in splits] == sorted((s.rate for s in splits), reverse=True)
    of_three_ranks = pipeline.rank_splits(7, 4, 1.0, 1.0, 0.0, target_tp=3)
    assert [(s.num_targets, s.num_drafters) for s in of_three_ranks] == [(1, 4), (2, 1)]


def advice(targets: int, drafters: int, accumulation: int, *times: float) -> str:
    args = arguments(gradient_accumulation_steps=accumulation)
    whole = pipeline.Topology(0, targets + drafters, 0, targets + drafters, targets)
    return pipeline.SplitAdvisor(whole, None, args).advice(*times)


def test_advice_in_words():
    assert advice(5, 3, 4, 100.0, 58.0, 8.0).endswith(": targets 5 : drafters 3 is balanced within 3 %: keep")
    assert advice(4, 4, 3, 100.0, 30.0, 0.0).endswith(
        ": 6 : 2 would give about 1.50x of 4 : 4: start again with --num-target-ranks 6 "
        "--gradient-accumulation-steps 6 (the global batch stays at 12 micro-batches, so the run may go on from its "
        "checkpoint)"
    )
    assert advice(6, 2, 1, 10.0, 90.0, 0.0).endswith(
        ": 1 : 7 would give about 3.50x of 6 : 2: start again with --num-target-ranks 1 "
        "--gradient-accumulation-steps 1 (no accumulation keeps the global batch of 2 micro-batches with 7 drafters: "
        "it would be 7, so start anew in another --output-dir)"
    )


class Alone:
    """A control group whose reductions mix in another drafter's numbers."""

    def __init__(self, other: list[list[float]]):
        self.other = [torch.tensor(x, dtype=torch.float64) for x in other]

    def allreduce(self, tensors, operation):
        other = self.other.pop(0)
        mixed = torch.minimum(tensors[0], other) if operation == torch.distributed.ReduceOp.MIN else tensors[0] + other
        tensors[0].copy_(mixed)
        return SimpleNamespace(wait=lambda: None)


def test_a_drafters_time_is_that_of_the_one_that_waited_least():
    def span(ms):
        return SimpleNamespace(ms=lambda: ms)

    record = SimpleNamespace(
        spans={"forward": [span(10.0), span(12.0)], "backward": [span(90.0), span(21.0)],
               "step": [span(0.0), span(7.0)]},
        wall_s=0.2, receive_wait_ms=50.0, target_times=defaultdict(float, forward=300.0, pack=6.0, micro_batches=3),
    )  # fmt: skip
    other = [[11.0, 11.0, 20.0, 80.0, 0.0, 5.0, 100.0], [100.0, 1.0]]
    advisor = pipeline.SplitAdvisor(topology(5, 3), Alone(other), arguments(gradient_accumulation_steps=2))
    # micro-batch: (10 + 11 + 20 + 21) / 2; step: 0 + 5, and what drafter 0 did beside: 200 - 50 - 140
    assert advisor.step_times(record) == [100.0, 31.0, 15.0]


# Measured times -------------------------------------------------------------------------------------------------------


def write_run(folder: Path, steps: int = 10, **settings) -> Path:
    """A run of 5 : 3 ranks, accumulation 2: 6 micro-batches of 1,000 tokens a step, of which drafter 0 has 2."""
    config = arguments(
        target="toy", tokens_per_micro_batch=1024, anchors_per_micro_batch=16, gradient_accumulation_steps=2,
        num_target_ranks="5", num_draft_layers=3, **settings,
    ).flat()  # fmt: skip
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(config))
    ms = {"target_forward": 200.0, "pack": 4.0, "send_wait": 1.0, "receive_wait": 30.0, "forward": 20.0,
          "backward": 40.0, "step": 8.0}  # fmt: skip
    records = [
        {"step": step, "tokens": 6000, "tokens_per_s": 60_000.0, "drafter_tokens_per_s": 2000 / 0.068, "ms": ms}
        for step in range(1, steps + 1)
    ]
    records[0]["ms"] = {name: 100 * value for name, value in ms.items()}  # the start is not counted
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_stage_times_of_a_run(tmp_path):
    measured = plan_ranks.read_rates(write_run(tmp_path / "run"))
    assert (measured.forward, measured.pack) == (100.0, 2.0)
    assert (measured.draft_forward, measured.draft_backward) == (10.0, 20.0)
    assert measured.step == pytest.approx(8 + 100 - 30 - 68)
    assert (measured.targets, measured.drafters, measured.accumulation, measured.zero_stage) == (5, 3, 2, 2)
    assert (measured.tokens, measured.tokens_per_micro_batch, measured.drafters_waited) == (1000.0, 1024, True)
    assert measured.flags == ("--target", "toy", "--num-draft-layers", "3")
    assert plan_ranks.read_rates(tmp_path / "run" / "metrics.jsonl") == measured


def test_stage_times_of_a_bench(tmp_path):
    results = {
        "target": {"tokens_per_s": 10_000.0, "tokens_per_micro_batch": 1000.0,
                   "stages_ms": {"forward": 95.0, "pack": 2.0}},
        "drafter": {"tokens_per_s": 20_000.0, "tokens_per_micro_batch": 1000.0,
                    "stages_ms": {"forward": 10.0, "backward": 30.0, "step": 4.0}},
        "pipeline": {"tokens_per_s": 9_900.0},
        "settings": {"ranks": {"target": 2, "drafter": 1}, "flags": ["--gradient-accumulation-steps", "2"]},
    }  # fmt: skip
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(results))
    measured = plan_ranks.read_rates(path)
    assert (measured.forward, measured.pack) == (100.0, 2.0)
    assert (measured.draft_forward, measured.draft_backward) == (10.0, 30.0)
    assert measured.step == pytest.approx(2 * (50 - 40))
    assert (measured.targets, measured.drafters, measured.tokens_per_s) == (2, 1, 9_900.0)
    del results["drafter"]
    path.write_text(json.dumps(results))
    with pytest.raises(UserError, match="no measurement of the drafter alone"):
        plan_ranks.read_rates(path)


# 3 drafters: auto gives 7 ranks 4 : 3 and 8 ranks 5 : 3
@pytest.mark.parametrize("flag, drafters, tp, targets", [
    ("4", 3, 1, 4), ("4", 3, 2, 2), ("auto", 1, 1, 1), ("auto", 3, 1, None), ("auto", 2, 2, 1), ("measure", 1, 1, 1),
])  # fmt: skip
def test_the_targets_of_a_run(flag, drafters, tp, targets):
    assert plan_ranks.targets_of(flag, drafters, tp) == targets


@pytest.mark.parametrize("steps, broken, complaint", [(4, None, "4 steps are too few"), (9, "metrics.jsonl", "Expect")])
def test_a_run_that_cannot_be_read_is_refused(tmp_path, steps, broken, complaint):
    run = write_run(tmp_path / "run", steps)
    if broken is not None:
        (run / broken).write_text("{")
    with pytest.raises(UserError, match=f"--rates .*run: .*{complaint}"):
        plan_ranks.read_rates(run)


def test_the_tool_from_a_run_to_a_command_that_the_pipeline_takes(tmp_path, monkeypatch, capsys):
    flags = ["--rates", str(write_run(tmp_path / "run")), "--gpus", "16", "--json", str(tmp_path / "plan.json")]
    monkeypatch.setattr(sys, "argv", ["plan_ranks.py", *flags])
    plan_ranks.main()
    shown = capsys.readouterr().out
    # 3 drafters do 6 micro-batches in 2 * 30 + 40 ms, 5 targets 5 in 100 ms: the targets are slower
    assert re.search(r"5 : 3 as measured: 60,000 tokens/s; predicted from the stage times: (49,9\d\d|50,000)", shown)
    plan = json.loads((tmp_path / "plan.json").read_text())
    best = plan["layouts"][0]
    assert best["tokens_per_s"] >= 0.99 * max(x["tokens_per_s"] for x in plan["layouts"])
    assert best["targets"] + best["drafters"] == 16 and plan["command"] in shown
    launcher, flags = plan["command"].split(" train_dflash_pipeline.py ")
    assert launcher.startswith("torchrun --nnodes 2 --nproc_per_node 8 ")
    flags = [flag.replace("ds_configs", str(pipeline.REPOSITORY / "ds_configs")) for flag in flags.split()]
    args = pipeline.parse_arguments(flags)
    assert (args.pipeline.num_target_ranks, args.data.tokens_per_micro_batch) == (str(best["targets"]), 1024)
    assert args.drafter.num_draft_layers == 3


def test_mistakes_are_one_line():
    for flags, complaint in (
        (["--gpus", 1], "at least 2 GPUs"), (["--gpus", 12], "no multiple"), (["--memory-share", "2"], "not exceed 1"),
        (["--rates", "nowhere"], "--rates nowhere: "),
    ):  # fmt: skip
        with pytest.raises(UserError, match=complaint):
            options, _ = plan_ranks.make_parser().parse_known_args([*map(str, flags)])
            plan_ranks.check_options(options)
            plan_ranks.read_rates(options.rates)


# Real runs ------------------------------------------------------------------------------------------------------------

# Sleeps make the roles' speeds plain; every thread notes when it began and ended what.
NOTE_TIMES = """
import json, os, sys, time
P, path = pipeline, os.path.join(os.path.dirname(sys.argv[2]), "events." + os.environ["RANK"])
TARGET_S, DRAFTER_S = {target_s}, {drafter_s}
def note(*event):
    with open(path, "a") as file:
        file.write(json.dumps([*event, time.monotonic()]) + "\\n")
def noted(owner, name, before, after, sleep_s=0.0):
    right = getattr(owner, name)
    def wrapped(self, *args, **keywords):
        note(*before(*args))
        time.sleep(sleep_s)
        result = right(self, *args, **keywords)
        note(*after(*args))
        return result
    setattr(owner, name, wrapped)
noted(P.TargetRunner, "forward", lambda plan: ("forward", plan.m), lambda plan: ("forwarded", plan.m), TARGET_S)
noted(P.SlotRing, "acquire", lambda owner: ("acquire", owner), lambda owner: ("acquired", owner))
noted(P.HiddenStateSender, "_pack", lambda job: ("pack", job.plan.m), lambda job: ("packed", job.plan.m))
noted(P.HiddenStateReceiver, "_receive_payload", lambda link, m, *_: ("grant", m), lambda link, m, *_: ("arrived", m))
noted(P.HiddenStateReceiver, "get", lambda m: ("get", m), lambda m: ("got", m), 0.0)
noted(P.DrafterTrainer, "settle", lambda b: ("train", b.plan.m), lambda b: ("trained", b.plan.m), DRAFTER_S)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    common = [*SMALL, "--resume", "never", "--gradient-accumulation-steps", "1"]
    few = [*common, "--num-target-ranks", "measure", "--max-steps"]
    cases = [
        Case("advised", [*few, "11"], NOTE_TIMES.format(target_s=0.15, drafter_s=0.0)),
        Case("too short", [*few, "3"]),
        Case("balanced", [*common, "--num-target-ranks", "2", "--max-steps", "25"],
             NOTE_TIMES.format(target_s=0.08, drafter_s=0.03)),
    ]
    return run_cases(3, cases, tmp_path_factory.mktemp("plan") / "cases")


def test_a_run_names_the_better_split_once(runs):
    result = runs["advised"].check_ok()
    said = re.findall(r"ranks: a target needs.*", "\n".join([*result.out, *result.err]))
    assert len(said) == 1 and re.search(
        r"2 : 1 would give about \d\.\d\dx of 1 : 2: start again with --num-target-ranks 2 "
        r"--gradient-accumulation-steps 2 \(the global batch stays at 2 micro-batches, so the run may go on from its "
        r"checkpoint\)", said[0]
    ), said  # fmt: skip
    assert float(re.search(r"a target needs ([\d.]+) ms", said[0])[1]) >= 150


def test_a_run_too_short_to_measure_says_so(runs):
    result = runs["too short"].check_ok()
    assert "ranks: 3 steps are too few to measure a split: 10 are needed" in "".join([*result.out, *result.err])


def test_stage_times_are_found_in_a_real_runs_folder(runs):
    measured = plan_ranks.read_rates(runs["balanced"].check_ok().output_dir)
    assert (measured.targets, measured.drafters, measured.accumulation, measured.zero_stage) == (2, 1, 1, 2)
    assert measured.forward >= 80 and 200 < measured.tokens <= 256 and not measured.drafters_waited


def test_a_real_run_takes_as_long_as_its_stages_say(runs):
    """The stage times noted by every thread, laid into the schedule, end when the run itself did."""
    result, at = runs["balanced"].check_ok(), defaultdict(dict)
    place, whole, total = result.output_dir.parent, topology(2, 1), 25
    for rank in range(3):
        m = None
        for name, what, when in map(json.loads, (place / f"events.{rank}").read_text().splitlines()):
            if isinstance(what, int):
                at[name][what] = when  # a target computes its first micro-batch twice: the second time counts
                m = what if name == "forwarded" else m
            elif what == "filling":
                at[name][m] = when
    start = min(at["forward"].values())
    # a target is busy from one slot to asking for the next
    forward = [at["acquire"][m] - (at["acquired"][m - 2] if m > 1 else at["forward"][m]) for m in range(total)]
    times = StageTimes(
        forward=np.array(forward),
        pack=np.array([at["packed"][m] - at["pack"][m] for m in range(total)]),
        transfer=np.array([at["arrived"][m] - at["grant"][m] for m in range(total)]),
        draft_forward=np.array([at["trained"][m] - at["got"][m] for m in range(total)]),
        draft_backward=0.0,
        step=np.array([at["get"].get(m + 1, at["trained"][m]) - at["trained"][m] for m in range(total)]),
    )
    trace = simulate(whole, 1, 2, times, total, cuda=False)
    real = np.array([at["trained"][m] for m in range(total)]) - start
    # both targets begin at the same time in the schedule, and about so in the run
    offset = real[0] - trace.round_end[0]
    assert np.abs(trace.round_end + offset - real).max() <= 0.1 * real[-1]
