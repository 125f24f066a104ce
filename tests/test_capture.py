"""Hooks against Hugging Face's own hidden states, packing against a plain loop, and the target rank's forward."""

import itertools
import types

import numpy as np
import pytest
import torch
from torch import nn

from helpers import arguments, load, make_documents
from train_dflash_pipeline import (
    FC_LAYER_IDS,
    VERIFIER_LAST_LAYER,
    HookCapture,
    Planner,
    TargetRunner,
    UserError,
    add_noise_,
    choose_fc_layer_ids,
    decoder_layers,
    length_buckets,
)

KINDS = ["qwen3", "llama", "gemma2"]


def token_batch(*shape) -> torch.Tensor:
    return torch.randint(2, 300, shape, generator=torch.Generator().manual_seed(1))


# Hooks ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_layer_i_is_hidden_state_i_plus_one(kind, target_folder):
    _, model = load(target_folder(kind))
    capture = HookCapture(model, (1, 3, 5))
    states = model(token_batch(3, 12), output_hidden_states=True).hidden_states
    for i, captured in capture.take().captured.items():
        assert torch.equal(captured, states[i + 1]) and not torch.equal(captured, states[i])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_last_layer_is_captured_before_the_final_norm(kind, target_folder):
    _, model = load(target_folder(kind))
    capture = HookCapture(model, (1,), verifier_last_layer=7)
    last_state = model(token_batch(3, 12), output_hidden_states=True).hidden_states[-1]
    captured = capture.take().captured[7]
    assert not torch.allclose(captured, last_state, atol=1e-2)
    assert torch.equal(model.get_decoder().norm(captured), last_state)


@torch.no_grad()
def test_captured_layers_are_still_the_same_after_the_forward_pass(target_folder):
    """No later layer writes into what a hook kept."""
    _, model = load(target_folder("qwen3"))
    capture, clones = HookCapture(model, range(8)), {}
    for i, layer in enumerate(decoder_layers(model)):
        layer.register_forward_hook(lambda m, x, y, i=i: clones.update({i: (y[0] if isinstance(y, tuple) else y).clone()}))
    model(token_batch(2, 9))
    captured = capture.take().captured
    assert sorted(captured) == list(range(8)) and all(torch.equal(captured[i], clones[i]) for i in clones)


@torch.no_grad()
def test_removed_hooks_keep_nothing(target_folder):
    _, model = load(target_folder("llama"))
    capture = HookCapture(model, (1, 3))
    capture.remove()
    model(token_batch(1, 4))
    assert capture.captured == {}


class Doubling(nn.Module):
    """A layer that returns a tensor, or a tuple as older models do."""

    def __init__(self, in_tuple: bool):
        super().__init__()
        self.in_tuple = in_tuple

    def forward(self, x):
        return (2 * x, "attention weights") if self.in_tuple else 2 * x


class Tower(nn.Module):
    def __init__(self, depth: int, in_tuple: bool):
        super().__init__()
        self.layers = nn.ModuleList(Doubling(in_tuple) for _ in range(depth))

    def forward(self, x, skip=(), repeat=()):
        for i, layer in enumerate(self.layers):
            for _ in range(0 if i in skip else 2 if i in repeat else 1):
                out = layer(x)
                x = out[0] if isinstance(out, tuple) else out
        return x


class Wrapper(nn.Module):
    """A vision-language model: both towers have lists of `layers`, of equal depth unless told otherwise."""

    def __init__(self, vision_name="visual", depth=4, in_tuple=False, text_config_depth=4):
        super().__init__()
        text = types.SimpleNamespace(num_hidden_layers=text_config_depth)
        self.config = types.SimpleNamespace(num_hidden_layers=99, get_text_config=lambda: text)
        self.add_module(vision_name, Tower(depth, in_tuple))
        self.language_model = Tower(depth, in_tuple)

    def get_decoder(self):
        return self.language_model

    def forward(self, x, **keywords):
        return self.language_model(x, **keywords)


@pytest.mark.parametrize("in_tuple", [False, True])
@pytest.mark.parametrize("vision_name", ["visual", "vision_tower", "audio_tower"])
def test_text_layers_are_found_inside_a_multimodal_wrapper(vision_name, in_tuple):
    model = Wrapper(vision_name, in_tuple=in_tuple)
    assert decoder_layers(model) is model.language_model.layers
    capture = HookCapture(model, (0, 2))
    x = torch.ones(1, 2, 3)
    model(x)
    assert {i: t.unique().tolist() for i, t in capture.take().captured.items()} == {0: [2.0], 2: [8.0]}


def test_model_without_a_clear_list_of_layers_is_refused():
    with pytest.raises(UserError, match="found 0 lists of 5 decoder layers"):
        decoder_layers(Wrapper(text_config_depth=5))
    with pytest.raises(UserError, match="found 2 lists of 4 decoder layers"):
        decoder_layers(Wrapper("second_language_model"))


def test_layer_that_did_not_fire_or_fired_twice_raises():
    model, x = Wrapper(), torch.ones(1, 2, 3)
    capture = HookCapture(model, (0, 2), verifier_last_layer=3)
    with pytest.raises(RuntimeError, match=r"layers \[0, 2, 3\] did not fire"):
        capture.take()
    model(x, skip=(2,))
    with pytest.raises(RuntimeError, match=r"layers \[2\] did not fire"):
        capture.take()
    capture.captured.clear()
    with pytest.raises(RuntimeError, match="layer 2 fired twice"):
        model(x, repeat=(2,))


def test_second_pass_without_taking_the_first_raises_and_after_it_does_not():
    model, x = Wrapper(), torch.ones(1, 2, 3)
    capture = HookCapture(model, (0,))
    model(x)
    first = capture.take()
    model(3 * x)
    assert capture.take().captured[0].unique() == 6 and first.captured[0].unique() == 2
    model(x)
    with pytest.raises(RuntimeError, match="layer 0 fired twice"):
        model(x)


# Packing --------------------------------------------------------------------------------------------------------------


def hand_made(fc_layer_ids, last, batch, length, width=6, dtype=torch.float32) -> HookCapture:
    capture = HookCapture.__new__(HookCapture)
    capture.fc_layer_ids, capture.verifier_last_layer = fc_layer_ids, last
    generator = torch.Generator().manual_seed(0)
    wanted = {*fc_layer_ids, *([] if last is None else [last])}
    capture.captured = {i: torch.randn(batch, length, width, generator=generator).to(dtype) for i in wanted}
    return capture


def naive_rows(layer: torch.Tensor, lengths) -> torch.Tensor:
    return torch.stack([layer[b, t] for b in range(len(lengths)) for t in range(lengths[b])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[5, 3, 1, 7], [1], [1, 1, 1], [7, 7], [2, 9]])
@pytest.mark.parametrize("last", [None, 4, 7])
def test_packing_equals_a_plain_loop(lengths, last, dtype):
    capture = hand_made((1, 4, 6), last, len(lengths), max(lengths), dtype=dtype)
    hidden, packed_last = capture.get_hidden_states_packed(lengths)
    layers, split_last = capture.get_hidden_state_layer_packs(lengths)
    expected = [naive_rows(capture.captured[i], lengths) for i in (1, 4, 6)]
    assert hidden.shape == (1, sum(lengths), 18) and hidden.dtype == dtype
    assert torch.equal(hidden[0], torch.cat(expected, 1)) and torch.equal(torch.cat(layers, 2), hidden)
    assert all(layer.shape == (1, sum(lengths), 6) for layer in layers)
    if last is None:
        assert packed_last is None and split_last is None
    else:
        assert torch.equal(packed_last[0], naive_rows(capture.captured[last], lengths))
        assert torch.equal(packed_last, split_last)


@pytest.mark.parametrize("lengths", [[5, 3], [5, 3, 8], [5, 3, 6, 1]])
def test_lengths_that_do_not_fit_the_batch_are_refused(lengths):
    with pytest.raises(ValueError, match="do not fit captured layers of shape"):
        hand_made((1, 4), None, 3, 7).get_hidden_states_packed(lengths)


def test_packing_into_too_few_or_too_many_rows_is_refused():
    capture = hand_made((1,), None, 2, 7)
    for rows in (7, 9):
        with pytest.raises(ValueError, match=f"8 tokens do not fit {rows} rows"):
            capture.pack_into([5, 3], [torch.zeros(rows, 6)], None)


# Noise ----------------------------------------------------------------------------------------------------------------


def test_noise_depends_on_its_seed_alone_and_has_the_asked_deviation():
    a, b, c = (add_noise_(torch.full((300, 40), 2.0), 0.25, seed) for seed in (5, 5, 6))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.mean() == pytest.approx(2.0, abs=0.01) and a.std() == pytest.approx(0.25, rel=0.03)
    assert not torch.equal(a[:, :20], a[:, 20:])  # layers get noise of their own


def test_no_noise_changes_nothing_and_no_global_state_is_touched():
    before, hidden = torch.random.get_rng_state(), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(add_noise_(hidden.clone(), 0.0, 1), hidden)
    assert not torch.equal(add_noise_(hidden.clone(), 0.1, 1), hidden)
    assert torch.equal(before, torch.random.get_rng_state())


# The target rank's forward --------------------------------------------------------------------------------------------


def plan_of(documents, tokens=128):
    return Planner(documents, arguments(tokens_per_micro_batch=tokens, anchors_per_micro_batch=4), 1).plan(0)


def run(folder, plan, fc_layer_ids=(1, 3, 5), with_last=False):
    """Packed rows of a plan, and of the last layer if asked for."""
    runner = TargetRunner(load(folder)[1], fc_layer_ids, with_last, torch.device("cpu"))
    parts = [shot.get_hidden_states_packed(plan.lengths[documents]) for shot, documents in runner.forward(plan)]
    return torch.cat([h[0] for h, _ in parts]), torch.cat([l[0] for _, l in parts]) if with_last else None


def document_rows(plan, hidden, document):
    [i] = np.flatnonzero(plan.documents == document)
    return hidden[torch.from_numpy(plan.document_ids[: plan.num_tokens] == i)]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_each_document_run_alone(kind, target_folder):
    documents = make_documents([1, 30, 12, 29, 3, 13, 40])
    plan = plan_of(documents)
    hidden, last = run(target_folder(kind), plan, with_last=True)
    _, model = load(target_folder(kind))
    prenorm = []
    model.get_decoder().norm.register_forward_hook(lambda m, inputs, out: prenorm.append(inputs[0][0]))
    assert hidden.shape == (128, 3 * 32)
    for document in range(len(documents)):
        ids = documents.token_ids[documents.offsets[document] : documents.offsets[document + 1]]
        states = model(torch.tensor(ids).long()[None], output_hidden_states=True).hidden_states
        alone = torch.cat([states[i + 1][0] for i in (1, 3, 5)], 1)
        torch.testing.assert_close(document_rows(plan, hidden, document), alone, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(document_rows(plan, last, document), prenorm[-1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_document_does_not_depend_on_its_neighbours(kind, target_folder):
    """Replace one document by other tokens of equal length: the forward passes keep their shape, the rest its bits."""
    documents, replaced = make_documents([20, 18, 17, 5]), make_documents([20, 18, 17, 5])
    replaced.token_ids[20:38] = 2 + (replaced.token_ids[20:38] + 7) % 290
    a, b = plan_of(documents), plan_of(replaced)
    rows_a, rows_b = run(target_folder(kind), a)[0], run(target_folder(kind), b)[0]
    for document in range(4):
        equal = torch.equal(document_rows(a, rows_a, document), document_rows(b, rows_b, document))
        assert equal == (document != 1)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_dropping_the_layers_nobody_reads_changes_no_capture(kind, target_folder):
    plan = plan_of(make_documents([30, 12, 29]))
    folder = target_folder(kind)
    model = load(folder)[1]
    runner = TargetRunner(model, (1, 3, 5), False, torch.device("cpu"))
    assert len(model.get_decoder().layers) == 6
    dropped = torch.cat([s.get_hidden_states_packed(plan.lengths[d])[0][0] for s, d in runner.forward(plan)])
    kept, _ = run(folder, plan, with_last=True)
    assert torch.equal(dropped, kept)


@pytest.mark.parametrize("pass_cost", [1, 64, 1000])
def test_buckets_cover_all_documents_at_the_least_cost(pass_cost):
    """Against every way there is to cut up to 9 documents."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = np.sort(rng.integers(1, 200, rng.integers(1, 10)))[::-1]

        def cost(buckets):
            return sum((b.stop - b.start) * lengths[b.start] + pass_cost for b in buckets)

        every_way = []
        for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
            edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
            every_way.append([slice(a, b) for a, b in itertools.pairwise(edges)])
        buckets = length_buckets(lengths, pass_cost)
        assert [i for b in buckets for i in range(b.start, b.stop)] == list(range(len(lengths)))
        assert cost(buckets) == min(cost(way) for way in every_way)


# Which layers ---------------------------------------------------------------------------------------------------------


def chosen(depth: int, **flags):
    return choose_fc_layer_ids(depth, arguments(**flags).target)


def test_constants_are_the_rule_at_depth_64():
    assert chosen(64) == FC_LAYER_IDS == (1, 16, 31, 46, 61) and VERIFIER_LAST_LAYER == 63


@pytest.mark.parametrize(
    "depth, k, ids",
    [(36, 5, (1, 9, 17, 25, 33)), (36, 1, (18,)), (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)), (8, 5, (1, 2, 3, 4, 5)),
     (5, 2, (1, 2)), (28, 3, (1, 13, 25))],
)  # fmt: skip
def test_layers_follow_the_z_lab_rule(depth, k, ids):
    assert chosen(depth, num_fc_layers=k) == ids


def test_explicit_layers_replace_the_rule():
    assert chosen(64, fc_layer_ids=[5, 19, 33, 47, 61]) == (5, 19, 33, 47, 61)
    assert chosen(8, fc_layer_ids=[1, 3], num_fc_layers=2) == (1, 3)


def test_explicit_layers_of_another_number_are_refused():
    with pytest.raises(UserError, match=r"^--num-fc-layers 3, but layers \[1, 3\] are asked for"):
        chosen(8, fc_layer_ids=[1, 3], num_fc_layers=3)


@pytest.mark.parametrize(
    "depth, flags",
    [(4, {}), (3, {}), (7, {}), (8, {"fc_layer_ids": [1, 8]}), (8, {"fc_layer_ids": [-1, 2]}),
     (8, {"fc_layer_ids": [3, 1]}), (8, {"fc_layer_ids": [1, 1]}), (8, {"fc_layer_ids": []})],
)  # fmt: skip
def test_layers_that_repeat_are_unsorted_or_do_not_exist_are_refused(depth, flags):
    with pytest.raises(UserError, match=f"of a target with {depth} layers: ids must rise"):
        chosen(depth, **flags)
