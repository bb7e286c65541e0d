"""Curves that go wrong are told of once, with causes and advice; curves of runs that go well are not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from flows import events, module_of

import flowrl as fl
from flowrl.runtime.driver.monitoring.health import Health
from flowrl.runtime.driver.monitoring.health_rules import RULES, WINDOW
from flowrl.runtime.values.step_records import Step

LONG = 6 * WINDOW
DOCS = Path(__file__).parents[4] / "docs"


def rings(name, values, health=None, first=0):
    """The steps at which something is told of a curve, with its kind and text."""
    health = health or Health()
    history = [{"program": "grpo", "step": first + i, name: value} for i, value in enumerate(values)]
    return [
        (line["step"], kind, text)
        for i, line in enumerate(history)
        for kind, text in health.look("grpo", line, Step(i), history[: i + 1])
    ]


def noisy(curve, by=0.1, seed=0):
    draw = random.Random(seed)
    return [value * (1 + by * draw.uniform(-1, 1)) for value in curve]


def slope(start, end, steps=LONG):
    return [start + (end - start) * i / (steps - 1) for i in range(steps)]


SICK = [
    ("entropy", slope(1.2, 0.01), "alarm", "entropy has fallen to"),
    ("actor/entropy", [1.5] * 20 + [0.02] * 20, "alarm", "actor/entropy has fallen to"),
    ("entropy", slope(0.8, 6.0), "alarm", "entropy has risen to"),
    ("rollout_kl", [0.5] * 12, "alarm", "rollout_kl is 0.5 nats per token"),
    ("ess", [0.1] * 12, "alarm", "ess is 0.1 in the middle of the last steps"),
    ("kl", [0.05 * 1.3**i for i in range(25)], "alarm", "kl is"),
    ("actor.update/ref_kl", [0.1] * 20 + [4.0] * 12, "alarm", "actor.update/ref_kl is"),
    ("kl", slope(0.05, 3.0), "hint", "kl is 1"),
    ("ref_kl", slope(0.05, 3.0), "hint", "ref_kl is 1"),
    ("reward", slope(0.2, 0.8) + slope(0.8, 0.3), "alarm", "reward has fallen to"),
    ("reward", slope(-5, -2) + slope(-2, -6), "alarm", "reward has fallen to -"),
    ("reward", [0.5] * 20 + [0.0] * 20, "alarm", "reward has fallen to"),
    ("ratio_max", [50.0] * 12, "hint", "ratio_max is"),
    ("response_truncated", [0.6] * 12, "hint", "response_truncated is"),
    (
        "grad_norm",
        [1.0] * 12 + [40.0] + [1.0] * 5,
        "alarm",
        "grad_norm is 40, more than ten times the median of the steps before, 1.",
    ),
    ("repetition", [0.02] * 20 + [0.6] * 20, "alarm", "repetition has risen to"),
    ("clip_fraction", [0.5] * 12, "hint", "clip_fraction is 50%"),
    ("actor.update/silent_groups", [0.95] * 12, "hint", "actor.update/silent_groups is 95%"),
    ("truncated", [0.6] * 12, "hint", "truncated is 60%"),
    ("response_length", slope(100, 900), "hint", "response_length has risen to"),
    ("response_length", slope(300, 10), "hint", "response_length has fallen to"),
]

WELL = [
    ("entropy", slope(1.2, 0.4)),  # a policy that learns becomes surer
    ("entropy", [0.02] * LONG),  # of a model that was sure from the start
    ("entropy", [1.2] * 30 + [0.0] + [1.2] * 30),  # one step alone
    ("rollout_kl", [0.001] * LONG),
    ("rollout_kl", [0.01] * 30 + [3.0] + [0.01] * 30),
    ("ess", [0.95] * LONG),
    ("grad_norm", slope(8.0, 0.2)),
    ("grad_norm", [0.0] * 5 + [1.0] * LONG),
    ("repetition", [0.4] * LONG),  # a task whose answers repeat
    ("clip_fraction", [0.15] * LONG),
    ("silent_groups", [0.6] * LONG),
    ("truncated", [0.9] + [0.1] * LONG),
    ("response_length", slope(100, 220)),
    ("loss", slope(-5, 900)),  # nobody looks at it
    ("kl", slope(0, 0.6)),
    ("kl", [0.1] * 30 + [50.0] + [0.1] * 30),  # one step alone
    ("kl", slope(8.0, 0.5)),  # to a teacher
    ("ref_kl", [3.0] * LONG),
    ("reward", slope(0, 1)),
    ("reward", slope(0, 1) + [0.9] * LONG),
    ("reward", [0.5] * 30 + [0.3] * 3 + [0.5] * 30),
    ("reward", [0.0] * LONG),
    ("reward", [-3.0] * LONG),
    ("ratio_max", [3.0] * LONG),
    ("ratio_max", [1.0] * 30 + [1e6] + [1.0] * 30),
    ("response_truncated", [0.9] + [0.1] * LONG),
]


@pytest.mark.parametrize(("name", "curve", "kind", "text"), SICK)
@pytest.mark.parametrize("seed", range(3))
def test_a_curve_that_goes_wrong_rings_once(name, curve, kind, text, seed):
    plain = rings(name, curve)
    assert [(k, t.partition(", ")[2][: len(text)]) for _, k, t in plain] == [(kind, text)]
    [(step, _, said)] = plain
    assert said.startswith(f"grpo: step {step}, ") and "Usual causes: " in said and " Try: " in said
    assert [k for _, k, _ in rings(name, noisy(curve, seed=seed))] == [kind]


@pytest.mark.parametrize(("name", "curve"), WELL)
@pytest.mark.parametrize("seed", range(3))
def test_a_curve_of_a_run_that_goes_well_does_not_ring(name, curve, seed):
    assert rings(name, curve) == [] and rings(name, noisy(curve, seed=seed)) == []


def test_every_rule_has_a_curve_that_rings_it():
    assert {rule.metric for rule in RULES} == {name.rpartition("/")[2] for name, *_ in SICK}


def test_no_number_is_no_curve():
    assert rings("ess", [None, float("nan"), "text", True][:3] * LONG) == []


@pytest.mark.parametrize("seed", range(5))
def test_luck_alone_is_no_fall_of_the_reward(seed):
    draw = random.Random(seed)
    luck = [sum(draw.random() < 0.3 for _ in range(64)) / 64 for _ in range(2000)]
    assert rings("reward", luck) == []


def recorded(page):
    """The reward curves of the runs that a page of the documentation shows."""
    runs = json.loads((DOCS / page).read_text())["runs"]
    return [run for run in runs if run.get("number", "reward") == "reward"]


def test_no_run_that_learned_has_a_reward_that_fell():
    runs = recorded("learning.json")
    assert len(runs) > 50 and all(run["reached"] for run in runs)
    assert [(run["title"], run["seed"]) for run in runs if rings("reward", run["curve"])] == []


def test_of_runs_on_stale_rows_those_without_a_correction_are_told_of():
    told = [run["loss"] for run in recorded("stale_100_steps.json") if rings("reward", run["curve"])]
    assert told == ["uncorrected"] * 4, "of five; one was well again soon"


def test_what_two_rules_see_is_told_once():
    health = Health()
    lines = [{"program": "grpo", "step": i, "response_truncated": 0.6, "truncated": 0.5} for i in range(15)]
    told = [text for i, line in enumerate(lines) for _, text in health.look("grpo", line, Step(i), [])]
    assert len(told) == 1 and ", truncated is 50%" in told[0]
    left_out = [{**line, "truncated": 0.0} for line in lines]  # an update of those alone that ended
    health = Health()
    told = [text for i, line in enumerate(left_out) for _, text in health.look("grpo", line, Step(i), [])]
    assert len(told) == 1 and ", response_truncated is 60%" in told[0]


def test_it_rings_again_when_it_was_well_for_a_window_in_between():
    assert len(rings("ess", [0.1] * 12 + [0.9] * 8 + [0.1] * 12)) == 1
    assert len(rings("ess", [0.1] * 12 + [0.9] * (2 * WINDOW) + [0.1] * 12)) == 2


def test_alarms_come_before_hints():
    line = {"program": "grpo", "truncated": 0.9, "silent_groups": 0.9, "ess": 0.1, "rollout_kl": 1.0}
    health = Health()
    told = [list(health.look("grpo", {**line, "step": i}, Step(i), [])) for i in range(WINDOW)]
    assert not any(told[:-1])
    assert [kind for kind, _ in told[-1]] == ["alarm", "alarm", "hint", "hint"]


def test_a_run_that_goes_on_remembers_its_first_steps_and_what_was_told():
    curve = [1.5] * 15 + [0.02] * 20
    whole = rings("entropy", curve)
    [(step, *_)] = whole
    for cut in (step, step + 1):
        health = Health()
        health.rewind([{"program": "grpo", "step": i, "entropy": v} for i, v in enumerate(curve[:cut])])
        assert rings("entropy", curve[cut:], health, first=cut) == (whole if cut == step else [])


@pytest.mark.parametrize("name", ["entropy", "reward"])
def test_what_it_has_seen_is_kept_as_json(name):
    curve = slope(0.2, 0.9, 30) + slope(0.9, 0.02, 30) + [0.02] * 15
    whole = rings(name, curve)
    assert whole
    for cut in (0, 5, 35, 50):
        health = Health()
        before = rings(name, curve[:cut], health)
        later = Health()
        later.restore(json.loads(json.dumps(health.state(), allow_nan=False)))
        assert before + rings(name, curve[cut:], later, first=cut) == whole


def test_the_state_of_an_older_flowrl_is_read():
    health = Health()
    health.restore([["grpo", "reward", [0.5] * 10, [0.5] * 10, 10, []]])
    assert [kind for _, kind, _ in rings("reward", [0.5] * 10 + [0.0] * 15, health, first=10)] == ["alarm"]


def test_a_run_tells_and_records_it_once_also_after_a_resume(tmp_path, capsys):
    numbers = module_of("small_flow").Numbers
    flow = fl.Flow("sick")

    @flow.program
    def sick(steps: int = 12):
        for step, _ in flow.steps(numbers(), steps):
            flow.log(step, ess=0.05, truncated=0.5)

    flow.run(out=tmp_path / "run", save_models=False)
    flow.run(out=tmp_path / "run", resume=True, steps=20, save_models=False)
    [alarm], [hint] = events(tmp_path / "run", "alarm"), events(tmp_path / "run", "hint")
    assert alarm["text"].startswith("sick: step 9, ess is 0.05") and hint["text"].startswith("sick: step 9, truncated")
    assert "few tokens carry most of the weight" in capsys.readouterr().err
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 20
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"


def test_the_median_that_a_gradient_is_compared_with_is_the_one_that_is_told():
    """Steps without a signal, whose norm is 0, are no steps to compare with."""
    norms = [0.0, 0.004, 0.004, 0.0, 0.004, 0.0, 0.004, 0.004, 0.0, 0.005]
    assert rings("grad_norm", [*norms, 0.03]) == [], "not ten times 0.004"
    [(step, kind, text)] = rings("grad_norm", [*norms, 0.05])
    assert (step, kind) == (10, "alarm")
    assert "grad_norm is 0.05, more than ten times the median of the steps before, 0.004." in text
    assert rings("grad_norm", [0.0] * 8 + [0.004, 0.004, 0.5]) == [], "two steps with a signal say nothing yet"


def test_responses_that_become_shorter_are_given_no_advice_that_shortens_them():
    [(_, _, longer)] = rings("response_length", slope(100, 900))
    [(_, _, shorter)] = rings("response_length", slope(300, 10))
    assert "; a penalty for length" in longer.partition("Try:")[2]
    assert "a smaller penalty for length, or none" in shorter.partition("Try:")[2]
    assert "such as a penalty for length" in shorter.partition("Try:")[0]
