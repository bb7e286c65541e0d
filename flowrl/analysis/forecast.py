"""What the plan of a run foretells: seconds of steps and calls, busy pools, memory and lag, as its record keeps it."""

from __future__ import annotations

from math import isfinite
from typing import Any

from ..errors import FlowError
from ..schedule.report.figures import totals
from ..schedule.simulation import Simulation
from .study import Study

STEPS = 8  # that are flown


def forecast_of(study: Study) -> dict[str, Any] | None:
    """Return what a program is foretold under its plan; None where it cannot be flown, as sizes are not known."""
    try:
        return forecast_record(study.simulate(STEPS + study.plan.pipeline.staleness))
    except FlowError:
        return None


def forecast_record(flown: Simulation) -> dict[str, Any]:
    """Return what a simulation says of a steady step, as plain data.

    ``calls`` have the seconds of one, ``pools`` the part of the time in which they are busy, and the most bytes on a
    device beside what it has, where its memory is known.
    """
    pools = {
        pool.name: {"busy": pool.busy, "memory": max((used for _, used in pool.memory), default=None) or None}
        | ({"capacity": pool.capacity} if pool.capacity else {})
        for pool in flown.pools
    }
    return {
        "step_seconds": flown.step_seconds if isfinite(flown.step_seconds) else None,
        "lag": flown.lag_mean,
        "source": flown.cost_source,
        "notes": list(flown.notes),
        "calls": {total.node: total.mean for total in totals(flown)},
        "pools": pools,
    }
