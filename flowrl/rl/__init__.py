"""The algorithms' mathematics, as ops and losses of a program: ``from flowrl import rl``.

This module is light: it knows what each function reads and adds, and loads the mathematics when it is run.
"""

from __future__ import annotations

from .signatures import gae, group_advantages, kl_penalty, ppo_clip, sft, value_clip
from .spec import Loss, LossInputs, loss

__all__ = [
    "Loss",
    "LossInputs",
    "gae",
    "group_advantages",
    "kl_penalty",
    "loss",
    "ppo_clip",
    "sft",
    "value_clip",
]
