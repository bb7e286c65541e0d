"""Estimators and losses against OpenRLHF 0.11.2, whose own files run on rows made here: values and gradients."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from padded import LONGEST, Rewarded, Rows, ours, same
from peers import OPENRLHF, load

from flowrl import rl
from flowrl.batch import Column
from flowrl.rl.math.kl import estimate

pytestmark = pytest.mark.nightly
torch.set_num_threads(1)
SEEDS = range(4)
CLIP, HIGH = 0.2, 0.28


@pytest.fixture(scope="module")
def losses():
    return load(OPENRLHF, "openrlhf.models.loss")


@pytest.fixture(scope="module")
def maker():
    return load(OPENRLHF, "openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker


# -- losses ----------------------------------------------------------------------------------------------------------


def theirs(losses, rows, **settings):
    """Loss, gradient [total] and the share of tokens that were clipped."""
    logps = rows.p.clone().requires_grad_()
    loss = losses.PolicyLoss(CLIP, HIGH, **settings)
    advantages = rows.advantages[:, None].expand(-1, LONGEST)
    found, clipped, *_ = loss(logps, rows.old, advantages, rows.sampled.double(), rows.rollout)
    found.backward()
    return float(found.detach()), rows.packed(logps.grad), float(clipped)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("empty", (False, True))
@pytest.mark.parametrize("dual", (None, 1.3))
@pytest.mark.parametrize("by_token", (True, False))
def test_the_clipped_loss(losses, by_token, dual, empty, seed):
    rows = Rows(seed, empty=empty, spread=0.8)
    wanted = theirs(losses, rows, token_level_loss=by_token, dual_clip=dual)
    aggregate = "token-mean" if by_token else "seq-mean-token-mean"
    found = ours(rl.ppo_clip(clip=CLIP, clip_high=HIGH, dual=dual, anchor="old", aggregate=aggregate), rows)
    same(found, wanted)
    assert found[2]["clip_fraction"] == pytest.approx(wanted[2])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("empty", (False, True))
def test_gspo(losses, empty, seed):
    rows = Rows(seed, empty=empty)
    same(ours(rl.gspo(clip=CLIP, clip_high=HIGH, anchor="old"), rows), theirs(losses, rows, policy_loss_type="gspo"))


BOUNDS = {"low": 0.7, "high": 1.4}
CORRECTIONS = {
    # its level and mode: our factors
    ("token", "clip"): rl.correct("token", "clip", **BOUNDS),
    ("token", "mask"): rl.correct("token", "mask", **BOUNDS),
    ("seq", "mask"): (rl.correct("geometric", "reject", **BOUNDS), rl.correct("token", "weigh")),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", CORRECTIONS, ids=str)
def test_the_correction_for_the_engine(losses, how, seed):
    """Its row-level gate is the geometric mean, and what passes keeps the weights of its tokens."""
    rows = Rows(seed)
    level, mode = how
    wanted = theirs(
        losses, rows, is_correction_level=level, is_correction_mode=mode, is_correction_threshold=[0.7, 1.4]
    )
    loss = rl.ppo_clip(clip=CLIP, clip_high=HIGH, anchor="old", correction=CORRECTIONS[how])
    same(ours(loss, rows), wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", (None, 0.3))
@pytest.mark.parametrize("by_token", (True, False))
def test_the_loss_of_values(losses, by_token, clip, seed):
    rows = Rows(seed)
    values = rows.p.clone().requires_grad_()
    wanted = losses.ValueLoss(clip, by_token)(values, rows.old, rows.ref, rows.sampled.double())
    wanted.backward()
    loss = rl.value_clip(clip=clip, aggregate="token-mean" if by_token else "seq-mean-token-mean")
    found = ours(loss, rows, fields={"returns": rows.ref, "values": rows.old})
    same(found, (float(wanted.detach()), rows.packed(values.grad)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("by_token", (True, False))
def test_sft(losses, by_token, seed):
    rows = Rows(seed, empty=True)
    logps = rows.p.clone().requires_grad_()
    wanted = losses.SFTLoss(by_token)(logps, rows.sampled.double())
    wanted.backward()
    found = ours(rl.sft(aggregate="token-mean" if by_token else "seq-mean-token-mean"), rows)
    same(found, (float(wanted.detach()), rows.packed(logps.grad)))


class Pairs:
    """Pairs of rows of one token each, whose log-probabilities or scores are the numbers given."""

    def __init__(self, seed, pairs=5):
        draw = torch.Generator().manual_seed(seed)
        self.p, self.ref = (torch.randn(2 * pairs, generator=draw, dtype=torch.float64) for _ in range(2))
        self.margin = torch.rand(pairs, generator=draw, dtype=torch.float64)
        self.better, self.worse = torch.arange(0, 2 * pairs, 2), torch.arange(1, 2 * pairs, 2)

    def ours(self, loss):
        """The mean over rows and its gradient [rows]."""
        rows = len(self.p)
        preferred = torch.zeros(rows, dtype=torch.bool)
        preferred[self.better] = True
        x = rl.LossInputs(
            self.p.clone().requires_grad_(),
            torch.ones(rows, dtype=torch.bool),
            {"ref_logprobs": self.ref, "preferred": preferred, "margin": self.margin.repeat_interleave(2)},
            torch.ones(rows, dtype=torch.int64),
            torch.arange(rows),
            by_row=frozenset({"preferred", "margin"}),
            group=torch.arange(rows) // 2,
        )
        found = loss.compute(x)[0].mean()
        found.backward()
        return float(found.detach()), x.predicted.grad

    def theirs(self, loss):
        """``loss`` is given the better and the worse rows' numbers, and gives a number."""
        leaf = self.p.clone().requires_grad_()
        found = loss(leaf[self.better], leaf[self.worse])
        found.backward()
        return float(found.detach()), leaf.grad


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_dpo(losses, smoothing, seed):
    pairs = Pairs(seed)
    its = losses.DPOLoss(0.3, smoothing)
    wanted = pairs.theirs(lambda up, down: its(up, down, pairs.ref[pairs.better], pairs.ref[pairs.worse])[0])
    same(pairs.ours(rl.dpo(beta=0.3, label_smoothing=smoothing)), wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_ipo_over_sums(losses, seed):
    """OpenRLHF compares sums of a row's tokens; ours does with average=False."""
    pairs = Pairs(seed)
    its = losses.DPOLoss(0.3, ipo=True)
    wanted = pairs.theirs(lambda up, down: its(up, down, pairs.ref[pairs.better], pairs.ref[pairs.worse])[0])
    same(pairs.ours(rl.ipo(beta=0.3, average=False)), wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ("PairWiseLoss", "LogExpLoss"))
def test_reward_models(losses, name, seed):
    pairs = Pairs(seed)
    same(pairs.ours(rl.bradley_terry()), pairs.theirs(getattr(losses, name)()))


@pytest.mark.parametrize("seed", SEEDS)
def test_reward_models_with_a_margin(losses, seed):
    pairs = Pairs(seed)
    wanted = pairs.theirs(lambda up, down: losses.PairWiseLoss()(up, down, pairs.margin))
    same(pairs.ours(rl.bradley_terry(margin="margin")), wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ("k1", "k2", "k3"))
def test_estimates_of_the_kl(kind, seed):
    """It computes in float32, and holds the value inside [-10, 10]; no number here is beyond."""
    its = load(OPENRLHF, "openrlhf.models.utils").compute_approx_kl
    rows = Rows(seed)
    mine, leaf = rows.p.clone().requires_grad_(), rows.p.clone().requires_grad_()
    found, wanted = estimate(mine, rows.ref, kind), its(leaf, rows.ref, kl_estimator=kind)
    assert torch.allclose(found, wanted.double(), rtol=1e-5, atol=1e-6)
    found.sum().backward()
    wanted.sum().backward()
    assert torch.allclose(mine.grad, leaf.grad, rtol=1e-5, atol=1e-6)


# -- advantages --------------------------------------------------------------------------------------------------------

GROUPS = [(prompt, i) for prompt in range(3) for i in range(4)]
ESTIMATORS = {
    # its name: ours
    "rloo": {"leave_one_out": True, "scale": "none"},
    "dr_grpo": {"scale": "none"},
    "group_norm": {"eps": 1e-9},
    "flash_reinforce": {"center": "batch", "scale": "none"},
    "reinforce_baseline": {"scale": "none", "whiten": True},
    "reinforce": {"of": "returns", "center": "none", "scale": "none", "whiten": True},
}


def advantages(maker, rows, name, *, kl=0.0, gamma=1.0, lam=1.0, normalise=True):
    """What its experience maker computes [rows, longest]: advantages and returns."""
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=4, max_new_tokens=LONGEST),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator=name, gamma=gamma, lambd=lam, no_std_norm=not normalise)
        ),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    experience = SimpleNamespace(
        index=list(range(len(rows.keys))),
        rewards=rows.rewards.clone(),
        kl=rows.old - rows.ref,
        action_mask=rows.sampled.double(),
        values=rows.values.clone(),
        info={},
    )
    me = SimpleNamespace(
        strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=kl), advantage_estimator=name
    )
    for method in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(me, method, partial(getattr(maker, method), me))
    maker.compute_advantages_and_returns(me, [experience])
    return experience.advantages.double(), experience.returns.double()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator(maker, name, seed):
    rows = Rewarded(seed, GROUPS)
    wanted, _ = advantages(maker, rows, name)
    rows.agree(rl.advantages(rows.batch(), **ESTIMATORS[name]).advantages, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", (1.0, 0.9))
def test_reinforce_with_the_kl_in_the_reward(maker, gamma, seed):
    """Discounts count sampled tokens in ours and all tokens in OpenRLHF, which are the same without observations."""
    rows = Rewarded(seed, GROUPS)
    rows.observe_nothing()
    wanted, _ = advantages(maker, rows, "reinforce", kl=0.1, gamma=gamma)
    rows.old_logprobs, rows.ref_logprobs = rows.old, rows.ref
    batch = rl.kl_penalty(rows.batch("old_logprobs", "ref_logprobs"), coef=0.1, anchor="old")
    rows.agree(rl.advantages(batch, **ESTIMATORS["reinforce"], gamma=gamma).advantages, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), ((1.0, 0.95), (0.9, 0.5)))
def test_gae(maker, gamma, lam, seed):
    """An observation is a step with the value 0 in OpenRLHF, and none in ours: here there are none."""
    rows = Rewarded(seed, GROUPS)
    rows.observe_nothing()
    wanted, returns = advantages(maker, rows, "gae", gamma=gamma, lam=lam)
    found = rl.gae(rows.batch("values"), gamma=gamma, lam=lam, whiten=True)
    rows.agree(found.advantages, wanted)
    rows.agree(found.returns, returns)


@pytest.mark.parametrize("buffer", (1, 3, 7))
def test_the_penalty_of_long_answers(buffer):
    penalty = load(OPENRLHF, "openrlhf.trainer.ppo_utils.length_penalty").apply_overlong_penalty
    rows = Rewarded(0, GROUPS)
    lengths = rows.sampled.sum(1)
    experience = SimpleNamespace(response_length=lengths, rewards=torch.zeros(len(rows.keys), dtype=torch.float64))
    penalty([experience], LONGEST, buffer)
    found = rl.overlong_penalty(rows.batch(), longest=LONGEST, buffer=buffer).overlong_penalty
    assert isinstance(found, Column)
    assert found.values.double().tolist() == pytest.approx(experience.rewards.tolist())
