"""The bench and profile tools: operations, ratios and merged traces by hand, and toy runs whose figures hang together."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import bench_drafter_step
import bench_pipeline
import pipeline_runner
import profile_pipeline
import train_dflash_pipeline as pipeline
from helpers import arguments, load, make_documents
from profile_pipeline import MARK, Stage


def run_tool(name: str, *flags, limit_s: float = 240) -> str:
    command = [sys.executable, ROOT / "tools" / f"{name}.py", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Operations


def visible_keys(plan, c, kind: str, block: int, slot: int) -> int:
    """How many keys a slot sees, by the definition, one key after the other."""
    row, position = plan.anchor_rows[block], plan.position_ids[plan.anchor_rows[block]] + slot
    count = 0
    for key in range(plan.num_tokens):
        same = plan.document_ids[key] == plan.document_ids[row] and plan.position_ids[key] < plan.position_ids[row]
        count += bool(same and (kind == "full_attention" or position - plan.position_ids[key] < c.sliding_window))
    for other in range(c.block_size):
        count += kind == "full_attention" or (other <= slot and slot - other < c.sliding_window)
    return count


@pytest.mark.parametrize("full_layers, window", [(3, 64), (0, 5), (1, 2)])
def test_step_operations_are_those_counted_slot_by_slot(full_layers, window):
    args = arguments(target="toy", tokens_per_micro_batch=48, anchors_per_micro_batch=12, block_size=4, num_fc_layers=2,
                     num_draft_layers=3, num_full_attention_layers=full_layers, sliding_window=window)  # fmt: skip
    masks = [[1] * 9 + [0] * 4, [1, 1, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1, 1, 1]]
    plan = pipeline.Planner(make_documents([13, 6, 10], masks), args, 1).plan(0)
    config = pipeline.choose_drafter_config(
        args, pipeline.load_target_config(args.target), pipeline.load_tokenizer(args.target)
    )
    trained = plan.weights > 0
    assert 0 < plan.num_tokens < 48 and trained.sum() < plan.num_anchors * 3  # a tail, and slots that are not trained
    size, q, kv = config.hidden_size, config.num_attention_heads * config.head_dim, 2 * config.num_key_value_heads * config.head_dim
    count = 0
    for _ in range(plan.num_tokens):
        count += 2 * (2 * 2 * size * size)  # fc: forward and its own gradient
        count += 3 * config.num_hidden_layers * 2 * size * kv
    for layer, kind in enumerate(config.layer_types):
        for block in range(plan.num_anchors):
            for slot in range(config.block_size):
                count += 3 * 2 * size * kv
                if layer < 2 or trained[block, slot]:
                    count += 3 * 2 * size * (2 * q + 3 * config.intermediate_size)
                    count += 3 * 4 * q * visible_keys(plan, config, kind, block, slot)
    count += trained.sum() * 2 * 2 * size * config.vocab_size
    assert bench_drafter_step.step_flops(plan, config) == count


def test_plan_of_the_bench_is_full_and_has_the_documents_asked_for():
    args = arguments(target="toy", tokens_per_micro_batch=256, anchors_per_micro_batch=8)
    for number in (1, 5, 128):
        plan = bench_drafter_step.make_plan(args, number)
        assert (len(plan.lengths), plan.num_tokens, plan.num_anchors) == (number, 256, 8)
        assert plan.lengths.min() >= 2
    with pytest.raises(pipeline.UserError, match="--documents 129: 1 to 128"):
        bench_drafter_step.make_plan(args, 129)


def test_causal_pairs_within_a_window():
    for window in (None, 1, 3, 50):
        pairs = sum(1 for n in (1, 4, 9) for q in range(n) for k in range(q + 1) if window is None or q - k < window)
        assert bench_pipeline.causal_pairs([1, 4, 9], window) == pairs


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_target_operations_are_those_of_its_products(target_folder, kind):
    config, model = load(target_folder(kind))
    text, layers = config.get_text_config(), pipeline.decoder_layers(model)
    del layers[6:]  # as the pipeline does after the last captured layer
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.get_decoder()(input_ids=torch.ones(1, 12, dtype=torch.int64), use_cache=False)
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    pairs = {"full_attention": 12 * 13 // 2, "sliding_attention": 8 * 9 // 2 + 4 * 8}  # window 8
    attention = sum(4 * pairs[k] * 4 * 8 for k in text.layer_types[:6])
    assert bench_pipeline.target_flops(layers, text, [12]) == products + attention
    text.layer_types = None  # where a config names none, a window it has is every layer's
    window = "full_attention" if text.sliding_window is None else "sliding_attention"
    assert bench_pipeline.target_flops(layers, text, [12]) == products + 6 * 4 * pairs[window] * 4 * 8
    layers[0].mlp.experts = torch.nn.Parameter(torch.zeros(4, 48, 32))
    assert bench_pipeline.target_flops(layers, text, [12]) is None


# Arithmetic


def test_throughput_counts_what_ended_after_the_warm_up():
    ticks = [[10.0, 1000], [12.0, 100], [13.0, 300], [16.0, 200]]
    assert bench_pipeline.throughput(ticks, 1) == 600 / 6.0
    assert bench_pipeline.throughput(ticks, 2) == 500 / 4.0


def test_the_time_between_two_stages_is_from_end_to_beginning():
    before, after = (SimpleNamespace(cuda=False, marks=marks) for marks in ([1.0, 2.0], [2.25, 9.0]))
    assert bench_pipeline.ms_between(before, after) == 250.0


def test_stages_are_per_micro_batch_and_leave_the_warm_up_out():
    metrics = [{"ms": {"forward": f, "step": s}} for f, s in ((900.0, 9.0), (10.0, 2.0), (30.0, 4.0))]
    assert bench_pipeline.stages(metrics, 1, 4) == {"forward": 5.0, "step": 0.75}


def test_ratios():
    results = {
        "target": {"tokens_per_s": 800.0, "forward_tokens_per_s": 1000.0, "forward_ms": 50.0},
        "drafter": {"tokens_per_s": 1500.0},
        "pipeline": {"tokens_per_s": 2700.0, "stages_ms": {"target_forward": 60.0}},
        "sync": {"tokens_per_s": 1800.0},
        "colocated": {"tokens_per_s": 2250.0},
    }
    found = bench_pipeline.ratios(results, target_ranks=5, drafter_ranks=2)
    assert found.pop("slower_side") == "drafter"  # 5 x 800 against 2 x 1500
    assert found == pytest.approx({
        "pipeline_to_slower_side": 0.9, "sync_to_slower_side": 0.6, "colocated_to_slower_side": 0.75,
        "pipeline_to_sync": 1.5, "pipeline_to_colocated": 1.2, "pack_to_forward": 0.25, "forward_slowdown_in_pipeline": 0.2,
    }, rel=1e-12)  # fmt: skip
    assert bench_pipeline.ratios(results, 3, 2)["slower_side"] == "target"
    results["pipeline"] = {"error": "out of memory"}
    kept = bench_pipeline.ratios(results, 5, 2)
    assert "pipeline_to_sync" not in kept and kept["sync_to_slower_side"] == 0.6
    assert bench_pipeline.ratios({"sync": results["sync"]}, 1, 1) == {}


# Merged traces

ZERO = 1_700_000_000_000_000_000  # ns of the wall clock: where the window of the hand-made traces begins


def mark(ts: float, pid: int) -> dict:
    return {"ph": "X", "cat": "user_annotation", "name": MARK, "pid": pid, "tid": 11, "ts": ts, "dur": 1.0}


def kernel(ts: float, dur: float, stream: int, correlation: int) -> dict:
    return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": stream, "ts": ts, "dur": dur,
            "args": {"correlation": correlation}}  # fmt: skip


def launch(ts: float, tid: int, correlation: int) -> dict:
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 77, "tid": tid, "ts": ts, "dur": 0.5,
            "args": {"correlation": correlation}}  # fmt: skip


def about(rank: int, name: str, pid: int, mark_us: float, stages, window=None, threads=None) -> dict:
    threads = threads or {"11": {"name": "MainThread", "ident": 140_000_000_000_011}}
    ns = [(t, what, ZERO + int(start * 1000), ZERO + int(end * 1000), waits) for t, what, start, end, waits in stages]
    return {"rank": rank, "name": name, "pid": pid, "main": 11, "threads": threads, "mark_ns": ZERO + int(mark_us * 1000),
            "window": window, "stages": ns, "steps": []}  # fmt: skip


def on_cpu():
    """A target on the CPU, its profiler's clock 500 us behind: main works 0-40, waits 40-90 (helper busy 60-70)."""
    stages = [
        (11, "forward pass of micro-batch 3", -20, 95, False),
        (11, "waiting for a free slot for micro-batch 3", 40, 90, True),
        (12, "waiting for the credit for micro-batch 2, peer drafter 0 (rank 1)", -5, 60, True),
        (12, "pack", 60, 70, False),
        (12, "waiting for the credit for micro-batch 3, peer drafter 0 (rank 1)", 70, 130, True),
    ]
    threads = {"11": {"name": "MainThread", "ident": 1}, "12": {"name": "postprocess", "ident": 2}}
    trace = {"traceEvents": [mark(480.0, 55), {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 55, "tid": 11,
                                               "ts": 505.0, "dur": 30.0}]}  # fmt: skip
    return about(0, "target 0 (rank 0)", 55, -20.0, stages, threads=threads), trace


def on_gpu():
    """A drafter on a GPU. Its helper thread is known to the profiler by the last 32 bits of pthread's number only."""
    low = 0xF0000007
    threads = {"11": {"name": "MainThread", "ident": 0x7F0000000001}, "13": {"name": "receiver", "ident": 0x7F00 << 32 | low}}
    stages = [
        (11, "drafter forward pass of micro-batch 3", 0, 50, False),
        (11, "loss", 20, 30, False),
        (11, "backward pass of micro-batch 3 in step 2", 50, 100, False),
        (13, "receiving the payload for micro-batch 4, peer target 0 (rank 0)", 10, 35, True),
    ]
    trace = {"traceEvents": [
        mark(1000.0, 77),
        launch(1005.0, 11, 1), kernel(1010.0, 10.0, 7, 1),  # drafter forward
        launch(1006.0, 11, 2), kernel(1022.0, 3.0, 7, 2),
        launch(1025.0, 11, 3), kernel(1030.0, 10.0, 7, 3),  # loss
        launch(1060.0, 99, 4), kernel(1065.0, 20.0, 7, 4),  # an autograd thread, while the main thread is in backward
        launch(1012.0, low - 2**32, 5), kernel(1015.0, 20.0, 20, 5),  # receive, on a stream of its own
        kernel(1095.0, 30.0, 7, 6),  # launched before the trace; reaches over the window's end
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 77, "tid": 11, "ts": 1005.0},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 0, "tid": 7, "ts": 1010.0, "bp": "e"},
        {"ph": "X", "cat": "Trace", "name": "whole", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 1000.0, "dur": 9.0},
    ]}  # fmt: skip
    return about(1, "drafter 0 (rank 1)", 77, 0.0, stages, window=[ZERO, ZERO + 100_000], threads=threads), trace


def tracks_of(whole: dict, rank: int) -> dict[str, list]:
    """track name -> [(name, ts, dur)] of one rank in the order of time."""
    mine = [event for event in whole["traceEvents"] if event["pid"] == rank]
    names = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
    rows = sorted((event for event in mine if event["ph"] == "X"), key=lambda event: event["ts"])
    return {track: [(e["name"], e["ts"], e["dur"]) for e in rows if e["tid"] == tid] for tid, track in names.items()}


def test_merged_traces_are_aligned_and_named():
    whole, _ = profile_pipeline.merge([on_gpu(), on_cpu()])
    processes = [e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["target 0 (rank 0)", "drafter 0 (rank 1)"]
    target, drafter = tracks_of(whole, 0), tracks_of(whole, 1)
    assert target["MainThread: operators"] == [(MARK, -20.0, 1.0), ("aten::mm", 5.0, 30.0)]
    assert target["MainThread: stages"] == [
        ("forward pass of micro-batch", -20.0, 115.0), ("waiting for a free slot for micro-batch", 40.0, 50.0),
    ]  # fmt: skip
    assert drafter["stream 7: kernels"] == [
        ("k", 10.0, 10.0), ("k", 22.0, 3.0), ("k", 30.0, 10.0), ("k", 65.0, 20.0), ("k", 95.0, 30.0),
    ]  # fmt: skip
    assert drafter["stream 7: stages"] == [
        ("drafter forward pass of micro-batch", 10.0, 15.0), ("loss", 30.0, 10.0),
        ("backward pass of micro-batch in step", 65.0, 20.0),
    ]  # fmt: skip
    assert drafter["stream 20: stages"] == [
        ("receiving the payload for micro-batch, peer target 0 (rank 0)", 15.0, 20.0)
    ]
    assert "receiver: operators" in drafter and not any("Spans" in track for track in drafter)
    flow = [(e["ph"], e["id"], e["ts"]) for e in whole["traceEvents"] if e["ph"] in "sf"]
    assert flow == [("s", "1/5", 5.0), ("f", "1/5", 10.0)]


def test_idle_shares_and_waits_of_merged_traces():
    _, (target, drafter) = profile_pipeline.merge([on_cpu(), on_gpu()])
    # the target's main thread works 0-40 and 90-95 of 100, its helper 60-70
    assert target["idle_share"] == pytest.approx(1 - 0.55, abs=1e-12)
    assert target["awaited"] == pytest.approx({
        ("postprocess", "waiting for the credit for micro-batch, peer drafter 0 (rank 1)"): 0.9,
        ("MainThread", "waiting for a free slot for micro-batch"): 0.5,
    })  # fmt: skip
    assert list(target["awaited"])[0][0] == "postprocess"
    # kernels at 10-40 (both streams), 65-85, 95-100
    assert drafter["idle_share"] == pytest.approx(1 - 0.55, abs=1e-12)
    assert drafter["awaited"] == {
        ("receiver", "receiving the payload for micro-batch, peer target 0 (rank 0)"): pytest.approx(0.25)
    }


def test_innermost_stage_at_any_time():
    stages = [Stage(1, "outer", 0, 100, False), Stage(1, "a", 0, 20, False), Stage(1, "b", 10, 15, True),
              Stage(1, "d", 15, 18, False), Stage(1, "c", 50, 100, False), Stage(1, "late", 120, 130, False)]  # fmt: skip
    times, tops = profile_pipeline.innermost(stages)
    for at in range(-5, 140):
        open_ones = [s for s in stages if s.start <= at < s.end]
        expected = min(open_ones, key=lambda s: s.end - s.start, default=None)
        place = int(np.searchsorted(times, at, side="right")) - 1
        assert (tops[place] if place >= 0 else None) == expected, at


def test_a_renamed_stage_of_the_pipeline_is_said(monkeypatch):
    monkeypatch.delattr(pipeline.TargetRunner, "forward")
    with pytest.raises(pipeline.UserError, match="the pipeline has no TargetRunner.forward any more"):
        profile_pipeline.check_names()


def test_steps_to_trace():
    assert profile_pipeline.parse_steps("10:13") == (10, 13)
    for text in ("10", "3:3", "0:2", "a:b", "5:4"):
        with pytest.raises(pipeline.UserError, match="expected FIRST:END"):
            profile_pipeline.parse_steps(text)


# Toy runs

TINY = ["--device=cpu", "--target=toy", "--tokens-per-micro-batch=128", "--anchors-per-micro-batch=4",
        "--num-draft-layers=1", "--num-fc-layers=2"]  # fmt: skip


def test_pipeline_bench_of_a_toy_target(tmp_path):
    flags = [*TINY, "--steps=3", "--warm-up=1", "--document-tokens", 32, 32, f"--json={tmp_path / 'target.json'}"]
    run_tool("bench_pipeline", *flags, "--target-ranks=2", "--only", "target", "plain")
    found = json.loads((tmp_path / "target.json").read_text())
    target, plain = found["target"], found["plain"]
    assert plain["tokens_per_s"] == plain["forward_tokens_per_s"] and plain["tokens_per_micro_batch"] == 128
    assert target["tokens_per_micro_batch"] == 128
    assert target["forward_ms"] == pytest.approx(1e3 * 128 / target["forward_tokens_per_s"])
    share = target["forward_tokens_per_s"] / target["tokens_per_s"] - 1
    ratio = target["forward_tokens_per_s"] / plain["tokens_per_s"]
    assert found["ratios"] == {"pack_to_forward": pytest.approx(share), "forward_to_plain": pytest.approx(ratio)}
    # the toy's operations: plain also computes the layers that nobody reads
    assert plain["useful_tflops"] * plain["forward_ms"] > 1.1 * target["useful_tflops"] * target["forward_ms"]
    assert found["settings"]["ranks"] == {"target": 2, "drafter": 1, "colocated": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with what small jobs of two ranks left: the pipeline as it is measured, the other loops, a traced run."""
    root = tmp_path_factory.mktemp("bench")
    data, tools = root / "documents.safetensors", f"import os, sys\nsys.path.insert(0, {str(ROOT / 'tools')!r})\n"
    bench_pipeline.write_random_documents(pipeline.parse_arguments(TINY), 20, (8, 60), data)
    flags = [*TINY, f"--train-data={data}", "--max-steps=3"]
    for name in ("measured", "colocated-result", "drafter-result", "ranks"):
        (root / name).mkdir()

    def worker(name: str, ranks: str) -> str:
        own = [f"--worker={name}", f"--folder={root / name}-result", "--warm-up=1", "--steps=2", *flags,
               f"--output-dir={root / 'data'}"]  # fmt: skip
        main = f"bench_pipeline.main if os.environ['RANK'] in {ranks!r} else lambda: 0"
        return f"{tools}import bench_pipeline\nsys.argv[1:] = {own!r}\npipeline.main = {main}"

    step = [*TINY, "--repeats=2", "--warm-up=1", "--gradient-accumulation-steps=2", f"--json={root / 'step.json'}"]
    step_bench = (f"{tools}import bench_drafter_step as bench\nsys.argv[1:] = {step!r}\n"
                  "pipeline.main = lambda: bench.main() or 0 if os.environ['RANK'] == '0' else 0")  # fmt: skip
    measured = f"{tools}import bench_pipeline\nbench_pipeline.record({str(root / 'measured')!r})"
    traced = f"{tools}import profile_pipeline\nprofile_pipeline.install({str(root / 'ranks')!r}, 3, 5)"
    pipeline_runner.run_cases(2, [
        pipeline_runner.Case("pipeline", [*flags, "--gradient-accumulation-steps=2"], measured),
        pipeline_runner.Case("colocated", [], worker("colocated", "01")),
        pipeline_runner.Case("drafter", [], worker("drafter", "0")),
        pipeline_runner.Case("step", [], step_bench),
        pipeline_runner.Case("traced", [*flags, "--max-steps=12"], traced),
    ], root / "cases")  # fmt: skip
    return root


def test_drafter_step_bench(runs):
    step = json.loads((runs / "step.json").read_text())
    assert (step["context_tokens"], step["documents"], step["blocks"]) == (128, 1, 4)
    assert step["floor_ms"] == pytest.approx(1e3 * step["useful_tflop"] / step["ceiling_tflops"])
    assert step["share_of_ceiling"] == pytest.approx(step["floor_ms"] / step["forward_backward_ms"])
    share = 1 - 2 * step["forward_backward_ms"] / step["optimizer_step_ms"]
    assert step["optimizer_and_zero_share"] == pytest.approx(share)
    assert step["stages_ms"].keys() == {"next_mask_and_copies", "forward_and_loss", "backward", "micro_step", "update"}


def test_colocated_ranks_train_what_the_pipeline_trains(runs):
    """Two ranks with one micro-batch each, against one drafter with two: the same global batches."""
    (runs / "measured" / "out").symlink_to(runs / "cases" / "pipeline" / "run")
    options = SimpleNamespace(warm_up=1, steps=2, target_ranks=1, drafter_ranks=1)
    whole = bench_pipeline.pipeline_result(runs / "measured", options, accumulation=2)
    apart = json.loads((runs / "colocated-result" / "result.json").read_text())
    assert apart["last_loss"] == pytest.approx(whole["last_loss"], rel=1e-6)
    assert apart["tokens_per_micro_batch"] == whole["tokens_per_micro_batch"]
    ticks = bench_pipeline.read_lines(runs / "measured" / "ticks-0.jsonl")
    assert sum(tokens for _, tokens in ticks) == pytest.approx(6 * whole["tokens_per_micro_batch"])
    assert whole["tokens_per_s"] == (ticks[1][1] + ticks[2][1]) / (ticks[2][0] - ticks[0][0])
    gaps = json.loads((runs / "measured" / "gaps-0.json").read_text())  # of 6 micro-batches, 2 of them warm-up
    assert len(gaps) == 5 and min(gaps) >= 0 and whole["ms_between_forward_passes"]["mean"] == pytest.approx(sum(gaps[1:]) / 4)
    ends = [end for end, _ in ticks]
    assert whole["ms_between_steps"]["most"] == pytest.approx(1e3 * max(ends[1] - ends[0], ends[2] - ends[1]))
    options.steps = 1  # the last step is then one of those that are left out
    short = bench_pipeline.pipeline_result(runs / "measured", options, accumulation=2)
    assert short["tokens_per_s"] == ticks[1][1] / (ends[1] - ends[0])
    assert short["ms_between_steps"]["most"] == pytest.approx(1e3 * (ends[1] - ends[0]))
    assert short["ms_between_forward_passes"]["mean"] == pytest.approx(sum(gaps[1:3]) / 2)
    assert short["last_loss"] != whole["last_loss"]
    assert not (runs / "measured" / "out" / "checkpoints").exists()


def test_drafter_alone_trains_on_the_plans_micro_batches(runs):
    result = json.loads((runs / "drafter-result" / "result.json").read_text())
    documents, _ = pipeline.open_documents(runs / "documents.safetensors")
    planner = pipeline.Planner(documents, pipeline.parse_arguments(TINY), 1)
    assert result["tokens_per_micro_batch"] == pytest.approx(sum(planner.plan(m).num_tokens for m in range(3)) / 3)
    busy = result["stages_ms"]["forward"] + result["stages_ms"]["backward"]
    assert result["share_of_ceiling"] == pytest.approx(result["floor_ms"] / busy)


def test_trace_of_a_run_is_one_timeline(runs):
    parts = [profile_pipeline.read_part(runs / "ranks", rank) for rank in range(2)]
    whole, summaries = profile_pipeline.merge(parts)
    assert [s["name"] for s in summaries] == ["target 0 (rank 0)", "drafter 0 (rank 1)"]
    assert all(0 <= s["idle_share"] < 1 and all(0 < v <= 1 for v in s["awaited"].values()) for s in summaries)

    def spans(rank: int, what: str) -> list[tuple[float, float]]:
        return [(e["ts"], e["ts"] + e["dur"]) for e in whole["traceEvents"]
                if e["pid"] == rank and e.get("cat") == "stage" and e["args"]["what"] == what]  # fmt: skip

    (third,), (fourth,) = spans(1, "step 3"), spans(1, "step 4")
    assert third[0] == 0.0 and third[1] <= fourth[0]
    for m in (2, 3):  # trained in steps 3 and 4: what must follow what, over both ranks
        (sent,) = spans(0, f"sending the payload for micro-batch {m}, peer drafter 0 (rank 1)")
        (received,) = spans(1, f"receiving the payload for micro-batch {m}, peer target 0 (rank 0)")
        (trained,) = spans(1, f"drafter forward pass of micro-batch {m}")
        assert sent[0] < received[1] < trained[1]
    operators = [e["ts"] for e in whole["traceEvents"] if e["pid"] == 1 and e.get("cat") == "cpu_op"]
    assert min(operators) > third[0] - 1e5 and any(third[0] <= ts <= fourth[1] for ts in operators)


def test_a_target_named_in_a_config_file_is_no_toy():
    for flags in (["--config", "x.yaml"], ["--config=x.yaml"], ["--target", "x"], ["--target=x"]):
        assert not any("toy" in flag for flag in bench_pipeline.with_toy(flags))
    assert "--target=toy" in bench_pipeline.with_toy(["--num-draft-layers", "1"])
    assert bench_pipeline.with_toy(["--device=cuda", "--target=x"]) == ["--device=cuda", "--target=x"]
