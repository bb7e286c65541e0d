"""The algorithms' mathematics, as ops and losses of a program: ``from flowrl import rl``.

This module is light: it knows what each function reads and adds, and loads the mathematics when it is run.
"""

from __future__ import annotations

from . import gates
from .advantages import advantages, gae, group_advantages
from .branches import branches
from .control import adaptive_entropy, adaptive_kl, clamp, lagrange
from .corrections import Correction, Rejection, correct, importance_weights, off_policy_mask, reject
from .credit import gdpo, gigpo, optimal_token_baseline, pass_at_k, turn_advantages
from .derived_rows import collect
from .distillation import divergence, full_kl, teacher_advantages
from .loss_spec import Loss, LossInputs, loss, where
from .pairs import best_of, mismatched, pairs
from .policy import Gate, policy_loss
from .preference import bradley_terry, cpo, dpo, ipo, kto, orpo, preference_loss, simpo
from .presets import (
    cispo,
    clip_cov,
    decoupled_ppo,
    dppo,
    gmpo,
    gspo,
    kl_cov,
    m2po,
    ppo_clip,
    quadratic,
    reinforce,
    sapo,
    topr,
    vespo,
)
from .rewards import clipped_rewards, kl_penalty, length_penalty, overlong_penalty, whitened_rewards
from .selection import first_groups, select_by_covariance, select_by_entropy, select_by_second_moment
from .supervised import sft, value_clip

__all__ = [
    "Correction",
    "Gate",
    "Loss",
    "LossInputs",
    "Rejection",
    "adaptive_entropy",
    "adaptive_kl",
    "advantages",
    "best_of",
    "bradley_terry",
    "branches",
    "cispo",
    "clamp",
    "clip_cov",
    "clipped_rewards",
    "collect",
    "correct",
    "cpo",
    "decoupled_ppo",
    "divergence",
    "dpo",
    "dppo",
    "first_groups",
    "full_kl",
    "gae",
    "gates",
    "gdpo",
    "gigpo",
    "gmpo",
    "group_advantages",
    "gspo",
    "importance_weights",
    "ipo",
    "kl_cov",
    "kl_penalty",
    "kto",
    "lagrange",
    "length_penalty",
    "loss",
    "m2po",
    "mismatched",
    "off_policy_mask",
    "optimal_token_baseline",
    "orpo",
    "overlong_penalty",
    "pairs",
    "pass_at_k",
    "policy_loss",
    "ppo_clip",
    "preference_loss",
    "quadratic",
    "reinforce",
    "reject",
    "sapo",
    "select_by_covariance",
    "select_by_entropy",
    "select_by_second_moment",
    "sft",
    "simpo",
    "teacher_advantages",
    "topr",
    "turn_advantages",
    "value_clip",
    "vespo",
    "where",
    "whitened_rewards",
]
