"""Estimators and losses against SkyRL 0.3.0, whose own files run on rows made here: values and gradients.

SkyRL's losses are sums: the division by tokens or rows is in its advantages (``loss_reduction``).
"""

from types import SimpleNamespace

import pytest
import torch
from padded import ALONE, LONGEST, Rewarded, Rows, ours, same, select
from peers import SKYRL, load

from flowrl import rl
from flowrl.rl.math.losses import token_weights

pytestmark = pytest.mark.nightly
torch.set_num_threads(1)
SEEDS = range(4)
CLIP, HIGH = 0.2, 0.28
OFF = {
    "tis_ratio_type": None,
    "sequence_mask_metric": None,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}


@pytest.fixture(scope="module")
def skyrl():
    return load(SKYRL, "skyrl.backends.skyrl_train.utils.ppo_utils")


def theirs(skyrl, name, rows, *, correction=None, rollout=True, **settings):
    """Loss, gradient [total] and metrics of one of its policy losses."""
    config = SimpleNamespace(
        **{
            "policy_loss_type": "regular",
            "eps_clip_low": CLIP,
            "eps_clip_high": HIGH,
            "clip_ratio_c": 3.0,
            "loss_reduction": "sequence_mean",
        }
        | settings,
        off_policy_correction=SimpleNamespace(**OFF | (correction or {})),
    )
    logps = rows.p.clone().requires_grad_()
    advantages = rows.advantages[:, None].expand(-1, LONGEST).clone()
    given = rows.rollout if rollout else None
    loss, told = getattr(skyrl, name)(logps, rows.old, advantages, config, rows.sampled.double(), given)
    loss.backward()
    return float(loss.detach()), rows.packed(logps.grad), told


def close(found, wanted):
    """SkyRL takes ratios in float32."""
    assert found[0] == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
    assert torch.allclose(found[1], wanted[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual", (None, 1.3))
@pytest.mark.parametrize("empty", (False, True))
def test_the_clipped_loss(skyrl, empty, dual, seed):
    rows = Rows(seed, empty=empty, spread=0.8)
    kind = {"policy_loss_type": "dual_clip", "clip_ratio_c": dual} if dual else {}
    found = ours(rl.ppo_clip(clip=CLIP, clip_high=HIGH, dual=dual, anchor="old", aggregate="token-sum"), rows)
    close(found, theirs(skyrl, "ppo_policy_loss", rows, **kind))


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo(skyrl, seed):
    rows = Rows(seed)
    wanted = theirs(skyrl, "sapo_policy_loss", rows, sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05))
    same(ours(rl.sapo(anchor="old", aggregate="token-sum"), rows), wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spread", (0.05, 0.4))
def test_gspo(skyrl, spread, seed):
    rows = Rows(seed, spread=spread)
    loss = rl.gspo(clip=CLIP, clip_high=HIGH, ratio="geometric-token", anchor="old", aggregate="token-sum")
    same(ours(loss, rows), theirs(skyrl, "gspo_policy_loss", rows))


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo(skyrl, seed):
    rows = Rows(seed)
    bounds = SimpleNamespace(cispo_eps_clip_low=CLIP, cispo_eps_clip_high=HIGH)
    wanted = theirs(skyrl, "compute_policy_loss_cispo", rows, cispo=bounds)
    close(ours(rl.cispo(low=1 - CLIP, high=1 + HIGH, anchor="old", aggregate="token-sum"), rows), wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ("tv", "kl"))
def test_dppo_to_the_policy_that_sampled(skyrl, kind, seed):
    """SkyRL's loss is ``w A`` itself, ours ``sg(min(w, cap)) A log p``: the same gradient, another value."""
    rows = Rows(seed, rows=12, spread=0.5)
    rows.rollout = rows.rollout.clamp(max=-0.01)  # of probabilities
    bounds = SimpleNamespace(dppo_type=f"binary_{kind}", delta_low=0.03, delta_high=0.05)
    wanted = theirs(skyrl, "dppo_policy_loss", rows, dppo=bounds)
    found = ours(rl.dppo(kind=kind, clip=0.03, clip_high=0.05, aggregate="token-sum"), rows)
    assert torch.allclose(found[1], wanted[1], rtol=1e-5, atol=1e-6)
    assert found[2]["clip_fraction"] == pytest.approx(wanted[2]["clip_ratio"])
    assert 0 < found[2]["clip_fraction"] < 1


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov(skyrl, seed):
    rows = Rows(seed)
    wanted = theirs(skyrl, "compute_policy_loss_kl_cov", rows, kl_cov=SimpleNamespace(kl_cov_frac=0.3, ppo_kl_coef=0.7))
    loss = rl.kl_cov(weight=0.7, anchor="old", aggregate="token-sum")
    same(ours(loss, rows, {"selected": select(rows, share=0.3)}), wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov(skyrl, seed):
    rows = Rows(seed)
    bounds = SimpleNamespace(clip_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.6)
    wanted = theirs(skyrl, "compute_policy_loss_clip_cov", rows, clip_cov=bounds, eps_clip_high=CLIP)
    selected = select(rows, share=1.0, low=0.1, high=0.6, largest=False)
    moved = (rows.p - rows.old).exp()
    held = moved.clamp(1 - CLIP, 1 + CLIP) * rows.advantages[:, None] < moved * rows.advantages[:, None]
    loss = rl.clip_cov(clip=CLIP, anchor="old", aggregate="token-sum")
    same(ours(loss, rows, {"selected": selected & ~held}), wanted)


CORRECTIONS = {
    # its settings: our factors
    "tis by token": (
        {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.3},
        rl.correct("token", "truncate", high=1.3),
    ),
    "tis by row": (
        {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.3},
        rl.correct("sequence", "truncate", high=1.3),
    ),
    "mask by token": (
        {"token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.4},
        rl.correct("token", "reject", low=0.7, high=1.4),
    ),
    "mask by row": (
        {"sequence_mask_metric": "product", "product_mask_low": 0.5, "product_mask_high": 1.8},
        rl.correct("sequence", "reject", low=0.5, high=1.8),
    ),
    "mask by mean": (
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.85, "geo_mask_high": 1.2},
        rl.correct("geometric", "reject", low=0.85, high=1.2),
    ),
    "outliers": ({"outlier_token_is_threshold_low": 0.5}, rl.correct("token", "veto", low=0.5)),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_correction_for_the_engine(skyrl, name, seed):
    rows = Rows(seed)
    settings, correction = CORRECTIONS[name]
    wanted = theirs(skyrl, "ppo_policy_loss", rows, correction=settings)
    loss = rl.ppo_clip(clip=CLIP, clip_high=HIGH, anchor="old", correction=correction, aggregate="token-sum")
    close(ours(loss, rows), wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", (None, 0.3))
def test_the_loss_of_values(skyrl, clip, seed):
    rows = Rows(seed)
    values = rows.p.clone().requires_grad_()
    wanted, share = skyrl.ppo_critic_loss(
        values, rows.old, rows.ref, SimpleNamespace(value_clip=clip), rows.sampled.double()
    )
    wanted.backward()
    loss = rl.value_clip(clip=clip, aggregate="seq-mean-token-mean")
    found = ours(loss, rows, fields={"returns": rows.ref, "values": rows.old})
    same(found, (float(wanted.detach()), rows.packed(values.grad)))
    if clip is not None:
        assert found[2]["value_clip_fraction"] == pytest.approx(share)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), ((1.0, 0.95), (0.9, 0.5)))
def test_gae(skyrl, gamma, lam, seed):
    """An observation is a step like any other in SkyRL, and none in ours: here there are none."""
    rows = Rewarded(seed, by_token=True)
    rows.observe_nothing()
    rows.values = rows.values * rows.there
    wanted, returns = skyrl.compute_gae_advantage_return(rows.paid, rows.values, rows.sampled.double(), gamma, lam)
    found = rl.gae(rows.batch("values", "token_rewards"), gamma=gamma, lam=lam, whiten=True)
    rows.agree(found.returns, returns)
    rows.agree(found.advantages, wanted * rows.bessel())


ESTIMATORS = {
    "compute_grpo_outcome_advantage": {"eps": 1e-6},
    "compute_rloo_outcome_advantage": {"leave_one_out": True, "scale": "none"},
    "compute_maxrl_advantage": {"scale": "mean", "eps": 1e-6},
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator(skyrl, name, seed):
    rows = Rewarded(seed)
    rows.rewards = rows.rewards.abs()  # MaxRL divides by a mean of rewards that are not below 0
    rows.paid = rows.rewards[:, None] * rows.last
    wanted, _ = getattr(skyrl, name)(rows.paid.clone(), response_mask=rows.sampled.double(), index=rows.prompt)
    rows.agree(rl.advantages(rows.batch(), **ESTIMATORS[name]).advantages, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_prompt_with_one_row_has_no_advantage_in_its_rloo_either(skyrl, seed):
    rows = Rewarded(seed, ALONE)
    wanted, _ = skyrl.compute_rloo_outcome_advantage(
        rows.paid.clone(), response_mask=rows.sampled.double(), index=rows.prompt
    )
    assert not wanted[-1].any()
    rows.agree(rl.advantages(rows.batch(), leave_one_out=True, scale="none").advantages, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", (1.0, 0.9))
def test_reinforce_plus_plus(skyrl, gamma, seed):
    rows = Rewarded(seed, by_token=True)
    rows.observe_nothing()
    wanted, _ = skyrl.compute_reinforce_plus_plus_outcome_advantage(rows.paid, rows.sampled.double(), gamma)
    found = rl.advantages(
        rows.batch("token_rewards"), of="returns", center="none", scale="none", whiten=True, gamma=gamma
    )
    rows.agree(found.advantages, wanted * rows.bessel())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ("k1", "k2", "k3"))
def test_estimates_of_the_kl(skyrl, kind, seed):
    from flowrl.rl.math.kl import estimate

    rows = Rows(seed)
    mine, its = rows.p.clone().requires_grad_(), rows.p.clone().requires_grad_()
    found = estimate(mine, rows.ref, kind) * rows.sampled
    wanted = skyrl.compute_approx_kl(its, rows.ref, rows.sampled.double(), kind)
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    found.sum().backward()
    wanted.sum().backward()
    assert torch.allclose(mine.grad, its.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mean_over_prompts(skyrl, seed):
    """Its weights are in the advantages. A prompt without a sampled token counts there and not here."""
    rows = Rewarded(seed)
    bounds, start = [], 0
    for prompt in dict.fromkeys(rows.prompt.tolist()):
        end = start + int((rows.prompt == prompt).sum())
        bounds.append((start, end))
        start = end
    ones = torch.ones_like(rows.p)
    wanted = skyrl.apply_loss_reduction_to_advantages_minibatch(
        ones, rows.sampled.double(), "prompt_mean", 1, LONGEST, bounds
    )
    row = torch.arange(len(rows.keys))[:, None].expand_as(rows.p)[rows.there]
    group = torch.tensor([list(dict.fromkeys(rows.prompt.tolist())).index(p) for p in rows.prompt.tolist()])
    found = token_weights(rows.packed(rows.sampled), row, len(rows.keys), "prompt-mean", group=group)
    assert torch.allclose(found, rows.packed(wanted * rows.sampled), rtol=1e-12)
