"""The drafter, its masks and its loss against slow references written from the design, and the target's frozen ends."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import arguments, load, make_documents
from train_dflash_pipeline import (
    TILE,
    DFlashDrafter,
    DrafterBatch,
    DrafterConfig,
    FrozenEnds,
    FrozenHeadLoss,
    HookCapture,
    Planner,
    RMSNorm,
    UserError,
    block_mask,
    block_statistics,
    build_drafter,
    compile_repeatably,
    dense_mask,
    dpace_weights,
    init_from_target_layer,
    load_drafter,
    load_frozen_ends,
    load_target_config,
    micro_batch_loss,
    tile_kinds,
    visibility,
)

CPU = torch.device("cpu")
FULL, SLIDING = "full_attention", "sliding_attention"
H, K, B, MASK = 16, 3, 4, 310


def drafter_config(layer_types=(FULL, FULL), window=5, block=B) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=H, intermediate_size=24, num_hidden_layers=len(layer_types), num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5, rope_theta=100.0, max_position_embeddings=512,
        vocab_size=320, block_size=block, mask_token_id=MASK, target_layer_ids=(1, 3, 5), num_target_layers=8,
        layer_types=tuple(layer_types), sliding_window=window,
    )  # fmt: skip


def random_drafter(config: DrafterConfig) -> DFlashDrafter:
    """Weights large enough that every path carries signal, norms included."""
    drafter = DFlashDrafter(config, seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in drafter.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if p.dim() == 1 else noise * p.shape[1] ** -0.5)
    return drafter


def make_plan(lengths, anchors, tokens, masks=None, block=B, seed=0, **flags):
    flags |= dict(tokens_per_micro_batch=tokens, anchors_per_micro_batch=anchors, block_size=block, seed=seed)
    return Planner(make_documents(lengths, masks, seed), arguments(**flags), 1).plan(0)


def forced_plan(length: int, anchors: list[int], tokens=None, block=B, document_before=0):
    """One supervised document with chosen anchors, if wanted after a longer one."""
    lengths = [document_before, length] if document_before else [length]
    plan = make_plan(lengths, len(anchors), tokens or sum(lengths), [[1] * n for n in lengths], block)
    object.__setattr__(plan, "anchor_rows", np.array(anchors))
    object.__setattr__(plan, "num_anchors", len(anchors))
    return plan


def random_inputs(plan, block=B, seed=0):
    """features [N, K*H] and slot embeddings [Q, H]."""
    generator = torch.Generator().manual_seed(seed)
    slots = len(plan.anchor_rows) * block
    return [torch.randn(n, w, generator=generator) for n, w in ((len(plan.token_ids), K * H), (slots, H))]


def run_drafter(drafter, plan, features, slots):
    batch = DrafterBatch.from_plan(plan, drafter.config, CPU)
    return drafter(features, batch.context_positions, slots, batch.slot_positions, batch.masks)


def block_rows(anchor_index: int, block=B) -> slice:
    return slice(anchor_index * block, (anchor_index + 1) * block)


# A slow reference: one anchor, one slot, one head at a time -----------------------------------------------------------


def slow_norm(x, weight, eps):
    return x / (x.square().sum() / len(x) + eps).sqrt() * weight


def slow_rope(x, position: int, theta: float):
    """Turn the pairs (x[i], x[i + D/2]) as complex numbers."""
    half = len(x) // 2
    angles = torch.tensor([position * theta ** (-2 * i / len(x)) for i in range(half)], dtype=x.dtype)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half, dtype=x.dtype), angles)
    return torch.cat([turned.real, turned.imag])


def slow_block(weights, c: DrafterConfig, context_rows, context_positions, block_slots, anchor_position):
    """Outputs of one block, given the features of its document before the anchor."""
    group = c.num_attention_heads // c.num_key_value_heads
    context = [slow_norm(weights["fc.weight"] @ row, weights["hidden_norm.weight"], c.rms_norm_eps) for row in context_rows]
    x = list(block_slots)
    for number, kind in enumerate(c.layer_types):

        def w(name):
            return weights[f"layers.{number}.{name}.weight"]

        def heads(projection, row):
            return (w(f"self_attn.{projection}") @ row).view(-1, c.head_dim)

        def keys(row, position):
            normed = [slow_norm(h, w("self_attn.k_norm"), c.rms_norm_eps) for h in heads("k_proj", row)]
            return [slow_rope(h, position, c.rope_theta) for h in normed]

        read = [slow_norm(row, w("input_layernorm"), c.rms_norm_eps) for row in x]
        candidates = [("context", j, keys(row, j), heads("v_proj", row)) for row, j in zip(context, context_positions)]
        candidates += [("slot", k, keys(row, anchor_position + k), heads("v_proj", row)) for k, row in enumerate(read)]
        out = []
        for k in range(c.block_size):
            position, mixed = anchor_position + k, []
            if kind == FULL:
                seen = candidates
            else:
                seen = [s for s in candidates if s[0] == "context" and position - s[1] < c.sliding_window]
                seen += [s for s in candidates if s[0] == "slot" and k - c.sliding_window < s[1] <= k]
            for h, query in enumerate(heads("q_proj", read[k])):
                query = slow_rope(slow_norm(query, w("self_attn.q_norm"), c.rms_norm_eps), position, c.rope_theta)
                scores = torch.stack([query @ key[h // group] for _, _, key, _ in seen]) / math.sqrt(c.head_dim)
                shares = scores.exp() / scores.exp().sum()
                mixed.append(sum(share * value[h // group] for share, (_, _, _, value) in zip(shares, seen)))
            row = x[k] + w("self_attn.o_proj") @ torch.cat(mixed)
            wide = slow_norm(row, w("post_attention_layernorm"), c.rms_norm_eps)
            gate, up = w("mlp.gate_proj") @ wide, w("mlp.up_proj") @ wide
            out.append(row + w("mlp.down_proj") @ (gate / (1 + (-gate).exp()) * up))
        x = out
    return torch.stack([slow_norm(row, weights["norm.weight"], c.rms_norm_eps) for row in x])


def slow_drafter(weights, config, plan, features, slots):
    """Outputs of all used blocks, document by document."""
    out, start = [], 0
    for number, length in enumerate(plan.lengths):
        for i in range(plan.num_anchors):
            a = plan.anchor_rows[i]
            if start <= a < start + length:
                assert plan.document_ids[a] == number
                context = features[start:a]
                block_slots = slots[block_rows(i, config.block_size)]
                out.append(slow_block(weights, config, context, range(a - start), block_slots, a - start))
        start += length
    return torch.cat(out)


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    "layer_types, window",
    [((FULL, FULL), 5), ((SLIDING, FULL), 5), ((SLIDING, SLIDING), 2), ((SLIDING, SLIDING), 5), ((SLIDING, SLIDING), 100)],
)
@pytest.mark.parametrize(
    "lengths, anchors, tokens, masks",
    [
        ([9, 7, 1, 4], 12, 25, None),  # several documents, overlapping anchors, unused slots, a padded tail
        ([12], 11, 12, [[1] * 12]),  # every possible anchor, from the first token to the last but one, no padding
    ],
)
def test_outputs_and_gradients_equal_the_slow_reference(layer_types, window, lengths, anchors, tokens, masks):
    config = drafter_config(layer_types, window)
    drafter, plan = random_drafter(config), make_plan(lengths, anchors, tokens, masks)
    used = plan.num_anchors * B
    assert (plan.num_anchors < anchors) == (masks is None) and plan.num_anchors > 2
    inputs = random_inputs(plan)
    cotangent = torch.randn(used, H, generator=torch.Generator().manual_seed(9))

    fast_in = [x.clone().requires_grad_() for x in inputs]
    fast = run_drafter(drafter, plan, *fast_in)
    (fast[:used] * cotangent).sum().backward()

    slow_in = [x.double().requires_grad_() for x in inputs]
    weights = {name: p.detach().double().requires_grad_() for name, p in drafter.named_parameters()}
    slow = slow_drafter(weights, config, plan, *slow_in)
    (slow * cotangent).sum().backward()

    close(fast[:used], slow.float())
    assert fast.isfinite().all()
    for fast_x, slow_x in zip(fast_in, slow_in):
        close(fast_x.grad, slow_x.grad.float())
    for name, parameter in drafter.named_parameters():
        close(parameter.grad, weights[name].grad.float())
        assert parameter.grad.abs().max() > 0


# Who sees whom, by perturbation ---------------------------------------------------------------------------------------


def changed_slots(drafter, plan, change, block=B) -> list[list[int]]:
    """Per block, the slots whose outputs have other bits after `change(features, slots)`."""
    features, slots = random_inputs(plan, block)
    with torch.no_grad():
        before = run_drafter(drafter, plan, features.clone(), slots.clone())
        change(features, slots)
        after = run_drafter(drafter, plan, features, slots)
    differs = (before != after).any(1).view(-1, block)
    return [row.nonzero().flatten().tolist() for row in differs]


def push(rows):
    def change(features, slots):
        features[rows] += 1.0

    return change


ALL = list(range(8))


@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_no_feature_from_the_anchor_onward_leaks_into_its_block(kind):
    """Overlapping blocks of 8 at 10, 12 and 14."""
    drafter = random_drafter(drafter_config([kind] * 2, window=100, block=8))
    plan = forced_plan(30, [10, 12, 14], block=8)
    assert changed_slots(drafter, plan, push(slice(14, None)), 8) == [[], [], []]
    assert changed_slots(drafter, plan, push(slice(12, None)), 8) == [[], [], ALL]
    assert changed_slots(drafter, plan, push(slice(10, None)), 8) == [[], ALL, ALL]
    assert changed_slots(drafter, plan, push(9), 8) == [ALL, ALL, ALL]


@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_other_documents_and_the_padded_tail_are_invisible(kind):
    drafter = random_drafter(drafter_config([kind] * 2, window=100, block=8))
    plan = forced_plan(10, [3, 13, 16], tokens=24, block=8, document_before=11)  # 3 is in the first document
    assert changed_slots(drafter, plan, push(slice(0, 3)), 8) == [ALL, [], []]
    assert changed_slots(drafter, plan, push(slice(3, 11)), 8) == [[], [], []]
    assert changed_slots(drafter, plan, push(slice(11, 13)), 8) == [[], ALL, ALL]
    assert changed_slots(drafter, plan, push(slice(21, 24)), 8) == [[], [], []]


def test_slots_of_a_block_see_each_other_and_no_other_block():
    plan = forced_plan(30, [10, 12, 14], block=8)

    def change(features, slots):
        slots[8 + 3] += 1.0

    full = random_drafter(drafter_config([FULL], block=8))
    assert changed_slots(full, plan, change, 8) == [[], ALL, []]
    sliding = random_drafter(drafter_config([SLIDING], window=100, block=8))
    assert changed_slots(sliding, plan, change, 8) == [[], [3, 4, 5, 6, 7], []]
    narrow = random_drafter(drafter_config([SLIDING], window=2, block=8))
    assert changed_slots(narrow, plan, change, 8) == [[], [3, 4], []]


def test_window_counts_from_the_slots_own_position():
    """Anchor 6, block 4, window 4: context {3, 4, 5}, {4, 5}, {5}, {} for the four slots."""
    drafter, plan = random_drafter(drafter_config([SLIDING], window=4)), forced_plan(12, [6])
    seen_by = [changed_slots(drafter, plan, push(j))[0] for j in range(12)]
    assert [[j for j in range(12) if k in seen_by[j]] for k in range(B)] == [[3, 4, 5], [4, 5], [5], []]


# Masks ----------------------------------------------------------------------------------------------------------------


def mask_by_the_table(plan, block: int, window) -> np.ndarray:
    """The visibility table of the design, entry by entry."""
    n, q = len(plan.token_ids), len(plan.anchor_rows) * block
    mask = np.zeros((q, n + q), bool)
    for i, a in enumerate(plan.anchor_rows):
        for k in range(block):
            row = i * block + k
            for j in range(a if i < plan.num_anchors else 0):
                in_window = window is None or (a + k) - j < window
                mask[row, j] = plan.document_ids[j] == plan.document_ids[a] and in_window
            for other in range(block):
                in_order = window is None or (other <= k and k - other < window)
                mask[row, n + i * block + other] = in_order
    return mask


plans = st.builds(
    lambda lengths, anchors, spare, block, seed: (make_plan(lengths, anchors, sum(lengths) + spare, block=block, seed=seed), block),
    st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 20), st.integers(0, 9), st.integers(2, 9),
    st.integers(0, 99),
)  # fmt: skip
windows = st.sampled_from([None, 1, 2, 3, 7, 20, 1000])


@settings(max_examples=60, deadline=None)
@given(plans, windows)
def test_dense_mask_equals_the_table(plan_and_block, window):
    plan, block = plan_and_block
    ranges = visibility(plan, block, window)
    mask = dense_mask(ranges, len(plan.token_ids) + ranges.shape[1]).numpy()
    assert np.array_equal(mask, mask_by_the_table(plan, block, window))
    assert mask.any(1).all()  # no row is empty, used or not


def tiled(dense: np.ndarray, reduce) -> np.ndarray:
    """Brute force: `reduce` over each tile of the dense mask, ragged edges included."""
    tiles = [[reduce(dense[i : i + TILE, j : j + TILE]) for j in range(0, dense.shape[1], TILE)] for i in range(0, len(dense), TILE)]
    return np.array(tiles)


def large_plan(seed: int, tokens=1024, anchors=64, block=16):
    rng = np.random.default_rng(seed)
    lengths = []
    while sum(lengths) < tokens - 100:
        lengths.append(int(rng.integers(1, min(700, tokens - sum(lengths)))))
    masks = [[1] * n for n in lengths] if seed % 2 else None
    return make_plan(lengths, anchors, tokens, masks, block, seed)


@pytest.mark.parametrize("window", [None, 3, 100, 300])
@pytest.mark.parametrize("seed, tokens, anchors", [(0, 1024, 64), (1, 1024, 64), (3, 1024, 16), (2, 640, 80), (5, 1000, 33)])
def test_tiles_equal_those_of_the_dense_mask(seed, tokens, anchors, window):
    plan = large_plan(seed, tokens, anchors)
    ranges = visibility(plan, 16, window)
    keys = tokens + ranges.shape[1]
    dense = dense_mask(ranges, keys).numpy()
    partial, full = tile_kinds(ranges, keys)
    assert np.array_equal(full, tiled(dense, np.all))
    assert np.array_equal(partial, tiled(dense, np.any) & ~full)


def test_full_tiles_occur():
    """The test above would say little if there were none."""
    plan = make_plan([1024], 8, 1024, [[0] * 900 + [1] * 124], block=16)
    partial, full = tile_kinds(visibility(plan, 16, None), 1024 + 128)
    assert full.tolist() == [[True] * 7 + [False] * 2] and partial.tolist() == [[False] * 7 + [True] * 2]


def executed(mask, queries: int, keys: int) -> torch.Tensor:
    """What a kernel that works through the lists of tiles makes of a BlockMask: dense bool [queries, keys]."""
    q, k = torch.arange(queries)[:, None], torch.arange(keys)[None]
    visible, out = mask.mask_mod(0, 0, q, k), torch.zeros(queries, keys, dtype=torch.bool)
    lists = [(mask.kv_num_blocks, mask.kv_indices, False), (mask.full_kv_num_blocks, mask.full_kv_indices, True)]
    for counts, indices, is_full in lists:
        for i in range(counts.shape[-1]):
            for j in indices[0, 0, i, : counts[0, 0, i]].tolist():
                part = (slice(i * TILE, (i + 1) * TILE), slice(j * TILE, (j + 1) * TILE))
                assert not out[part].any()  # no tile is listed twice
                out[part] = True if is_full else visible[part]
    return out


@pytest.mark.parametrize("window", [None, 3, 100, 300])
@pytest.mark.parametrize("seed", range(4))
def test_block_mask_equals_the_dense_mask(seed, window):
    plan = large_plan(seed)
    ranges = visibility(plan, 16, window)
    dense, mask = dense_mask(ranges, 2048), block_mask(ranges, 2048, CPU)
    q, k = torch.arange(1024)[:, None], torch.arange(2048)[None]
    assert mask.shape == (1, 1, 1024, 2048)
    assert torch.equal(mask.mask_mod(0, 0, q, k), dense)
    assert np.array_equal(mask.to_dense()[0, 0].bool().numpy(), tiled(dense.numpy(), np.any))
    assert torch.equal(executed(mask, 1024, 2048), dense)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 100])
@torch.no_grad()  # flex has no backward on the CPU
def test_flex_attention_with_the_block_mask_equals_sdpa_with_the_dense_one(window):
    from torch.nn.attention.flex_attention import flex_attention

    ranges = visibility(large_plan(0, anchors=16), 16, window)
    keys = 1024 + 256
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, rows, 8, generator=generator) for heads, rows in ((4, 256), (2, keys), (2, keys)))
    flex = flex_attention(q, k, v, block_mask=block_mask(ranges, keys, CPU), enable_gqa=True)
    sdpa = F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(ranges, keys), enable_gqa=True)
    torch.testing.assert_close(flex, sdpa, atol=1e-5, rtol=1e-4)


# What a plan becomes --------------------------------------------------------------------------------------------------


def test_every_graph_is_compiled_without_timing_kernels(monkeypatch):
    """Forward and backward, of a module and of a function after it: Dynamo sets the global switch back after each frame."""
    torch._dynamo.reset()
    seen = []

    def compile_graph(graph, *_, is_backward=False, **__):
        config = torch._inductor.config
        seen.append((is_backward, config.deterministic, config.triton.autotune_pointwise))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr("torch._inductor.compile_fx._compile_fx_inner", compile_graph)
    rows = torch.randn(4, 32, requires_grad=True)
    for code in (RMSNorm(32, 1e-6), lambda x: x.softmax(-1)):
        compile_repeatably(code)(rows).sum().backward()
    assert seen == [(False, True, False), (True, True, False)] * 2


def test_batch_of_a_forced_anchor():
    """ids 0, 1, 2, ..., anchor 10, block 4: input [10, M, M, M], positions 10..13, targets from rows 10, 11, 12."""
    plan = forced_plan(20, [10])
    plan.token_ids[:] = np.arange(20)
    batch = DrafterBatch.from_plan(plan, drafter_config(), CPU)
    assert batch.slot_ids.tolist() == [10, MASK, MASK, MASK]
    assert batch.slot_positions.tolist() == [10, 11, 12, 13]
    assert batch.verifier_rows.tolist() == [10, 11, 12]
    assert batch.context_positions.tolist() == list(range(20))


def test_positions_of_a_block_run_on_past_the_documents_end():
    plan = forced_plan(20, [17], block=8, document_before=21)  # in the first document: 17..24, although it ends at 20
    batch = DrafterBatch.from_plan(plan, drafter_config(block=8), CPU)
    assert batch.slot_positions.tolist() == list(range(17, 25))
    assert batch.context_positions.tolist() == [*range(21), *range(20)]
    second = DrafterBatch.from_plan(forced_plan(20, [23], document_before=21), drafter_config(), CPU)
    assert second.slot_positions.tolist() == [2, 3, 4, 5]


# Loss -----------------------------------------------------------------------------------------------------------------


def random_ends(softcap=None, vocab=37) -> FrozenEnds:
    generator = torch.Generator().manual_seed(0)
    table, head = (torch.randn(vocab, H, generator=generator) for _ in range(2))
    return FrozenEnds(table, head, torch.nn.Identity(), 1.0, softcap)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("soft_targets", [False, True])
def test_head_loss_equals_plain_autograd(chunk, softcap, soft_targets, monkeypatch):
    """Loss, argmax and gradient, with rows of weight 0 and a factor from further up."""
    monkeypatch.setattr("train_dflash_pipeline.LOSS_CHUNK", chunk)
    ends, rows = random_ends(softcap), 20
    generator = torch.Generator().manual_seed(1)
    hidden, states = torch.randn(2, rows, H, generator=generator)
    labels = torch.randint(0, 37, (5, 4), generator=generator)
    weights = torch.rand(5, 4, generator=generator) * (torch.arange(4) > 0)

    ours = hidden.clone().requires_grad_()
    loss, best = FrozenHeadLoss.apply(ours, ends, labels, weights, states if soft_targets else None, None)
    (3.0 * loss).backward()

    plain = hidden.clone().requires_grad_()
    logits, target = plain @ ends.head_weight.T, states @ ends.head_weight.T
    if softcap is not None:
        logits, target = (softcap * torch.tanh(x / softcap) for x in (logits, target))
    if soft_targets:
        per_row = F.kl_div(logits.log_softmax(-1), target.softmax(-1), reduction="none").sum(-1)
    else:
        per_row = F.cross_entropy(logits, labels.flatten(), reduction="none")
    expected = (weights.flatten() * per_row).sum()
    (3.0 * expected).backward()

    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad, plain.grad, atol=1e-5, rtol=1e-5)
    assert torch.equal(best.flatten(), logits.argmax(-1)) and not ours.grad[::4].any() and ours.grad[1].any()


def test_uniform_loss_is_reported_as_that_loss():
    """The divisor is the sum of weights: with equal logits every label costs log V, whatever the weights."""
    ends, plan = random_ends(), forced_plan(30, [3, 9])
    weights = torch.from_numpy(plan.weights)
    labels = torch.zeros(weights.shape, dtype=torch.int64)
    loss, _ = FrozenHeadLoss.apply(torch.zeros(labels.numel(), H), ends, labels, weights, None, None)
    assert loss / plan.weight_sum == pytest.approx(math.log(37), rel=1e-5)


def slow_dpace(confidence: list[float], alpha: float) -> list[float]:
    """Weights of one block's supervised slots: for slot k, the sum over all j >= k of s_1 * ... * s_j."""
    smooth = [(1 - alpha) * p + alpha for p in confidence]
    return [sum(math.prod(smooth[: j + 1]) for j in range(k, len(smooth))) for k in range(len(smooth))]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=1, max_size=5), st.floats(0, 1))
def test_dpace_weighs_a_slot_by_what_lies_behind_it(blocks, alpha):
    confidence, supervised, expected = (torch.zeros(len(blocks), 6) for _ in range(3))
    for i, block in enumerate(blocks):
        confidence[i, : len(block)], supervised[i, : len(block)] = torch.tensor(block), 1.0
        expected[i, : len(block)] = torch.tensor(slow_dpace(block, alpha))
    confidence[supervised == 0] = 0.9  # of unsupervised slots: must not matter
    torch.testing.assert_close(dpace_weights(confidence, supervised, alpha), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("objective", ["ce", "kl", "dpace"])
def test_loss_of_a_micro_batch_equals_a_loop_over_its_trained_slots(objective, monkeypatch):
    monkeypatch.setattr("train_dflash_pipeline.LOSS_CHUNK", 10)  # several chunks, whole blocks in each
    soft_targets, flags = objective == "kl", {"loss_weights": "dpace"} if objective == "dpace" else {}
    drafter = random_drafter(drafter_config())
    plan = make_plan([9, 7, 1, 4], 12, 25, **flags)
    ends = random_ends(vocab=320)
    ends.norm = torch.nn.RMSNorm(H, eps=1e-5)
    features, _ = random_inputs(plan)
    last = torch.randn(plan.num_tokens, H, generator=torch.Generator().manual_seed(5))
    batch = DrafterBatch.from_plan(plan, drafter.config, CPU)
    alpha = 0.3 if objective == "dpace" else None
    loss, statistics = micro_batch_loss(drafter, ends, features, batch, last if soft_targets else None, alpha)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()

    out = run_drafter(drafter, plan, features, ends.embed(batch.slot_ids)).view(12, B, H)
    expected, right, trained = 0.0, np.zeros(B - 1), np.zeros(B - 1)
    for i in range(plan.num_anchors):
        costs = []
        for k in range(1, B):
            row = plan.anchor_rows[i] + k
            if not plan.weights[i, k]:
                continue
            log_q = (ends.head_weight @ out[i, k]).log_softmax(-1)
            if soft_targets:
                p = (ends.head_weight @ ends.norm(last[row - 1])).softmax(-1)
                cost = (p * (p.log() - log_q)).sum()
            else:
                cost = -log_q[plan.token_ids[row]]
            costs.append(cost)
            trained[k - 1] += 1
            right[k - 1] += int(log_q.argmax()) == plan.token_ids[row]
        weights = [math.exp(-k / 2) for k in range(len(costs))]
        if objective == "dpace":
            weights = slow_dpace([math.exp(-cost.item()) for cost in costs], alpha)
        expected = expected + sum(w * cost for w, cost in zip(weights, costs))
    assert plan.weight_sum == (trained.sum() if objective == "dpace" else plan.weight_sum)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-4, rtol=1e-4)
    assert statistics[1] == plan.num_anchors and statistics[2 : 2 + B - 1].tolist() == right.tolist()
    assert statistics[2 + B - 1 :].tolist() == trained.tolist()


@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_micro_batch_without_a_supervised_token_has_zero_loss_and_finite_zero_gradients(kind):
    drafter, plan = random_drafter(drafter_config([kind] * 2)), make_plan([9, 3], 5, 16, [[0] * 9, [0] * 3])
    features, _ = random_inputs(plan)
    batch = DrafterBatch.from_plan(plan, drafter.config, CPU)
    loss, statistics = micro_batch_loss(drafter, random_ends(vocab=320), features, batch, None)
    loss.backward()
    assert loss == 0 and not statistics.any()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in drafter.parameters())


def test_unused_anchor_slots_change_neither_loss_nor_gradient():
    """One document with one anchor beside one with many: 3 unused slots or 30, the numbers stay."""
    masks = [[0] * 6 + [1, 1], [1] * 20]
    results = []
    for anchors in (23, 50):
        drafter, plan = random_drafter(drafter_config()), make_plan([8, 20], anchors, 28, masks)
        assert plan.num_anchors == 20
        features, _ = random_inputs(plan)
        batch = DrafterBatch.from_plan(plan, drafter.config, CPU)
        loss, statistics = micro_batch_loss(drafter, random_ends(vocab=320), features, batch, None)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in drafter.parameters())])
    for few, many in zip(*results):
        torch.testing.assert_close(few, many, atol=1e-4, rtol=1e-5)


def test_accepted_length_is_a_mean_over_blocks():
    """Runs of 3, 2, 1, 0 accepted slots in batches (3, 1) and (2, 0): 1.5 a block, not a mean of means or a product."""

    def batch(*runs):
        labels = torch.zeros(len(runs), 4, dtype=torch.int64)
        right = torch.tensor([[k < run or k > run for k in range(4)] for run in runs])  # wrong at one slot only
        return block_statistics(labels + ~right, labels, torch.ones(len(runs), 4))

    total = batch(3, 1) + batch(2, 0)
    assert (total[0] / total[1]).item() == 1.5 and total[1] == 4
    assert total[2:6].tolist() == [3, 3, 3, 3] and total[6:].tolist() == [4, 4, 4, 4]


def test_untrained_slots_and_blocks_are_not_counted():
    labels = torch.zeros(3, 3, dtype=torch.int64)
    weights = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    statistics = block_statistics(labels.clone(), labels, weights)  # all are right
    assert statistics.tolist() == [3, 2, 2, 1, 0, 2, 1, 0]


# The target's frozen ends ---------------------------------------------------------------------------------------------


def frozen_ends(folder: str) -> FrozenEnds:
    args = arguments(target=folder).target
    return load_frozen_ends(args, load_target_config(args), CPU, torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3", "llama", "llama-tied", "gemma2"])
def test_frozen_ends_equal_the_targets_own(kind, target_folder):
    """Embedding (with Gemma's scale), final norm, head (tied or not) and soft-cap."""
    _, model = load(target_folder(kind))
    ends = frozen_ends(target_folder(kind))
    capture = HookCapture(model, (1,), verifier_last_layer=7)
    ids = torch.arange(2, 42).view(2, 20)
    logits = model(ids).logits
    rebuilt = ends.logits(ends.norm(capture.take().captured[7]))
    torch.testing.assert_close(rebuilt, logits, atol=1e-6, rtol=1e-6)
    assert torch.equal(rebuilt.argmax(-1), logits.argmax(-1))
    assert torch.equal(ends.embed(ids), model.get_input_embeddings()(ids))
    assert torch.equal(ends.embedding, ends.head_weight) == (kind in ("llama-tied", "gemma2"))
    assert not any(p.requires_grad for p in ends.parameters())


def test_gemmas_scale_and_soft_cap_do_something(target_folder):
    ends = frozen_ends(target_folder("gemma2"))
    assert ends.embed_scale == pytest.approx(math.sqrt(32)) and ends.softcap == 3.0
    big = 100 * ends.head_weight[:1]
    assert 2.9 < ends.logits(big).max() <= 3.0 < (big @ ends.head_weight.T).max()


def shard(target_folder, tmp_path) -> Path:
    config, model = load(target_folder("llama"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def test_sharded_weights_give_the_same_ends(target_folder, tmp_path):
    folder = shard(target_folder, tmp_path)
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    whole, sharded = frozen_ends(target_folder("llama")), frozen_ends(str(folder))
    assert all(torch.equal(a, sharded.state_dict()[name]) for name, a in whole.state_dict().items())


def test_missing_shard_is_named(target_folder, tmp_path):
    folder = shard(target_folder, tmp_path)
    missing = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["lm_head.weight"]
    (folder / missing).unlink()
    with pytest.raises(UserError, match=f"shard {missing} is missing"):
        frozen_ends(str(folder))


def test_folder_without_weights_is_refused(target_folder, tmp_path):
    (tmp_path / "config.json").write_text((Path(target_folder("llama")) / "config.json").read_text())
    with pytest.raises(UserError, match="no safetensors weights found"):
        frozen_ends(str(tmp_path))


@torch.no_grad()
def test_random_targets_have_the_same_ends_in_both_roles():
    args = arguments(target="toy").target
    _, model = load("toy")
    ends = load_frozen_ends(args, load_target_config(args), CPU, torch.float32)
    ids = torch.arange(2, 22)[None]
    assert torch.equal(ends.embed(ids), model.get_input_embeddings()(ids))
    states = model.get_decoder()(ids).last_hidden_state  # already normed
    torch.testing.assert_close(ends.logits(states), model(ids).logits, atol=1e-6, rtol=1e-6)


# Configuration --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)])
def test_config_survives_json(layer_types):
    config = drafter_config(layer_types, window=2048)
    written = json.loads(json.dumps(config.to_json()))
    assert DrafterConfig.from_json(written) == config
    assert written["layer_types"] == list(layer_types) and written["rope_theta"] == 100.0
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 100.0}
    assert written["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5], "block_size": B}
    assert written["sliding_window"] == (2048 if SLIDING in layer_types else None)
    assert written["use_sliding_window"] == (SLIDING in layer_types) and not written["tie_word_embeddings"]


def test_partial_rotary_factor_of_the_target_is_not_passed_on(target_folder):
    """The drafter rotates whole heads; a copied factor would be honoured in serving only."""
    text = load_target_config(arguments(target=target_folder("qwen3")).target).get_text_config()
    text.partial_rotary_factor = 0.25
    text.rope_parameters = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}
    config = DrafterConfig.for_target(text, arguments().drafter, (1, 3), MASK)
    assert "partial_rotary_factor" not in json.dumps(config.to_json()) and config.rope_theta == 5e5


def test_drafter_takes_width_and_heads_from_the_target_and_depth_from_the_flags(target_folder):
    text = load_target_config(arguments(target=target_folder("gemma2")).target).get_text_config()
    flags = arguments(num_draft_layers=3, num_full_attention_layers=1, sliding_window=99, block_size=8).drafter
    config = DrafterConfig.for_target(text, flags, (1, 3), MASK)
    assert (config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (32, 8, 4, 2)
    assert config.layer_types == (SLIDING, SLIDING, FULL) and (config.sliding_window, config.block_size) == (99, 8)
    assert config.num_target_layers == 8 and config.target_layer_ids == (1, 3)


@pytest.mark.parametrize("key", ["hidden_size", "layer_types", "num_target_layers", "head_dim", "vocab_size"])
def test_missing_key_of_the_configuration_is_named(key):
    written = drafter_config().to_json()
    del written[key]
    with pytest.raises(UserError, match=f"has no '{key}'"):
        DrafterConfig.from_json(written)


def test_missing_layer_ids_mask_token_or_window_are_never_guessed():
    for key in ("target_layer_ids", "mask_token_id"):
        written = drafter_config().to_json()
        del written["dflash_config"][key]
        with pytest.raises(UserError, match=f"has no '{key}'"):
            DrafterConfig.from_json(written)
    written = drafter_config([SLIDING]).to_json()
    del written["sliding_window"]
    with pytest.raises(UserError, match="has no 'sliding_window'"):
        DrafterConfig.from_json(written)


def test_tensor_names_and_shapes_are_z_labs():
    shapes = {name: tuple(p.shape) for name, p in DFlashDrafter(drafter_config([FULL])).state_dict().items()}
    layer = "layers.0."
    assert shapes == {
        "fc.weight": (16, 48), "hidden_norm.weight": (16,), "norm.weight": (16,),
        layer + "input_layernorm.weight": (16,), layer + "post_attention_layernorm.weight": (16,),
        layer + "self_attn.q_proj.weight": (24, 16), layer + "self_attn.k_proj.weight": (12, 16),
        layer + "self_attn.v_proj.weight": (12, 16), layer + "self_attn.o_proj.weight": (16, 24),
        layer + "self_attn.q_norm.weight": (6,), layer + "self_attn.k_norm.weight": (6,),
        layer + "mlp.gate_proj.weight": (24, 16), layer + "mlp.up_proj.weight": (24, 16),
        layer + "mlp.down_proj.weight": (16, 24),
    }  # fmt: skip


def test_saved_drafter_loads_bit_for_bit_and_a_renamed_tensor_is_refused(tmp_path):
    from safetensors.torch import save_file

    drafter = random_drafter(drafter_config([SLIDING, FULL]))
    (tmp_path / "config.json").write_text(json.dumps(drafter.config.to_json()))
    weights = drafter.state_dict()
    save_file(weights, tmp_path / "model.safetensors")
    loaded = load_drafter(tmp_path, CPU, torch.float32)
    assert loaded.config == drafter.config
    assert all(torch.equal(weights[name], p) for name, p in loaded.state_dict().items())
    save_file({name.replace("fc.", "fcc."): p for name, p in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="fc.weight"):
        load_drafter(tmp_path, CPU, torch.float32)


# Initial weights ------------------------------------------------------------------------------------------------------


def test_untrained_drafter_depends_on_the_seed_alone():
    """Not on the global generator, which moves on between the three."""
    config = drafter_config()
    a, b, c = (build_drafter(config, arguments(seed=seed)).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a) and not torch.equal(a["fc.weight"], c["fc.weight"])
    assert a["fc.weight"].std() == pytest.approx(0.02, rel=0.1)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_drafter_started_from_a_target_layer_reads_what_that_layer_reads(kind, target_folder):
    """Keys and values of the context equal those of target layer 4 (layer 3 is captured), rotation included."""
    target_config, model = load(target_folder(kind))
    text = target_config.get_text_config()
    config = DrafterConfig.for_target(text, arguments(num_draft_layers=2).drafter, (1, 3, 5), MASK)
    args = arguments(target=target_folder(kind), init_from_target_layer=4)
    drafter = build_drafter(config, args)

    capture, ids = HookCapture(model, (1, 3, 5)), torch.arange(2, 22)[None]
    seen = {}
    theirs = model.get_decoder().layers[4].self_attn
    theirs.v_proj.register_forward_hook(lambda m, x, out: seen.update(value=out[0]))
    keys_before_rotation = theirs.k_norm if kind == "qwen3" else theirs.k_proj
    keys_before_rotation.register_forward_hook(lambda m, x, out: seen.update(key=out[0]))
    cache = model(ids, use_cache=True).past_key_values
    context = drafter.context(capture.take().get_hidden_states_packed([20])[0][0])
    for layer in drafter.layers:
        ours = layer.self_attn
        k = ours.k_proj(context)
        if kind == "qwen3":  # Llama has no key norm; the drafter's then starts at 1 but still normalises
            rotated, v = ours.keys_values(context, drafter.rope(torch.arange(20)))
            torch.testing.assert_close(rotated, cache.layers[4].keys[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
            k = ours.k_norm(ours.heads(k)).view_as(seen["key"])
        torch.testing.assert_close(k, seen["key"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ours.v_proj(context), seen["value"], atol=1e-6, rtol=1e-6)
        assert torch.equal(layer.mlp.gate_proj.weight, model.get_decoder().layers[4].mlp.gate_proj.weight)


@pytest.mark.parametrize("layer", [0, 1, 8])
def test_layers_that_no_captured_one_feeds_are_refused(layer, target_folder):
    drafter = DFlashDrafter(drafter_config())
    with pytest.raises(UserError, match=f"--init-from-target-layer {layer}: needs"):
        init_from_target_layer(drafter, layer, arguments(target=target_folder("llama")).target)


def test_target_layer_of_another_make_is_refused(target_folder):
    config = load_target_config(arguments(target=target_folder("gemma2")).target).get_text_config()
    drafter = DFlashDrafter(DrafterConfig.for_target(config, arguments().drafter, (1, 3), MASK))
    with pytest.raises(UserError, match="the target's layer differs in"):
        init_from_target_layer(drafter, 4, arguments(target=target_folder("gemma2")).target)
