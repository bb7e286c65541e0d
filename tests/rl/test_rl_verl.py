"""Estimators and losses against verl 0.9.1, whose own files run on rows made here: values and gradients in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from padded import ALONE, LONGEST, Rewarded, Rows, ours, same, select
from peers import VERL, load

from flowrl import rl
from flowrl.batch import Column

pytestmark = pytest.mark.nightly
torch.set_num_threads(1)
SEEDS = range(4)
CLIP, HIGH = 0.2, 0.28


class Settings(SimpleNamespace):
    """What verl's losses ask a configuration for."""

    def get(self, name, default=None):
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def core():
    module = load(VERL, "verl.trainer.ppo.core_algos")
    module.ActorConfig, module.AlgoConfig = Settings, type("AlgoConfig", (dict,), {})
    groups = load(VERL, "verl.utils.groupwise")
    module.as_torch_index, module.group_mean_std = groups.as_torch_index, groups.group_mean_std
    return module


@pytest.fixture(scope="module")
def corrections():
    return load(VERL, "verl.trainer.ppo.rollout_corr_helper")


# -- losses ----------------------------------------------------------------------------------------------------------


def theirs(core, name, rows, *, mode="token-mean", weights=None, policy=None, **settings):
    """Loss, gradient [total] and metrics of one of verl's policy losses."""
    config = Settings(
        **{"clip_ratio": CLIP, "clip_ratio_low": CLIP, "clip_ratio_high": HIGH, "global_batch_info": {}} | settings,
        policy_loss=Settings(**policy or {}),
    )
    logps = rows.p.clone().requires_grad_()
    advantages = rows.advantages if rows.advantages.dim() == 2 else rows.advantages[:, None].expand(-1, LONGEST)
    loss, metrics = core.get_policy_loss_fn(name)(
        old_log_prob=rows.old,
        log_prob=logps,
        advantages=advantages.clone(),
        response_mask=rows.sampled.double(),
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    return float(loss.detach()), rows.packed(logps.grad), metrics


MODES = {
    "token-mean": {},
    "token-sum": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-sum-norm": {"norm": LONGEST},
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("empty", (False, True))
def test_the_clipped_loss_and_each_aggregate(core, mode, empty, seed):
    rows = Rows(seed, empty=empty, spread=0.8)
    wanted = theirs(core, "vanilla", rows, mode=mode, clip_ratio_c=3.0)
    found = ours(rl.ppo_clip(clip=CLIP, clip_high=HIGH, dual=3.0, anchor="old", aggregate=mode, **MODES[mode]), rows)
    same(found, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual", (1.2, 3.0, 50.0))
def test_the_dual_clip(core, dual, seed):
    rows = Rows(seed, spread=1.5)
    wanted = theirs(core, "vanilla", rows, clip_ratio_c=dual)
    same(ours(rl.ppo_clip(clip=CLIP, clip_high=HIGH, dual=dual, anchor="old"), rows), wanted)


LOSSES = {
    # verl's name: its settings, and our loss
    "dppo_tv": ({"clip_ratio_c": 20.0}, lambda: rl.dppo(kind="tv", clip=CLIP, clip_high=HIGH, anchor="old")),
    "gspo": ({}, lambda: rl.gspo(clip=CLIP, clip_high=HIGH, ratio="geometric-token", anchor="old")),
    "sapo": ({"tau_pos": 1.0, "tau_neg": 1.05}, lambda: rl.sapo(anchor="old")),
    "gpg": ({}, lambda: rl.reinforce()),
    "dro": ({"policy": {"dro_beta": 0.3}}, lambda: rl.quadratic(temperature=0.3, anchor="old")),
    "cispo": ({}, lambda: rl.cispo(low=1 - CLIP, high=1 + HIGH, anchor="old")),
}
BY_ROW = ("gspo", "sapo")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spread", (0.05, 0.4))
@pytest.mark.parametrize("empty", (False, True))
@pytest.mark.parametrize("name", LOSSES)
def test_each_loss(core, name, empty, spread, seed):
    settings, loss = LOSSES[name]
    rows = Rows(seed, empty=empty, spread=spread)
    mode = "seq-mean-token-mean" if name in BY_ROW else "token-mean"
    same(ours(loss(), rows), theirs(core, name, rows, mode=mode, **settings))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bound", (0.003, 0.05))
def test_dppo_by_kl_but_for_its_guards(core, bound, seed):
    """verl adds 1e-8 to probabilities of the rest, which moves its divergence by about as much; ours has no guard."""
    rows = Rows(seed, spread=0.3)
    wanted = theirs(core, "dppo_kl", rows, clip_ratio_low=bound, clip_ratio_high=bound, clip_ratio_c=20.0)
    same(ours(rl.dppo(kind="kl", clip=bound, anchor="old"), rows), wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_gmpo_is_verls_geometric_mean_where_no_row_is_empty(core, seed):
    """verl takes the mean over all rows, ours over rows with a sampled token; and verl adds 1e-8 to their number."""
    rows = Rows(seed)
    wanted = theirs(core, "geo_mean", rows, clip_ratio_low=0.3, clip_ratio_high=0.4)
    same(ours(rl.gmpo(clip=0.3, clip_high=0.4, anchor="old"), rows), wanted)
    rows = Rows(seed, empty=True)
    loss, gradient, _ = ours(rl.gmpo(clip=0.3, clip_high=0.4, anchor="old"), rows)
    filled = int(rows.sampled.any(1).sum())
    wanted = theirs(core, "geo_mean", rows, clip_ratio_low=0.3, clip_ratio_high=0.4)
    same((loss * filled / 6, gradient * filled / 6), wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", (0.05, 0.3))
def test_kl_cov(core, share, seed):
    """verl chooses tokens by the policy as it is in the update; ours by the log-probabilities that are named."""
    rows = Rows(seed)
    wanted = theirs(core, "kl_cov", rows, policy={"kl_cov_ratio": share, "ppo_kl_coef": 0.7})
    selected = select(rows, share=share)
    assert selected.sum() == max(1, int(share * int(rows.sampled.sum())))
    found = ours(rl.kl_cov(weight=0.7, anchor="old"), rows, {"selected": selected})
    # At a log-ratio of exactly 0 |x| has no slope; no such token is here.
    same(found, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov(core, seed):
    """With a share of 1 all tokens inside the bounds are left out, so that nothing is drawn."""
    rows = Rows(seed)
    policy = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.6}
    wanted = theirs(core, "clip_cov", rows, policy=policy, clip_ratio_high=CLIP)
    selected = select(rows, share=1.0, low=0.1, high=0.6, largest=False)
    moved = (rows.p - rows.old).exp()
    held = moved.clamp(1 - CLIP, 1 + CLIP) * rows.advantages[:, None] < moved * rows.advantages[:, None]
    chosen = selected & ~held  # verl asks the others only
    found = ours(rl.clip_cov(clip=CLIP, anchor="old"), rows, {"selected": chosen})
    same(found, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", (0.1, 0.5))
@pytest.mark.parametrize("mode", ("token-mean", "seq-mean-token-mean"))
def test_the_loss_of_values(core, mode, clip, seed):
    rows = Rows(seed, empty=True)
    values = rows.p.clone().requires_grad_()
    loss, share = core.compute_value_loss(values, rows.ref, rows.old, rows.sampled.double(), clip, mode)
    loss.backward()
    found = ours(rl.value_clip(clip=clip, aggregate=mode), rows, fields={"returns": rows.ref, "values": rows.old})
    same(found, (float(loss.detach()), rows.packed(values.grad)))
    assert found[2]["value_clip_fraction"] == pytest.approx(float(share))


KINDS = {
    # verl's name: what our loss is told
    "k1": {"kl_kind": "k1"},
    "mse": {"kl_kind": "k2"},
    "low_var_kl": {"kl_kind": "k3", "kl_bound": 10.0},
    "k1+": {"kl_kind": "k1", "kl_gradient": "k2"},
    "k3+": {"kl_kind": "k3", "kl_bound": 10.0, "kl_gradient": "k2"},
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spread", (0.4, 6.0))
@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_with_its_bound_and_the_gradient_of_another(core, kind, spread, seed):
    """Log-ratios stay inside 20, beyond which ours counts as 20 for every kind and verl's for k3 alone."""
    rows = Rows(seed)
    rows.ref = rows.p + spread * (rows.ref - rows.p) / 0.4
    its = rows.p.clone().requires_grad_()
    kl = core.kl_penalty(its, rows.ref, kind)
    wanted = (kl * rows.sampled).sum() / rows.sampled.sum()
    wanted.backward()
    rows.advantages = torch.zeros_like(rows.advantages)
    same(ours(rl.reinforce(kl=1.0, **KINDS[kind]), rows), (float(wanted.detach()), rows.packed(its.grad)))
    if "k3" in kind and spread > 1:
        assert (kl == 10).any()


# -- weights for what the engine sampled -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bounds", ("1.3", "0.6_1.4"))
@pytest.mark.parametrize("level", ("token", "sequence"))
def test_importance_weights(core, corrections, level, bounds, seed):
    rows = Rows(seed)
    weights, _ = corrections.compute_rollout_correction_weights(
        (rows.old - rows.rollout) * rows.sampled, rows.sampled.double(), level, bounds
    )
    low, _, high = bounds.rpartition("_")
    how = {"how": "mask", "low": float(low)} if low else {"how": "truncate"}
    wanted = theirs(core, "vanilla", rows, weights=weights, clip_ratio_c=1e9)
    loss = rl.ppo_clip(clip=CLIP, clip_high=HIGH, anchor="old", correction=rl.correct(level, **how, high=float(high)))
    same(ours(loss, rows), wanted)


REJECTIONS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}


@pytest.mark.parametrize("option", REJECTIONS)
def test_rejections_by_the_ratio(core, corrections, option):
    """verl takes what is rejected out of the mask, ours keeps it in the denominator; and verl's bounds are of 1 / w."""
    shares = []
    for seed in range(6):
        rows = Rows(seed, spread=0.15)
        kept, _ = corrections.compute_rollout_rejection_mask(
            (rows.old - rows.rollout) * rows.sampled, rows.sampled.double(), option, "0.9_1.15"
        )
        shares.append(float(kept.sum() / rows.sampled.sum()))
        rejected = rl.correct(REJECTIONS[option], "reject", low=1 / 1.15, high=1 / 0.9)
        loss = rl.ppo_clip(clip=CLIP, clip_high=HIGH, anchor="old", correction=rejected, aggregate="token-sum")
        found = ours(loss, rows)
        rows.sampled = kept.bool()
        same(found, theirs(core, "vanilla", rows, mode="token-sum", clip_ratio_c=1e9))
    assert 0.1 < sum(shares) / len(shares) < 0.9  # some are rejected, some are kept


DIVERGED = {
    # verl's option: ours
    "token_k2": ("k2", "token", 0.02),
    "token_k3": ("k3", "token", 0.02),
    "seq_sum_k2": ("k2", "sequence", 0.05),
    "seq_sum_k3": ("k3", "sequence", 0.05),
    "seq_mean_k2": ("k2", "mean", 0.015),
    "seq_mean_k3": ("k3", "mean", 0.015),
    "seq_max_k2": ("k2", "max", 0.05),
    "seq_max_k3": ("k3", "max", 0.05),
}


@pytest.mark.parametrize("option", DIVERGED)
def test_rejections_by_a_divergence(core, corrections, option):
    """verl takes what is rejected out of the mask, ours keeps it in the denominator."""
    divergence, level, limit = DIVERGED[option]
    shares = []
    for seed in range(6):
        rows = Rows(seed, spread=0.15)
        kept, _ = corrections.compute_rollout_rejection_mask(
            (rows.old - rows.rollout) * rows.sampled, rows.sampled.double(), option, limit
        )
        shares.append(float(kept.sum() / rows.sampled.sum()))
        rejected = rl.reject(divergence, level, limit=limit)
        found = ours(
            rl.ppo_clip(clip=CLIP, clip_high=HIGH, anchor="old", correction=rejected, aggregate="token-sum"), rows
        )
        rows.sampled = kept.bool()
        same(found, theirs(core, "vanilla", rows, mode="token-sum", clip_ratio_c=1e9))
    assert 0.1 < sum(shares) / len(shares) < 0.9  # some are rejected, some are kept


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bounds", ("1.3", "0.6_1.4"))
@pytest.mark.parametrize("level", ("token", "sequence"))
def test_weights_divided_by_their_mean(corrections, level, bounds, seed):
    rows = Rewarded(seed)
    rows.old_logprobs, rows.rollout_logprobs = rows.old.float().double(), rows.rollout.float().double()
    moved = (rows.old_logprobs - rows.rollout_logprobs) * rows.sampled
    wanted, _ = corrections.compute_rollout_correction_weights(
        moved, rows.sampled.double(), level, bounds, rollout_is_batch_normalize=True
    )
    low, _, high = bounds.rpartition("_")
    how = {"how": "mask", "low": float(low)} if low else {"how": "truncate"}
    found = rl.importance_weights(
        rows.batch("old_logprobs", "rollout_logprobs"),
        correction=rl.correct(level, **how, high=float(high)),
        normalize="tokens" if level == "token" else "rows",
    )
    rows.agree(found.importance_weights, wanted)


# -- advantages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), ((1.0, 0.95), (0.9, 0.5), (1.0, 1.0)))
def test_gae(core, gamma, lam, seed):
    rows = Rewarded(seed, by_token=True)
    wanted, returns = core.compute_gae_advantage_return(rows.paid, rows.values, rows.sampled.double(), gamma, lam)
    batch = rows.batch("values", "token_rewards")
    rows.agree(rl.gae(batch, gamma=gamma, lam=lam).returns, returns)
    rows.agree(rl.gae(batch, gamma=gamma, lam=lam, whiten=True).advantages, wanted * rows.bessel())


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_with_a_lambda_of_its_own_for_the_returns(core, seed):
    rows = Rewarded(seed, by_token=True)
    given = (rows.paid, rows.values, rows.sampled.double(), 0.9)
    wanted, returns = (
        core.compute_gae_advantage_return(*given, 0.5)[0],
        core.compute_gae_advantage_return(*given, 1.0)[1],
    )
    found = rl.gae(rows.batch("values", "token_rewards"), gamma=0.9, lam=0.5, lam_returns=1.0, whiten=True)
    rows.agree(found.returns, returns)
    rows.agree(found.advantages, wanted * rows.bessel())


ESTIMATORS = {
    # verl's name: ours, without a critic
    "grpo": lambda batch: rl.advantages(batch, eps=1e-6),
    "rloo": lambda batch: rl.advantages(batch, leave_one_out=True, scale="none"),
    "opo": lambda batch: rl.advantages(batch, center="optimal", scale="none"),
    "reinforce_plus_plus_baseline": lambda batch: rl.advantages(batch, scale="none", whiten=True),
}
WHITENED = ("reinforce_plus_plus_baseline",)


def estimate(core, name, rows, **more):
    estimator = core.get_adv_estimator_fn(name)
    found, _ = estimator(rows.paid.clone(), response_mask=rows.sampled.double(), index=rows.prompt, **more)
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator(core, name, seed):
    rows = Rewarded(seed)
    wanted = estimate(core, name, rows) * (rows.bessel() if name in WHITENED else 1)
    rows.agree(ESTIMATORS[name](rows.batch()).advantages, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_without_its_std_is_dr_grpo(core, seed):
    rows = Rewarded(seed)
    wanted = estimate(core, "grpo", rows, norm_adv_by_std_in_grpo=False)
    rows.agree(rl.advantages(rows.batch(), scale="none").advantages, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ("grpo", "rloo", "opo"))
def test_a_prompt_with_one_row_has_its_reward_in_verl_and_0_in_ours(core, name, seed):
    rows = Rewarded(seed, ALONE)
    wanted = estimate(core, name, rows)
    alone = wanted[-1][rows.sampled[-1]]
    assert torch.allclose(alone, rows.rewards[-1].expand_as(alone), rtol=1e-5)
    wanted[-1] = 0
    rows.agree(ESTIMATORS[name](rows.batch()).advantages, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ("grpo_vectorized", "rloo_vectorized"))
def test_the_vectorised_ones_are_the_others(core, name, seed):
    rows = Rewarded(seed)
    wanted = estimate(core, name, rows)
    rows.agree(ESTIMATORS[name.partition("_")[0]](rows.batch()).advantages, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", (1.0, 0.9))
def test_reinforce_plus_plus(core, gamma, seed):
    rows = Rewarded(seed, by_token=True)
    wanted, _ = core.compute_reinforce_plus_plus_outcome_advantage(
        rows.paid, rows.sampled.double(), config=SimpleNamespace(gamma=gamma)
    )
    found = rl.advantages(
        rows.batch("token_rewards"), of="returns", center="none", scale="none", whiten=True, gamma=gamma
    )
    rows.agree(found.advantages, wanted * rows.bessel())


@pytest.mark.parametrize("seed", SEEDS)
def test_remax(core, seed):
    rows = Rewarded(seed, by_token=True)
    greedy = torch.randn(len(rows.keys), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).float()
    wanted, _ = core.compute_remax_outcome_advantage(rows.paid, greedy.double(), rows.sampled.double())
    batch = rows.batch("token_rewards", greedy=Column.of(greedy))
    found = rl.advantages(batch, of="returns", baseline="greedy", center="none", scale="none")
    rows.agree(found.advantages, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_gpg_is_the_difference_to_the_mean_but_for_its_factor(core, seed):
    """verl multiplies by the rows of the batch over those with a reward that is not 0; in ours the program would."""
    rows = Rewarded(seed)
    rows.rewards[::3] = 0
    rows.paid = rows.rewards[:, None] * rows.last
    wanted = estimate(core, "gpg", rows)
    factor = len(rows.keys) / int((rows.rewards != 0).sum())
    rows.agree(rl.advantages(rows.batch(), scale="none").advantages, wanted / factor)


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_but_for_its_last_normalisation(core, seed):
    """verl's is over tokens, ours over rows: the same up to one factor where every row has as many tokens."""
    rows = Rewarded(seed)
    rows.sampled = rows.there = torch.ones_like(rows.there)
    rows.lengths = torch.full_like(rows.lengths, LONGEST)
    format_reward = torch.randn(len(rows.keys), generator=torch.Generator().manual_seed(seed)).float()
    total = None
    for reward, weight in ((rows.rewards, 1.0), (format_reward.double(), 0.5)):
        paid = torch.zeros_like(rows.p)
        paid[:, -1] = reward
        part, _ = core.compute_grpo_outcome_advantage(paid, rows.sampled.double(), rows.prompt)
        total = weight * part if total is None else total + weight * part
    verl_f = load(VERL, "verl.utils.torch_functional")
    wanted = verl_f.masked_whiten(total, rows.sampled.double())
    batch = rows.batch(format_reward=Column.of(format_reward))
    found = rl.gdpo(batch, rewards=("rewards", "format_reward"), weights=(1.0, 0.5), eps=1e-6)
    count, tokens = len(rows.keys), rows.sampled.numel()
    rows.agree(found.advantages, wanted * math.sqrt((count - 1) / count * tokens / (tokens - 1)))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_optimal_token_baseline_but_for_its_tail(core, seed):
    """What one row has beyond all others has the whole return in verl, and 0 in ours. Observations are no steps."""
    rows = Rewarded(seed)
    squares = (rows.old.exp().square() * 1.1).clamp(max=1).float().double()
    logps = rows.old.clamp(max=-0.01).float().double()
    wanted, returns = core.compute_multi_turn_optimal_token_baseline_advantage(
        rows.paid, rows.sampled.double(), rows.prompt, logps, squares
    )
    rows.old, rows.squares = logps, squares
    rows.old_logprobs = logps
    batch = rows.batch("old_logprobs", "squares")
    found = rl.optimal_token_baseline(batch, anchor="old", sum_squares="squares").advantages
    mine = torch.zeros_like(rows.p)
    mine[rows.there] = found.values.double()
    step = rows.sampled.cumsum(1) * rows.sampled
    count = rows.sampled.sum(1)
    tail = torch.zeros_like(rows.sampled)
    for i in range(len(rows.keys)):
        others = [int(count[j]) for j in range(len(rows.keys)) if j != i and rows.prompt[j] == rows.prompt[i]]
        tail[i] = step[i] > max(others)
    rows.agree(found, wanted, rows.sampled & ~tail)
    assert torch.equal(mine[tail], torch.zeros_like(mine[tail]))
    assert torch.allclose(wanted[tail], returns[tail])


@pytest.mark.parametrize("kl", (0.0, 0.01, 0.019, 0.021, 0.5))
def test_the_adaptive_coefficient(core, kl):
    controller = core.AdaptiveKLController(0.1, target_kl=0.02, horizon=1000)
    controller.update(kl, 64)
    assert rl.adaptive_kl(0.1, kl, target=0.02, horizon=1000, rows=64) == pytest.approx(controller.value)
