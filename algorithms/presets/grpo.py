"""Published variants of GRPO: the presets of ``algorithms/grpo.py``, by what each one changes.

A preset changes the advantage, the loss, or a number of the program. ``advantages`` is a function from scored rows to
rows that are ready for the update; ``loss`` is one of the library, perhaps with other parts. ``kl=0.0`` leaves the
reference out. docs/algorithms.md has the equation of each, and where it departs from its paper.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

center = partial(rl.advantages, scale="none")  # the difference to the mean of the group, not divided by its std


def variants(actor: fl.Actor, ref: fl.Reference) -> dict[str, dict[str, Any]]:
    """Values of the program's parameters by the name of the variant; some advantages ask a worker for more columns."""

    def rloo(batch: fl.Batch) -> fl.Batch:
        batch = rl.kl_penalty(ref.logprobs(batch), coef=1e-3)
        return center(batch, of="total", leave_one_out=True)

    def reinforce_plus_plus(batch: fl.Batch) -> fl.Batch:
        batch = rl.kl_penalty(ref.logprobs(batch), coef=1e-3)
        return rl.advantages(batch, of="returns", center="none", scale="none", whiten=True)

    def two_policies(batch: fl.Batch) -> fl.Batch:
        """With several optimizer steps per step, ``old_logprobs`` are those before the first of them."""
        return actor.logprobs(rl.advantages(batch))

    def largest_covariances(batch: fl.Batch) -> fl.Batch:
        return rl.select_by_covariance(two_policies(batch), anchor="old")

    def smallest_moves(batch: fl.Batch) -> fl.Batch:
        return rl.select_by_second_moment(two_policies(batch))

    def high_entropy(batch: fl.Batch) -> fl.Batch:
        return rl.select_by_entropy(actor.entropies(rl.advantages(batch)))

    return {
        "grpo": {},
        # -- another advantage -------------------------------------------------------------------------------
        "rloo": {  # the KL is paid from the reward; the baseline is the mean of the others; no ratio
            "kl": 0.0,
            "advantages": rloo,
            "loss": partial(rl.reinforce, aggregate="seq-mean-token-sum"),
        },
        "reinforce_plus_plus": {  # one answer per prompt; the KL is paid token by token; the batch is the baseline
            "kl": 0.0,
            "prompts_per_step": 512,
            "group_size": 1,
            "advantages": reinforce_plus_plus,
        },
        "reinforce_plus_plus_baseline": {  # centred in the group, divided by the std of the batch
            "advantages": partial(center, whiten=True),
            "loss": partial(rl.ppo_clip, kl_kind="k2"),
        },
        "dr_grpo": {  # no division: neither by the std nor by the length of the row
            "kl": 0.0,
            "advantages": center,
            "loss": partial(rl.ppo_clip, aggregate="seq-mean-token-sum-norm", norm=arithmetic.MAX_TOKENS),
        },
        "gpg": {"kl": 0.0, "advantages": informative, "loss": rl.reinforce},  # only groups whose rewards differ
        "opo": {"kl": 0.0, "advantages": partial(center, center="optimal"), "loss": rl.reinforce},  # by length
        "pass_at_k": {"kl": 0.0, "advantages": partial(rl.pass_at_k, k=3)},  # the best of any three is paid
        "maxrl": {"kl": 0.0, "advantages": partial(rl.advantages, scale="mean")},  # hard prompts weigh more
        "lite_ppo": {"kl": 0.0, "advantages": partial(rl.advantages, scale="batch")},  # one std for all prompts
        "otb": {"kl": 0.0, "advantages": rl.optimal_token_baseline},  # a baseline of each token
        # -- another gate: how far the ratio to the policy that sampled is followed --------------------------
        "gspo": {  # one ratio per row, to the trainer: its bounds are narrower than the rounding of an engine in bf16
            "kl": 0.0,
            "advantages": two_policies,
            "loss": partial(rl.gspo, anchor="old", correction=rl.correct("token", "truncate")),
        },
        "luspo": {  # gspo, where a row is as heavy as it is long
            "kl": 0.0,
            "advantages": two_policies,
            "loss": partial(
                rl.gspo,
                clip=2e-3,
                clip_high=2.5e-3,
                anchor="old",
                correction=rl.correct("token", "truncate"),
                aggregate="seq-mean-token-sum",
            ),
        },
        "cispo": {"kl": 0.0, "loss": rl.cispo},  # a bounded weight, so that every token keeps a gradient
        "sapo": {"kl": 0.0, "loss": rl.sapo},  # a sigmoid instead of a clip
        "gmpo": {"kl": 0.0, "loss": rl.gmpo},  # the geometric mean over the row's tokens
        "dppo": {"kl": 0.0, "loss": rl.dppo},  # bounds on the probability, not on the ratio
        "topr": {"kl": 0.0, "loss": rl.topr},  # only rows with a negative advantage are weighted
        "vespo": {"kl": 0.0, "loss": rl.vespo},  # a smooth weight of the whole row
        "kimi": {"kl": 0.0, "advantages": center, "loss": rl.quadratic},  # a square holds the ratio near 1
        "decoupled_ppo": {  # two optimizer steps; the clip is around the policy before them, not the one that sampled
            "kl": 0.0,
            "minibatch": 256,
            "advantages": two_policies,
            "loss": rl.decoupled_ppo,
        },
        "icepop": {  # the same ratio, without tokens of which engine and trainer think otherwise
            "kl": 0.0,
            "minibatch": 256,
            "advantages": two_policies,
            "loss": partial(rl.ppo_clip, anchor="old", correction=rl.correct("token", "mask", low=0.5, high=5.0)),
        },
        "mis": {  # the same without whole rows
            "kl": 0.0,
            "minibatch": 256,
            "advantages": two_policies,
            "loss": partial(rl.ppo_clip, anchor="old", correction=rl.correct("sequence", "mask")),
        },
        "deepseek_v3_2": {  # no division by the std; rows that went too far from their sampler are masked; weighted KL
            "advantages": center,
            "loss": partial(
                rl.ppo_clip,
                kl_weighted=True,
                correction=rl.off_policy_mask(0.5),
                aggregate="seq-mean-token-mean",
            ),
        },
        # -- some tokens are treated otherwise ---------------------------------------------------------------
        "clip_cov": {"kl": 0.0, "advantages": drawn_by_covariance, "loss": rl.clip_cov},  # some are left out
        "kl_cov": {  # some are held back to the policy before the first of two optimizer steps
            "kl": 0.0,
            "minibatch": 256,
            "advantages": largest_covariances,
            "loss": partial(rl.kl_cov, anchor="old", correction=rl.correct("token", "truncate")),
        },
        "high_entropy": {  # only where the policy was undecided
            "kl": 0.0,
            "advantages": high_entropy,
            "loss": partial(rl.ppo_clip, clip_high=0.28, only="selected"),
        },
        "m2po": {  # two optimizer steps, without the tokens that moved furthest
            "kl": 0.0,
            "minibatch": 256,
            "advantages": smallest_moves,
            "loss": rl.m2po,
        },
    }


def informative(batch: fl.Batch) -> fl.Batch:
    """Centred advantages of the groups whose rewards differ; the others leave the batch."""
    return center(batch.filter(batch.group_std("rewards") > 0))


def drawn_by_covariance(batch: fl.Batch) -> fl.Batch:
    return rl.select_by_covariance(rl.advantages(batch), how="drawn", low=1.0, high=5.0)
