"""Costs from a file: what they mean, and each mistake with its line and the nearest word."""

from pathlib import Path

import pytest

from flowrl.errors import PlanError, UsageError
from flowrl.placement.cost.calibrated_costs import Calibrated, Fit
from flowrl.placement.cost.cost_model import Costs, Roofline, load_costs
from flowrl.placement.cost.given_costs import GivenCosts
from flowrl.placement.cost.work import Role, Work, Workload

GOOD = "# seconds\nactor.generate: 6.0\nactor.generate#2: 2\nactor.publish: 0.5\nreward.score: 1e-1\n"
ACTOR = Role("actor")


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text):
        (tmp_path / "costs.yaml").write_text(text)
        return load_costs("costs.yaml")

    return read


def call(node, kind="generate", **more):
    return Work(node, node.partition("#")[0], kind, ACTOR, Workload(8, 10, 10), **more)


def test_costs_are_given_by_title_and_a_node_goes_first(load):
    costs = load(GOOD)
    assert isinstance(costs, GivenCosts) and costs.source == "given: costs.yaml"
    assert [costs.seconds(call(n)) for n in ("actor.generate", "actor.generate#2", "actor.generate#3")] == [6, 2, 6]
    assert costs.seconds(call("reward.score", "external")) == 0.1
    assert load("{actor.generate: 6.0, actor.publish: 0.5}").seconds(call("actor.generate")) == 6


def test_what_is_not_listed_costs_nothing(load):
    assert load(GOOD).seconds(call("actor.update", "train")) == 0
    assert load("").seconds(call("actor.update", "train")) == 0


def test_chunks_divide_a_cost(load):
    costs = load(GOOD)
    assert sum(costs.seconds(call("actor.generate", share=0.25)) for _ in range(4)) == 6


def test_a_publish_costs_where_it_crosses_pools(load):
    costs = load(GOOD)
    assert costs.seconds(call("actor.publish", "publish", pool="rollout", source_pool="train")) == 0.5
    assert costs.seconds(call("actor.publish", "publish", pool="train", source_pool="train")) == 0
    assert costs.seconds(call("actor.publish", "publish")) == 0


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        ("a.b: 1\nactor.update: -1\n", 2, "'actor.update': '-1' is no number of seconds.", "0 or more"),
        ("actor.update: fast\n", 1, "'actor.update': 'fast' is no number of seconds.", "as in actor.update: 6.0."),
        ("actor.update: .nan\n", 1, "'actor.update': '.nan' is no number of seconds.", "0 or more"),
        ("actor.update: 1e999\n", 1, "'actor.update': '1e999' is no number of seconds.", "0 or more"),
        ("actor.update: 1e308\n", 1, "'actor.update': 1e308 seconds are more than 30 years.", "0 or more"),
        ("actor.update:\n", 1, "'actor.update': '' is no number of seconds.", "0 or more"),
        ("actor.update: [1]\n", 1, "'actor.update' takes a single value.", "Write a number, as in 6.0."),
        ("a.b: 1\na.b: 2\n", 2, "a file of costs has 'a.b' twice.", "Take one out."),
        ("- a.b\n", 1, "a file of costs is a mapping of names.", "Write actor.generate: 6.0, one line for each op."),
        ("a.b: {\n", 2, "the costs are no YAML:", None),
        ("calibrated: r\nstep: {base: 0}\nop: {}\n", 3, "calibrated costs have no 'op'.", "Did you mean 'ops'?"),
        ("calibrated: r\nstep: {base: 0}\n", 0, "calibrated costs need 'ops'.", "flowrl calibrate RUN."),
        ("calibrated: r\nstep: {base: 0}\nops:\n  a.b: {bass: 1}\n", 4, "'a.b' has no 'bass'.", "Did you mean 'base'?"),
        ("calibrated: r\nstep: {base: 0}\nops:\n  a.b: {error: 1}\n", 4, "'a.b' has no 'base'.", "Write {base: 6.0}"),
        ("calibrated: r\nstep: {base: 0}\nops:\n  a.b: {base: -1}\n", 4, "'base': '-1' is no number", "0 or more"),
        ("calibrated: r\nstep: {base: 0}\nops:\n  a.b: 1\n", 4, "'a.b' is a mapping of names.", "Write"),
    ],
)
def test_mistakes_are_named_by_line(load, text, line, what, fix):
    with pytest.raises(PlanError) as caught:
        load(text)
    error = caught.value
    assert error.what.startswith(what), error.what
    assert error.at is not None and (error.at.file, error.at.line) == ("costs.yaml", line)
    assert fix is None or fix in (error.fix or "")


def test_a_name_that_the_program_does_not_call(load):
    costs = load("actor.generate: 6\nactor.updaet: 3\n")
    with pytest.raises(PlanError) as caught:
        costs.check_names(["actor.generate", "actor.update", "reward.score"])
    assert str(caught.value) == (
        "costs are given for 'actor.updaet', which this program does not call.\n"
        "  at   costs.yaml:2   actor.updaet: 3\n"
        "  have actor.generate, actor.update, reward.score\n"
        "  fix  Did you mean 'actor.update'?"
    )
    costs.check_names(["actor.generate", "actor.updaet"])


def test_a_file_that_is_not_there(load):
    load(GOOD)
    with pytest.raises(UsageError, match=r"there is no file cost\.yaml\.") as caught:
        load_costs("cost.yaml")
    assert caught.value.fix == "Did you mean costs.yaml?"
    Path("p_neg.yaml").write_text("{}")
    with pytest.raises(UsageError) as caught:
        load_costs("none.yaml")
    assert caught.value.fix == "Name a YAML file."
    with pytest.raises(PlanError, match="cannot be read"):
        load_costs(".")


def test_every_kind_of_costs_is_costs():
    kinds: list[Costs] = [Roofline(), GivenCosts({}), Calibrated("r", {}, Fit(0.0))]
    assert [c.source for c in kinds] == ["roofline", "given", "calibrated: r (error unknown)"]
    assert all(c.seconds(call("batch.filter", "none")) == 0 for c in kinds)
