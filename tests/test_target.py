"""The target with its documents end to end in one row: against each document alone, its neighbours, the padded layout;
which targets may do so; compiled layers; random targets."""

import copy
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

import train_dflash_pipeline as pipeline
from helpers import arguments, load, make_documents
from train_dflash_pipeline import TargetRunner, UserError, decoder_layers, document_bounds, length_buckets

CPU = torch.device("cpu")
LAYERS = (0, 1, 3)
# Full attention; all layers sliding, told only by `sliding_window`; the last three layers sliding.
KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
}
HYBRID = {"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_value_head_dim": 8,
          "linear_key_head_dim": 8}  # fmt: skip
LENGTHS = [1, 30, 12, 1, 29, 2, 13, 40, 4, 5]


def tiny(kind: str, **values):
    """A random model of 5 layers whose weights all differ, those of norms and decays too."""
    values = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2} | values
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=320, hidden_size=32, intermediate_size=48, max_position_embeddings=512, **values
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval().requires_grad_(False)


def plan_of(documents, tokens=160):
    args = arguments(tokens_per_micro_batch=tokens, anchors_per_micro_batch=4)
    return pipeline.Planner(documents, args, 1).plan(0)


def packed_rows(runner: TargetRunner, plan) -> torch.Tensor:
    """[n, K*H] as it would be sent, filled through `pack_shots` into memory that holds NaN."""
    width = runner.decoder.config.hidden_size
    joined = torch.full((plan.num_tokens, len(runner.capture.fc_layer_ids) * width), torch.nan)
    pipeline.pack_shots(plan, runner.forward(plan), list(joined.split(width, dim=1)), None)
    return joined


def alone(model, plan) -> torch.Tensor:
    """The same, every document by itself, from Hugging Face's own hidden states."""
    rows, start = [], 0
    for length in plan.lengths:
        ids = torch.from_numpy(plan.token_ids[start : start + length])[None]
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        rows.append(torch.cat([states[i + 1][0] for i in LAYERS], dim=1))
        start += length
    return torch.cat(rows)


# Bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths, tokens, bounds",
    [([5, 3, 1], 9, [0, 5, 8, 9]), ([5, 3, 1], 10, [0, 5, 8, 9, 10]), ([5, 3], 20, [0, 5, 8, 13, 18, 20]),
     ([1], 4, [0, 1, 2, 3, 4]), ([7], 7, [0, 7])],
)  # fmt: skip
def test_padding_is_cut_into_documents_no_longer_than_the_longest(lengths, tokens, bounds):
    found = document_bounds(np.array(lengths), tokens)
    assert found.tolist() == bounds and found.dtype == np.int32


# Values ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("lengths", [LENGTHS, [160], [1], [1] * 9, [80, 80]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_are_those_of_each_document_alone(kind, lengths):
    model, plan = tiny(kind, **KINDS[kind]), plan_of(make_documents(lengths))
    reference = alone(model, plan)
    runner = TargetRunner(model, (*LAYERS,), False, CPU, "packed")
    assert runner.packed and runner.describe() == "4 layers; documents end to end"
    torch.testing.assert_close(packed_rows(runner, plan), reference, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_last_layer_is_packed_too_and_before_the_final_norm():
    model, plan = tiny("qwen3", **KINDS["qwen3"]), plan_of(make_documents([7, 5, 30]))
    prenorm, row = [], 0
    other = copy.deepcopy(model)
    other.model.norm.register_forward_hook(lambda module, inputs, out: prenorm.append(inputs[0][0]))
    for length in plan.lengths:
        other(torch.from_numpy(plan.token_ids[row : row + length])[None])
        row += length
    [(shot, documents)] = TargetRunner(model, (1,), True, CPU, "packed").forward(plan)
    last = shot.get_hidden_states_packed(plan.lengths[documents])[1][0]
    torch.testing.assert_close(last, torch.cat(prenorm), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_other_documents_and_padding_do_not_change_a_bit_of_a_document(kind):
    documents, replaced = make_documents([20, 18, 17, 5]), make_documents([20, 18, 17, 5])
    replaced.token_ids[20:38] = 2 + (replaced.token_ids[20:38] + 7) % 290
    plans = plan_of(documents), plan_of(replaced)
    plans[1].token_ids[plans[1].num_tokens :] = 77  # padding that is not 0
    runner = TargetRunner(tiny(kind, **KINDS[kind]), LAYERS, False, CPU, "packed")
    first, second = (packed_rows(runner, plan) for plan in plans)
    places = plans[0].document_ids[:60]
    for i, document in enumerate(plans[0].documents):
        assert torch.equal(first[places == i], second[places == i]) == (document != 1)


@torch.no_grad()
def test_positions_alone_do_not_keep_documents_apart():
    """The check above sees what it should: with bounds that make one document of all, the neighbours do matter."""
    model, plan = tiny("llama"), plan_of(make_documents([20, 18, 17, 5]))
    reference = alone(model, plan)
    runner = TargetRunner(model, LAYERS, False, CPU, "packed")
    right = pipeline.attend_by_document
    with pytest.MonkeyPatch.context() as patch:
        one = torch.tensor([0, 160])
        patch.setattr(pipeline, "attend_by_document", lambda q, k, v, _, e, *rest: right(q, k, v, one, e // e, *rest))
        leaking = packed_rows(runner, plan)
    assert torch.allclose(leaking[:20], reference[:20], atol=1e-5) and not torch.allclose(leaking, reference, atol=0.1)


@torch.no_grad()
def test_linear_attention_layers_need_no_mask_over_padding_on_the_right():
    """A padded hybrid, against each document alone; and padding really was there."""
    model, plan = tiny("qwen3_5_text", **HYBRID), plan_of(make_documents([40, 39, 30, 3, 1]))
    reference = alone(model, plan)
    runner = TargetRunner(model, LAYERS, False, CPU)
    assert any(len(set(plan.lengths[bucket])) > 1 for bucket in length_buckets(plan.lengths, runner.pass_cost))
    torch.testing.assert_close(packed_rows(runner, plan), reference, atol=1e-5, rtol=1e-5)


def test_nan_fault_strikes_a_real_token_of_the_longest_document(target_folder):
    """And the guard names it: in one row its last column is padding."""
    plan = plan_of(make_documents([7, 30, 12]))
    runner = TargetRunner(load(target_folder("llama"))[1], (1, 3, 5), False, CPU, "packed")
    shots = runner.forward(plan)
    injector = pipeline.FaultInjector.__new__(pipeline.FaultInjector)
    injector.fault, injector.kind, injector.m = ("nan-layer", 0, None), "nan-layer", 0
    injector.after_capture(shots, plan)
    rows = shots[0][0].captured[3].flatten(0, 1)[shots[0][0].real_rows(plan.lengths)]
    assert torch.isnan(rows).nonzero().tolist() == [[29, 3]]


def test_row_of_documents_is_packed_into_exactly_its_real_tokens():
    capture = pipeline.HookCapture.__new__(pipeline.HookCapture)
    capture.fc_layer_ids, capture.verifier_last_layer, capture.end_to_end = (2,), None, True
    capture.captured = {2: torch.arange(20.0).view(1, 10, 2)}
    assert torch.equal(capture.get_hidden_states_packed([4, 3])[0], torch.arange(14.0).view(1, 7, 2))
    with pytest.raises(ValueError, match="do not fit captured layers of shape"):
        capture.get_hidden_states_packed([4, 7])


# Which targets --------------------------------------------------------------------------------------------------------


class OwnAttention(torch.nn.Module):
    """An attention layer that reads its neighbours without asking the attention function."""

    def forward(self, hidden_states, **keywords):
        return hidden_states.cumsum(1), None


@pytest.mark.parametrize(
    "kind, values, why",
    [("qwen3_5_text", HYBRID, "layers of linear_attention"),
     ("gemma2", {"head_dim": 8}, r"plain causal one \(softcap\)"),
     ("gpt_oss", {"head_dim": 8, "num_local_experts": 4}, r"plain causal one \(s_aux\)"),
     ("llama4_text", {"head_dim": 8}, "layers of chunked_attention")],
)  # fmt: skip
def test_target_that_cannot_be_packed_is_padded_and_says_why(kind, values, why, monkeypatch):
    with pytest.raises(UserError, match=f"--target-layout packed: not with this target: .*{why}"):
        TargetRunner(tiny(kind, **values), LAYERS, False, CPU, "packed")
    model = tiny(kind, **values)
    before = model.config._attn_implementation
    monkeypatch.setattr(pipeline, "FAST_DTYPES", {("cpu", torch.float32)})
    runner, plan = TargetRunner(model, LAYERS, False, CPU), plan_of(make_documents([20, 18, 3]))
    assert not runner.packed and re.search(rf"documents padded \(.*{why}", runner.describe())
    assert model.config._attn_implementation == before  # tried and put back
    padded = TargetRunner(tiny(kind, **values), LAYERS, False, CPU, "padded")
    assert torch.equal(packed_rows(runner, plan), packed_rows(padded, plan))


def test_auto_packs_where_there_is_a_kernel(monkeypatch):
    monkeypatch.setattr(pipeline, "FAST_DTYPES", {("cpu", torch.float32)})
    assert TargetRunner(tiny("llama"), LAYERS, False, CPU).describe() == "4 layers; documents end to end"


def test_layer_that_goes_its_own_way_is_found_out():
    model = tiny("llama")
    decoder_layers(model)[1].self_attn = OwnAttention()
    with pytest.raises(UserError, match="some layers have attention of their own"):
        TargetRunner(model, LAYERS, False, CPU, "packed")


@pytest.mark.parametrize(
    "fault, why",
    [(lambda right, q, k, v, bounds, extent, *rest: right(q, k, v, torch.tensor([0, len(q)]), extent // extent, *rest),
      "documents would not be kept apart"),
     (lambda right, q, k, v, bounds, extent, scale, window: right(q, k, v, bounds, extent, scale * 2, window),
      "it computes something else then")],
)  # fmt: skip
def test_attention_that_leaks_or_differs_is_found_out_at_start(fault, why, monkeypatch):
    right = pipeline.attend_by_document
    monkeypatch.setattr(pipeline, "attend_by_document", lambda *a: fault(right, *a))
    with pytest.raises(UserError, match=why):
        TargetRunner(tiny("llama"), LAYERS, False, CPU, "packed")


def test_auto_stays_padded_where_there_is_no_kernel():
    runner = TargetRunner(tiny("llama"), LAYERS, False, CPU)
    assert runner.describe() == "4 layers; documents padded (no fast variable-length attention in float32 on cpu)"


# Compiled layers ------------------------------------------------------------------------------------------------------


class Counting:
    """A compiler backend that changes nothing and counts graphs."""

    graphs = 0

    def __call__(self, graph, inputs, **_):
        self.graphs += 1
        return graph


@torch.no_grad()
@pytest.mark.parametrize("layout, graphs", [("packed", 2), ("padded", 4)])
def test_compiled_layers_capture_the_same_and_are_compiled_at_start_only(layout, graphs):
    """Ten micro-batches of varied lengths, within and beyond the sliding window; hooks fire as before. More layers than
    torch compiles variants of a function: layers of a kind share theirs."""
    torch._dynamo.reset()
    values = KINDS["qwen3"] | {"num_hidden_layers": 12, "max_window_layers": 6, "sliding_window": 16}
    model, rng = tiny("qwen3", **values), np.random.default_rng(0)
    plans = [plan_of(make_documents(rng.integers(1, 60, rng.integers(1, 9))), tokens=512) for _ in range(10)]
    plain = TargetRunner(copy.deepcopy(model), LAYERS + (11,), False, CPU, layout)
    compiled, counting = TargetRunner(model, LAYERS + (11,), False, CPU, layout), Counting()
    compiled.compiled = True
    compiled.compile_layers(backend=counting)
    planner = pipeline.Planner(make_documents([30, 12, 29]), arguments(tokens_per_micro_batch=512), 1)
    compiled.warm_up(planner, 0)
    assert counting.graphs == graphs  # two kinds of layer, times one row or several where padded
    assert all(torch.equal(packed_rows(compiled, plan), packed_rows(plain, plan)) for plan in plans)
    assert counting.graphs == graphs


@torch.no_grad()
def test_layers_of_linear_attention_are_compiled_around_its_kernels(monkeypatch):
    """transformers calls flash-linear-attention unless for an export, and torch 2.11 takes compiling for one."""
    torch._dynamo.reset()
    model, rng = tiny("qwen3_5_text", **HYBRID | {"head_dim": 16, "num_hidden_layers": 4}), np.random.default_rng(0)
    code, calls = sys.modules[type(model).__module__], []
    rule = code.torch_chunk_gated_delta_rule

    @torch.compiler.disable
    def kernels(query, key, value, **keywords):
        calls.append(len(query))
        return rule(query, key, value, **keywords)[0].contiguous(), None

    def dispatch(query, key, value, **keywords):
        exporting = torch.compiler.is_exporting()
        return (torch.zeros_like(value), None) if exporting else kernels(query, key, value, **keywords)

    monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", dispatch)
    monkeypatch.setattr(pipeline, "linear_attention_kernels", lambda: "0.0")
    plans = [plan_of(make_documents(rng.integers(1, 60, rng.integers(1, 9))), tokens=512) for _ in range(10)]
    plain = TargetRunner(copy.deepcopy(model), LAYERS, False, CPU, "padded")
    compiled, counting = TargetRunner(model, LAYERS, False, CPU, "padded"), Counting()
    compiled.compiled = True
    compiled.compile_layers(backend=counting)
    compiled.warm_up(pipeline.Planner(make_documents([30, 12, 29]), arguments(tokens_per_micro_batch=512), 1), 0)
    graphs = counting.graphs
    assert graphs > 2 and calls
    assert all(torch.equal(packed_rows(compiled, plan), packed_rows(plain, plan)) for plan in plans)
    assert counting.graphs == graphs


# Random targets -------------------------------------------------------------------------------------------------------


def test_27b_shape_is_that_of_the_real_model():
    config = pipeline.load_target_config(arguments(target="qwen3.6-27b-shape").target)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    layers = sum(p.numel() for p in decoder_layers(model).parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert round(layers / 1e9, 1) == 24.4 and round(whole * 2 / 1e9) == 54 and config.dtype == torch.bfloat16
    assert [kind == "full_attention" for kind in config.layer_types] == [False, False, False, True] * 16


def test_ends_of_a_random_hybrid_are_its_own(monkeypatch):
    """Its norms start at 0, since 1 is added to them."""
    small = HYBRID | {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
                      "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "float32"}  # fmt: skip
    shape = pipeline.RANDOM_TARGETS["qwen3.6-27b-shape"] | small
    monkeypatch.setitem(pipeline.RANDOM_TARGETS, "small-hybrid", shape)
    config, model = load("small-hybrid")
    ends = pipeline.load_frozen_ends(arguments(target="small-hybrid").target, config, CPU, torch.float32)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.lm_head(model.model.norm(hidden)), ends.logits(ends.norm(hidden)))


def test_targets_that_compute_differently_are_refused(capsys):
    store = dist.HashStore()
    runners = [SimpleNamespace(describe=lambda text=text: text) for text in ("packed", "packed", "padded")]
    fabrics = [SimpleNamespace(store=store, topology=pipeline.Topology(rank, 4, rank, 4, 3)) for rank in range(3)]
    for rank in (0, 1):
        pipeline.check_targets_alike(fabrics[rank], runners[rank])
    with pytest.raises(UserError, match=r"differently: padded here, packed on target 0 \(rank 0\)"):
        pipeline.check_targets_alike(fabrics[2], runners[2])
    assert capsys.readouterr().out == "target: packed\n"


def test_hidden_states_that_do_not_fit_their_documents_are_named():
    plan = plan_of(make_documents(LENGTHS))
    runner = TargetRunner(tiny("llama"), LAYERS, False, CPU)
    layers = list(torch.empty(plan.num_tokens, len(LAYERS) * 32).split(32, dim=1))
    shots = runner.forward(plan)
    missing = plan.documents[shots[-1][1]].tolist()
    with pytest.raises(RuntimeError, match=re.escape(f"none for documents {missing}")):
        pipeline.pack_shots(plan, shots[:-1], layers, None)
    shots = runner.forward(plan)
    capture, documents = shots[0]
    capture.captured = {i: states[:, :2] for i, states in capture.captured.items()}
    named = re.escape(f"micro-batch 0, documents {plan.documents[documents].tolist()}: lengths")
    with pytest.raises(RuntimeError, match=named):
        pipeline.pack_shots(plan, shots, layers, None)


def test_targets_that_round_otherwise_are_warned_of(capsys):
    """By what each captured of the same micro-batch, whichever its own first one is."""
    planner, store = pipeline.Planner(make_documents(LENGTHS), arguments(tokens_per_micro_batch=160), 1), dist.HashStore()
    runners = [TargetRunner(tiny("llama"), LAYERS, False, CPU) for _ in range(3)]
    with torch.no_grad():
        runners[2].layers[1].mlp.down_proj.weight[3, 5] *= 1 + 2**-10
    for rank, runner in enumerate(runners):
        fabric = SimpleNamespace(store=store, topology=pipeline.Topology(rank, 4, rank, 4, 3))
        pipeline.check_targets_round_alike(fabric, runner.warm_up(planner, 0, summed=True))
    warning = "warning: target 2 (rank 2) rounds otherwise than target 0 (rank 0): results depend on the number of targets\n"
    assert capsys.readouterr().out == warning
    assert runners[0].warm_up(planner, planner.end_m, summed=True) is None
