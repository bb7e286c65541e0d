"""GDPO, pass@k, the optimal token baseline and GiGPO against slow loops written from their equations."""

import math
from itertools import combinations

import pytest
import torch

from flowrl.batch import Batch, Column
from flowrl.errors import FlowError, ProgramError
from flowrl.graph.ops.signature import CallShape
from flowrl.rl.credit import gdpo, gigpo, optimal_token_baseline, pass_at_k, turn_advantages

torch.set_num_threads(1)


def normalised(numbers, eps, scale="group"):
    """``(x - mean) / (std + eps)`` of a list; 0 for one number."""
    mean = sum(numbers) / len(numbers)
    if len(numbers) == 1:
        return [0.0]
    std = math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))
    return [(x - mean) / (std + eps) if scale == "group" else x - mean for x in numbers]


def by_group(names, numbers, *args):
    """The same within each set of equal names, in the order of the numbers."""
    found = [0.0] * len(numbers)
    for name in set(names):
        where = [i for i, other in enumerate(names) if other == name]
        for i, x in zip(where, normalised([numbers[i] for i in where], *args), strict=True):
            found[i] = x
    return found


def random_rows(seed, prompts=4):
    """Groups of 1 to 4 in random order, with empty responses, observations and turns; numbers in float64."""
    draw = torch.Generator().manual_seed(seed)

    def real(*shape):
        return torch.rand(*shape, dtype=torch.float64, generator=draw)

    keys = [(p, i) for p in range(prompts) for i in range(p + 1)]
    keys = [keys[i] for i in torch.randperm(len(keys), generator=draw).tolist()]
    turns = torch.randint(0, 5, (len(keys),), generator=draw).tolist()
    turns[0] = 0
    ids = [[t for k in range(n) for t in [k] * (k % 3) + [-1]] for n in turns]  # turn 0 and 3 have no token
    lengths, total, steps = [len(row) for row in ids], sum(len(row) for row in ids), sum(turns)
    rollout, old = -3 * real(total), -3 * real(total)
    mask = [[t >= 0 for t in row] for row in ids]
    return Batch.of(
        keys,
        rewards=Column.of(real(len(keys))),
        format=Column.of((real(len(keys)) < 0.5).double()),
        response_mask=Column.of(mask, dim="response", dtype="bool"),
        turn_ids=Column.of(ids, dim="response", dtype="i32"),
        turn_rewards=Column.packed(real(steps), turns, "turn"),
        turn_states=Column.packed(torch.randint(0, 3, (steps,), generator=draw), turns, "turn"),
        rollout_logprobs=Column.packed(rollout, lengths, "response"),
        old_logprobs=Column.packed(old, lengths, "response"),
        squares=Column.packed((2 * rollout.maximum(old)).exp() + real(total) / 9, lengths, "response"),
        token_rewards=Column.packed(real(total), lengths, "response"),
    )


def close(found, wanted):
    for row, other in zip(found.to_list(), wanted, strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-6)


CALLS = {
    "gdpo": lambda batch: gdpo(batch, rewards=("rewards", "format"), weights=(1.0, 0.3)),
    "optimal_token_baseline": lambda batch: optimal_token_baseline(batch, sum_squares="squares"),
    "gigpo": gigpo,
    "turn_advantages": turn_advantages,
    "pass_at_k": lambda batch: pass_at_k(batch, k=2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_the_order_of_rows_means_nothing(call):
    batch = random_rows(0)
    found = call(batch).sort().advantages
    assert found.type == "f32[*response]"
    turned = call(batch.take(list(range(len(batch)))[::-1])).sort().advantages
    torch.testing.assert_close(turned.values, found.values, rtol=1e-6, atol=1e-6)
    assert not found.values[~batch.sort().response_mask.values].any()


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_batch_without_tokens_has_no_advantages(call):
    batch = random_rows(0)
    bare = batch.filter([not len(row) for row in batch.response_mask.to_list()])
    assert len(bare) and call(bare).advantages.to_list() == [[] for _ in range(len(bare))]
    assert len(call(batch.filter([False] * len(batch))).advantages) == 0


@pytest.mark.parametrize(
    ("call", "said"), [(optimal_token_baseline, {}), (gigpo, {}), (turn_advantages, {}), (pass_at_k, {"k": 2})]
)
def test_prompts_are_apart(call, said):
    batch = random_rows(1)
    parts = Batch.concat(*(call(batch.take(rows), **said) for rows in batch.groups()))
    torch.testing.assert_close(parts.sort().advantages.values, call(batch, **said).sort().advantages.values)
    assert call.in_pieces({}, call.bind((batch,), said))


# -- GDPO ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, (2.0, 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_gdpo_normalises_each_reward_and_then_their_sum(seed, weights):
    batch = random_rows(seed)
    prompts = [key[0] for key in batch.keys]
    shares = weights or (1.0, 1.0)
    parts = [by_group(prompts, batch[name].values.tolist(), 1e-4) for name in ("rewards", "format")]
    summed = [shares[0] * a + shares[1] * b for a, b in zip(*parts, strict=True)]
    whole = normalised(summed, 1e-4)
    wanted = [[a * m for m in row] for a, row in zip(whole, batch.response_mask.to_list(), strict=True)]
    close(gdpo(batch, rewards=("rewards", "format"), weights=weights).advantages, wanted)


def test_gdpo_is_the_normalise_then_sum_of_trl():
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    draw = torch.Generator().manual_seed(3)
    rewards, weights = torch.rand(12, 2, dtype=torch.float64, generator=draw), torch.tensor([0.7, 1.5])
    grouped = rewards.view(3, 4, 2)
    each = (grouped - grouped.mean(dim=1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    summed = (each.view(12, 2) * weights).sum(dim=1)
    wanted = (summed - summed.mean()) / (nanstd(summed) + 1e-4)
    mask = Column.packed(torch.ones(12, dtype=torch.bool), [1] * 12, "response")
    fields = {"a": Column.of(rewards[:, 0]), "b": Column.of(rewards[:, 1])}
    batch = Batch.of([(i // 4, i % 4) for i in range(12)], response_mask=mask, **fields)
    found = gdpo(batch, rewards=("a", "b"), weights=weights.tolist()).advantages.values
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_gdpo_of_equal_rewards_is_exactly_0_and_crosses_prompts():
    batch = random_rows(0).drop("rewards", "format")
    equal = batch.with_columns({name: Column.of([0.1] * len(batch)) for name in ("rewards", "format")})
    assert not gdpo(equal, rewards=("rewards", "format")).advantages.values.any()
    assert not gdpo.in_pieces({}, {})


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ({"rewards": "rewards"}, 'Write rewards=("rewards", "format").'),
        ({"rewards": ()}, 'Write rewards=("correctness", "format").'),
        ({"rewards": ("rewards", "format"), "weights": (1.0,)}, "Give one weight for each of rewards, format."),
    ],
)
def test_gdpo_refuses_what_names_no_rewards(said, fix):
    with pytest.raises(FlowError) as error:
        gdpo(random_rows(0), **said)
    assert error.value.fix == fix
    assert error.value.at is not None and error.value.at.file == __file__


def test_what_gdpo_would_read_can_be_asked_without_a_call():
    assert callable(gdpo.reads)
    reads = gdpo.reads(CallShape({}, {n: p.default for n, p in gdpo.parameters.named.items()}, frozenset()))
    assert "response_mask" in reads


# -- the optimal token baseline -----------------------------------------------------------------------------------


def slow_pass_at_k(rewards, k, scale, eps):
    """The advantages of one prompt's rows, over every set of ``k`` of them."""
    n = len(rewards)
    best = {rows: max(rewards[i] for i in rows) for rows in combinations(range(n), k)}
    if len(best) < 2:
        return [0.0] * n
    mean = sum(best.values()) / len(best)
    std = math.sqrt(sum((x - mean) ** 2 for x in best.values()) / len(best))
    found = []
    for i in range(n):
        mine = [x for rows, x in best.items() if i in rows]
        away = sum(mine) / len(mine) - mean
        found.append(away if scale == "none" else away / (std + eps) if std else 0.0)
    return found


def graded(groups, seed=0):
    """Rows of prompts with these rewards, in random order; rows of 0 to 2 tokens, and what was sampled of them."""
    draw = torch.Generator().manual_seed(seed)
    keys = [(p, i) for p, rewards in enumerate(groups) for i in range(len(rewards))]
    keys = [keys[i] for i in torch.randperm(len(keys), generator=draw).tolist()]
    mask = [[True, False][: (3 * p + i) % 3] for p, i in keys]
    return Batch.of(
        keys,
        rewards=Column.of(torch.tensor([groups[p][i] for p, i in keys], dtype=torch.float64)),
        response_mask=Column.of(mask, dim="response", dtype="bool"),
    )


def check_pass_at_k(groups, k, scale="group", eps=1e-3):
    batch = graded(groups)
    found = pass_at_k(batch, k=k, scale=scale, eps=eps).advantages
    wanted = [slow_pass_at_k(rewards, k, scale, eps) for rewards in groups]
    for (p, i), tokens, mask in zip(batch.keys, found.to_list(), batch.response_mask.to_list(), strict=True):
        assert tokens == pytest.approx([wanted[p][i] * m for m in mask], abs=1e-6)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_pass_at_k_is_the_mean_over_every_set_of_k_rows(seed, k, scale):
    draw = torch.Generator().manual_seed(seed)
    sizes = [1, 2, 3, 5, 6, 6, 8]
    check_pass_at_k([torch.randn(n, generator=draw, dtype=torch.float64).tolist() for n in sizes], k, scale)
    whole = [torch.randint(0, 3, (n,), generator=draw).tolist() for n in sizes]  # of which some are equal
    check_pass_at_k(whole, k, scale)
    check_pass_at_k([[float(r > 1) for r in rewards] for rewards in whole], k, scale)


@pytest.mark.parametrize("right", [1, 3, 5])
def test_pass_at_k_of_right_and_wrong_rows_is_the_analytic_form_of_the_paper(right):
    n, k, eps = 8, 3, 1e-4
    wrong = n - right
    p = 1 - math.comb(wrong, k) / math.comb(n, k)
    s = math.sqrt(p * (1 - p)) + eps
    up, down = (1 - p) / s, (1 - p - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / s
    mask = Column.packed(torch.ones(n, dtype=torch.bool), [1] * n, "response")
    rewards = [1.0] * right + [0.0] * wrong
    found = pass_at_k(Batch.of([(7, i) for i in range(n)], rewards=rewards, response_mask=mask), k=k, eps=eps)
    assert found.advantages.values.tolist() == pytest.approx([up] * right + [down] * wrong, abs=1e-6)


@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.7, 1.0, 1.0, 1.0, 0.2], [1 / 3, 0.1, 1 / 3, 1 / 3]])
def test_where_every_set_earns_the_same_there_is_exactly_no_advantage(rewards):
    """Two wrong rows cannot fill a set of three."""
    assert not pass_at_k(graded([rewards]), k=3).advantages.values.any()


def test_large_groups_have_finite_advantages():
    rewards = [float(i % 7 == 0) for i in range(2000)]
    mask = Column.packed(torch.ones(2000, dtype=torch.bool), [1] * 2000, "response")
    batch = Batch.of([(0, i) for i in range(2000)], rewards=rewards, response_mask=mask)
    for k in (1, 64, 1999):
        assert torch.isfinite(pass_at_k(batch, k=k).advantages.values).all()


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ({"k": 0}, "Write k=4, and sample more rows than that of each prompt."),
        ({"k": 2.5}, "Write k=4, and sample more rows than that of each prompt."),
        ({"k": 2, "scale": "std"}, 'Write scale="group".'),
    ],
)
def test_pass_at_k_refuses_what_is_no_number_of_answers(said, fix):
    with pytest.raises(FlowError) as error:
        pass_at_k(graded([[0.0, 1.0]]), **said)
    assert error.value.fix == fix
    assert error.value.at is not None and error.value.at.file == __file__


def slow_token_baseline(batch, anchor, squares, token_rewards):
    """Each prompt padded over its sampled tokens, each position by itself."""
    logprobs, extra = batch[f"{anchor}_logprobs"].to_list(), batch.token_rewards.to_list()
    found = [[0.0] * len(row) for row in batch.response_mask.to_list()]
    for group in batch.groups():
        steps = {i: [t for t, m in enumerate(batch.response_mask.to_list()[i]) if m] for i in group}
        for k in range(max(len(s) for s in steps.values())):
            there = [i for i in group if len(steps[i]) > k]
            returns, weights = [], []
            for i in there:
                later = sum(extra[i][t] for t in steps[i][k:]) if token_rewards else 0.0
                returns.append(float(batch.rewards[i]) + later)
                p = [math.exp(logprobs[i][t]) for t in steps[i][: k + 1]]
                if squares:
                    s = [batch.squares.to_list()[i][t] for t in steps[i][: k + 1]]
                    weights.append(sum(1 - 2 * x + y for x, y in zip(p, s, strict=True)))
                else:
                    weights.append(sum(1 - x for x in p))
            b = sum(g * w for g, w in zip(returns, weights, strict=True)) / sum(weights)
            for i, g in zip(there, returns, strict=True):
                found[i][steps[i][k]] = g - b
    return found


@pytest.mark.parametrize("squares", ["squares", None])
@pytest.mark.parametrize("anchor", ["rollout", "old"])
@pytest.mark.parametrize("token_rewards", [True, False])
def test_the_token_baseline_is_the_weighted_mean_of_the_returns(squares, anchor, token_rewards):
    for seed in range(3):
        batch = random_rows(seed)
        given = batch if token_rewards else batch.drop("token_rewards")
        found = optimal_token_baseline(given, anchor=anchor, sum_squares=squares).advantages
        close(found, slow_token_baseline(batch, anchor, squares, token_rewards))


def test_sure_tokens_weigh_nothing_and_where_all_are_sure_all_weigh_the_same():
    logprobs = Column.of([[0.0, -1.0], [0.0, 0.0]], dim="response")
    mask = Column.of([[True, True], [True, True]], dim="response")
    batch = Batch.of([(0, 0), (0, 1)], rewards=[1.0, 0.0], response_mask=mask, rollout_logprobs=logprobs)
    assert optimal_token_baseline(batch).advantages.to_list() == [[0.5, 0.0], [-0.5, -1.0]]


def test_equal_rewards_lone_rows_and_tails_have_no_token_advantage():
    lengths = [3, 1, 0, 2]
    mask = Column.packed(torch.ones(6, dtype=torch.bool), lengths, "response")
    logprobs = Column.packed(-torch.rand(6), lengths, "response")
    keys = [(0, 0), (0, 1), (0, 2), (1, 0)]
    equal = Batch.of(keys, rewards=[0.1, 0.1, 0.1, 0.7], response_mask=mask, rollout_logprobs=logprobs)
    assert not optimal_token_baseline(equal).advantages.values.any()
    apart = Batch.of(keys, rewards=[1.0, 0.0, 0.0, 0.7], response_mask=mask, rollout_logprobs=logprobs)
    assert optimal_token_baseline(apart).advantages.to_list()[0][1:] == [0.0, 0.0]


def test_the_token_baseline_refuses_an_unknown_anchor():
    with pytest.raises(FlowError) as error:
        optimal_token_baseline(random_rows(0), anchor="olt")
    assert error.value.fix == 'Write anchor="old".'


# -- GiGPO --------------------------------------------------------------------------------------------------------


def slow_gigpo(batch, weight, gamma, scale, eps):
    episode = by_group([key[0] for key in batch.keys], batch.rewards.values.tolist(), eps, scale)
    names, returns = [], []
    for i, key in enumerate(batch.keys):
        paid = batch.turn_rewards.to_list()[i]
        returns += [sum(gamma**n * r for n, r in enumerate(paid[k:])) for k in range(len(paid))]
        names += [(key[0], state) for state in batch.turn_states.to_list()[i]]
    step, first, found = by_group(names, returns, eps, scale), 0, []
    for i, (ids, mask) in enumerate(zip(batch.turn_ids.to_list(), batch.response_mask.to_list(), strict=True)):
        found.append([episode[i] + weight * step[first + t] if m else 0.0 for t, m in zip(ids, mask, strict=True)])
        first += len(batch.turn_rewards[i])
    return found


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize(("weight", "gamma"), [(1.0, 0.95), (0.3, 1.0), (0.0, 0.5)])
def test_gigpo_compares_episodes_and_turns_from_equal_states(scale, weight, gamma):
    for seed in range(3):
        batch = random_rows(seed)
        said = {"weight": weight, "gamma": gamma, "scale": scale, "eps": 1e-3}
        close(gigpo(batch, **said).advantages, slow_gigpo(batch, **said))


def episodes(rewards, states, turn_rewards, keys, mask=None):
    """Rows whose turns have one token each."""
    ids = [list(range(len(row))) for row in states]
    return Batch.of(
        keys,
        rewards=rewards,
        response_mask=Column.of(mask or [[True] * len(row) for row in ids], dim="response"),
        turn_ids=Column.of(ids, dim="response", dtype="i32"),
        turn_rewards=Column.of(turn_rewards, dim="turn"),
        turn_states=Column.of(states, dim="turn"),
    )


def test_a_state_that_was_seen_once_leaves_the_episode_alone():
    batch = episodes([1.0, 0.0], [[5, 6], [5, 7]], [[0.0, 1.0], [0.0, 0.0]], [(0, 0), (0, 1)])
    found = gigpo(batch, scale="none", gamma=0.5).advantages.to_list()
    assert found == [[0.5 + 0.25, 0.5], [-0.5 - 0.25, -0.5]]


def test_states_of_other_prompts_are_other_states():
    batch = episodes([1.0, 0.0], [[5], [5]], [[1.0], [0.0]], [(0, 0), (1, 0)])
    assert not gigpo(batch).advantages.values.any()


def test_two_turns_of_one_episode_may_share_a_state():
    batch = episodes([1.0], [[5, 5]], [[0.0, 1.0]], [(0, 0)])
    assert gigpo(batch, scale="none", gamma=0.5).advantages.to_list() == [[-0.25, 0.25]]


def test_a_masked_turn_counts_among_its_state_and_has_no_advantage():
    batch = episodes([1.0, 0.0], [[5], [5]], [[1.0], [0.0]], [(0, 0), (0, 1)], mask=[[True], [False]])
    assert gigpo(batch, scale="none").advantages.to_list() == [[1.0], [0.0]]


@pytest.mark.parametrize("scale", ["group", "none"])
def test_equal_episodes_have_exactly_no_advantage(scale):
    batch = episodes([0.1] * 3, [[1, 2, 3]] * 3, [[0.1, 0.2, 0.1]] * 3, [(0, i) for i in range(3)])
    assert not gigpo(batch, scale=scale).advantages.values.any()


@pytest.mark.parametrize("turn", [-1, 2])
def test_a_sampled_token_belongs_to_a_turn_of_its_row(turn):
    batch = episodes([1.0], [[5, 6]], [[0.0, 1.0]], [(0, 0)]).drop("turn_ids")
    batch = batch.with_columns({"turn_ids": Column.of([[0, turn]], dim="response", dtype="i32")})
    with pytest.raises(FlowError, match=f"belongs to turn {turn} of a row of 2 turns") as error:
        gigpo(batch)
    assert "from 0" in (error.value.fix or "")


@pytest.mark.parametrize("fn", [gigpo, turn_advantages])
@pytest.mark.parametrize("scale", ["sdt", "std", "batch"])
def test_turns_refuse_another_scale_than_that_of_their_group(fn, scale):
    with pytest.raises(FlowError) as error:
        fn(random_rows(0), scale=scale)
    assert error.value.fix == 'Write scale="group".'
    assert error.value.at is not None and error.value.at.file == __file__


# -- turns ----------------------------------------------------------------------------------------------------------


def slow_turns(batch, weight, gamma, scale, eps):
    """Row by row: the k-th turns of the prompt that there are, each with what is paid from it on."""
    found = []
    rows = list(zip(batch.keys, batch.rewards.values.tolist(), batch.turn_rewards.to_list(), strict=True))

    def against(own, others):
        mean = sum(others) / len(others)
        spread = math.sqrt(sum((x - mean) ** 2 for x in others) / max(1, len(others) - 1))
        if len(others) < 2 or spread < 1e-12:
            return 0.0
        return (own - mean) / (spread + eps) if scale == "group" else own - mean

    def to_go(paid, k):
        return sum(gamma**n * r for n, r in enumerate(paid[k:]))

    for (key, reward, paid), ids, mask in zip(
        rows, batch.turn_ids.to_list(), batch.response_mask.to_list(), strict=True
    ):
        mates = [(r, p) for other, r, p in rows if other[0] == key[0]]
        whole, parts = against(reward, [r for r, _ in mates]), []
        for turn, trained in zip(ids, mask, strict=True):
            own = [to_go(p, turn) for _, p in mates if trained and len(p) > turn]
            parts.append(whole + weight * against(to_go(paid, turn), own) if trained else 0.0)
        found.append(parts)
    return found


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize(("weight", "gamma"), [(1.0, 1.0), (0.3, 0.9), (2.0, 0.0), (0.0, 0.5)])
def test_turn_advantages_compare_turns_of_one_number(scale, weight, gamma):
    for seed in range(3):
        batch = random_rows(seed)
        said = {"weight": weight, "gamma": gamma, "scale": scale, "eps": 1e-3}
        close(turn_advantages(batch.drop("turn_states"), **said).advantages, slow_turns(batch, **said))


def test_a_turn_that_one_episode_alone_came_to_has_the_credit_of_the_episode():
    batch = episodes([1.0, 0.0], [[5, 6], [5]], [[0.0, 1.0], [0.0]], [(0, 0), (0, 1)])
    assert turn_advantages(batch, scale="none").advantages.to_list() == [[1.0, 0.5], [-1.0]]
    assert turn_advantages(batch, scale="none", gamma=0.0).advantages.to_list() == [[0.5, 0.5], [-0.5]]


def test_a_token_of_a_turn_that_there_is_not_is_refused_by_the_name_of_the_op():
    batch = episodes([1.0, 0.0], [[5, 6], [5]], [[0.0], [0.0]], [(0, 0), (0, 1)])
    with pytest.raises(ProgramError, match=r"rl\.turn_advantages: a sampled token belongs to turn 1 of a row of 1"):
        turn_advantages(batch)


def test_turn_advantages_refuse_an_unknown_scale():
    with pytest.raises(FlowError, match="scale"):
        turn_advantages(random_rows(0), scale="mean")
