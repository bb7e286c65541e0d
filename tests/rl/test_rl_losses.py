"""Losses against slow loops; their gradients in float64; how tokens become one number."""

import math

import pytest
import torch

from flowrl import rl
from flowrl.errors import ProgramError
from flowrl.rl.math.kl import estimate
from flowrl.rl.math.losses import token_weights

torch.set_num_threads(1)
LENGTHS = torch.tensor([3, 1, 4])


def inputs(predicted, entropy=None, **fields):
    row = torch.repeat_interleave(torch.arange(3), LENGTHS)
    by_row = frozenset(n for n, f in fields.items() if len(f) == 3)
    mask = torch.ones(8, dtype=torch.bool)
    return rl.LossInputs(predicted, mask, fields, LENGTHS, row, entropy, by_row)


def numbers(seed):
    return torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_ppo(new, old, advantage, ref, low, high, kl):
    ratio = math.exp(new - old)
    held = min(max(ratio, 1 - low), 1 + high)
    loss = -min(ratio * advantage, held * advantage)
    return loss + kl * (math.exp(ref - new) - 1 - (ref - new))


def test_ppo_clip_is_the_formula_token_by_token():
    new, old, advantages, ref = (numbers(i) for i in range(4))
    loss = rl.ppo_clip(clip=0.2, clip_high=0.3, kl=0.05)
    assert loss.reads == "rollout_logprobs, advantages, response_mask, ref_logprobs"
    found, reports = loss.compute(inputs(new, rollout_logprobs=old, advantages=advantages, ref_logprobs=ref))
    wanted = [
        slow_ppo(*t, 0.2, 0.3, 0.05)
        for t in zip(new.tolist(), old.tolist(), advantages.tolist(), ref.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(wanted)
    assert reports["ratio"].tolist() == pytest.approx((new - old).exp().tolist())
    clipped = [(a > 0 and r > 1.3) or (a < 0 and r < 0.8) for a, r in zip(advantages, (new - old).exp(), strict=True)]
    assert reports["clip_fraction"].tolist() == clipped
    assert (reports["approx_kl"] >= 0).all()


def test_its_gradient_is_the_policy_gradient_where_nothing_is_clipped():
    old, advantages = numbers(1), numbers(2)
    new = old.clone().requires_grad_()
    rl.ppo_clip().compute(inputs(new, rollout_logprobs=old, advantages=advantages))[0].sum().backward()
    assert new.grad.tolist() == pytest.approx((-advantages).tolist())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradients_are_those_of_the_numbers(kind):
    old, advantages, ref = (0.05 * numbers(1), numbers(2), numbers(3))
    entropy = numbers(4).abs()
    loss = rl.ppo_clip(kl=0.3, kl_kind=kind, entropy=0.1)
    assert loss.needs_entropy
    assert not loss.zero_advantage_is_zero

    def value(new, spread):
        fields = {"rollout_logprobs": old, "advantages": advantages, "ref_logprobs": ref}
        return loss.compute(inputs(new, spread, **fields))[0]

    new = (old + 0.05 * numbers(5)).requires_grad_()
    assert torch.autograd.gradcheck(value, (new, entropy.requires_grad_()))


def test_the_anchor_says_whether_rows_may_be_stale():
    assert rl.ppo_clip().corrects_stale
    assert not rl.ppo_clip(anchor="old").corrects_stale
    assert "old_logprobs" in rl.ppo_clip(anchor="old").reads
    assert rl.ppo_clip().zero_advantage_is_zero


@pytest.mark.parametrize(
    ("kind", "formula"),
    [("k1", lambda d: -d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(d) - 1 - d)],
)
def test_kl_estimates(kind, formula):
    p, q = numbers(1), numbers(2)
    assert estimate(p, q, kind).tolist() == pytest.approx([formula(d) for d in (q - p).tolist()])


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = logits.log_softmax(-1)
    exact = float((p.exp() * (p - q)).sum())
    for kind in ("k1", "k3"):
        assert float((p.exp() * estimate(p, q, kind)).sum()) == pytest.approx(exact)
    assert (estimate(p, q, "k3") >= 0).all()


def test_value_clip_takes_the_worse_of_the_two_squares():
    new, old, returns = numbers(1), numbers(2), numbers(3)
    found, reports = rl.value_clip(clip=0.2).compute(inputs(new, values=old, returns=returns))
    for i in range(8):
        near = old[i] + max(-0.2, min(0.2, float(new[i] - old[i])))
        wanted = max(float(new[i] - returns[i]) ** 2, float(near - returns[i]) ** 2) / 2
        assert float(found[i]) == pytest.approx(wanted)
    assert reports["value_error"].tolist() == pytest.approx((new - returns).square().tolist())
    plain, _ = rl.value_clip(clip=None).compute(inputs(new, values=old, returns=returns))
    assert plain.tolist() == pytest.approx(((new - returns).square() / 2).tolist())


def test_sft_is_the_negative_log_probability():
    new = numbers(1)
    assert rl.sft().compute(inputs(new))[0].tolist() == (-new).tolist()


@pytest.mark.parametrize("per", ["token", "row"])
def test_a_loss_without_a_gradient_is_refused_where_predictions_have_one(per):
    @rl.loss(reads="weight, response_mask", per=per)
    def imitate(x):
        found = x["weight"] * x.predicted.detach()
        return x.row_sum(found) if per == "row" else found

    def compute(predicted):
        return imitate().compute(inputs(predicted, weight=torch.ones(3, dtype=torch.float64)))[0]

    with pytest.raises(ProgramError, match=r"loss imitate does not depend on x.predicted, so nothing") as error:
        compute(numbers(0).requires_grad_())
    assert error.value.at.file == __file__ and error.value.at.text == "def imitate(x):"
    assert "Compute it from x.predicted" in error.value.fix
    assert not compute(numbers(0)).requires_grad
    with torch.no_grad():
        assert not compute(numbers(0).requires_grad_()).requires_grad


def test_a_loss_of_ones_own_may_read_fields_by_row():
    @rl.loss(reads="rewards, response_mask", aggregate="token-sum")
    def reinforce(x, *, scale=1.0):
        return -scale * x["rewards"] * x.predicted

    new = numbers(1)
    made = reinforce(scale=0.5)
    assert repr(made) == "reinforce(scale=0.5, token-sum)"
    found, reports = made.compute(inputs(new, rewards=torch.tensor([1.0, 2.0, 3.0])))
    spread = [1.0] * 3 + [2.0] + [3.0] * 4
    assert found.tolist() == pytest.approx([-0.5 * r * p for r, p in zip(spread, new.tolist(), strict=True)])
    assert reports == {}


@pytest.mark.parametrize(
    ("aggregate", "wanted"),
    [
        ("token-mean", [1 / 4, 1 / 4, 0, 0, 1 / 4, 0, 1 / 4, 0]),
        ("token-sum", [1, 1, 0, 0, 1, 0, 1, 0]),
        ("seq-mean-token-mean", [1 / 4, 1 / 4, 0, 0, 1 / 4, 0, 1 / 4, 0]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 0, 0, 1 / 2, 0, 1 / 2, 0]),
    ],
)
def test_token_weights_count_only_masked_tokens_and_rows_that_have_some(aggregate, wanted):
    mask = torch.tensor([1, 1, 0, 0, 1, 0, 1, 0], dtype=torch.bool)
    row = torch.repeat_interleave(torch.arange(3), LENGTHS)
    assert token_weights(mask, row, 3, aggregate).tolist() == pytest.approx(wanted)
