"""Workers that take turns in a memory leave lines in the timeline, from which their moves are priced."""

from __future__ import annotations

import pytest
from direct import run_direct
from flows import module_of

from flowrl.placement.cost.calibrate_run import calibrate
from flowrl.placement.plan.plan import Place, Plan
from flowrl.schedule.events import Memory

SIZES = {"actor.train": 3.0, "ref.train": 1.0}


@pytest.mark.parametrize("plan", [Plan({"a": "cpu"}), Plan({"a": "cpu", "b": "cpu"}, {"reward": Place("b")})])
def test_each_leaves_and_comes_back_with_a_time_of_its_own(tmp_path, plan):
    """There is room for the actor or the reference; calls do not count what was moved for them."""
    module = module_of("stale_flow")
    how = {"parameters": {"stale": {"steps": 4}}, "memory": {"a": Memory(3.0, SIZES)}}
    run_direct(module.flow, plan, tmp_path / "tight", "stale", **how)
    costs = calibrate(tmp_path / "tight")
    moves = {title: fit.base for title, fit in costs.fits.items() if title.endswith("load")}
    assert moves.keys() == {f"{who}.{what}" for who in SIZES for what in ("offload", "onload")}
    assert all(seconds > 0 for seconds in moves.values())
    free = calibrate(run(module, plan, tmp_path / "roomy"))
    assert not any(title.endswith("load") for title in free.fits), "all stay"


def run(module, plan, out):
    """A run with room for all."""
    run_direct(module.flow, plan, out, "stale", parameters={"stale": {"steps": 4}})
    return out
