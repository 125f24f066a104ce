"""The target with its documents end to end in one row: against each document alone, its neighbours, the padded layout;
which targets may do so; compiled layers; random targets."""

import contextlib
import copy
import itertools
import re
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers.models.qwen3_5 import modeling_qwen3_5

import train_dflash_pipeline as pipeline
from helpers import arguments, load, make_documents
from train_dflash_pipeline import TargetRunner, UserError, decoder_layers, document_bounds, length_buckets

CPU = torch.device("cpu")
LAYERS = (0, 1, 3)
# Full attention; all layers sliding, told only by `sliding_window`; the last three layers sliding.
# Three layers of linear attention before each that attends.
HYBRID = {"head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_value_head_dim": 8,
          "linear_key_head_dim": 8}  # fmt: skip
KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3_5_text": HYBRID,
}
QWEN3_5_NAMES = {name: getattr(modeling_qwen3_5, name) for name in (pipeline.DELTA_RULE, pipeline.CONVOLUTION)}
LENGTHS = [1, 30, 12, 1, 29, 2, 13, 40, 4, 5]


def tiny(kind: str, **values):
    """A random model of 5 layers whose weights all differ, those of norms and decays too."""
    values = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512} | values
    config = transformers.AutoConfig.for_model(kind, vocab_size=320, hidden_size=32, intermediate_size=48, **values)
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
    """The same, every document by itself, from Hugging Face's own hidden states and code."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in QWEN3_5_NAMES.items():
            patch.setattr(modeling_qwen3_5, name, function)
        return alone_as_served(model, plan)


def alone_as_served(model, plan) -> torch.Tensor:
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
    [([5, 3, 1], 9, [0, 5, 8, 9]), ([5, 3, 1], 10, [0, 5, 8, 9, 10]), ([100, 3], 320, [0, 100, 103, 203, 303, 320]),
     ([1], 4, [0, 1, 4]), ([1], 140, [0, 1, 65, 129, 140]), ([7], 7, [0, 7])],
)  # fmt: skip
def test_padding_is_cut_into_documents_no_longer_than_the_longest_or_than_64(lengths, tokens, bounds):
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
    assert runner.packed and re.fullmatch("4 layers; documents end to end(; linear attention by .*)?", runner.describe())
    # the norm after linear attention divides by what is near 0 for some token, and enlarges the rounding there
    atol = 1e-3 if kind == "qwen3_5_text" else 1e-5
    torch.testing.assert_close(packed_rows(runner, plan), reference, atol=atol, rtol=1e-5)


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
    torch.testing.assert_close(packed_rows(runner, plan), reference, atol=1e-3, rtol=1e-5)


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
    [("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv", "conv"]}, "layers of conv"),
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


def test_layers_with_a_convolution_of_unknown_kind_are_not_packed():
    model = tiny("llama")
    decoder_layers(model)[1].convolution = torch.nn.Conv1d(4, 4, 2)
    with pytest.raises(UserError, match="--target-layout packed: not with this target: layers with a convolution"):
        TargetRunner(model, LAYERS, False, CPU, "packed")


def test_auto_packs_where_there_is_a_kernel(monkeypatch):
    monkeypatch.setattr(pipeline, "FAST_DTYPES", {("cpu", torch.float32)})
    assert TargetRunner(tiny("llama"), LAYERS, False, CPU).describe() == "4 layers; documents end to end"


def test_a_trial_that_ends_in_a_later_layer_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(pipeline, "FAST_DTYPES", {("cpu", torch.float32)})
    model = tiny("llama")
    decoder_layers(model)[2].self_attn.is_causal = False  # two layers have been captured by then
    padded = TargetRunner(copy.deepcopy(model), LAYERS, False, CPU, "padded")
    runner, plan = TargetRunner(model, LAYERS, False, CPU), plan_of(make_documents(LENGTHS))
    assert "documents padded (its attention is not the plain causal one" in runner.describe()
    assert torch.equal(packed_rows(runner, plan), packed_rows(padded, plan))


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
@pytest.mark.parametrize(
    "kind, values, count", [("qwen3", {"max_window_layers": 6, "sliding_window": 16}, 10), ("qwen3_5_text", {}, 3)]
)
def test_compiled_layers_capture_the_same_and_are_compiled_at_start_only(kind, values, count, layout, graphs):
    """Micro-batches of varied lengths, within and beyond the sliding window; hooks fire as before. More layers than
    torch compiles variants of a function: layers of a kind share theirs. Those of linear attention are one graph, too."""
    torch._dynamo.reset()
    model, rng = tiny(kind, **KINDS[kind] | {"num_hidden_layers": 12} | values), np.random.default_rng(0)
    plans = [plan_of(make_documents(rng.integers(1, 60, rng.integers(1, 9))), tokens=512) for _ in range(count)]
    plain = TargetRunner(copy.deepcopy(model), LAYERS + (11,), False, CPU, layout)
    compiled, counting = TargetRunner(model, LAYERS + (11,), False, CPU, layout), Counting()
    compiled.compiled = True
    compiled.compile_layers(backend=counting)
    planner = pipeline.Planner(make_documents([30, 12, 29]), arguments(tokens_per_micro_batch=512), 1)
    compiled.warm_up(planner, 0)
    assert counting.graphs == graphs  # two kinds of layer, times one row or several where padded
    assert all(torch.equal(packed_rows(compiled, plan), packed_rows(plain, plan)) for plan in plans)
    assert counting.graphs == graphs


# Linear attention -----------------------------------------------------------------------------------------------------


def delta_rule_token_by_token(query, key, value, g, beta):
    """[N, heads, D] each, g and beta [N, heads] -> [N, heads, Dv]: one state a head, S = exp(g) S + beta k (v - k' exp(g) S)."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state, out = torch.zeros(query.shape[1], key.shape[-1], value.shape[-1]), []
    for q, k, v, decay, rate in zip(query, key, value, g.exp(), beta):
        state = decay[:, None, None] * state
        told = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, rate[:, None] * (v - told))
        out.append(torch.einsum("hkv,hk->hv", state, q) * query.shape[-1] ** -0.5)
    return torch.stack(out)


@torch.no_grad()
@pytest.mark.parametrize("kernels", [None, "6"])
@pytest.mark.parametrize("lengths", [[1], [70, 1, 64, 5], [1] * 7, [130]], ids=str)
def test_delta_rule_begins_anew_with_each_document(lengths, kernels, monkeypatch):
    """Without flash-linear-attention, and with a stand-in that is told where documents begin, as its kernels are."""
    code, told = types.ModuleType(f"some.rule_{kernels}_{len(lengths)}_{lengths[0]}"), []

    def rule(*args, cu_seqlens=None, **keywords):
        right = QWEN3_5_NAMES[pipeline.DELTA_RULE]
        if cu_seqlens is None:
            return right(*args, **keywords)
        told.append(cu_seqlens)
        documents = itertools.pairwise(cu_seqlens.tolist())
        return torch.cat([right(*(x[:, a:b] for x in args), **keywords)[0] for a, b in documents], 1), None

    code.torch_chunk_gated_delta_rule = rule
    monkeypatch.setattr(pipeline, "linear_attention_kernels", lambda: kernels)
    pipeline.serve_delta_rule(code)
    n, draw = sum(lengths), torch.Generator().manual_seed(len(lengths))
    query, key, value = (torch.randn(1, n, 3, width, generator=draw) for width in (8, 8, 5))
    g, beta = -torch.rand(1, n, 3, generator=draw), torch.rand(1, n, 3, generator=draw)
    bounds = torch.full((n + 1,), n, dtype=torch.int32)
    bounds[: len(lengths) + 1] = torch.tensor([0, *itertools.accumulate(lengths)])

    def layer():
        return code.torch_chunk_gated_delta_rule(
            query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True, bounds=bounds,
            extent=torch.tensor([len(lengths), max(lengths)]), cu_seqlens=None,
        )  # fmt: skip

    served, state = layer()
    rows = zip(*(x[0].split(lengths) for x in (query, key, value, g, beta)))
    reference = torch.cat([delta_rule_token_by_token(*document) for document in rows])
    torch.testing.assert_close(served[0], reference, atol=1e-5, rtol=1e-4)
    assert state is None and [x.tolist() for x in told] == ([[0, *itertools.accumulate(lengths)]] if kernels else [])
    again = torch.compile(layer, backend=Counting())()[0]  # another layer of the same pass: the very same tensor
    assert torch.equal(again, served) and (not kernels or told[0] is told[1])
    bounds = bounds.clone()
    layer()
    assert not kernels or told[2] is not told[0]


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[1], [7, 1, 2, 30, 3], [1] * 9], ids=str)
@pytest.mark.parametrize("bias, activation", [(True, None), (False, "silu")])
def test_convolution_begins_anew_with_each_document(lengths, bias, activation):
    draw = torch.Generator().manual_seed(1)
    states, weight = torch.randn(1, 6, sum(lengths), generator=draw), torch.randn(6, 4, generator=draw)
    bias = torch.randn(6, generator=draw) if bias else None
    parts = [F.conv1d(x, weight[:, None], bias, padding=3, groups=6)[..., : x.shape[-1]] for x in states.split(lengths, -1)]
    reference = torch.cat(parts, -1) if activation is None else F.silu(torch.cat(parts, -1))
    positions = torch.cat([torch.arange(n) for n in lengths])
    served = pipeline.convolve_documents(states, weight, bias, activation=activation, document_positions=positions)
    torch.testing.assert_close(served, reference, atol=1e-5, rtol=1e-5)
    rows = torch.randn(3, 6, 20, generator=draw)  # padded: a document a row
    reference = F.conv1d(rows, weight[:, None], bias, padding=3, groups=6)[..., :20]
    torch.testing.assert_close(pipeline.convolve_documents(rows, weight, bias), reference, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_hybrid_still_decodes_with_a_cache_once_its_code_is_exchanged():
    model = tiny("qwen3_5_text", **HYBRID)
    TargetRunner(copy.deepcopy(model), LAYERS, False, CPU, "packed")
    assert modeling_qwen3_5.causal_conv1d_fn is pipeline.convolve_documents
    ids = torch.arange(2, 40)[None]
    whole, first = model(ids).logits, model(ids[:, :20], use_cache=True)
    logits, cache = [first.logits], first.past_key_values
    for i in range(20, 38):
        step = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        logits, cache = [*logits, step.logits], step.past_key_values
    torch.testing.assert_close(torch.cat(logits, 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "kernels, why", [(None, "linear attention without flash-linear-attention"), ("0.1", "(keep|kept).* apart")]
)
def test_hybrid_is_padded_without_kernels_or_with_such_as_know_no_documents(kernels, why, monkeypatch):
    """What is installed here is transformers' own rule, which cannot be told where documents begin."""
    monkeypatch.setattr(pipeline, "FAST_DTYPES", {("cpu", torch.float32)})
    monkeypatch.setattr(pipeline, "linear_attention_kernels", lambda: kernels)
    runner = TargetRunner(tiny("qwen3_5_text", **HYBRID), LAYERS, False, CPU)
    assert not runner.packed and re.search(why, runner.obstacle)


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
    runners = [SimpleNamespace(describe=lambda text=text: text, fp8_layers=7, fp8_error=error)
               for text, error in (("packed", 0.04321), ("packed", 0.05), ("padded", 0.04321))]  # fmt: skip
    fabrics = [SimpleNamespace(store=store, topology=pipeline.Topology(rank, 4, rank, 4, 3)) for rank in range(3)]
    for rank in (0, 1):
        pipeline.check_targets_alike(fabrics[rank], runners[rank])
    with pytest.raises(UserError, match=r"differently: padded here, packed on target 0 \(rank 0\)"):
        pipeline.check_targets_alike(fabrics[2], runners[2])
    said = "target: packed; fp8 moves its captured states by 4.3% (of random tokens)\n"
    assert capsys.readouterr().out == said


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


def test_version_of_the_linear_attention_kernels(monkeypatch):
    """Of what is imported: flash-linear-attention or, enough for transformers, fla-core alone."""
    found = pipeline.linear_attention_kernels.__wrapped__
    assert found() is None  # not among the requirements
    modules = {name: types.ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule")}
    modules["fla"].ops, modules["fla"].__version__ = modules["fla.ops"], "9.9"
    monkeypatch.setattr(sys, "modules", sys.modules | modules)
    assert found() == "9.9"


ROPES = {
    "longrope": ("phi3", {"pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 16.0,
        "original_max_position_embeddings": 32}}),
    "dynamic": ("llama", {"max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_that_goes_by_the_longest_document_is_refused_where_that_matters(name, layout):
    kind, values = ROPES[name]
    for longest, moves in ((32, False), (40, True)):
        runner = TargetRunner(tiny(kind, **values), LAYERS, False, CPU, layout)
        run = runner._packed_pass if runner.packed else runner._padded_pass
        ids = np.random.default_rng(0).integers(0, 320, longest + 31)
        states = []
        for lengths in ([longest, 31], [31]):
            shot = run(ids[-sum(lengths) :], np.array(lengths))
            states.append(shot.get_hidden_states_packed(lengths)[0][0][-31:])
        assert (pipeline.relative_error(*states) > 1e-3) is moves
    config, limit = runner.decoder.config, {"longrope": 32, "dynamic": 31}[name]
    pipeline.check_rope(config, limit)
    with pytest.raises(UserError, match=rf"RoPE \({name}\) changes .* set --max-document-tokens {limit}$"):
        pipeline.check_rope(config, limit + 1)
    config.rope_parameters = {"full_attention": config.rope_parameters, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(UserError, match=f"--max-document-tokens {limit}"):
        pipeline.check_rope(config, limit + 1)
    pipeline.check_rope(tiny("llama").config, 10**6)


@pytest.mark.parametrize("quantised, name", [("model.embed_tokens.weight", "embedding"), ("lm_head.weight", "LM head")])
def test_ends_that_are_stored_with_scales_are_refused(tmp_path, quantised, name):
    """Their codes alone would be taken for weights."""
    tensors = {key: torch.ones(4, 4).bfloat16() for key in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        tensors[quantised] = tensors[quantised].to(dtype)
        save_file(tensors, tmp_path / "model.safetensors")
        files = pipeline.safetensors_index(str(tmp_path))
        refused = pytest.raises(UserError, match=f"its {name} is stored in .*8.*, whose scales are not read")
        with refused if dtype.itemsize == 1 else contextlib.nullcontext():
            pipeline.read_ends(files, False, ["weight"], str(tmp_path))


# fp8 ------------------------------------------------------------------------------------------------------------------


def test_linear_layer_in_fp8_is_the_product_of_what_was_rounded():
    """Weights and inputs rounded to 3 bits of mantissa with a scale a row; no row depends on another."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48).bfloat16().requires_grad_(False)
    layer, x = pipeline.Float8Linear(linear), torch.randn(3, 5, 64).bfloat16() * torch.tensor([1e-3, 1.0, 200.0])[:, None, None]
    x = x.bfloat16()

    def rounded(rows):
        scale = rows.float().abs().amax(1, keepdim=True) / 448
        return (rows.float() / scale).to(torch.float8_e4m3fn).float() * scale

    expected = rounded(x.flatten(0, 1)) @ rounded(linear.weight.detach()).T + linear.bias.float()
    found = layer(x)
    assert found.shape == (3, 5, 48) and found.dtype == torch.bfloat16
    assert pipeline.relative_error(found.flatten(0, 1), expected) < 5e-3
    assert 1e-2 < pipeline.relative_error(found.flatten(0, 1), linear(x).flatten(0, 1)) < 0.1
    alone = torch.cat([layer(x[i : i + 1]) for i in range(3)])
    assert torch.equal(alone, found)
    assert torch.equal(layer(torch.zeros(1, 2, 64).bfloat16()), linear.bias.expand(1, 2, 48))


@pytest.mark.parametrize("into, out, fits", [(512, 32, True), (512, 16, False), (24, 48, False), (48, 40, False), (16, 512, True)])
def test_gates_and_odd_sizes_stay_out_of_fp8(into, out, fits):
    assert pipeline.Float8Linear.fits(torch.nn.Linear(into, out)) is fits


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_target_in_fp8_says_how_far_off_its_states_are(kind, layout, monkeypatch):
    monkeypatch.setattr(pipeline, "forward_pass_cost", lambda layers, *_: sum(p.numel() for p in layers.parameters()) / 1e3)
    plan, plain = plan_of(make_documents(LENGTHS)), TargetRunner(tiny(kind, **KINDS[kind]), LAYERS, False, CPU)
    runner = TargetRunner(tiny(kind, **KINDS[kind]), LAYERS, False, CPU, layout, fp8=True)
    assert runner.pass_cost == plain.pass_cost > 0  # by which documents are cut into padded passes
    error = pipeline.relative_error(packed_rows(runner, plan), packed_rows(plain, plan))
    assert error == pytest.approx(runner.fp8_error, rel=0.5) and 0.02 < error < 0.5
    assert f"; {25 if kind == 'qwen3_5_text' else 28} linear layers in fp8" in runner.describe() and "fp8" not in plain.describe()


@pytest.mark.parametrize("capability, dtype, refused", [
    ((8, 0), torch.bfloat16, True), ((8, 9), torch.bfloat16, False), ((9, 0), torch.bfloat16, False),
    ((9, 0), torch.float16, True), ((10, 0), torch.bfloat16, False),
])  # fmt: skip
def test_fp8_needs_a_gpu_that_has_it_and_bf16(monkeypatch, capability, dtype, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    args, config = arguments(target="toy", target_fp8=True).target, SimpleNamespace(dtype=dtype)
    goes_on = pytest.raises(AttributeError, match="get_text_config")  # to load the target of a config that is none
    with pytest.raises(UserError, match="Ada, Hopper or newer") if refused else goes_on:
        pipeline.load_target(args, config, torch.device("cuda"))


def test_fp8_is_refused_where_there_is_nothing_to_put_it_in():
    model = tiny("llama")
    for module in [m for m in decoder_layers(model).modules() if isinstance(m, torch.nn.Linear)]:
        module.in_features = 24  # as it says of itself
    with pytest.raises(UserError, match="no linear layer of its own whose sizes are multiples of 16"):
        TargetRunner(model, LAYERS, False, CPU, fp8=True)
    with pytest.raises(UserError, match="--target-fp8: not with --target-tp"):
        pipeline.parse_arguments(["--target-fp8", "--target-tp", "2"])
