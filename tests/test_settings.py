"""Flags, YAML defaults, refusals, schedules, and what importing the pipeline must not do."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import train_dflash_pipeline as pipeline
from helpers import arguments
from train_dflash_pipeline import (
    UserError,
    choose_device,
    learning_rate_at,
    load_deepspeed_config,
    noise_std_at,
    parse_arguments,
    read_topology,
)

REPOSITORY = Path(__file__).resolve().parent.parent


def with_yaml(tmp_path, text: str, *flags: str):
    (tmp_path / "config.yaml").write_text(text)
    return parse_arguments(["--config", str(tmp_path / "config.yaml"), *flags])


# Flags ----------------------------------------------------------------------------------------------------------------


def test_no_flag_gives_the_defaults():
    assert parse_arguments([]).flat() == arguments().flat()


def test_flags_set_their_own_field_and_no_other():
    args = parse_arguments("--max-steps 7 --loss kl --fc-layer-ids 1 4 --learning_rate 1e-5".split())
    changed = dict(max_steps=7, loss="kl", fc_layer_ids=[1, 4], learning_rate=1e-5)
    assert args.flat() == arguments().flat() | changed


@pytest.mark.parametrize("name", ["compile", "async_postprocess", "split_fc_layers"])
def test_switches_have_a_no_twin(name):
    flag = name.replace("_", "-")
    assert getattr(parse_arguments([]).pipeline, name) is True
    assert getattr(parse_arguments([f"--no-{flag}"]).pipeline, name) is False
    assert getattr(parse_arguments([f"--no-{flag}", f"--{flag}"]).pipeline, name) is True


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ("--no-such-flag 1", "unrecognized arguments: --no-such-flag 1"),
        ("--max-step 3", "unrecognized arguments: --max-step 3"),  # no abbreviations
        ("stray", "unrecognized arguments: stray"),
        ("--max-steps many", "invalid int value: 'many'"),
        ("--loss hinge", "invalid choice: 'hinge'"),
        ("--block-size 1", "--block-size 1: must be at least 2"),
        ("--max-steps 0", "--max-steps 0: must be at least 1"),
        ("--anchors-per-micro-batch 0", "must be at least 1"),
        ("--seed -1", "--seed -1: must be at least 0"),
        ("--noise-std nan", "--noise-std nan: must be at least 0"),
        ("--learning-rate -0.1", "--learning-rate -0.1: must be at least 0"),
        ("--adam-beta2 1", "--adam-beta2 1.0: must lie in 0..1"),
        ("--num-epochs 0", "--num-epochs 0.0: must be above 0"),
        ("--num-epochs inf", "--num-epochs inf: must be above 0"),
        ("--warmup-ratio 3", "--warmup-ratio 3.0: must lie in 0..1"),
        ("--decay-ratio 1.5", "--decay-ratio 1.5: must lie in 0..1"),
        ("--dpace-alpha nan", "--dpace-alpha nan: must lie in 0..1"),
        ("--loss kl --loss-weights dpace", "--loss-weights dpace needs --loss ce"),
        ("--eval-every 0", "--eval-every 0: must be at least 1"),
        ("--eval-data nowhere.jsonl", "--eval-data nowhere.jsonl: no such file"),
        ("--loss-gamma 0", "--loss-gamma 0.0: must be above 0"),
        ("--num-draft-layers 2 --num-full-attention-layers 3", "the drafter has 2 layers"),
        ("--num-target-ranks many", "--num-target-ranks many: a number, auto or measure"),
        ("--max-document-tokens 2000", "a document is never cut"),
        ("--max-document-tokens 0", "--max-document-tokens 0: must be at least 2"),
        ("--train-data nowhere.jsonl", "--train-data nowhere.jsonl: no such file"),
        ("--deepspeed nowhere.json", "--deepspeed nowhere.json: no such file"),
        ("--config nowhere.yaml", "--config nowhere.yaml: .*No such file"),
    ],
)
def test_refusals_name_the_flag(flags, complaint):
    with pytest.raises(UserError, match=complaint):
        parse_arguments(flags.split())


# YAML -----------------------------------------------------------------------------------------------------------------


def test_flag_beats_yaml_beats_default(tmp_path):
    text = "max-steps: 7\nblock_size: 8\ncompile: false\ntrain_data: [" + str(REPOSITORY / "requirements.txt") + "]\n"
    args = with_yaml(tmp_path, text, "--max-steps", "9")
    assert (args.optimization.max_steps, args.drafter.block_size, args.pipeline.compile) == (9, 8, False)
    assert args.data.train_data == [str(REPOSITORY / "requirements.txt")]
    assert args.data.seed == arguments().data.seed
    assert with_yaml(tmp_path, text, "--compile").pipeline.compile is True


def test_yaml_values_mean_what_the_flags_mean(tmp_path):
    """YAML 1.1 reads 6e-4 as a string, and 5 as an int where the flag is text."""
    args = with_yaml(tmp_path, "learning_rate: 6e-4\nnum_target_ranks: 5\nfc_layer_ids: [1, 4]\nnum_epochs: null\n")
    assert args.optimization.learning_rate == 6e-4 and args.pipeline.num_target_ranks == "5"
    assert args.target.fc_layer_ids == [1, 4] and args.optimization.num_epochs is None


def test_saved_settings_can_be_read_back(tmp_path):
    flags = "--learning-rate 1e-5 --no-compile --fc-layer-ids 1 4 --num-target-ranks 2 --trust-remote-code --resume never"
    args = parse_arguments(flags.split())
    assert with_yaml(tmp_path, yaml.safe_dump(args.flat())).flat() == args.flat()
    assert with_yaml(tmp_path, "").flat() == with_yaml(tmp_path, yaml.safe_dump(arguments().flat())).flat()


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("max_stepz: 3", "unknown key 'max_stepz'"),
        ("5: 3", "unknown key '5'"),
        ("max_steps: many", "invalid int value: 'many'"),
        ("max_steps: 2.5", "invalid int value: '2.5'"),
        ("max_steps: true", "invalid int value: 'True'"),
        ("mask_token_id: 3.5", "invalid int value: '3.5'"),
        ("loss: hinge", "invalid choice: 'hinge'"),
        ("compile: 3", "Truthy value expected"),
        ("- 1", "expected `key: value` lines"),
        ("a: [", "expected"),
    ],
)
def test_yaml_refusals_name_the_file(tmp_path, text, complaint):
    with pytest.raises(UserError, match=f"--config .*config.yaml: .*{complaint}"):
        with_yaml(tmp_path, text)


# Topology from torchrun's environment ---------------------------------------------------------------------------------


def topology(monkeypatch, rank: int, world: int, num_target_ranks: str):
    for name, value in dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world).items():
        monkeypatch.setenv(name, str(value))
    return read_topology(num_target_ranks)


@pytest.mark.parametrize("world, targets", [(2, 1), (3, 1), (4, 2), (8, 5), (16, 10)])
def test_five_eighths_of_the_ranks_are_targets(monkeypatch, world, targets):
    roles = [topology(monkeypatch, rank, world, "auto") for rank in range(world)]
    assert roles == [topology(monkeypatch, rank, world, "measure") for rank in range(world)]
    assert [r.role for r in roles] == ["target"] * targets + ["drafter"] * (world - targets)
    assert [r.role_rank for r in roles] == [*range(targets), *range(world - targets)]


@pytest.mark.parametrize("targets, drafters", [(1, 1), (5, 3), (2, 4), (3, 3)])
def test_links_join_exactly_the_ranks_that_share_a_micro_batch(monkeypatch, targets, drafters):
    pairs = topology(monkeypatch, 0, targets + drafters, str(targets)).pairs()
    assert pairs == sorted({(m % targets, m % drafters) for m in range(1000)})


@pytest.mark.parametrize("world, targets, complaint", [(1, "auto", "at least 2"), (2, "0", "2 drafter ranks"), (2, "2", "0 drafter ranks")])
def test_roles_that_cannot_be_laid_out_are_refused(monkeypatch, world, targets, complaint):
    with pytest.raises(UserError, match=complaint):
        topology(monkeypatch, 0, world, targets)


@pytest.mark.parametrize(
    "world, targets, gpus, expected",
    [
        (4, 2, 4, [("cuda:0", False), ("cuda:1", False), ("cuda:2", False), ("cuda:3", False)]),
        (2, 1, 1, [("cuda:0", True), ("cuda:0", True)]),
        (3, 1, 2, [("cuda:0", True), ("cuda:1", True), ("cuda:0", True)]),
        (3, 2, 1, [("cpu", False)] * 3),  # two targets cannot share a GPU
        (2, 1, 0, [("cpu", False)] * 2),
    ],
)
def test_a_gpu_serves_at_most_one_rank_of_each_role(monkeypatch, world, targets, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    ranks = [topology(monkeypatch, rank, world, str(targets)) for rank in range(world)]
    chosen = [choose_device("auto", rank) for rank in ranks]
    assert [(str(device), shared) for device, shared in chosen] == expected
    for role in ("target", "drafter"):
        mine = [str(device) for rank, (device, _) in zip(ranks, chosen) if rank.role == role and device.type == "cuda"]
        assert len(mine) == len(set(mine))
    if expected[0][0] == "cpu":
        with pytest.raises(UserError, match=f"--device cuda: .* of one role on this host, but {gpus} GPUs"):
            choose_device("cuda", ranks[0])


def test_start_without_torchrun_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="start with torchrun"):
        read_topology("auto")


# Schedules ------------------------------------------------------------------------------------------------------------


def test_learning_rate_rises_linearly_and_falls_along_a_cosine():
    optim = arguments(learning_rate=2.0, warmup_ratio=0.1, min_lr_ratio=0.25).optimization
    rates = [learning_rate_at(step, 100, optim) for step in range(100)]
    assert rates[:10] == pytest.approx([2.0 * (step + 1) / 10 for step in range(10)])
    # the closed form of the cosine from step 10 (peak) to step 99 (a quarter of it)
    assert rates[10:] == pytest.approx([1.25 + 0.75 * math.cos(math.pi * (step - 10) / 89) for step in range(10, 100)])
    assert rates[10] == 2.0 and rates[99] == pytest.approx(0.5)


def test_wsd_stays_at_the_peak_and_falls_linearly_at_the_end():
    optim = arguments(
        learning_rate=2.0, warmup_ratio=0.1, min_lr_ratio=0.25, lr_schedule="wsd", decay_ratio=0.2
    ).optimization
    rates = [learning_rate_at(step, 100, optim) for step in range(100)]
    assert rates[:10] == pytest.approx([2.0 * (step + 1) / 10 for step in range(10)])
    assert rates[10:80] == [2.0] * 70
    # 20 equal steps down, the last of them at a quarter of the peak
    assert rates[80:] == pytest.approx([2.0 - 1.5 * (step + 1) / 20 for step in range(20)])


def test_constant_stays_at_the_peak():
    optim = arguments(learning_rate=2.0, warmup_ratio=0.1, lr_schedule="constant").optimization
    assert [learning_rate_at(step, 50, optim) for step in range(5, 50)] == [2.0] * 45


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_learning_rate_of_very_short_runs_starts_at_the_peak(total, schedule):
    optim = arguments(learning_rate=1.0, warmup_ratio=0.04, lr_schedule=schedule).optimization
    rates = [learning_rate_at(step, total, optim) for step in range(total)]
    assert rates[0] == 1.0 and all(0 < rate <= 1 for rate in rates)


def test_noise_schedules():
    def at(step, schedule):
        return noise_std_at(step, 8, arguments(noise_std=0.5, noise_schedule=schedule).data)

    assert [at(step, "constant") for step in (0, 4, 8)] == [0.5, 0.5, 0.5]
    assert [at(step, "linear") for step in (0, 2, 4, 8)] == [0.5, 0.375, 0.25, 0.0]
    expected = [0.5 * math.cos(math.pi * step / 16) ** 2 for step in range(9)]  # half-angle form of (1 + cos) / 2
    assert [at(step, "cosine") for step in range(9)] == pytest.approx(expected)


# Import ---------------------------------------------------------------------------------------------------------------


def test_import_parses_nothing_starts_nothing_and_leaves_deepspeed_alone(tmp_path):
    """In a process of its own, with flags that parsing would refuse and without torchrun's environment."""
    code = """
import os, signal, sys, threading
sys.argv = ["x", "--no-such-flag"]
before = dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGTERM)
import torch
state, threads, grad = torch.random.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled()
import train_dflash_pipeline
assert "deepspeed" not in sys.modules and "transformers" not in sys.modules
assert before == (dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGTERM))
assert torch.equal(state, torch.random.get_rng_state()) and not torch.distributed.is_initialized()
assert (threads, grad) == (torch.get_num_threads(), torch.is_grad_enabled()) and not torch.cuda.is_initialized()
assert os.listdir(".") == []
"""
    path = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.dont_write_bytecode = True\n"
    done = subprocess.run([sys.executable, "-c", path + code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("text, complaint", [
    ("[]", "own.json holds no JSON object"), ("{", "own.json cannot be read"),
    ('{"gradient_clipping": 5}', 'gradient_clipping is 5, the flags say 1.0; write "auto" there'),
    ('{"optimizer": {}}', "optimizer and scheduler come from the flags"),
    ('{"zero_optimization": {"stage": 7}}', "zero_optimization needs a stage of 0, 1, 2 or 3"),
    ('{"zero_optimization": [2]}', "zero_optimization needs a stage of 0, 1, 2 or 3"),
])  # fmt: skip
def test_a_deepspeed_file_that_cannot_be_followed_is_one_line(tmp_path, text, complaint):
    (tmp_path / "own.json").write_text(text)
    args = parse_arguments(["--deepspeed", str(tmp_path / "own.json")])
    with pytest.raises(UserError, match=f"--deepspeed .*{re.escape(complaint)}"):
        load_deepspeed_config(args, torch.device("cpu"))


def test_what_else_is_auto_in_a_deepspeed_file_keeps_its_default(tmp_path):
    """As in the files that transformers' Trainer takes."""
    zero = {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True}
    own = {"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": zero}
    (tmp_path / "own.json").write_text(json.dumps(own))
    args = parse_arguments(["--deepspeed", str(tmp_path / "own.json"), "--max-grad-norm", "3"])
    config = load_deepspeed_config(args, torch.device("cpu"))
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert "train_batch_size" not in config and config["gradient_clipping"] == 3


def test_what_start_up_made_is_not_looked_through_again():
    """In a process of its own: other tests' garbage stays theirs."""
    code = """
import gc, sys, weakref
sys.path.insert(0, REPOSITORY)
import train_dflash_pipeline as pipeline
class Thing: pass
kept = [Thing() for _ in range(1000)]
pipeline.freeze_objects()
assert gc.get_freeze_count() > 10_000 and len(gc.get_objects()) < 1000
new = Thing()
new.itself, gone = new, weakref.ref(new)
del new
gc.collect()
assert gone() is None
"""
    code = code.replace("REPOSITORY", repr(str(REPOSITORY)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# What a user's GPUs run, bf16 with fp32 masters, on the CPU: DeepSpeed beside a few lines of torch.
BF16_TRAINING = """
import copy, json, os, sys
from types import SimpleNamespace
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
sys.path[:0] = [REPOSITORY, REPOSITORY + "/tools"]
import torch
import torch.distributed as dist
import bench_drafter_step as bench
import train_dflash_pipeline as pipeline

cpu, as_on_gpus = torch.device("cpu"), pipeline.load_deepspeed_config
flags = ["--target=toy", "--device=cpu", "--num-draft-layers=2", "--tokens-per-micro-batch=128", "--anchors-per-micro-batch=8",
         "--gradient-accumulation-steps=3", "--max-grad-norm=1e9", "--learning-rate=1e-2"]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def train(stage, without=()):
    def config(args, device):
        found = as_on_gpus(args, torch.device("cuda"))
        return {key: value for key, value in found.items() if key not in without}
    pipeline.load_deepspeed_config = config
    args = pipeline.parse_arguments([*flags, f"--deepspeed={REPOSITORY}/ds_configs/zero{stage}.json"])
    target_config = pipeline.load_target_config(args.target)
    config = pipeline.choose_drafter_config(args, target_config.get_text_config(), pipeline.load_tokenizer(args.target))
    ends = pipeline.load_frozen_ends(args.target, target_config, cpu, torch.bfloat16)
    batch = pipeline.DrafterBatch.from_plan(bench.make_plan(args, 2), config, cpu)
    drafter = pipeline.build_drafter(config, args)
    plain = copy.deepcopy(drafter).to(torch.bfloat16)
    engine = pipeline.build_engine(drafter, ends, args, SimpleNamespace(device=cpu))
    masters = [p.detach().float().requires_grad_() for p in plain.parameters()]
    optim = args.optimization
    adam = torch.optim.AdamW(masters, lr=optim.learning_rate, betas=(optim.adam_beta1, optim.adam_beta2),
                             weight_decay=optim.weight_decay, fused=True)
    losses, norms = [], []
    torch.manual_seed(0)
    for step in range(4):
        sums = [torch.zeros_like(master) for master in masters]
        for _ in range(optim.gradient_accumulation_steps):
            features = torch.randn(128, len(config.target_layer_ids) * config.hidden_size).to(torch.bfloat16)
            loss, _ = pipeline.micro_batch_loss(engine, ends, features, batch, None)
            engine.backward(loss / 100, scale_wrt_gas=False)
            engine.step()
            own, _ = pipeline.micro_batch_loss(plain, ends, features, batch, None)
            for total, gradient in zip(sums, torch.autograd.grad(own / 100, list(plain.parameters()))):
                total += gradient
            losses.append((loss.item(), own.item()))
        norms.append((engine.get_global_grad_norm().item(), torch.stack([total.norm() for total in sums]).norm().item()))
        for master, total in zip(masters, sums):
            master.grad = total
        adam.step()
        for p, master in zip(plain.parameters(), masters):
            p.data.copy_(master)
    weights = pipeline.drafter_weights(engine)
    return losses, norms, all(torch.equal(weights[n].to(torch.bfloat16), p) for n, p in plain.named_parameters())

runs = [train(stage) for stage in (1, 2, 3)] + [train(2, ("data_types", "communication_data_type"))]
open(sys.argv[1], "w").write(json.dumps(runs))
"""


def test_deepspeed_in_bf16_trains_as_fp32_masters_do(tmp_path):
    """ZeRO 1 and 2 bit for bit, ZeRO 3 within rounding (it sums a backward pass's bf16 parts in another order). Without
    the fp32 sums that the shipped files ask for, the norm is off by more, so this would show."""
    code, path = BF16_TRAINING.replace("REPOSITORY", repr(str(REPOSITORY))), tmp_path / "runs.json"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, timeout=300)
    *exact, zero3, without = json.loads(path.read_text())
    for losses, norms, same_weights in exact:
        assert len(losses) == 12 and all(there == here for there, here in losses) and same_weights
        assert all(there == pytest.approx(here, rel=1e-6) for there, here in norms)
    assert zero3[0][:3] == exact[0][0][:3] and zero3[1][0][0] == pytest.approx(zero3[1][0][1], rel=1e-4)
    assert all(there == pytest.approx(here, rel=1e-3) for there, here in zero3[0])
    assert not without[2] and max(abs(there / here - 1) for there, here in without[1]) > 1e-4


@pytest.mark.parametrize("config, exact", [
    ({"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}, True),
    ({}, False), ({"data_types": {"grad_accum_dtype": "fp32"}}, False), ({"communication_data_type": "fp32"}, False),
    ({"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32"}, False),
])  # fmt: skip
def test_sums_in_bf16_are_warned_of(config, exact):
    warning = pipeline.inexact_sums(config)
    assert (warning is None) == exact
    assert exact or '"communication_data_type": "fp32"' in warning
