"""Coefficients that follow what they control: formulas, bounds, errors, and one that a program carries."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl import rl
from flowrl.errors import ProgramError
from flowrl.graph.compile_paths import compile_graph
from flowrl.graph.tracing.trace_program import trace

NUMBERS = st.floats(-1e6, 1e6)
ABOVE = st.floats(1e-6, 1e6)


@settings(deadline=None, derandomize=True)
@given(value=NUMBERS, low=NUMBERS, width=st.floats(0, 1e6))
def test_clamp(value, low, width):
    found = rl.clamp(value, low=low, high=low + width)
    assert low <= found <= low + width
    assert found == value or value < low or value > low + width
    assert rl.clamp(value) == value


def test_clamp_has_one_bound_or_two():
    assert rl.clamp(3, high=2.0) == 2.0
    assert rl.clamp(-3.0, low=0.0) == 0.0
    assert rl.clamp(math.inf, high=1.0) == 1.0


@pytest.mark.parametrize(
    ("kl", "error"),
    [(0.02, 0.0), (0.022, 0.1), (0.019, -0.05), (1.0, 0.2), (0.0, -0.2), (-0.5, -0.2), (math.inf, 0.2)],
)
def test_the_coefficient_of_the_kl_moves_by_at_most_a_fifth_of_a_horizon(kl, error):
    wanted = 0.1 * (1 + error * 512 / 10_000)
    assert rl.adaptive_kl(0.1, kl, target=0.02, rows=512) == pytest.approx(wanted)
    assert rl.adaptive_kl(0.1, kl, target=0.02, horizon=512, rows=512) == pytest.approx(0.1 * (1 + error))


@settings(deadline=None, derandomize=True)
@given(coef=ABOVE, target=ABOVE, kl=NUMBERS, rows=st.integers(1, 1000))
def test_it_rises_above_the_target_and_falls_below(coef, target, kl, rows):
    found = rl.adaptive_kl(coef, kl, target=target, rows=rows, horizon=1000)
    assert found >= coef if kl > target else found <= coef
    assert 0.8 * coef <= found * (1 + 1e-9) and found <= 1.2 * coef * (1 + 1e-9)


@pytest.mark.parametrize("target", (0.0, -1.0, math.nan))
def test_a_target_of_the_kl_is_above_zero(target):
    with pytest.raises(ProgramError, match=f"rl.adaptive_kl: target={target}") as told:
        rl.adaptive_kl(0.1, 0.02, target=target)
    assert "Give a KL above 0" in str(told.value)


@pytest.mark.parametrize(
    ("coef", "entropy", "wanted"),
    [
        (0.02, 0.1, 0.021),
        (0.02, 0.3, 0.021),  # at the target it still rises
        (0.02, 0.4, 0.019),
        (0.1, 0.1, 0.1),
        (0.0, 0.4, 0.0),
        (5.0, 0.4, 0.1),  # what starts outside comes inside
    ],
)
def test_the_coefficient_of_the_entropy_goes_by_steps_inside_its_bounds(coef, entropy, wanted):
    assert rl.adaptive_entropy(coef, entropy, target=0.3) == pytest.approx(wanted)


def test_its_step_and_bounds_can_be_said():
    assert rl.adaptive_entropy(0.5, 1.0, target=2.0, step=0.2, high=0.6) == pytest.approx(0.6)
    assert rl.adaptive_entropy(0.5, 3.0, target=2.0, step=0.2, low=0.4, high=1.0) == pytest.approx(0.4)


def test_an_entropy_ends_up_around_its_target():
    """A process whose entropy falls by itself and rises with the coefficient."""
    coef, entropy, seen = 0.0, 1.0, []
    for _ in range(400):
        coef = rl.adaptive_entropy(coef, entropy, target=0.3, step=2e-3)
        entropy = max(0.0, entropy - 0.02 + coef)
        seen.append(entropy)
    assert sum(seen[200:]) / 200 == pytest.approx(0.3, abs=0.15)


@pytest.mark.parametrize(
    ("multiplier", "cost", "wanted"),
    [
        (1.0, 0.5, math.exp(0.05)),
        (1.0, -0.5, math.exp(-0.05)),
        (2.0, 0.5, 2 * math.exp(0.1)),  # in ln m the step is proportional to m
        (9.9, 3.0, 10.0),
        (1.0, 0.0, 1.0),
    ],
)
def test_the_multiplier_of_a_constraint(multiplier, cost, wanted):
    assert rl.lagrange(multiplier, cost) == pytest.approx(wanted)
    assert rl.lagrange(multiplier, cost + 7, limit=7.0) == pytest.approx(wanted)


@settings(deadline=None, derandomize=True)
@given(multiplier=st.floats(1e-6, 10), cost=NUMBERS, limit=NUMBERS)
def test_a_multiplier_stays_above_zero_and_below_its_bound(multiplier, cost, limit):
    found = rl.lagrange(multiplier, cost, limit=limit)
    assert 0 < found <= 10
    assert found >= multiplier if cost >= limit else found <= multiplier


@pytest.mark.parametrize("multiplier", (0.0, -1.0, math.nan))
def test_a_multiplier_starts_above_zero(multiplier):
    with pytest.raises(ProgramError, match=f"rl.lagrange: multiplier={multiplier}") as told:
        rl.lagrange(multiplier, 1.0)
    assert "Start it above 0" in str(told.value)


# -- in a program --------------------------------------------------------------------------------------------------


prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
flow = fl.Flow("tests")
actor = flow.worker(fl.Actor, model="a/model")
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, lambda response, answer: float(response == answer))


def traced(program):
    found = trace(program, {}, name=program.__name__)
    assert [e.report() for e in found.errors] == []
    return compile_graph(found)


def edges(graph, kind):
    return {f"{e.src} -> {e.dst}: {', '.join(e.fields)}" for e in graph.edges if e.kind == kind}


def test_a_coefficient_is_carried_from_step_to_step():
    def adaptive(steps=10):
        coef = 0.1
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(ref.logprobs(reward.score(actor.generate(batch, n=4))))
            metrics = actor.update(batch, loss=rl.ppo_clip(kl=coef))
            coef = rl.adaptive_kl(coef, metrics.kl, target=0.02, rows=4)
            flow.log(step, metrics, coef=coef)

    graph = traced(adaptive)
    assert edges(graph, "carried") == {
        "rl.adaptive_kl -> actor.update: value",
        "rl.adaptive_kl -> rl.adaptive_kl: value",
    }
    assert "actor.update -> rl.adaptive_kl: kl" in edges(graph, "data")
    assert graph.paths == 1


def test_a_coefficient_that_may_become_something_needs_the_reference_from_the_first_step():
    def adaptive(steps=10):
        coef = 0.1
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=4)))
            metrics = actor.update(batch, loss=rl.ppo_clip(kl=coef))
            coef = rl.clamp(rl.adaptive_kl(coef, metrics.loss, target=0.02), high=0.5)
            flow.log(step, metrics)

    found = trace(adaptive, {}, name="adaptive")
    assert any("ref_logprobs" in e.report() for e in found.errors)


def test_each_controller_is_an_op_of_a_graph():
    def controlled(steps=10):
        entropy, multiplier = 0.01, 1.0
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=4)))
            metrics = actor.update(batch, loss=rl.ppo_clip(entropy=entropy))
            entropy = rl.clamp(rl.adaptive_entropy(entropy, metrics.entropy, target=0.3), low=1e-4)
            multiplier = rl.lagrange(multiplier, batch.rewards.mean(), limit=0.5)
            flow.log(step, metrics, multiplier=multiplier)

    graph = traced(controlled)
    assert edges(graph, "carried") == {
        "rl.clamp -> actor.update: value",
        "rl.clamp -> rl.adaptive_entropy: value",
        "rl.lagrange -> rl.lagrange: value",
    }
    assert "rl.adaptive_entropy -> rl.clamp: value" in edges(graph, "data")


def test_what_is_no_number_leaves_coefficients_alone():
    nan = float("nan")
    assert rl.adaptive_kl(0.1, nan, target=0.02) == 0.1
    assert rl.adaptive_entropy(0.01, nan, target=1.0) == 0.01
    assert rl.adaptive_kl(0.1, 0.0, target=0.02, rows=10**9) == 0.0
