"""Which tokens are selected by entropy or second moment, and normalised weights, against slow loops over a batch."""

from __future__ import annotations

import math

import pytest
import torch

from flowrl import rl
from flowrl.batch import Batch, Column
from flowrl.errors import FlowError
from flowrl.rl.math.losses import token_weights


def some_rows(seed, rows=7, longest=6, spread=0.3):
    """A batch, and the same as lists; one row is empty, one all masked."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [0, 3, *torch.randint(1, longest, (rows - 2,), generator=draw).tolist()]
    masks = [(torch.rand(n, generator=draw) < 0.8).tolist() for n in lengths]
    masks[1] = [False] * 3

    def numbers(scale=1.0, shift=0.0):
        return [(scale * torch.randn(n, generator=draw) + shift).float().tolist() for n in lengths]

    rollout = [[-abs(x) for x in row] for row in numbers()]
    moved = numbers(spread)
    lists = {
        "rollout_logprobs": rollout,
        "old_logprobs": [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(rollout, moved, strict=True)],
        "advantages": numbers(),
        "entropies": [[abs(x) for x in row] for row in numbers()],
    }
    columns = {name: Column.of([torch.tensor(r) for r in x], dim="response", dtype="f32") for name, x in lists.items()}
    mask = Column.of([torch.tensor(r, dtype=torch.bool) for r in masks], dim="response", dtype="bool")
    batch = Batch.of([(i // 2, i) for i in range(rows)], response_mask=mask, **columns)
    return batch, {"mask": masks, **{name: batch[name].to_list() for name in lists}}


def places(lists):
    return [(i, t) for i, row in enumerate(lists["mask"]) for t, inside in enumerate(row) if inside]


def chosen(batch):
    return {(i, t) for i, row in enumerate(batch.selected.to_list()) for t, x in enumerate(row) if x}


# -- entropy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", (0.01, 0.2, 0.5, 1.0))
def test_the_tokens_of_the_largest_entropies(share):
    for seed in range(5):
        batch, lists = some_rows(seed)
        found = rl.select_by_entropy(batch, share=share)
        assert found.selected.type == "bool[*response]"
        every = [lists["entropies"][i][t] for i, t in places(lists)]
        least = float(torch.quantile(torch.tensor(every, dtype=torch.float64), 1 - share))
        assert chosen(found) == {(i, t) for i, t in places(lists) if lists["entropies"][i][t] >= least - 1e-12}


def test_equal_entropies_are_selected_together():
    batch, _ = some_rows(0)
    batch = batch.drop("entropies").with_columns(
        {"entropies": batch.entropies.with_values(torch.ones(len(batch.entropies.values)))}
    )
    assert torch.equal(rl.select_by_entropy(batch).selected.values, batch.response_mask.values)


@pytest.mark.parametrize("share", (0.0, -0.1, 1.5))
def test_a_share_that_is_none(share):
    with pytest.raises(FlowError, match=rf"share={share} is not a number above 0 and at most 1") as told:
        rl.select_by_entropy(some_rows(0)[0], share=share)
    assert told.value.fix == "Give a number above 0 and at most 1, such as 0.2."


# -- second moment -----------------------------------------------------------------------------------------------------


def slow_second_moment(lists, limit, among):
    """Take the token that moved furthest away until the mean of the others is below the limit, or one is left."""
    square = {(i, t): (lists["old_logprobs"][i][t] - lists["rollout_logprobs"][i][t]) ** 2 for i, t in places(lists)}

    def away(i, t):
        moved = lists["old_logprobs"][i][t] - lists["rollout_logprobs"][i][t]
        return moved * lists["advantages"][i][t] > 0

    counted = sorted((place for place in square if among == "all" or away(*place)), key=square.__getitem__)
    gone = []
    while len(counted) > 1 and sum(square[p] for p in counted) / len(counted) >= limit:
        gone.append(counted.pop())
    return set(square) - set(gone)


@pytest.mark.parametrize("among", ("all", "away"))
@pytest.mark.parametrize("limit", (0.0, 0.01, 0.04, 0.5))
def test_the_tokens_that_moved_furthest_go(limit, among):
    gone = 0
    for seed in range(5):
        batch, lists = some_rows(seed)
        found = chosen(rl.select_by_second_moment(batch, limit=limit, among=among))
        assert found == slow_second_moment(lists, limit, among)
        gone += len(places(lists)) - len(found)
    assert (gone > 0) == (limit < 0.5)


def test_equal_ones_go_together_so_that_the_order_of_rows_does_not_matter():
    moved = torch.tensor([0.3, 0.1, 0.3, 0.3])
    batch = Batch.of(
        4,
        response_mask=Column.of([torch.ones(1, dtype=torch.bool)] * 4, dim="response"),
        rollout_logprobs=Column.of([torch.tensor([-1.0])] * 4, dim="response"),
        old_logprobs=Column.of([torch.tensor([-1 + float(x)]) for x in moved], dim="response"),
    )
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]):
        found = rl.select_by_second_moment(batch.take(order), limit=0.06).selected.to_list()
        assert found == [[k == 1] for k in order]  # (0.01 + 0.09) / 2 would do


@pytest.mark.parametrize("select", (rl.select_by_entropy, rl.select_by_second_moment))
def test_neither_the_order_of_rows_nor_masked_tokens_matter(select):
    for seed in range(4):
        batch, lists = some_rows(seed)
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
        turned = select(batch.take(order))
        by_key = dict(zip(turned.keys, turned.selected.to_list(), strict=True))
        assert [by_key[key] for key in batch.keys] == select(batch).selected.to_list()
        assert chosen(select(batch)) <= set(places(lists))


@pytest.mark.parametrize("select", (rl.select_by_entropy, rl.select_by_second_moment))
def test_nothing_sampled_is_nothing_selected(select):
    batch, _ = some_rows(0)
    assert not select(batch.take([0, 1])).selected.values.any()
    assert len(select(batch.take([])).selected) == 0


# -- weights of a whole batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", ("tokens", "rows", "none"))
@pytest.mark.parametrize("level", ("token", "sequence", "geometric"))
def test_importance_weights(level, normalize):
    for seed in range(4):
        batch, lists = some_rows(seed)
        found = rl.importance_weights(batch, correction=rl.correct(level, high=1.3), normalize=normalize)
        wanted = {}
        for i, t in places(lists):
            row = [u for j, u in places(lists) if j == i]
            logs = {u: lists["old_logprobs"][i][u] - lists["rollout_logprobs"][i][u] for u in row}
            log = {"token": logs[t], "sequence": sum(logs.values()), "geometric": sum(logs.values()) / len(row)}[level]
            wanted[i, t] = min(math.exp(log), 1.3)
        by_row = [[w for (j, _), w in wanted.items() if j == i] for i in {i for i, _ in wanted}]
        mean = {
            "tokens": sum(wanted.values()) / len(wanted),
            "rows": sum(sum(row) / len(row) for row in by_row) / len(by_row),
            "none": 1.0,
        }[normalize]
        weights = found.importance_weights.to_list()
        for i, row in enumerate(weights):
            for t, weight in enumerate(row):
                assert weight == pytest.approx(wanted.get((i, t), 0.0) / mean, rel=1e-5)


def test_weights_of_several_factors_may_all_be_0():
    batch, _ = some_rows(1)
    nothing = [rl.correct("token", "truncate"), rl.reject("k3", limit=0.0)]
    assert not rl.importance_weights(batch, correction=nothing).importance_weights.values.any()
    negative = rl.importance_weights(batch, correction=rl.off_policy_mask(0.0), normalize="none")
    kept = negative.importance_weights.values[batch.response_mask.values] > 0
    assert kept[batch.advantages.values[batch.response_mask.values] >= 0].all() and not kept.all()


def test_errors_of_the_weights():
    batch, _ = some_rows(0)
    with pytest.raises(FlowError, match="normalize='row' is none of tokens, rows, none"):
        rl.importance_weights(batch, correction=rl.correct(), normalize="row")
    with pytest.raises(FlowError, match="reads 'old_logprobs'"):
        rl.importance_weights(batch.drop("old_logprobs"), correction=rl.correct())


# -- a mean over prompts -----------------------------------------------------------------------------------------------


def test_a_mean_over_prompts_counts_each_prompt_once():
    mask = torch.tensor([True, True, True, False, True, True])
    row = torch.tensor([0, 0, 1, 1, 2, 3])
    found = token_weights(mask, row, 5, "prompt-mean", group=torch.tensor([0, 0, 1, 1, 2]))
    assert found.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0, 1 / 4, 1 / 4])  # the third prompt has no token
