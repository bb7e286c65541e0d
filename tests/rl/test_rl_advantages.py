"""Advantages against closed forms and slow loops."""

import math

import pytest
import torch

from flowrl import rl
from flowrl.batch import Batch, Column
from flowrl.errors import FlowError
from flowrl.rl.advantages import advantages as rl_advantages

torch.set_num_threads(1)


def rows(rewards, lengths, keys=None, **more):
    """A batch with these rewards; every response token is the policy's."""
    mask = Column.packed(torch.ones(sum(lengths), dtype=torch.bool), lengths, "response")
    return Batch.of(keys, rewards=Column.of(rewards, dtype="f32"), response_mask=mask, **more)


def test_group_advantages_are_normalised_within_each_prompt():
    batch = rows([1.0, 0.0, 0.0, 5.0], [2, 1, 3, 2], keys=[(7, 0), (7, 1), (7, 2), (9, 0)])
    found = rl.group_advantages(batch).advantages
    std = math.sqrt(((1 - 1 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    up, down = (2 / 3) / (std + 1e-4), (-1 / 3) / (std + 1e-4)
    assert found.type == "f32[*response]"
    for row, wanted in zip(found.to_list(), [[up] * 2, [down], [down] * 3, [0.0] * 2], strict=True):
        assert row == pytest.approx(wanted)


def test_rows_of_a_prompt_need_not_lie_together():
    keys = [(0, 0), (1, 0), (0, 1), (1, 1)]
    batch = rows([1.0, 2.0, 0.0, 6.0], [1, 1, 1, 1], keys=keys)
    found = rl.group_advantages(batch, scale="none").advantages.values
    assert found.tolist() == [0.5, -2.0, -0.5, 2.0]
    turned = rl.group_advantages(batch.take([3, 1, 0, 2]), scale="none")
    assert turned.sort().advantages.values.tolist() == [0.5, -0.5, -2.0, 2.0]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_have_no_advantage_at_all(reward):
    batch = rows([reward] * 7, [1] * 7, keys=[(0, i) for i in range(7)])
    assert not rl.group_advantages(batch).advantages.values.any()


def test_leave_one_out_takes_the_mean_of_the_others():
    rewards = [3.0, 1.0, 2.0]
    batch = rows(rewards, [1, 1, 1], keys=[(0, i) for i in range(3)])
    found = rl.group_advantages(batch, scale="none", leave_one_out=True).advantages.values.tolist()
    assert found == pytest.approx([r - (sum(rewards) - r) / 2 for r in rewards])


def test_tokens_outside_the_mask_have_no_advantage():
    mask = Column.of([[True, False, True], [False]], dim="response")
    batch = Batch.of([(0, 0), (0, 1)], rewards=[1.0, 0.0], response_mask=mask)
    assert rl.group_advantages(batch, scale="none").advantages.to_list() == [[0.5, 0.0, 0.5], [0.0]]


def slow_gae(reward, values, mask, token_rewards, gamma, lam):
    """One row, by the definition: a sum over later steps."""
    steps = [t for t, m in enumerate(mask) if m]
    paid = {t: token_rewards[t] for t in steps}
    if steps:
        paid[steps[-1]] += reward
    delta = []
    for i, t in enumerate(steps):
        after = values[steps[i + 1]] if i + 1 < len(steps) else 0.0
        delta.append(paid[t] + gamma * after - values[t])
    advantages, returns = [0.0] * len(mask), list(values)
    for i, t in enumerate(steps):
        advantages[t] = sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:]))
        returns[t] = advantages[t] + values[t]
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
@pytest.mark.parametrize("given", [True, False])
def test_gae_is_the_sum_of_the_paper(gamma, lam, given):
    torch.manual_seed(0)
    lengths = [5, 1, 0, 4, 3]
    total = sum(lengths)
    packed = {n: Column.packed(torch.randn(total), lengths, "response") for n in ("values", "token_rewards")}
    mask = Column.packed(torch.tensor([1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0], dtype=torch.bool), lengths, "response")
    rewards = Column.of(torch.randn(5))
    fields = {"values": packed["values"], **({"token_rewards": packed["token_rewards"]} if given else {})}
    found = rl.gae(Batch.of(5, rewards=rewards, response_mask=mask, **fields), gamma=gamma, lam=lam)
    for i in range(5):
        extra = packed["token_rewards"].to_list()[i] if given else [0.0] * lengths[i]
        wanted = slow_gae(float(rewards[i]), packed["values"].to_list()[i], mask.to_list()[i], extra, gamma, lam)
        assert found.advantages.to_list()[i] == pytest.approx(wanted[0], abs=1e-6)
        assert found.returns.to_list()[i] == pytest.approx(wanted[1], abs=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize(("lam_returns", "alpha"), [(1.0, None), (None, 0.7), (1.0, 0.7), (0.3, 0.25), (0.0, 2.0)])
def test_the_two_lambdas_of_vapo(lam_returns, alpha, gamma):
    """Advantages with a lambda of the row's own length, returns with another one: each as if it were alone."""
    torch.manual_seed(0)
    lengths = [5, 1, 0, 4, 3]
    values = Column.packed(torch.randn(13), lengths, "response")
    mask = Column.packed(torch.tensor([1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0], dtype=torch.bool), lengths, "response")
    rewards = Column.of(torch.randn(5))
    batch = Batch.of(5, rewards=rewards, response_mask=mask, values=values)
    found = rl.gae(batch, gamma=gamma, lam_returns=lam_returns, alpha=alpha)
    for i in range(5):
        given = (float(rewards[i]), values.to_list()[i], mask.to_list()[i], [0.0] * lengths[i], gamma)
        sampled = sum(mask.to_list()[i])
        lam = 0.95 if alpha is None else max(0.0, 1 - 1 / (alpha * sampled)) if sampled else 0.0
        assert found.advantages.to_list()[i] == pytest.approx(slow_gae(*given, lam)[0], abs=1e-6)
        later = lam if lam_returns is None else lam_returns
        assert found.returns.to_list()[i] == pytest.approx(slow_gae(*given, later)[1], abs=1e-6)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"lam": 0.9, "alpha": 0.05}, "lam=0.9 and alpha=0.05 both say how far the advantages look"),
        ({"lam": 1.5}, "lam=1.5 is not a number from 0 to 1"),
        ({"lam_returns": -0.1}, "lam_returns=-0.1 is not a number from 0 to 1"),
        ({"alpha": 0}, "alpha=0 is not a number above 0"),
    ],
)
def test_lambdas_that_make_no_sense_are_refused_before_it_runs(said, what):
    with pytest.raises(FlowError) as error:
        rl.gae(rows([1.0], [1], values=Column.packed(torch.zeros(1), [1], "response")), **said)
    assert what in error.value.what and error.value.fix
    assert error.value.at.file == __file__


def test_with_lam_1_the_return_is_what_is_paid_from_here_on():
    lengths = [4]
    batch = rows([2.0], lengths, values=Column.packed(torch.tensor([0.3, -0.1, 0.7, 0.2]), lengths, "response"))
    assert rl.gae(batch, lam=1.0).returns.values.tolist() == pytest.approx([2.0] * 4)


def test_whitened_advantages_have_mean_0_and_std_1_and_leave_the_returns():
    torch.manual_seed(1)
    lengths = [3, 4]
    mask = Column.packed(torch.tensor([1, 1, 0, 1, 1, 1, 0], dtype=torch.bool), lengths, "response")
    values = Column.packed(torch.randn(7), lengths, "response")
    batch = Batch.of(2, rewards=[1.0, -1.0], values=values, response_mask=mask)
    plain, white = rl.gae(batch), rl.gae(batch, whiten=True)
    chosen = white.advantages.values[mask.values]
    assert float(chosen.mean()) == pytest.approx(0, abs=1e-6)
    assert float(chosen.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert not white.advantages.values[~mask.values].any()
    assert white.returns.equal(plain.returns)


def test_kl_penalty_is_paid_per_token_and_gae_adds_the_reward_at_the_end():
    lengths = [2, 1]
    fields = {
        "rollout_logprobs": Column.packed(torch.tensor([-1.0, -2.0, -0.5]), lengths, "response"),
        "ref_logprobs": Column.packed(torch.tensor([-1.5, -1.0, -0.5]), lengths, "response"),
        "values": Column.packed(torch.zeros(3), lengths, "response"),
    }
    batch = rl.kl_penalty(rows([1.0, 1.0], lengths, **fields), coef=0.1)
    assert batch.token_rewards.values.tolist() == pytest.approx([-0.05, 0.1, 0.0])
    assert rl.gae(batch, lam=1.0).returns.values.tolist() == pytest.approx([1.05, 1.1, 1.0])


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda b: rl.group_advantages(b, scale="std"), 'Write scale="group".'),
        (lambda b: rl.kl_penalty(b, coef=1.0, kind="k4"), 'Write kind="k1".'),
        *(
            (lambda b, coef=coef: rl.kl_penalty(b, coef=coef), "Give coef= the weight of the penalty, such as 0.001.")
            for coef in (-0.1, float("nan"), float("inf"), None)
        ),
        (lambda b: rl.kl_penalty(b, coef=1.0, anchor="rollouts"), 'Write anchor="rollout".'),
    ],
)
def test_a_misspelt_option_is_refused_before_it_runs(call, fix):
    with pytest.raises(FlowError) as error:
        call(rows([1.0], [1]))
    assert error.value.fix == fix
    assert error.value.at.file == __file__


# -- the factored estimator ---------------------------------------------------------------------------------------


def ragged(seed, prompts=4, longest=6):
    """Random rows in random order: groups of 1 to 5, empty responses, observations; everything in float64."""
    draw = torch.Generator().manual_seed(seed)
    keys = [(p, i) for p in range(prompts) for i in range(p % 5 + 1)]
    keys = [keys[i] for i in torch.randperm(len(keys), generator=draw).tolist()]
    lengths = torch.randint(0, longest + 1, (len(keys),), generator=draw).tolist()
    lengths[0], total = 0, sum(lengths) - lengths[0]
    return Batch.of(
        keys,
        rewards=Column.of(torch.rand(len(keys), dtype=torch.float64, generator=draw)),
        greedy=Column.of(torch.rand(len(keys), dtype=torch.float64, generator=draw)),
        response_mask=Column.packed(torch.rand(total, generator=draw) < 0.7, lengths, "response"),
        token_rewards=Column.packed(torch.randn(total, dtype=torch.float64, generator=draw), lengths, "response"),
    )


def mean(numbers):
    return sum(numbers) / len(numbers)


def bessel(numbers):
    return math.sqrt(sum((x - mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1)) if len(numbers) > 1 else 0.0


def slow_advantages(batch, of, baseline, center, leave_one_out, scale, eps, whiten, gamma):
    """By the definition: loops over rows, prompts and tokens."""
    rewards, masks = batch.rewards.values.tolist(), batch.response_mask.to_list()
    number, tokens = [], []
    for i, mask in enumerate(masks):
        steps = [t for t, m in enumerate(mask) if m]
        paid = [batch.token_rewards.to_list()[i][t] for t in steps]
        if steps:
            paid[-1] += rewards[i]
        returns = [sum(gamma**k * r for k, r in enumerate(paid[j:])) for j in range(len(steps))]
        number.append(returns[0] if of == "returns" and steps else rewards[i])
        tokens.append({t: returns[j] if of == "returns" else rewards[i] for j, t in enumerate(steps)})
        if baseline:
            number[i] -= batch[baseline].values.tolist()[i]
            tokens[i] = {t: x - batch[baseline].values.tolist()[i] for t, x in tokens[i].items()}
    found = [[0.0] * len(mask) for mask in masks]
    for i, key in enumerate(batch.keys):
        group = [j for j, other in enumerate(batch.keys) if other[0] == key[0]]
        among = list(range(len(number))) if center == "batch" else group
        c = 0.0
        if center == "optimal":
            weights = [len(tokens[j]) for j in among]
            c = sum(w * number[j] for w, j in zip(weights, among, strict=True)) / max(sum(weights), 1)
        elif center != "none" and len(among) > 1:
            c = mean([number[j] for j in among if not (leave_one_out and j == i)])
        spread = {
            "group": bessel([number[j] for j in group]),
            "batch": bessel(number),
            "mean": mean([number[j] for j in group]),
            "none": 1.0 - eps,
        }[scale]
        for t, x in tokens[i].items():
            alone = center != "none" and len(among) == 1
            found[i][t] = 0.0 if alone or spread == 0 else (x - c) / (spread + eps)
    if whiten:
        chosen = [found[i][t] for i, row in enumerate(tokens) for t in row]
        std = math.sqrt(mean([(x - mean(chosen)) ** 2 for x in chosen]))
        for i, row in enumerate(tokens):
            for t in row:
                found[i][t] = (found[i][t] - mean(chosen)) / (std + 1e-8)
    return found


CHOICES = [
    (of, center, out, scale)
    for of in ("rewards", "returns")
    for center in ("group", "batch", "optimal", "none")
    for out in ((False, True) if center in ("group", "batch") else (False,))
    for scale in ("group", "batch", "mean", "none")
    if not (of == "returns" and scale == "mean")  # token rewards may be negative
]


@pytest.mark.parametrize(("of", "center", "leave_one_out", "scale"), CHOICES)
def test_advantages_are_the_definition(of, center, leave_one_out, scale):
    for seed, whiten, baseline in [(0, False, None), (1, True, None), (2, False, "greedy")]:
        if scale == "mean" and baseline:
            continue
        batch, gamma = ragged(seed), 0.9 if of == "returns" else 1.0
        said = {"of": of, "center": center, "leave_one_out": leave_one_out, "scale": scale, "eps": 1e-3}
        said |= {"whiten": whiten, "baseline": baseline, "gamma": gamma}
        found = rl_advantages(batch, **said).advantages
        assert found.type == "f32[*response]"
        for row, wanted in zip(found.to_list(), slow_advantages(batch, **said), strict=True):
            assert row == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("of", "center", "leave_one_out", "scale"), CHOICES)
def test_the_order_of_rows_means_nothing(of, center, leave_one_out, scale):
    batch = ragged(3)
    said = {"of": of, "center": center, "leave_one_out": leave_one_out, "scale": scale}
    found = rl_advantages(batch, **said).sort().advantages
    turned = rl_advantages(batch.take(list(range(len(batch)))[::-1]), **said).sort().advantages
    torch.testing.assert_close(turned.values, found.values, rtol=1e-6, atol=1e-6)


def test_what_crosses_no_prompt_may_be_run_prompt_by_prompt():
    batch = ragged(4)
    parts = Batch.concat(*(rl_advantages(batch.take(rows), of="returns") for rows in batch.groups()))
    whole = rl_advantages(batch, of="returns")
    torch.testing.assert_close(parts.sort().advantages.values, whole.sort().advantages.values)

    def in_pieces(**said):
        return rl_advantages.in_pieces({}, rl_advantages.bind((batch,), said))

    assert in_pieces() and in_pieces(center="optimal", scale="mean")
    assert not (in_pieces(center="batch") or in_pieces(scale="batch") or in_pieces(whiten=True))


@pytest.mark.parametrize("center", ["group", "batch", "optimal"])
@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
@pytest.mark.parametrize("whiten", [False, True])
def test_equal_rewards_have_exactly_no_advantage(center, scale, whiten):
    batch = rows([0.1] * 7, [3, 1, 0, 2, 5, 1, 2], keys=[(i % 2, i) for i in range(7)])
    for of in ("rewards", "returns"):
        assert not rl_advantages(batch, of=of, center=center, scale=scale, whiten=whiten).advantages.values.any()


def test_reinforce_plus_plus_of_equal_rewards_is_exactly_0():
    batch = rows([0.1] * 3, [3, 4, 1])
    said = {"of": "returns", "center": "none", "scale": "none", "whiten": True}
    assert not rl_advantages(batch, **said).advantages.values.any()


@pytest.mark.parametrize("center", ["group", "optimal"])
@pytest.mark.parametrize("of", ["rewards", "returns"])
def test_a_prompt_with_one_row_has_none(center, of):
    batch = rows([0.3, 0.9], [3, 2], keys=[(0, 0), (1, 0)])
    gamma = 0.5 if of == "returns" else 1.0
    for scale in ("group", "batch", "mean", "none"):
        found = rl_advantages(batch, of=of, center=center, scale=scale, gamma=gamma)
        assert not found.advantages.values.any()


def test_a_row_without_tokens_counts_in_its_group():
    batch = rows([3.0, 0.0, 0.0], [1, 0, 2], keys=[(0, 0), (0, 1), (0, 2)])
    for of in ("rewards", "returns"):
        assert rl_advantages(batch, of=of, scale="none").advantages.to_list() == [[2.0], [], [-1.0, -1.0]]
    assert rl_advantages(batch, center="optimal", scale="none").advantages.to_list() == [[2.0], [], [-1.0, -1.0]]


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_batch_without_tokens_has_no_advantages(lengths):
    batch = rows(torch.rand(len(lengths)), lengths, keys=[(0, i) for i in range(len(lengths))])
    for of, center, out, scale in CHOICES:
        found = rl_advantages(batch, of=of, center=center, leave_one_out=out, scale=scale, whiten=True)
        assert found.advantages.to_list() == [[] for _ in lengths]


def padded_trl(batch, scale):
    """The advantages of GRPO as another library has them: rewards in equal groups, its own std, row by row."""
    utils = pytest.importorskip("trl.trainer.utils")
    grouped = batch.sort().rewards.values.view(3, 4)
    std = {"group": utils.nanstd(grouped, dim=1)[:, None], "batch": utils.nanstd(grouped)}.get(scale)
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    return (centred if std is None else centred / (std + 1e-4)).flatten()


def equal_groups():
    draw = torch.Generator().manual_seed(5)
    mask = Column.packed(torch.ones(12, dtype=torch.bool), [1] * 12, "response")
    rewards = Column.of(torch.rand(12, dtype=torch.float64, generator=draw))
    return Batch.of([(i % 3, i // 3) for i in range(12)], rewards=rewards, response_mask=mask)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_is_that_of_trl(scale):
    batch = equal_groups()
    found = rl_advantages(batch, scale=scale).sort().advantages.values
    torch.testing.assert_close(found.double(), padded_trl(batch, scale), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("normalised", [False, True])
def test_rloo_is_that_of_trl(normalised):
    utils = pytest.importorskip("trl.trainer.utils")
    batch = equal_groups()
    grouped = batch.sort().rewards.values.view(3, 4)
    others = torch.stack([(grouped.nansum(dim=1) - grouped[:, i]) / 3 for i in range(4)], dim=1)
    wanted = (grouped - others).flatten()
    found = rl_advantages(batch, scale="none", leave_one_out=True, whiten=normalised).sort().advantages.values.double()
    if normalised:  # there with Bessel's correction and 1e-4 in the divisor
        wanted = (wanted - wanted.nanmean()) / utils.nanstd(wanted)
        found = found * math.sqrt(11 / 12)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_group_advantages_are_the_defaults_of_advantages():
    batch = ragged(6)
    assert rl.group_advantages(batch).advantages.equal(rl_advantages(batch).advantages)
    alone = rl_advantages(batch, scale="none", leave_one_out=True).advantages
    assert rl.group_advantages(batch, scale="none", leave_one_out=True).advantages.equal(alone)


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ({"of": "reward"}, 'Write of="rewards".'),
        ({"center": "grup"}, 'Write center="group".'),
        ({"scale": "std"}, 'Write scale="group".'),
        ({"center": "none", "leave_one_out": True}, 'Write center="group", or leave out leave_one_out.'),
        ({"center": "optimal", "leave_one_out": True}, 'Write center="group", or leave out leave_one_out.'),
        ({"gamma": 0.9}, 'Write of="returns", or leave out gamma.'),
    ],
)
def test_what_does_not_go_together_is_refused_before_it_runs(said, fix):
    with pytest.raises(FlowError) as error:
        rl_advantages(rows([1.0], [1]), **said)
    assert error.value.fix == fix
    assert error.value.at.file == __file__


def test_the_mean_of_negative_rewards_divides_nothing():
    with pytest.raises(FlowError) as error:
        rl_advantages(rows([1.0, -1.0], [1, 1]), scale="mean")
    assert "the smallest is -1" in error.value.what
    assert error.value.fix == 'Shift the rewards, or write scale="group".'


def test_the_total_is_the_reward_with_those_of_the_tokens():
    """RLOO with the KL in the reward: every token has the row's whole return, compared with the other rows'."""
    batch = ragged(5)
    found = rl_advantages(batch, of="total", leave_one_out=True, scale="none")
    columns = [batch.rewards, batch.token_rewards, batch.response_mask]
    rewards, paid, masks = (column.to_list() for column in columns)
    total = [
        r + sum(p for p, m in zip(ps, ms, strict=True) if m) for r, ps, ms in zip(rewards, paid, masks, strict=True)
    ]
    for i, key in enumerate(batch.keys):
        others = [total[j] for j, other in enumerate(batch.keys) if other[0] == key[0] and j != i]
        wanted = total[i] - sum(others) / len(others) if others else 0.0
        assert found.take([i]).advantages.values.tolist() == pytest.approx([wanted * m for m in masks[i]], abs=1e-6)
