"""The plan against a slow, obvious reference written from the design, and the draws it makes."""

import dataclasses
import math
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import arguments, make_documents
import train_dflash_pipeline as pipeline
from train_dflash_pipeline import Planner, UserError, pack_epoch

ARRAYS = ("documents", "lengths", "token_ids", "document_ids", "position_ids", "loss_mask", "anchor_rows", "labels", "weights")


def planner(documents, num_drafters=1, tokens=64, anchors=8, block=4, **flags) -> Planner:
    flags |= dict(tokens_per_micro_batch=tokens, anchors_per_micro_batch=anchors, block_size=block)
    return Planner(documents, arguments(**flags), num_drafters)


def same(a, b) -> bool:
    scalars = [(p.m, p.num_tokens, p.num_anchors, p.noise_std, p.noise_seed) for p in (a, b)]
    return scalars[0] == scalars[1] and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ARRAYS)


def document_tokens(documents, i):
    part = slice(documents.offsets[i], documents.offsets[i + 1])
    return documents.token_ids[part].tolist(), documents.loss_mask[part].tolist()


def check_against_reference(plan, documents, tokens, anchors, block, gamma):
    """Everything in a plan that is not drawn at random, element by element."""
    rows = []  # (document within the plan, position, token, supervised)
    for number, document in enumerate(plan.documents):
        for position, (token, supervised) in enumerate(zip(*document_tokens(documents, document))):
            rows.append((number, position, token, supervised))
    assert plan.num_tokens == len(rows) <= tokens
    assert plan.lengths.tolist() == [documents.lengths[d] for d in plan.documents]
    assert plan.lengths.tolist() == sorted(plan.lengths, reverse=True)
    for row in range(tokens):
        expected = rows[row] if row < len(rows) else (-1, 0, 0, False)
        got = (plan.document_ids[row], plan.position_ids[row], plan.token_ids[row], plan.loss_mask[row])
        assert got == expected

    def trained(row, document):
        return row < len(rows) and rows[row][3] and rows[row][0] == document

    candidates = [r for r in range(len(rows)) if trained(r, rows[r][0]) and trained(r + 1, rows[r][0])]
    used, unused = plan.anchor_rows[: plan.num_anchors].tolist(), plan.anchor_rows[plan.num_anchors :]
    assert len(plan.anchor_rows) == anchors and plan.num_anchors == min(anchors, len(candidates))
    assert used == sorted(set(used)) and set(used) <= set(candidates) and not unused.any()
    for i, a in enumerate(plan.anchor_rows):
        open_ = i < plan.num_anchors
        for k in range(block):
            open_ = open_ and trained(a + k, rows[a][0])
            weight = math.exp(-(k - 1) / gamma) if open_ and k > 0 else 0.0
            assert plan.weights[i, k] == np.float32(weight)
            if weight:
                assert plan.labels[i, k] == rows[a + k][2]
    assert plan.weight_sum == pytest.approx(sum(float(w) for w in plan.weights.ravel()), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=25), tokens=st.integers(40, 90),
    anchors=st.integers(1, 30), block=st.integers(2, 9), seed=st.integers(0, 1000),
)  # fmt: skip
def test_plan_equals_the_reference(lengths, tokens, anchors, block, seed):
    documents = make_documents(lengths, seed=seed)
    plans = planner(documents, tokens=tokens, anchors=anchors, block=block, seed=seed, loss_gamma=3.0)
    for m in range(6):
        check_against_reference(plans.plan(m), documents, tokens, anchors, block, 3.0)


# Ugly documents -------------------------------------------------------------------------------------------------------


def plan_of(lengths, masks, **shape):
    documents = make_documents(lengths, masks)
    plan = planner(documents, **shape, loss_gamma=3.0).plan(0)
    check_against_reference(plan, documents, **shape, gamma=3.0)
    return plan


def test_documents_of_one_token_give_no_anchor_even_side_by_side():
    plan = plan_of([1] * 12, [[1]] * 12, tokens=20, anchors=4, block=4)
    assert plan.num_tokens == 12 and plan.num_anchors == 0 and plan.weight_sum == 0


def test_one_document_fills_the_pack():
    plan = plan_of([16], [[1] * 16], tokens=16, anchors=20, block=4)
    assert plan.anchor_rows[: plan.num_anchors].tolist() == list(range(15))  # 15 has no next token
    assert (plan.weights[14] > 0).tolist() == [False, True, False, False]  # stops at the end of the pack


def test_no_supervised_token_weighs_nothing():
    plan = plan_of([10], [[0] * 10], tokens=16, anchors=3, block=4)
    assert plan.num_anchors == 0 and plan.weight_sum == 0 and np.isfinite(plan.weights).all()


def test_more_anchors_than_candidates_takes_them_all():
    plan = plan_of([10], [[0, 1, 1, 1, 0, 1, 1, 0, 1, 0]], tokens=16, anchors=9, block=4)
    assert plan.anchor_rows.tolist() == [1, 2, 5, 0, 0, 0, 0, 0, 0] and plan.num_anchors == 3


def test_short_document_gets_all_its_anchors_beside_a_long_one():
    """The budget is the micro-batch's, not a share per document."""
    plan = plan_of([7, 30], [[1] * 7, [1] * 30], tokens=40, anchors=35, block=4)
    assert plan.num_anchors == 6 + 29


@pytest.mark.parametrize("answer", [1, 2, 15, 16, 17, 32])
def test_answers_around_the_block_size(answer):
    plan = plan_of([4 + answer], [[0] * 4 + [1] * answer], tokens=64, anchors=40, block=16)
    assert plan.num_anchors == answer - 1  # every supervised token but the last opens a block
    expected = [min(15, answer - 1 - i) for i in range(answer - 1)]
    assert (plan.weights[: plan.num_anchors] > 0).sum(1).tolist() == expected


def test_block_never_counts_past_a_gap():
    plan = plan_of([8], [[1, 1, 0, 1, 1, 1, 0, 1]], tokens=8, anchors=8, block=8)
    assert plan.anchor_rows[:3].tolist() == [0, 3, 4]
    assert [np.flatnonzero(row).tolist() for row in plan.weights[:3]] == [[1], [1, 2], [1]]


def forced(plans, plan, anchor):
    rows = np.zeros_like(plan.anchor_rows)
    rows[0] = anchor
    return plans._label(plan.token_ids, plan.document_ids, plan.loss_mask, rows, 1)


def test_block_never_crosses_a_document_end():
    """Two documents of 20 tokens, block 8, anchor 17: slots 1 and 2 are labelled, 3 to 7 are not."""
    documents = make_documents([20, 20], [[1] * 20] * 2)
    plans = planner(documents, tokens=40, anchors=2, block=8)
    plan = plans.plan(0)
    labels, weights = forced(plans, plan, 17)
    assert (weights[0] > 0).tolist() == [False, True, True, False, False, False, False, False]
    assert labels[0, 1:3].tolist() == plan.token_ids[18:20].tolist()
    assert not weights[1].any()


def test_slot_k_is_labelled_with_the_token_at_anchor_plus_k():
    documents = make_documents([20], [[1] * 20])
    documents.token_ids[:] = np.arange(20)
    plans = planner(documents, tokens=20, anchors=1, block=4)
    labels, weights = forced(plans, plans.plan(0), 10)
    assert labels[0].tolist() == [10, 11, 12, 13] and (weights[0] > 0).tolist() == [False, True, True, True]


# Weights --------------------------------------------------------------------------------------------------------------


def test_weights_of_a_block_of_sixteen():
    plan = planner(make_documents([40], [[1] * 40]), tokens=40, anchors=39, block=16).plan(0)
    assert plan.weights[0, :5].tolist() == pytest.approx([0, 1, 0.8669, 0.7515, 0.6514], abs=5e-5)


@pytest.mark.parametrize("block, gamma", [(16, 7), (10, 5), (8, 4), (6, 3)])
def test_default_gamma(block, gamma):
    plans = planner(make_documents([40]), block=block)
    assert plans.slot_weights[2] == np.float32(math.exp(-1 / gamma))
    assert planner(make_documents([40]), block=block, loss_gamma=2.0).slot_weights[2] == np.float32(math.exp(-0.5))


def test_step_weight_is_the_sum_over_the_global_batch():
    plans = planner(make_documents([30] * 20), num_drafters=3, gradient_accumulation_steps=2)
    assert list(plans.micro_batches(2)) == [12, 13, 14, 15, 16, 17]
    total = sum(plans.plan(m).weights.astype(np.float64).sum() for m in range(12, 18))
    assert sum(plans.plan(m).weight_sum for m in plans.micro_batches(2)) == pytest.approx(total, rel=1e-12) and total > 0


# Purity, epochs, packs ------------------------------------------------------------------------------------------------


def test_plan_is_a_pure_function_of_m():
    documents = make_documents([5, 17, 30, 9, 64, 1, 22] * 6)
    straight = [planner(documents, noise_std=0.1, noise_schedule="linear").plan(m) for m in range(40)]
    mixed = planner(documents, noise_std=0.1, noise_schedule="linear")
    for m in np.random.default_rng(0).permutation(40):
        assert same(mixed.plan(int(m)), straight[m])
    assert not same(dataclasses.replace(straight[1], m=0), straight[0])


def held_out_planner(total_steps, every, held_out_lengths, num_drafters=2, accumulation=2):
    flags = dict(tokens_per_micro_batch=64, anchors_per_micro_batch=8, block_size=4, max_steps=total_steps,
                 eval_every=every, gradient_accumulation_steps=accumulation, noise_std=0.1)  # fmt: skip
    documents, held_out = make_documents([20, 30, 40, 50, 60] * 3), make_documents(held_out_lengths, seed=9)
    return [Planner(documents, arguments(**flags), num_drafters, extra) for extra in (None, held_out)]


@pytest.mark.parametrize("total_steps, every", [(7, 3), (6, 3), (2, 5), (3, 1), (1, 1)])
@pytest.mark.parametrize("held_out_lengths", [[50], [40] * 3, [60, 60, 60, 60]])
def test_evaluations_stand_in_the_one_global_order_and_change_no_step(total_steps, every, held_out_lengths):
    """Against a list made by hand: each step's micro-batches, and after each due step the whole held-out set."""
    without, plans = held_out_planner(total_steps, every, held_out_lengths)
    packs = len(pack_epoch(plans.held_out.lengths, 64, 0, 0))
    size = packs + packs % 2  # two drafters take the same number
    order = []
    for step in range(total_steps):
        order += [("train", step, i) for i in range(4)]
        if (step + 1) % every == 0 or step + 1 == total_steps:
            order += [("held out", step, i) for i in range(size)]
    assert plans.end_m == len(order) and plans.eval_micro_batches == size
    for m, (kind, step, i) in enumerate(order):
        numbers = plans.micro_batches(step) if kind == "train" else plans.evaluation_after(step + 1)
        assert numbers[i] == m
        plan = plans.plan(m)
        if kind == "train":
            assert same(dataclasses.replace(plan, m=4 * step + i), without.plan(4 * step + i))
        else:
            assert plan.noise_std == 0 and (plan.num_anchors > 0) == (i < packs)
            assert same(dataclasses.replace(plan, m=0), dataclasses.replace(plans.plan(plans.evaluation_after(total_steps)[i]), m=0))
    assert [plans.first_m(step) for step in range(total_steps)] == [order.index(("train", s, 0)) for s in range(total_steps)]
    seen = [plans.plan(m).documents for m in plans.evaluation_after(total_steps)[:packs]]
    assert sorted(np.concatenate(seen)) == list(range(len(held_out_lengths)))


def test_no_evaluation_without_held_out_documents():
    without, _ = held_out_planner(6, 3, [50])
    assert without.end_m == 24 and not any(without.evaluation_after(step) for step in range(1, 7))


def test_another_seed_changes_order_anchors_and_noise():
    documents = make_documents([64])  # one document: the order cannot differ
    a, b = (planner(documents, anchors=4, seed=seed).plan(0) for seed in (0, 1))
    assert a.noise_seed != b.noise_seed and a.anchor_rows.tolist() != b.anchor_rows.tolist()
    many = make_documents([30] * 20)
    assert planner(many, seed=0).plan(0).documents.tolist() != planner(many, seed=1).plan(0).documents.tolist()


def test_noise_seed_and_anchors_differ_between_micro_batches():
    plans = planner(make_documents([64]), anchors=4)
    assert len({plans.plan(m).noise_seed for m in range(50)}) == 50
    assert len({tuple(plans.plan(m).anchor_rows) for m in range(50)}) > 30


def test_noise_follows_the_optimizer_step():
    plans = planner(make_documents([64]), num_drafters=2, gradient_accumulation_steps=2, max_steps=4, noise_std=0.4,
                    noise_schedule="linear")  # fmt: skip
    assert [plans.plan(m).noise_std for m in (0, 3, 4, 8, 12, 15)] == pytest.approx([0.4, 0.4, 0.3, 0.2, 0.1, 0.1])


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=80), seed=st.integers(0, 99), width=st.integers(1, 20))
def test_every_document_once_per_epoch_and_no_pack_over_budget(lengths, seed, width):
    lengths = np.array(lengths)
    packs = pack_epoch(lengths, 50, seed, epoch=0, open_packs=width)
    assert Counter(np.concatenate(packs).tolist()) == Counter(range(len(lengths)))
    assert all(len(pack) and lengths[pack].sum() <= 50 for pack in packs)


def test_packs_of_mixed_documents_are_nearly_full():
    lengths = np.random.default_rng(0).integers(10, 500, 2000)
    packs = pack_epoch(lengths, 1024, seed=0, epoch=0)
    assert lengths.sum() / (1024 * len(packs)) > 0.93


def test_epochs_roll_over_in_another_order():
    documents = make_documents([20] * 30)
    plans = planner(documents)
    per_epoch = [len(plans.epoch(e)) for e in range(3)]
    seen, first = [], []
    for epoch, count in enumerate(per_epoch):
        start = sum(per_epoch[:epoch])
        assert [plans.locate_pack(m) for m in range(start, start + count)] == [(epoch, i) for i in range(count)]
        first.append(plans.plan(start).documents.tolist())
        seen += [d for m in range(start, start + count) for d in plans.plan(m).documents]
    assert Counter(seen) == {d: 3 for d in range(30)}
    assert first[0] != first[1] != first[2]


def test_a_single_short_document_serves_every_micro_batch():
    plans = planner(make_documents([3], [[1, 1, 1]]), tokens=64)
    assert [plans.plan(m).documents.tolist() for m in range(5)] == [[0]] * 5
    assert plans.locate_pack(4) == (4, 0)


@pytest.mark.parametrize("epochs, micro_batches", [(1, 10), (3, 30), (0.5, 5), (1.25, 12), (0.01, 0)])
def test_num_epochs_sets_the_steps(epochs, micro_batches):
    """Ten packs an epoch (one document each), four micro-batches a step, rounded up to whole steps, at least one."""
    plans = planner(make_documents([40] * 10), num_drafters=2, gradient_accumulation_steps=2, num_epochs=epochs)
    assert plans.total_steps == max(1, math.ceil(micro_batches / 4))


def test_whole_epochs_cover_every_document():
    plans = planner(make_documents([7, 30, 12, 50, 64, 3] * 7), num_drafters=3, num_epochs=2)
    seen = Counter(d for m in range(plans.total_steps * 3) for d in plans.plan(m).documents.tolist())
    assert len(seen) == 42 and min(seen.values()) >= 2


# Draws ----------------------------------------------------------------------------------------------------------------


def test_anchors_are_drawn_uniformly_without_replacement():
    """700 candidates, 512 anchors, 2,000 draws: each is chosen 512 / 700 of the time, give or take five deviations."""
    plans = planner(make_documents([701], [[1] * 701]), tokens=701, anchors=512)
    plan, counts = plans.plan(0), np.zeros(701)
    for m in range(2000):
        rows, used = plans._draw_anchors((2, m), 512, plan.document_ids, plan.loss_mask, False)
        assert used == 512 and (np.diff(rows) > 0).all()
        counts[rows] += 1
    p = 512 / 700
    deviation = math.sqrt(p * (1 - p) / 2000)
    assert counts[700] == 0 and np.abs(counts[:700] / 2000 - p).max() < 5 * deviation
    assert (counts[:700] / 2000).std() == pytest.approx(deviation, rel=0.15)  # neither clumped nor too even


def deal(valid: list[int], anchors: int) -> list[int]:
    """How many anchors documents with so many valid positions get, sorted: one each in turn, while there are any."""
    given = [0] * len(valid)
    while anchors > 0 and given != valid:
        for i in sorted(range(len(valid)), key=lambda i: -valid[i])[:anchors]:
            if given[i] < valid[i]:
                given[i], anchors = given[i] + 1, anchors - 1
    return sorted(given)


@pytest.mark.parametrize("anchors", [1, 3, 10, 17, 40, 500])
@pytest.mark.parametrize("lengths", [[1], [2], [9, 2], [30, 5, 5, 1, 60], [20, 20, 20], [1, 1]])
def test_even_anchors_are_shared_out_over_documents(lengths, anchors):
    """Which documents get one more than others is drawn; how many do is not."""
    plans = planner(make_documents(lengths), tokens=128, anchors=anchors, anchor_draw="even")
    for m in range(20):
        plan = plans.plan(m)
        valid = [0] * len(plan.lengths)
        for row in range(plan.num_tokens - 1):
            one_document = plan.document_ids[row] == plan.document_ids[row + 1]
            valid[plan.document_ids[row]] += int(one_document and plan.loss_mask[row] and plan.loss_mask[row + 1])
        rows = plan.anchor_rows[: plan.num_anchors]
        assert (np.diff(rows) > 0).all() and plan.num_anchors == min(anchors, sum(valid))
        got = np.bincount(plan.document_ids[rows], minlength=len(plan.lengths))
        assert sorted(got.tolist()) == deal(valid, anchors)


def test_even_anchors_are_uniform_within_a_document_and_leave_held_out_data_alone():
    all_supervised = make_documents([41, 11], [[1] * 41, [1] * 11])
    plans = planner(all_supervised, tokens=52, anchors=20, anchor_draw="even")
    plan, counts = plans.plan(0), np.zeros(52)
    for m in range(2000):
        rows, used = plans._draw_anchors((2, m), 20, plan.document_ids, plan.loss_mask, True)
        assert used == 20
        counts[rows] += 1
    assert (counts[41:51] == 2000).all() and counts[40] == counts[51] == 0  # 10 of 10
    assert np.abs(counts[:40] / 2000 - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / 2000)  # 10 of 40
    flags = dict(tokens_per_micro_batch=52, anchors_per_micro_batch=20, block_size=4, eval_every=1, eval_data=["given"])
    uniform, even = (
        Planner(make_documents([30]), arguments(anchor_draw=draw, **flags), 1, all_supervised) for draw in ("uniform", "even")
    )
    numbers = even.evaluation_after(1)
    assert len(numbers) and all((even.plan(m).anchor_rows == uniform.plan(m).anchor_rows).all() for m in numbers)


@pytest.mark.parametrize("reads", [0, 1, 5])
def test_a_file_cut_off_before_or_while_a_plan_reads_it_is_named(tmp_path, reads):
    path = tmp_path / "x.safetensors"
    pipeline.write_documents(make_documents([13, 6, 10]), path, {})
    documents = pipeline.open_documents(path)[0]
    plans = planner(documents)

    class CutAtARead(np.ndarray):
        """Takes the file's last byte away, as a shortened file's last page reads on."""

        left = reads

        def __getitem__(self, index):
            CutAtARead.left -= 1
            if CutAtARead.left == 0:
                os.truncate(path, path.stat().st_size - 1)
            return super().__getitem__(index)

    plans.plan(0)
    documents.offsets = documents.offsets.view(CutAtARead)
    if reads == 0:
        os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(UserError, match=r"x\.safetensors was shortened while this run reads it$"):
        plans.plan(1)
