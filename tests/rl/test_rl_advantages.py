"""Advantages against closed forms and slow loops."""

import math

import pytest
import torch

from flowrl import rl
from flowrl.batch import Batch, Column
from flowrl.errors import FlowError

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
        (lambda b: rl.group_advantages(b, scale="sdt"), 'Write scale="std".'),
        (lambda b: rl.kl_penalty(b, coef=1.0, kind="k4"), 'Write kind="k1".'),
        (lambda b: rl.kl_penalty(b, coef=1.0, anchor="rollouts"), 'Write anchor="rollout".'),
    ],
)
def test_a_misspelt_option_is_refused_before_it_runs(call, fix):
    with pytest.raises(FlowError) as error:
        call(rows([1.0], [1]))
    assert error.value.fix == fix
    assert error.value.at.file == __file__
