"""Losses against AReaL 1.0.4, whose own files run on rows made here: values and gradients."""

from types import SimpleNamespace

import pytest
import torch
from padded import LONGEST, Rows, ours, same
from peers import AREAL, load

from flowrl import rl
from flowrl.rl.math.corrections import kept as kept_by
from flowrl.rl.math.ratio import anchored
from flowrl.rl.math.token_selection import selected_by_second_moment

pytestmark = pytest.mark.nightly
torch.set_num_threads(1)
SEEDS = range(4)
CLIP, HIGH = 0.2, 0.28


@pytest.fixture(scope="module")
def areal():
    return load(AREAL, "areal.utils.functional.functional")


def spread(rows):
    return rows.advantages[:, None].expand(-1, LONGEST)


def theirs(areal, rows, **settings):
    """Loss, gradient [total] and the share of sampled tokens that were clipped."""
    logps = rows.p.clone().requires_grad_()
    given = {"proximal_logprobs": rows.old, "old_logprobs": rows.rollout, "eps_clip": CLIP, "eps_clip_higher": HIGH}
    loss, told = areal.ppo_actor_loss_fn(
        logps, advantages=spread(rows), loss_mask=rows.sampled, **{**given, **settings}
    )
    loss.backward()
    share = float(told["clip_mask"].sum() / rows.sampled.sum())
    return float(loss.detach()), rows.packed(logps.grad), share


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("empty", (False, True))
@pytest.mark.parametrize("dual", (None, 1.3))
def test_the_clipped_loss(areal, dual, empty, seed):
    """AReaL's dual clip bounds losses of either sign of A; for A > 0 a loss below its bound is never reached."""
    rows = Rows(seed, empty=empty, spread=0.8)
    wanted = theirs(areal, rows, c_clip=dual)
    found = ours(rl.ppo_clip(clip=CLIP, clip_high=HIGH, dual=dual, anchor="old"), rows)
    same(found, wanted)
    assert found[2]["clip_fraction"] == pytest.approx(wanted[2])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ratio_of_a_row(areal, seed):
    rows = Rows(seed, spread=0.3)
    wanted = theirs(areal, rows, importance_sampling_level="sequence")
    same(ours(rl.ppo_clip(clip=CLIP, clip_high=HIGH, anchor="old", ratio="geometric"), rows), wanted)


def bounds(level, action, low, high, agg="mean", metric="ratio"):
    return SimpleNamespace(level=level, action=action, lower=low, upper=high, agg=agg, metric=metric)


FACTORS = {
    # its level and action, with bounds: our factors
    ("token", "clamp", None): rl.correct("token", "truncate", high=1.3),
    ("token", "clamp", 0.7): rl.correct("token", "clip", low=0.7, high=1.3),
    ("token", "mask", None): rl.correct("token", "mask", high=1.3),
    ("token", "mask", 0.7): rl.correct("token", "mask", low=0.7, high=1.3),
    ("sequence", "clamp", 0.7): rl.correct("geometric", "clip", low=0.7, high=1.3),
    ("sequence", "mask", 0.7): rl.correct("geometric", "mask", low=0.7, high=1.3),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", FACTORS, ids=str)
def test_the_decoupled_loss_and_its_weights(areal, how, seed):
    """AReaL takes the difference of log-probabilities in float32."""
    rows = Rows(seed)
    level, action, low = how
    wanted = theirs(areal, rows, rejection_sampling=bounds(level, action, low, 1.3))
    found = ours(rl.ppo_clip(clip=CLIP, clip_high=HIGH, anchor="old", correction=FACTORS[how]), rows)
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert torch.allclose(found[1], wanted[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_decoupled_ppo_is_the_preset(areal, seed):
    rows = Rows(seed)
    wanted = theirs(areal, rows, rejection_sampling=bounds("token", "clamp", None, 5.0))
    found = ours(rl.decoupled_ppo(clip=CLIP, clip_high=HIGH, cap=5.0), rows)
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert torch.allclose(found[1], wanted[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_but_for_its_mean(areal, seed):
    """AReaL takes the mean over tokens; ours does with aggregate="token-mean"."""
    rows = Rows(seed, empty=True)
    logps = rows.p.clone().requires_grad_()
    wanted, _ = areal.sapo_loss_fn(logps, rows.old, spread(rows), 1.0, 1.05, rows.sampled)
    wanted.backward()
    found = ours(rl.sapo(anchor="old", aggregate="token-mean"), rows)
    same(found, (float(wanted.detach()), rows.packed(logps.grad)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", (0.1, 0.5))
def test_the_loss_of_values(areal, clip, seed):
    """AReaL's is for float32 alone."""
    rows = Rows(seed)
    values = rows.p.float().requires_grad_()
    wanted, _ = areal.ppo_critic_loss_fn(values, rows.old.float(), rows.ref.float(), clip, rows.sampled)
    wanted.backward()
    found = ours(rl.value_clip(clip=clip), rows, fields={"returns": rows.ref, "values": rows.old})
    assert found[0] == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert torch.allclose(found[1], rows.packed(values.grad).double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lengths", ([3, 5, 8, 12],))
def test_the_penalty_of_long_answers_is_unbounded_in_areal(lengths):
    """Beyond the longest answer AReaL's goes on falling, ours stays at -1."""
    from flowrl.rl.math.rewards import overlong

    penalty = load(AREAL, "areal.utils.functional.functional").reward_overlong_penalty
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    data = {"rewards": torch.zeros(len(lengths)), "input_ids": mask.long(), "loss_mask": mask}
    wanted = penalty(data, overlong_tokens=4, overlong_penalty_factor=1.0, max_response_length=8)["rewards"]
    found = overlong(torch.tensor(lengths), 8, 4)
    assert wanted.tolist() == pytest.approx([0, -0.25, -1, -2])
    assert found.tolist() == pytest.approx(wanted.clamp(min=-1).tolist())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ("sigmoid", "ipo"))
def test_preferences(areal, kind, seed):
    """It computes in float32. Its numbers are sums of a row's tokens."""
    draw = torch.Generator().manual_seed(seed)
    margin = torch.randn(5, generator=draw)
    mine, its = margin.double().requires_grad_(), margin.clone().requires_grad_()
    wanted = areal.dpo_preference_loss(its, beta=0.3, loss_type=kind).mean()
    wanted.backward()
    predicted = torch.stack([mine, torch.zeros_like(mine)], 1).flatten()
    x = rl.LossInputs(
        predicted,
        torch.ones(10, dtype=torch.bool),
        {"ref_logprobs": torch.zeros(10, dtype=torch.float64), "preferred": torch.arange(10) % 2 == 0},
        torch.ones(10, dtype=torch.int64),
        torch.arange(10),
        by_row=frozenset({"preferred"}),
        group=torch.arange(10) // 2,
    )
    loss = rl.dpo(beta=0.3) if kind == "sigmoid" else rl.ipo(beta=0.3, average=False)
    found = loss.compute(x)[0].mean()
    found.backward()
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    assert torch.allclose(mine.grad, its.grad.double(), rtol=1e-5, atol=1e-6)


# -- what it does before the loss --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def actor():
    return load(AREAL, "areal.trainer.ppo.actor")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("limit", (0.01, 0.04, 0.1))
def test_the_tokens_that_m2po_keeps(actor, limit, seed):
    rows = Rows(seed, rows=12)
    wanted = actor._apply_m2po_masking(rows.rollout, rows.old, rows.sampled, limit)
    found = selected_by_second_moment(rows.old - rows.rollout, rows.sampled, rows.sampled, limit)
    assert torch.equal(found, wanted) and wanted.sum() < rows.sampled.sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_m2po_but_for_its_denominator(areal, actor, seed):
    """AReaL takes what is left out of the mask out of the denominator too, and clips besides unless its bounds are wide."""
    rows = Rows(seed, rows=12)
    count = int(rows.sampled.sum())
    selected = actor._apply_m2po_masking(rows.rollout, rows.old, rows.sampled, 0.04)
    loss, gradient, _ = ours(rl.m2po(anchor="old"), rows, {"selected": selected})
    rows.sampled = selected
    wanted = theirs(areal, rows, old_logprobs=rows.old, eps_clip=1e9, eps_clip_higher=1e9)
    share = int(selected.sum()) / count
    same((loss / share, gradient / share), wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_log_linear_anchor_is_that_of_one_version_less(actor, seed):
    """AReaL's anchor is the policy one version before the weights of the update, ours is that of those weights."""
    rows, version = Rows(seed), 7
    age = torch.randint(0, 5, rows.p.shape, generator=torch.Generator().manual_seed(seed))
    wanted = actor.compute_prox_logp_approximations(rows.rollout, rows.p, version - age - 1, version, "loglinear")
    x = rows.inputs()
    x.fields |= {"versions": rows.packed(version - age)}
    x.version = version
    assert torch.allclose(anchored(x, "loglinear"), rows.packed(wanted["loglinear"]), rtol=1e-6, atol=1e-7)


AGGREGATED = {"token": None, "sequence": "sum", "mean": "mean", "max": "max"}


@pytest.mark.parametrize("level", AGGREGATED)
@pytest.mark.parametrize("divergence", ("k2", "k3"))
def test_rejections_by_a_divergence(areal, divergence, level):
    """Its k3 is that of the other direction: ``exp(-d) - 1 + d``. What is rejected leaves its denominator."""
    limit, shares = {"token": 0.05, "sequence": 0.2, "mean": 0.06, "max": 0.2}[level], []
    for seed in range(4):
        rows = Rows(seed)
        near, far = (rows.rollout, rows.old) if divergence == "k3" else (rows.old, rows.rollout)
        settings = bounds(
            "token" if level == "token" else "sequence", "mask", None, limit, AGGREGATED[level], f"kl_{divergence}"
        )
        told = areal.apply_rejection_sampling(near, far, rows.sampled.double(), None, settings)
        part = rl.reject(divergence, level, limit=limit)
        x = rows.inputs()
        found = kept_by(x, part, "old") & x.mask
        assert torch.equal(found, rows.packed(told.loss_mask).bool())
        shares.append(float(found.sum() / x.mask.sum()))
    assert 0.05 < sum(shares) / len(shares) < 0.95
