"""A run beside its prediction: each node's seconds of a call, and those of a steady step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrl.analysis.prediction import STEP, Predicted, beside, in_words
from flowrl.schedule.simulation import Bar, Simulation


def simulation(generate: float, update: float, *, staleness: int = 0) -> Simulation:
    """Six steps, one after another; a publish takes half a second of the next one's time."""
    bars: list[Bar] = []
    for step in range(6):
        begin = step * (generate + update)
        bars.append(Bar("actor.generate", step, "rollout", begin, begin + generate, call=2 * step))
        bars.append(Bar("actor.update", step, "train", begin + generate, begin + generate + update, call=2 * step + 1))
        bars.append(Bar("actor.publish", step, "rollout", begin + generate + update, begin + generate + update + 0.5))
    end = max(bar.end for bar in bars)
    return Simulation("grpo", 6, end, 99.0, tuple(bars), (), {}, "given", staleness)


def test_every_node_and_the_step_are_held_against_what_was_measured():
    found = {row.node: row for row in beside(simulation(2.0, 1.0), simulation(2.5, 1.0))}
    assert (found["actor.generate"].predicted, found["actor.generate"].measured) == pytest.approx((2.0, 2.5))
    assert found["actor.generate"].off == pytest.approx(0.2) and found["actor.update"].off == pytest.approx(0.0)
    assert list(found)[-1] == STEP and (found[STEP].predicted, found[STEP].measured) == pytest.approx((3.0, 3.5))


def test_what_one_of_the_two_lacks_is_told():
    real = simulation(2.0, 1.0)
    flown = replace(real, bars=tuple(bar for bar in real.bars if bar.node != "actor.publish"))
    publish = next(row for row in beside(flown, real) if row.node == "actor.publish")
    assert (publish.predicted, publish.measured, publish.off) == (None, pytest.approx(0.5), None)
    assert in_words([publish, Predicted("actor.update", 1.0, 0.8)]).splitlines() == [
        "node           predicted s  measured s     off",
        "actor.publish            -         0.5       -",
        "actor.update             1         0.8  25.0 %",
    ]
