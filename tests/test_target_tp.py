"""--target-tp: several ranks hold one target. Where its ranks lie, what is refused, and real runs on the CPU."""

import itertools
import os
import subprocess

import pytest
import torch
import train_dflash_pipeline as pipeline
from helpers import arguments
from pipeline_runner import REPOSITORY, SMALL, Case, run_cases
from test_families import FAMILIES, randomise, save_random
from train_dflash_pipeline import Topology, UserError, check_target_fits, check_target_tp, target_tp_degrees

import check_pipeline_equiv as equiv  # isort: skip
import check_target_tp as check_target_tp_tool  # isort: skip

GIB = 2**30

# Where the ranks lie --------------------------------------------------------------------------------------------------


def read_topology(monkeypatch, rank: int, world: int, num_target_ranks: str, target_tp: int) -> Topology:
    for name, value in dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world).items():
        monkeypatch.setenv(name, str(value))
    return pipeline.read_topology(num_target_ranks, target_tp)


def test_ranks_of_a_target_lie_side_by_side_and_only_its_leader_meets_drafters(monkeypatch):
    ranks = [read_topology(monkeypatch, rank, 8, "6", 3) for rank in range(8)]
    assert [r.role for r in ranks] == ["target", "target shard", "target shard"] * 2 + ["drafter"] * 2
    assert [r.role_rank for r in ranks] == [0, 0, 1, 1, 2, 3, 0, 1]
    assert [r.target for r in ranks[:6]] == [0, 0, 0, 1, 1, 1]
    assert [r.shard_peers for r in ranks[:6]] == [[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]]
    groups = [("target0", i, 3) for i in range(3)] + [("target1", i, 3) for i in range(3)]
    assert [r.default_group for r in ranks] == [*groups, ("drafter", 0, 2), ("drafter", 1, 2)]
    assert all((r.num_targets, r.num_drafters, r.pairs()) == (2, 2, [(0, 0), (1, 1)]) for r in ranks)
    assert [ranks[0].target_of(m) for m in range(4)] == [0, 1, 0, 1]
    assert (ranks[0].global_rank("target", 1), ranks[0].global_rank("drafter", 0)) == (3, 6)
    assert str(ranks[5]) == "target shard 3 (rank 5)"


def test_without_it_the_group_of_a_rank_is_its_role(monkeypatch):
    ranks = [read_topology(monkeypatch, rank, 4, "3", 1) for rank in range(4)]
    assert [r.default_group for r in ranks] == [("target", 0, 3), ("target", 1, 3), ("target", 2, 3), ("drafter", 0, 1)]


@pytest.mark.parametrize("world, target_tp, targets", [(8, 2, 2), (8, 4, 1), (8, 5, 1), (16, 4, 2), (3, 2, 1)])
def test_auto_takes_whole_targets_out_of_five_eighths(monkeypatch, world, target_tp, targets):
    assert read_topology(monkeypatch, 0, world, "auto", target_tp).num_targets == targets


@pytest.mark.parametrize(
    "world, targets, target_tp, complaint",
    [(8, "3", 2, "--target-tp 2 does not divide the 3 target ranks"), (2, "auto", 2, "leaves 0 drafter ranks")],
)
def test_targets_that_cannot_be_laid_out_are_refused(monkeypatch, world, targets, target_tp, complaint):
    with pytest.raises(UserError, match=complaint):
        read_topology(monkeypatch, 0, world, targets, target_tp)


@pytest.mark.parametrize(
    "nodes, num_targets, placement, leaders",
    [([4, 4], 2, "spread", (0, 4)), ([4, 4], 2, "targets-first", (0, 2)), ([3, 3], 2, "spread", (0, 3)),
     ([5, 4], 3, "targets-first", (0, 2, 5)), ([8], 2, "spread", (0, 2))],
)  # fmt: skip
def test_no_target_spans_two_nodes(nodes, num_targets, placement, leaders):
    nodes = tuple(node for node, size in enumerate(nodes) for _ in range(size))
    assert pipeline.place_sharded_targets(nodes, num_targets, placement, 2) == leaders
    assert all(nodes[leader] == nodes[leader + 1] for leader in leaders)


def test_more_targets_than_the_nodes_have_room_for_are_refused():
    with pytest.raises(UserError, match="the nodes have room for 2 targets, not for 3"):
        pipeline.place_sharded_targets((0, 0, 0, 1, 1, 1, 2), 3, "spread", 2)


# What is refused ------------------------------------------------------------------------------------------------------


def toy_config(**changes):
    config = pipeline.load_target_config(arguments(target="toy").target)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_degrees_divide_all_that_is_split():
    assert target_tp_degrees(toy_config()) == [1, 2]  # 2 heads of keys and values
    wide = toy_config(num_attention_heads=24, num_key_value_heads=12, intermediate_size=96, vocab_size=384)
    assert target_tp_degrees(wide) == [1, 2, 3, 4, 6, 12]
    wide.moe_intermediate_size = 64
    assert target_tp_degrees(wide) == [1, 2, 4]


def test_what_transformers_cannot_share_is_refused():
    check_target_tp(toy_config(), 2)
    with pytest.raises(UserError, match=r"--target-tp 4: the widths of this target can be shared by 1, 2 ranks"):
        check_target_tp(toy_config(), 4)
    for plan in (None, {"embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}):
        without = toy_config(base_model_tp_plan=plan)
        check_target_tp(without, 1)
        with pytest.raises(UserError, match="--target-tp 2: transformers has no plan to share the layers of a qwen3"):
            check_target_tp(without, 2)


@pytest.mark.parametrize(
    "need, free, target_tp, message",
    [(90, 100, 1, None), (91, 100, 1, "need 91.0 GiB, more .* of the 100.0 GiB free.*--target-tp 2 would do"),
     (180, 100, 2, None), (181, 100, 2, "need 181.0 GiB / 2, more .*--target-tp 4 would do"),
     (361, 100, 4, "no degree of tensor parallelism does"), (7, 2, 1, "--target-tp 4 would do")],
)  # fmt: skip
def test_target_that_does_not_fit_is_refused_with_the_degree_that_would(need, free, target_tp, message):
    degrees = [1, 2, 4]
    if message is None:
        check_target_fits(need * GIB, free * GIB, target_tp, degrees)
    else:
        with pytest.raises(UserError, match=message):
            check_target_fits(need * GIB, free * GIB, target_tp, degrees)


def test_bytes_of_a_target_are_those_of_its_parameters():
    args, config = arguments(target="toy").target, toy_config()
    model = pipeline.load_target(args, config, torch.device("cpu"))
    assert pipeline.target_bytes(args, config) == sum(p.numel() * 4 for p in model.parameters())
    config.dtype = torch.bfloat16
    assert pipeline.target_bytes(args, config) == sum(p.numel() * 2 for p in model.parameters())


# Runs -----------------------------------------------------------------------------------------------------------------

STOP = """
right_step = pipeline.DrafterTrainer.train_step
def step_that_asks_for_the_end(self, step):
    if step == 1:
        self.stop_requested.set()
    return right_step(self, step)
pipeline.DrafterTrainer.train_step = step_that_asks_for_the_end
"""
DIE = """
import os, signal
right_forward = pipeline.TargetRunner.forward
def last_forward(self, plan):
    if os.environ["RANK"] == "1" and plan.m == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return right_forward(self, plan)
pipeline.TargetRunner.forward = last_forward
"""
LOOK = """
right_start = pipeline.Fabric.start
def start_and_say(self):
    import gc, torch
    held = {type(p.data).__name__ for x in gc.get_objects() if isinstance(x, torch.nn.Linear) for p in x.parameters()}
    sizes = {tuple(e.head_weight.shape) for e in gc.get_objects() if isinstance(e, pipeline.FrozenEnds)}
    print("holds", sorted(held), sorted(sizes))
    right_start(self)
pipeline.Fabric.start = start_and_say
"""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # transformers shards onto any GPU that it sees
SWITCHES = list(itertools.product((True, False), repeat=2))


def test_a_target_of_two_ranks_trains_as_a_whole_one_does(tmp_path):
    """The short form of what follows, with one drafter."""
    common = [*SMALL, "--train-data", str(equiv.write_small_data(tmp_path / "train.jsonl")), "--max-steps", "3"]
    whole = run_cases(2, [Case("whole", [*common, "--num-target-ranks", "1"])], tmp_path / "whole")["whole"].check_ok()
    flags = [*common, "--num-target-ranks", "2", "--target-tp", "2"]
    shared = run_cases(3, [Case("shared", flags, LOOK, NO_GPU)], tmp_path / "shared")["shared"].check_ok()
    assert "DTensor" in shared.out[0] + shared.out[1]
    pairs = [[(m["loss"], m["grad_norm"]) for m in result.metrics] for result in (whole, shared)]
    assert len(pairs[0]) == 3 and pairs[1] == [pytest.approx(pair, rel=1e-4) for pair in pairs[0]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two drafters and a target of one rank (3 ranks in all), or of two: name -> result."""
    work = tmp_path_factory.mktemp("tp")
    common = [*SMALL, "--train-data", str(equiv.write_small_data(work / "train.jsonl")), "--max-steps", "3"]
    whole = run_cases(3, [Case("whole", [*common, "--num-target-ranks", "1"])], work / "whole")
    shared = [*common, "--num-target-ranks", "2", "--target-tp", "2"]
    cases = []
    for number, (post, split) in enumerate(SWITCHES):
        flags = ["--async-postprocess" if post else "--no-async-postprocess"]
        flags += ["--split-fc-layers" if split else "--no-split-fc-layers"]
        cases.append(Case(f"switches{number}", [*shared, *flags], LOOK if number == 0 else "", NO_GPU))
    cases += [
        Case("stop", [*shared, "--max-steps", "50"], STOP, NO_GPU),
        Case("die", shared, DIE, NO_GPU),
        Case("widths", [*shared[:-4], "--num-target-ranks", "3", "--target-tp", "3"], "", NO_GPU),
    ]
    return whole | run_cases(4, cases, work / "shared")


def losses(result) -> list[float]:
    return [record["loss"] for record in result.metrics]


@pytest.mark.slow
def test_losses_equal_those_of_a_whole_target_within_rounding(runs):
    whole, shared = losses(runs["whole"].check_ok()), losses(runs["switches0"].check_ok())
    assert len(whole) == 3 and shared == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
def test_weights_are_shared_and_the_drafters_ends_are_whole(runs):
    """Else equal losses would prove nothing, and the drafters would train on half a vocabulary."""
    out = runs["switches0"].out
    assert all("DTensor" in text for text in out[:2]) and all("DTensor" not in text for text in out[2:])
    assert all("[(320, 64)]" in text for text in out[2:])


@pytest.mark.slow
def test_all_switches_are_bit_identical(runs):
    first = runs["switches0"]
    for number in range(1, 4):
        other = runs[f"switches{number}"].check_ok()
        assert losses(other) == losses(first)
        weights = [equiv.last_weights(result.output_dir) for result in (first, other)]
        assert equiv.first_weight_difference(*weights, "drafters") is None


@pytest.mark.slow
def test_early_stop_ends_all_ranks_of_the_target(runs):
    result = runs["stop"].check_ok()
    assert 1 <= len(result.metrics) < 50


@pytest.mark.slow
def test_death_of_a_shard_ends_every_rank_naming_it(runs):
    result = runs["die"]
    assert result.codes[1] == -9 and all(result.codes[rank] == 1 for rank in (0, 2, 3))
    for rank in (0, 2, 3):
        assert "target shard 0 (rank 1)" in result.err[rank].strip().splitlines()[-1]


@pytest.mark.slow
def test_degree_that_does_not_divide_the_heads_is_one_line_on_every_rank(runs):
    result = runs["widths"]
    assert set(result.codes) == {1}
    for line in result.last_lines():
        assert "--target-tp 3: the widths of this target can be shared by 1, 2 ranks" in line


@pytest.mark.slow
def test_tool_compares_captures_of_a_hybrid_inside_a_wrapper(tmp_path):
    torch.manual_seed(0)
    model = FAMILIES["qwen3_5"].reference_class()._from_config(FAMILIES["qwen3_5"].config())
    randomise(model)
    flags = ["--target", save_random(model, tmp_path), "--device", "cpu", "--tolerance", "1e-5"]
    command = equiv.torchrun_command(2, REPOSITORY / "tools" / "check_target_tp.py", flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | NO_GPU)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if "lowest cosine" in line]) == 8
    assert "2 ranks, 51% of the weights on each, float32: all layers within 1e-05" in done.stdout


@pytest.mark.slow
def test_tool_names_the_layers_beyond_its_tolerance(capsys):
    whole = [torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 4)]
    shared = [torch.ones(3, 4), 1.2 * torch.ones(3, 4), torch.full((3, 4), torch.nan)]
    assert check_target_tp_tool.compare(whole, shared, 0.1) == [1, 2]
    assert "layer   1  relative error 2.00e-01  lowest cosine 1.000000  BEYOND" in capsys.readouterr().out
