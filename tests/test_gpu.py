"""What only GPUs show: kernels that overlap copies, NCCL, compiled kernels. The runs need two GPUs, the rest one; elsewhere
all of it is skipped.

Pairs of ranks (a target and a drafter on a GPU each) run side by side. A toy target: its steps are short, so that
copies, sends and kernels of several micro-batches are under way at once.
"""

import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers

import train_dflash_pipeline as pipeline
from pipeline_runner import REPOSITORY, SMALL, Case, run_cases
from test_nonfinite import BAD_GRADIENT, check_ended, zero

from check_pipeline_equiv import first_weight_difference, last_weights, write_small_data

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Every captured state of micro-batch m is m. The pack is held up, and what the forward pass gave back is overwritten with
# -1 meanwhile; a single wrong element among those received fails the run.
FLOOD = """
import torch
right_forward, right_pack = pipeline.TargetRunner.forward, pipeline.HiddenStateSender._pack
right_submit, right_get = pipeline.HiddenStateSender.submit, pipeline.HiddenStateReceiver.get
def forward(self, plan):
    shots = right_forward(self, plan)
    for shot, _ in shots:
        shot.captured = {i: torch.full_like(x, plan.m % 256) for i, x in shot.captured.items()}
    return shots
def pack(self, job):
    torch.cuda._sleep(3_000_000)
    return right_pack(self, job)
def submit(self, action, argument):
    right_submit(self, action, argument)
    del argument
    for _ in range(32):
        torch.full((2048, 64), -1.0, device="cuda", dtype=torch.bfloat16)
seen = 0
def get(self, m):
    global seen
    slot, n = right_get(self, m), self.planner.plan(m).num_tokens
    if wrong := sum(int((x != m % 256).sum()) for x in slot.layers(n, True)):
        raise RuntimeError(f"{wrong} elements of micro-batch {m} are not its own")
    seen += 1
    print("checked", seen)
    return slot
pipeline.TargetRunner.forward, pipeline.HiddenStateSender._pack = forward, pack
pipeline.HiddenStateSender.submit, pipeline.HiddenStateReceiver.get = submit, get
"""
# Every other step has nothing to predict.
UNSUPERVISED = """
right_plan = pipeline.Planner._plan
def plan(self, m):
    found = right_plan(self, m)
    return found.unsupervised() if m % 2 else found
pipeline.Planner._plan = plan
"""
DIE_ONCE = """
import os
right_step = pipeline.DrafterTrainer.train_step
def step(self, number):
    mark = os.path.join(self.args.run.output_dir, "died")
    if number == 6 and not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(9)
    return right_step(self, number)
pipeline.DrafterTrainer.train_step = step
"""


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("gpu")
    data = write_small_data(folder / "train.jsonl", rows=600)
    flags = [*SMALL, "--device", "cuda", "--train-data", str(data), "--num-target-ranks", "1", "--tokens-per-micro-batch", "2048",
             "--anchors-per-micro-batch", "64", "--max-steps", "12", "--prefetch-depth", "2"]  # fmt: skip
    joined, in_line, skip = ["--no-split-fc-layers"], ["--no-async-postprocess"], ["--on-nonfinite", "skip"]

    def fault(text, *more):
        return [*flags, "--inject-fault", text, *more]

    cases = [
        Case("split", flags), Case("joined", [*flags, *joined]), Case("in-line", [*flags, *in_line]),
        Case("in-line-joined", [*flags, *in_line, *joined]), Case("poisoned", [*flags, "--poison-slots"]),
        Case("early", fault("early-release@6")), Case("early-joined", fault("early-release@6", *joined)),
        Case("early-poison", fault("early-release@6", "--poison-slots")),
        Case("early-poison-joined", fault("early-release@6", "--poison-slots", *joined)),
        Case("early-poison-target", fault("early-release@6:0", "--poison-slots")),
        Case("short-payload", fault("short-payload@6", "--transport-timeout", "4")),
        Case("nan-layer", fault("nan-layer@6")),
        *[Case(f"bad-gradient-zero{stage}", [*flags, *skip, *zero(stage)], BAD_GRADIENT) for stage in (1, 2, 3)],
        *[Case(f"idle-zero{stage}", [*flags, *zero(stage)], UNSUPERVISED) for stage in (1, 2, 3)],
        *[Case(f"flood{i}", [*flags, "--noise-std", "0", "--max-steps", "1000", "--log-every", "500"], FLOOD, environment)
          for i, environment in enumerate([{}, {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}])],
    ]  # fmt: skip
    groups = [cases[i::5] for i in range(5)]
    for stage in (2, 3):
        own = [*flags, *zero(stage), "--save-every", "6"]
        again = [*own, "--output-dir", str(folder / f"again-zero{stage}")]
        groups.append([Case(f"straight-zero{stage}", own), Case(f"killed-zero{stage}", again, DIE_ONCE),
                       Case(f"resumed-zero{stage}", again)])  # fmt: skip
    with ThreadPoolExecutor(len(groups)) as pool:  # side by side: half of a case is its start
        started = [pool.submit(run_cases, 2, group, folder / f"cases{i}") for i, group in enumerate(groups)]
        results = {name: result for job in started for name, result in job.result().items()}
    for stage in (2, 3):
        results[f"resumed-zero{stage}"].output_dir = folder / f"again-zero{stage}"
    return results


def losses(result) -> list[tuple]:
    return [(m["loss"], m["grad_norm"]) for m in result.check_ok().metrics]


@pytest.mark.parametrize("other", ["joined", "in-line", "in-line-joined", "poisoned"])
def test_switches_change_no_bit(runs, other):
    assert len(losses(runs["split"])) == 12 and losses(runs[other]) == losses(runs["split"])
    weights = (last_weights(runs[name].output_dir) for name in ("split", other))
    assert first_weight_difference(*weights, "switches") is None


@pytest.mark.parametrize("name", ["early", "early-joined"])
def test_a_slot_that_is_freed_too_early_is_really_corrupted(runs, name):
    right, wrong = losses(runs["split"]), losses(runs[name])
    assert right[:6] == wrong[:6] and right[6] != wrong[6]


@pytest.mark.parametrize("name, stage", [
    ("early-poison", "drafter input"), ("early-poison-joined", "drafter input"), ("early-poison-target", "received"),
])  # fmt: skip
def test_poison_shows_a_slot_that_is_freed_too_early_at_once(runs, name, stage):
    check_ended(runs[name], rf"micro-batch 6 \(step 7\): {stage} is not finite on drafter 0 \(rank 1\): nan(?: at document|, but .* written to)")


def test_a_short_payload_is_named(runs):
    """NCCL may wait for the rest, or go on with something else in its place."""
    waits = "receiving the payload for micro-batch 6, peer target 0"
    check_ended(runs["short-payload"], rf"{waits}|micro-batch 6 from target 0 .* mark: shorter than announced")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bad_gradient_is_skipped(runs, stage):
    last = runs[f"bad-gradient-zero{stage}"].check_ok().metrics[-1]
    assert (last["step"], last["skipped_steps"], last["skipped_micro_batches"]) == (12, 1, 0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_without_anything_to_predict_change_nothing_but_the_decay(runs, stage):
    metrics = runs[f"idle-zero{stage}"].check_ok().metrics
    assert [(m["loss"], m["grad_norm"]) == (0, 0) for m in metrics] == [False, True] * 6
    assert all(math.isfinite(m["loss"]) and m["skipped_steps"] == 0 for m in metrics)
    assert metrics[-1]["unsupervised_micro_batches"] == 6 and metrics[-2]["loss"] < metrics[0]["loss"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_run_goes_on_bit_for_bit(runs, stage):
    straight, resumed = runs[f"straight-zero{stage}"], runs[f"resumed-zero{stage}"]
    assert 9 in runs[f"killed-zero{stage}"].codes
    assert len(losses(straight)) == 12 and losses(resumed) == losses(straight)
    weights = (last_weights(result.output_dir) for result in (straight, resumed))
    assert first_weight_difference(*weights, "straight and resumed") is None


@pytest.mark.parametrize("name", ["flood0", "flood1"])
def test_no_state_is_overwritten_while_it_is_packed_and_sent(runs, name):
    assert "checked 1000\n" in runs[name].check_ok().out[1]


def test_a_dump_replays_on_the_gpu(runs):
    dump = runs["nan-layer"].output_dir / "nonfinite" / "m-00000006"
    command = [sys.executable, str(REPOSITORY / "tools" / "replay_dump.py"), str(dump), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "verdict: the target's forward pass: captured layer 3 held it" in done.stdout
    assert re.search(r"drafter output, split, compiled +[\d.]+", done.stdout)


# The hash of a compiled drafter's gradient on one micro-batch, three times over, in a process with kernel caches of its own.
GRADIENT = """
import sys, hashlib, json
sys.path[:0] = [REPOSITORY, REPOSITORY + "/tools"]
import torch
import bench_drafter_step as bench
import train_dflash_pipeline as pipeline
torch.cuda.set_device(0)
shape = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=2, head_dim=128)
pipeline.RANDOM_TARGETS["toy"] |= shape | {"dtype": "bfloat16"}
args = pipeline.parse_arguments(["--target", "toy", "--tokens-per-micro-batch", "4096", "--num-draft-layers", "2"])
device, config = torch.device("cuda", 0), pipeline.load_target_config(args.target)
ends = pipeline.load_frozen_ends(args.target, config, device, torch.bfloat16)
drafter_config = pipeline.choose_drafter_config(args, config, pipeline.load_tokenizer(args.target))
plan = bench.make_plan(args, 4)
drafter = pipeline.build_drafter(drafter_config, args).to(device, torch.bfloat16)
pipeline.compile_drafter(drafter, ends)
torch.manual_seed(0)
features = torch.randn(4096, 5 * 1024, device=device, dtype=torch.bfloat16)
batch, hashes = pipeline.DrafterBatch.from_plan(plan, drafter_config, device), []
for _ in range(3):
    drafter.zero_grad()
    pipeline.micro_batch_loss(drafter, ends, features, batch, None)[0].backward()
    grads = [p.grad.view(torch.uint8).cpu().numpy().tobytes() for p in drafter.parameters()]
    hashes.append(hashlib.sha256(b"".join(grads)).hexdigest())
print(json.dumps(hashes))
"""


def test_compiled_gradients_are_the_same_in_every_process(tmp_path):
    """Several at once: timing kernels against each other would choose differently then."""
    code = GRADIENT.replace("REPOSITORY", repr(str(REPOSITORY)))
    workers = [
        subprocess.Popen(
            ["env", f"TORCHINDUCTOR_CACHE_DIR={tmp_path}/inductor{i}", f"TRITON_CACHE_DIR={tmp_path}/triton{i}",
             "OMP_NUM_THREADS=1", "TORCHINDUCTOR_COMPILE_THREADS=1", sys.executable, "-c", code],
            stdout=subprocess.PIPE, text=True,
        )
        for i in range(6)
    ]  # fmt: skip
    hashes = [h for worker in workers for h in json.loads(worker.communicate(timeout=300)[0].splitlines()[-1])]
    assert len(hashes) == 18 and len(set(hashes)) == 1, hashes


def test_compiled_head_loss_equals_the_eager_one():
    """In fp32, on rows that are sure of the label, that are not, and of weight 0; with and without soft-capping, KL, D-PACE."""
    device, rng = torch.device("cuda", 0), np.random.default_rng(0)
    logits, target = (torch.from_numpy(rng.normal(0, 4, (60, 5003)).astype(np.float32)).to(device) for _ in range(2))
    labels = torch.from_numpy(rng.integers(0, 5003, (20, 3))).to(device)
    logits.scatter_add_(1, labels.view(-1, 1)[::2].repeat_interleave(2, 0), torch.full((60, 1), 20.0, device=device))
    weights = torch.from_numpy(rng.random((20, 3)).astype(np.float32)).to(device) * (labels % 5 > 0)
    for soft_targets, softcap, alpha in ((None, None, None), (None, 5.0, None), (target, 5.0, None), (None, None, 0.5)):
        inputs = logits, soft_targets, labels, weights, softcap, alpha
        eager = pipeline.head_rows(*inputs)
        compiled = pipeline.compiled_once(pipeline.head_rows)(*inputs)
        for ours, theirs in zip(compiled, eager):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def spread(ours, reference) -> float:
    """Distance relative to the reference's size."""
    return float((ours.float() - reference.float()).norm() / reference.float().norm())


@pytest.mark.parametrize("window", [None, 1, 17, 500])
@pytest.mark.parametrize("lengths", [[1], [700, 300, 24], [64] * 16, [513, 129, 1, 1, 1]])
def test_variable_length_attention_is_attention_within_each_document(lengths, window):
    """The kernel in bf16, grouped heads and a padded tail included, beside SDPA in fp32, one document at a time."""
    tokens, device = 1024, torch.device("cuda", 0)
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, 64, device=device, dtype=torch.bfloat16) for heads in (8, 2, 2))
    found = pipeline.document_bounds(np.array(lengths), tokens)
    bounds = torch.full((tokens + 1,), tokens, dtype=torch.int32)
    bounds[: len(found)] = torch.from_numpy(found)
    extent, scale = torch.tensor([len(found) - 1, int(np.diff(found).max())]), 0.125
    fast = pipeline.attend_by_kernel(q, k, v, bounds.to(device), extent, scale, window)
    slow = pipeline.attend_by_document(q.float(), k.float(), v.float(), bounds.to(device), extent, scale, window)
    assert fast.shape == slow.shape and spread(fast, slow) < 5e-3
    other = [x.clone() for x in (q, k, v)]
    for x in other:
        x[: lengths[0]] = 3  # the first document changes, no bit of the others may
    again = pipeline.attend_by_kernel(*other, bounds.to(device), extent, scale, window)
    assert torch.equal(again[lengths[0] :], fast[lengths[0] :])


@torch.no_grad()
def test_hybrid_packed_and_compiled_is_each_document_alone():
    """Its kernels are told where documents begin. Beside transformers' own code in bf16, one document at a time."""
    pytest.importorskip("fla")
    device, lengths, tokens = torch.device("cuda", 0), np.array([700, 200, 65, 64, 3, 1]), 1100
    config = transformers.AutoConfig.for_model(
        "qwen3_5_text", vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_value_heads=4, linear_num_key_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()
    ids = torch.randint(320, (int(lengths.sum()),))
    states = [model(x[None].to(device), output_hidden_states=True).hidden_states for x in ids.split(lengths.tolist())]
    reference = torch.cat([torch.cat([states_of[i + 1][0] for i in (0, 2)], 1) for states_of in states])
    runner = pipeline.TargetRunner(model, (0, 2), False, device, "packed", compiled=True)
    row = np.zeros(tokens, np.int64)

    def captured():
        row[: len(ids)] = ids
        return runner._packed_pass(row, lengths).get_hidden_states_packed(lengths)[0][0]

    whole = captured()
    assert spread(whole, reference) < 2e-2 and "compiled; documents end to end" in runner.describe()
    ids[700:900] = 7  # the second document changes, no bit of the others may
    assert (captured() == whole).all(1).nonzero().flatten().tolist() == [*range(700), *range(900, len(ids))]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layer_in_fp8_is_the_product_of_what_was_rounded(bias):
    """By the GPU's fp8 kernel, compiled too; rows of very different size, one of zeros."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(1024, 272, bias).to("cuda", torch.bfloat16).requires_grad_(False)
    x = (torch.randn(3, 100, 1024) * torch.tensor([1e-3, 1.0, 200.0])[:, None, None]).to("cuda", torch.bfloat16)
    x[1, 7] = 0

    def rounded(rows):
        scale = (rows.float().abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
        return (rows.float() / scale).to(torch.float8_e4m3fn).float() * scale

    expected = (rounded(x.flatten(0, 1)) @ rounded(linear.weight).T + (linear.bias.float() if bias else 0)).unflatten(0, (3, 100))
    layer = pipeline.Float8Linear(linear)
    for run in (layer, pipeline.compile_repeatably(layer.forward)):
        assert max(map(spread, run(x), expected)) < 5e-3
    assert spread(linear(x)[2], expected[2]) > 1e-2  # where the bias is small beside it


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("supervised", [2, 40, 1024])  # one anchor, some, more than slots
def test_flex_attention_and_its_gradient_equal_dense_attention(supervised, window):
    device, block, anchors, tokens = torch.device("cuda", 0), 8, 64, 1024
    flags = ["--target", "toy", "--tokens-per-micro-batch", str(tokens), "--anchors-per-micro-batch", str(anchors)]
    args = pipeline.parse_arguments([*flags, "--block-size", str(block)])
    mask = np.zeros(tokens, bool)
    mask[300 : 300 + supervised] = True
    offsets = np.array([0, 100, 900, 1000])  # and 24 tokens of padding
    documents = pipeline.Documents(np.zeros(1000, np.int32), mask[:1000], offsets, np.arange(3), {})
    plan = pipeline.Planner(documents, args, 1).plan(0)
    assert plan.num_anchors == min(max(supervised - 1, 1), anchors)
    ranges, keys = pipeline.visibility(plan, block, window), tokens + anchors * block
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, heads, 64, device=device) for n, heads in ((anchors * block, 8), (keys, 2), (keys, 2)))
    grad, results = torch.randn(anchors * block, 8 * 64, device=device), []
    for kind, dtype in ((pipeline.block_mask(ranges, keys, device), torch.bfloat16),
                        (pipeline.dense_mask(ranges, keys).to(device), torch.float32)):  # fmt: skip
        inputs = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in (q, k, v)]
        out = pipeline.attend(*inputs, kind)
        results.append([out, *torch.autograd.grad(out, inputs, grad.to(torch.bfloat16).to(dtype))])
    for name, ours, reference in zip(("output", "q", "k", "v"), *results):
        assert torch.isfinite(ours).all() and spread(ours, reference) < 1e-2, name
