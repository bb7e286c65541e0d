"""DPO (Rafailov et al. 2023, arXiv:2305.18290) and other losses on given preferences: no sampling while training.

``--preset`` is one of dpo, ipo, cdpo, orpo, kto, simpo, cpo, and the kinds of ``rl.preference_loss``. Departures:
1. the reference is computed in every step, not beforehand for the whole data set. 2. KTO's reference point is that of
the weights before the step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

PRESETS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "ipo": {"loss": rl.ipo},
    "cdpo": {"loss": partial(rl.dpo, label_smoothing=0.1)},
    "orpo": {"loss": rl.orpo, "reference": False},
    "kto": {"loss": rl.kto, "reference_point": True},
    "simpo": {"loss": rl.simpo, "reference": False},
    "cpo": {"loss": rl.cpo, "reference": False},
    "robust": {"loss": partial(rl.preference_loss, "robust", label_smoothing=0.1)},
    "hinge": {"loss": partial(rl.preference_loss, "hinge")},
    "exo": {"loss": partial(rl.preference_loss, "exo", label_smoothing=1e-3)},
    "discopop": {"loss": partial(rl.preference_loss, "discopop")},
    "sppo": {"loss": partial(rl.preference_loss, "sppo")},
    "nca": {"loss": partial(rl.preference_loss, "nca")},
    "bco": {"loss": partial(rl.preference_loss, "bco")},
    "apo_zero": {"loss": partial(rl.preference_loss, "apo_zero")},
    "apo_down": {"loss": partial(rl.preference_loss, "apo_down")},
}

flow = fl.Flow("dpo")
actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=1e-4, betas=(0.9, 0.99), max_tokens=arithmetic.MAX_TOKENS)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, arithmetic.exact_match)


@flow.program(presets=PRESETS)
def dpo(
    steps: int = 200,
    pairs: int = 64,
    reference: bool = True,
    reference_point: bool = False,
    one_digit: float | None = None,
    loss: Callable[..., rl.Loss] = rl.dpo,
) -> None:
    for step, batch in flow.steps(arithmetic.preferences(pairs, one_digit=one_digit), steps):
        if reference:
            batch = ref.logprobs(batch)
        if reference_point:
            others = rl.mismatched(batch)
            others = actor.logprobs(others) | ref.logprobs(others)
            log_ratio = (others.old_logprobs - others.ref_logprobs) * others.response_mask
            divergence = log_ratio.row_sum().mean()
            metrics = actor.update(batch, loss=loss(reference_point=divergence))
        else:
            metrics = actor.update(batch, loss=loss())
        flow.log(step, metrics)


arithmetic.stages(flow, actor, reward)

if __name__ == "__main__":
    flow.main()
