"""Fits of calls: what they find, and when a base is worth it."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowrl.placement.cost.calibrated_costs import Call, Fit


@example([(0.0, 0.0), (0.0, 0.0), (0.0, 2.5e-283)])
@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e6)), min_size=1, max_size=20))
def test_no_figure_is_ever_negative(pairs):
    fit = Fit.of([Call("a.b", i, seconds, tokens) for i, (seconds, tokens) in enumerate(pairs)])
    assert fit.base >= 0 and fit.per_token >= 0 and fit.calls == len(pairs)
    assert fit.seconds(2e6) >= fit.seconds(1e6)


@given(st.floats(0, 10), st.floats(1e-6, 1e-2), st.lists(st.integers(1, 10**6), min_size=3, max_size=20, unique=True))
def test_a_line_is_found_exactly(base, slope, sizes):
    fit = Fit.of([Call("a.b", i, base + slope * n, float(n)) for i, n in enumerate(sizes)])
    if max(sizes) - min(sizes) > 0.01 * sum(sizes) / len(sizes):
        assert fit.seconds(5e5) == pytest.approx(base + slope * 5e5, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_sizes_that_vary_little_say_what_a_token_takes_and_nothing_of_a_base(seed):
    """Sizes within 10 %, seconds within 3 %: a line through them would be far off at twice the size."""
    chance = random.Random(seed)
    sizes = [chance.randint(2800, 3400) for _ in range(14)]
    fit = Fit.of([Call("actor.update", n, 4e-4 * x * chance.uniform(0.97, 1.03), x, 32) for n, x in enumerate(sizes)])
    assert fit.base == 0.0 and fit.seconds(6000) == pytest.approx(2.4, rel=0.03)


def test_a_base_that_is_there_is_found():
    sizes = [1000, 2000, 4000, 8000]
    fit = Fit.of([Call("actor.update", n, 0.5 + 1e-4 * x, x, 32) for n, x in enumerate(sizes)])
    assert (fit.base, fit.per_token) == (pytest.approx(0.5), pytest.approx(1e-4))
