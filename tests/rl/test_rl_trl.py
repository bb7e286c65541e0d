"""Policy losses against the trainers of trl, which run their own arithmetic on rows made here: loss and gradient.

A trainer's loss is called on a stand-in that has what it looks at; the model's log-probabilities are the leaves.
"""

import math
import warnings
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from padded import LONGEST, Rows, ours, same

from flowrl import rl
from flowrl.rl.math.token_selection import selected_by_entropy

pytest.importorskip("trl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trainers = pytest.importorskip("trl.trainer.grpo_trainer")
    rloo = pytest.importorskip("trl.trainer.rloo_trainer")
    supervised = pytest.importorskip("trl.trainer.sft_trainer")

pytestmark = pytest.mark.filterwarnings("ignore")
torch.set_num_threads(1)
SEEDS = range(4)
CLIP, HIGH, CISPO = 0.2, 0.28, 1.2
GEOMETRIC = {"token": "token", "sequence": "geometric"}  # what trl calls a sequence's ratio is its geometric mean


# -- trl -------------------------------------------------------------------------------------------------------------


def trainer(rows, logps, **settings):
    """What a policy trainer's loss looks at besides the batch; ``logps`` are the model's."""
    args = {
        "use_bias_correction_kl": False,
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.25,
        "steps_per_generation": 1,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    me = {
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda tensor: tensor,
            reduce=lambda tensor, reduction: tensor,
            pad_across_processes=lambda tensor, **_: tensor,
        ),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logps, rows.entropy, None),
        "get_off_policy_mask": trainers.GRPOTrainer.get_off_policy_mask,
        "get_gamma_weights": trainers.GRPOTrainer.get_gamma_weights,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon_low": CLIP,
        "epsilon_high": HIGH,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 16,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "_metrics": {"train": defaultdict(list)},
    }
    args |= {name: settings.pop(name) for name in list(settings) if name in args}
    made = SimpleNamespace(**me | settings, args=SimpleNamespace(**args))
    made.get_high_entropy_mask = partial(trainers.GRPOTrainer.get_high_entropy_mask, made)
    return made


def batch(rows, **more):
    ones = torch.ones(len(rows.lengths), 1, dtype=torch.long)
    return {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.zeros(len(rows.lengths), LONGEST, dtype=torch.long),
        "completion_mask": rows.there.long(),
        "tool_mask": rows.sampled.long(),
        "advantages": rows.advantages,
        "old_per_token_logps": rows.old,
        "ref_per_token_logps": rows.ref,
        "sampling_per_token_logps": rows.rollout,
        "num_items_in_batch": rows.sampled.sum(),
        **more,
    }


def theirs(rows, *, importance=None, **settings):
    """Loss, gradient [total] and metrics of trl's GRPO trainer; ``importance``: what it weighs the loss by."""
    logps = rows.p.clone().requires_grad_()
    if settings.get("loss_type") == "cispo":
        settings["epsilon_high"] = CISPO
    me = trainer(rows, logps, use_vllm=importance is not None, **settings)
    loss = trainers.GRPOTrainer._compute_loss(me, None, batch(rows, importance_sampling_ratio=importance))
    loss.backward()
    metrics = {name: values[0] for name, values in me._metrics["train"].items()}
    return float(loss.detach()), rows.packed(logps.grad), metrics


TRL = {
    # loss_type: ours, with the ratio to the trainer before the update
    "grpo": lambda **parts: rl.ppo_clip(clip=CLIP, clip_high=HIGH, aggregate="seq-mean-token-mean", **parts),
    "bnpo": lambda **parts: rl.ppo_clip(clip=CLIP, clip_high=HIGH, aggregate="token-mean", **parts),
    "dapo": lambda **parts: rl.ppo_clip(clip=CLIP, clip_high=HIGH, aggregate="token-mean", **parts),
    "dr_grpo": lambda **parts: rl.ppo_clip(
        clip=CLIP, clip_high=HIGH, aggregate="seq-mean-token-sum-norm", norm=16, **parts
    ),
    "luspo": lambda **parts: rl.ppo_clip(clip=CLIP, clip_high=HIGH, aggregate="seq-mean-token-sum", **parts),
    "cispo": lambda **parts: rl.cispo(high=CISPO, **parts),  # trl's bound is of the ratio too, not of 1 + eps
    "sapo": lambda **parts: rl.sapo(positive=1.0, negative=1.25, **parts),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("loss_type", TRL)
def test_each_loss_type(loss_type, level, seed):
    rows = Rows(seed)
    wanted = theirs(rows, loss_type=loss_type, importance_sampling_level=level)
    found = ours(TRL[loss_type](anchor="old", ratio=GEOMETRIC[level]), rows)
    same(found, wanted)
    if level == "token" and "clip_ratio/region_mean" in wanted[2]:
        assert found[2]["clip_fraction"] == pytest.approx(wanted[2]["clip_ratio/region_mean"])


@pytest.mark.parametrize("loss_type", ("grpo", "dapo", "cispo", "sapo"))
def test_advantages_may_differ_from_token_to_token(loss_type):
    rows = Rows(5)
    rows.advantages = torch.randn(6, LONGEST, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    same(ours(TRL[loss_type](anchor="old"), rows), theirs(rows, loss_type=loss_type))


def test_gspo_is_the_clipped_loss_at_trls_sequence_level():
    rows = Rows(6, spread=0.002)
    wanted = theirs(rows, importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4)
    same(ours(rl.gspo(anchor="old"), rows), wanted)
    assert wanted[2]["clip_ratio/region_mean"] > 0


def test_the_anchor_may_be_the_policy_itself():
    """trl leaves the old log-probabilities away where an update is one step; ours then has the ratio 1 as well."""
    rows = Rows(7)
    logps = rows.p.clone().requires_grad_()
    loss = trainers.GRPOTrainer._compute_loss(trainer(rows, logps), None, batch(rows, old_per_token_logps=None))
    loss.backward()
    rows.old = rows.p
    same(ours(TRL["grpo"](anchor="old"), rows), (float(loss.detach()), rows.packed(logps.grad)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ("token", "sequence"))
def test_its_delta_is_our_dual(level, seed):
    rows = Rows(seed)
    wanted = theirs(rows, loss_type="bnpo", delta=1.4, importance_sampling_level=level)
    same(ours(TRL["bnpo"](anchor="old", dual=1.4, ratio=GEOMETRIC[level]), rows), wanted)


def test_a_delta_below_the_clip_is_none_of_our_dual():
    """There trl bounds rises that are wanted and not those that are not; ours is the bound of the paper at any size."""
    rows = Rows(1)
    rows.old = rows.p - math.log(1.2)
    for advantage, trl, mine in ((-1, 1.2, 1.05), (1, -1.05, -1.2)):
        rows.advantages = torch.full_like(rows.advantages, advantage)
        assert theirs(rows, loss_type="bnpo", delta=1.05)[0] == pytest.approx(trl)
        assert ours(TRL["bnpo"](anchor="old", dual=1.05), rows)[0] == pytest.approx(mine)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("loss_type", ("grpo", "dapo", "luspo", "cispo"))
def test_the_kl_and_its_correction_for_bias(loss_type, weighted, level, seed):
    rows = Rows(seed)
    if weighted:
        rows.rollout = rows.old  # trl weighs by the trainer's old policy, which sampled only where no engine rounds
    wanted = theirs(
        rows, loss_type=loss_type, beta=0.3, use_bias_correction_kl=weighted, importance_sampling_level=level
    )
    loss = TRL[loss_type](anchor="old", kl=0.3, kl_weighted=weighted, ratio=GEOMETRIC[level])
    found = ours(loss, rows)
    same(found, wanted)
    assert found[2]["kl"] == pytest.approx(wanted[2]["kl"])


def importance(rows, level, how, low, high):
    """trl's weights for what the engine sampled [rows, longest or 1], by its rule (in its generation, not its loss)."""
    moved = (rows.old - rows.rollout).nan_to_num(nan=0.0).masked_fill(~rows.sampled, 0.0)
    weights = (moved.sum(1, keepdim=True) if level == "sequence" else moved).exp()
    if how == "truncate":
        return weights.clamp(min=low, max=high)
    outside = (weights > high) | (weights < (-math.inf if low is None else low))
    return torch.where(outside, 0.0, weights)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("low", (None, 0.7))
@pytest.mark.parametrize("how", ("truncate", "mask"))
@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("loss_type", ("grpo", "cispo", "luspo"))
def test_the_correction_for_the_engine(loss_type, level, how, low, seed):
    rows = Rows(seed)
    wanted = theirs(rows, loss_type=loss_type, beta=0.1, importance=importance(rows, level, how, low, 1.3))
    named = "clip" if how == "truncate" and low else how
    correction = rl.correct(level, named, low=low or 0.0, high=1.3)
    same(ours(TRL[loss_type](anchor="old", correction=correction, kl=0.1), rows), wanted)


def test_a_token_that_the_engine_has_no_number_for_weighs_as_one():
    rows = Rows(2)
    rows.rollout[:, 0] = math.nan
    wanted = theirs(rows, importance=importance(rows, "token", "truncate", None, 1.3))
    found = ours(TRL["grpo"](anchor="old", correction=rl.correct(high=1.3)), rows)
    same(found, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("anchor", ("old", "rollout"))
def test_its_off_policy_mask(anchor, seed):
    """Both measure from the policy of the pass to the one that sampled, whatever the ratio is to."""
    rows = Rows(seed)
    rows.rollout = rows.rollout + 0.2
    loss = TRL["bnpo"](anchor=anchor, correction=rl.off_policy_mask(0.2))
    found = ours(loss, rows)
    sampled = rows.old if anchor == "old" else rows.rollout
    more = {"old_per_token_logps": sampled, "sampling_per_token_logps": rows.rollout}
    logps = rows.p.clone().requires_grad_()
    me = trainer(rows, logps, loss_type="bnpo", off_policy_mask_threshold=0.2)
    wanted = trainers.GRPOTrainer._compute_loss(me, None, batch(rows, **more))
    wanted.backward()
    same(found, (float(wanted.detach()), rows.packed(logps.grad)))
    assert 0 < found[2]["weight"] < 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_token_that_the_engine_has_no_number_for_is_no_evidence_against_a_row(seed):
    rows = Rows(seed)
    rows.rollout[:, 0] = math.nan
    wanted = theirs(rows, loss_type="bnpo", off_policy_mask_threshold=0.1)
    same(ours(TRL["bnpo"](anchor="old", correction=rl.off_policy_mask(0.1)), rows), wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("own", (False, True))
def test_vespo(own, seed):
    """TRL bounds the ratio of a row below by 1e-8, ours by exp(-20): both weights are nothing there."""
    rows = Rows(seed)
    settings, parts = {}, {}
    if own:
        settings = {"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.7, "vespo_lambda_neg": 1.5}
        parts = {"positive": (1.0, 0.5), "negative": (0.7, 1.5)}
    same(ours(rl.vespo(anchor="old", **parts), rows), theirs(rows, loss_type="vespo", **settings))


@pytest.mark.parametrize("seed", SEEDS)
def test_vespo_to_the_engine_is_trls_with_its_weights(seed):
    """Its weights of the trainer to the engine make of the ratio that to the engine, which is ours from the start."""
    rows = Rows(seed, spread=0.15)
    weights = importance(rows, "token", "truncate", None, math.inf).masked_fill(~rows.sampled, 1.0)
    same(ours(rl.vespo(), rows), theirs(rows, loss_type="vespo", importance=weights))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", (0.2, 0.5))
@pytest.mark.parametrize("loss_type", ("grpo", "dapo", "cispo"))
def test_tokens_of_high_entropy(loss_type, share, seed):
    rows = Rows(seed)
    rows.entropy = rows.entropy.float().double()  # trl's quantile is of float32
    wanted = theirs(rows, loss_type=loss_type, beta=0.1, top_entropy_quantile=share)
    chosen = torch.zeros_like(rows.sampled)
    packed = selected_by_entropy(rows.packed(rows.entropy), rows.packed(rows.sampled), share)
    chosen[rows.there] = packed
    loss = TRL[loss_type](anchor="old", kl=0.1, only="selected")
    found = ours(loss, rows, {"selected": chosen})
    same(found, wanted)
    assert 0 < found[2]["selected_fraction"] < 1


# -- where trl means something else ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ("grpo", "sapo", "luspo", "dr_grpo"))
def test_trl_counts_rows_without_a_sampled_token_and_we_leave_them_out(loss_type):
    """A row that is empty or all observations is a row with the loss 0 in trl's mean over rows, and none in ours."""
    rows = Rows(3, empty=True)
    loss, gradient, _ = ours(TRL[loss_type](anchor="old"), rows)
    assert gradient is not None
    filled = int(rows.sampled.any(1).sum())
    assert filled == 4
    same((loss * filled / 6, gradient * filled / 6), theirs(rows, loss_type=loss_type))


@pytest.mark.parametrize("loss_type", ("bnpo", "dapo", "cispo"))
def test_means_over_tokens_do_not_ask_how_many_rows_are_empty(loss_type):
    rows = Rows(3, empty=True)
    same(ours(TRL[loss_type](anchor="old"), rows), theirs(rows, loss_type=loss_type))


def test_trls_entropy_bonus_is_a_mean_over_tokens_and_ours_aggregates_as_the_loss():
    rows = Rows(4)
    bonus = {"_entropy_bonus_enabled": True, "entropy_coef": 0.05}
    same(ours(TRL["bnpo"](anchor="old", entropy=0.05), rows), theirs(rows, loss_type="bnpo", **bonus))
    found, wanted = ours(TRL["grpo"](anchor="old", entropy=0.05), rows), theirs(rows, loss_type="grpo", **bonus)
    plain = theirs(rows, loss_type="grpo")
    means = [float(h[m].mean()) for h, m in zip(rows.entropy, rows.sampled, strict=True)]
    assert found[0] == pytest.approx(plain[0] - 0.05 * sum(means) / len(means))
    assert wanted[0] == pytest.approx(plain[0] - 0.05 * float(rows.entropy[rows.sampled].mean()))
    assert found[0] != pytest.approx(wanted[0], rel=1e-6)


@pytest.mark.parametrize("target", (0.2, 2.0))
@pytest.mark.parametrize("coef", (0.0, 0.03, 0.1))
def test_the_coefficient_of_the_entropy_follows_as_trls_does(coef, target):
    """One step of the controller. In trl the coefficient counts only below the target; ours is whatever it is."""
    rows = Rows(4)
    me = trainer(
        rows,
        rows.p.clone().requires_grad_(),
        _entropy_bonus_enabled=True,
        use_adaptive_entropy=True,
        entropy_coef=coef,
        _entropy_window_stats=None,
        _last_world_entropy=0.0,
    )
    vars(me.args).update(entropy_target=target, entropy_coef_delta=0.02, entropy_coef_min=0.01, entropy_coef_max=0.1)
    trainers.GRPOTrainer._compute_loss(me, None, batch(rows))
    entropy = float(rows.entropy[rows.sampled].mean())
    found = rl.adaptive_entropy(coef, entropy, target=target, step=0.02, low=0.01, high=0.1)
    assert found == pytest.approx(me.entropy_coef)


# -- the other trainers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spread", (0.1, 0.4))
def test_rloo_is_the_clipped_loss_of_the_product_of_ratios(spread, seed):
    """Its loss is one number per row: that of each of the row's tokens in ours, of which a mean is taken."""
    rows = Rows(seed, spread=spread)
    rows.sampled = rows.there  # it knows no observations
    logps = rows.p.clone().requires_grad_()
    sums = (rows.old * rows.there).sum(1)
    wanted = rloo.RLOOTrainer._compute_loss(trainer(rows, logps), None, batch(rows, old_logps=sums))
    wanted.backward()
    loss = TRL["grpo"](anchor="old", ratio="sequence")
    same(ours(loss, rows), (float(wanted.detach()), rows.packed(logps.grad)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("empty", (False, True))
def test_sft_is_that_of_trl(empty, seed):
    rows = Rows(seed, empty=empty)
    logps = rows.p.clone().requires_grad_()
    blank = torch.zeros_like(rows.p)
    outputs = SimpleNamespace(
        log_probs=logps * rows.sampled, label_mask=rows.sampled, entropy=blank, is_top1=blank.bool()
    )
    me = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(parallelism_config=None, gather_for_metrics=lambda tensor: tensor),
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
        compute_loss_func=None,
        label_smoother=None,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": rows.there.long(), "labels": blank.long()}
    wanted = supervised.SFTTrainer.compute_loss(me, lambda **_: outputs, inputs)
    wanted.backward()
    same(ours(rl.sft(), rows), (float(wanted.detach()), rows.packed(logps.grad)))
