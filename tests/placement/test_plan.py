"""Plans: what a file means, and each of its mistakes with file, line and the nearest right word."""

import pytest

from flowrl.errors import PlanError
from flowrl.placement.plan import Place, Plan

GOOD = """\
# two pools of this process
pools:
  gpu: {device: "cuda:0"}
  cpu: {device: cpu}
  spare: {}
place:
  actor:
    pool: gpu
    backend: hf
  reward: {pool: cpu}
  ref: {backend: hf}
pipeline: {staleness: 0}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text):
        (tmp_path / "plan.yaml").write_text(text)
        return Plan.load("plan.yaml")

    return read


def test_a_plan_says_where_each_worker_runs(load):
    plan = load(GOOD)
    assert plan.pools == {"gpu": "cuda:0", "cpu": "cpu", "spare": "auto"}
    assert (plan.pool("actor"), plan.device("actor"), plan.backend("actor")) == ("gpu", "cuda:0", "hf")
    assert (plan.pool("reward"), plan.device("reward")) == ("cpu", "cpu")
    assert plan.pool("ref") == plan.pool("critic") == "gpu", "the first pool takes whoever is not placed"
    assert plan.backend("critic") == "hf"


def test_no_plan_is_one_pool():
    plan = Plan.one_process()
    assert plan.pools == {"main": "auto"} and plan.pool("anybody") == "main" and plan.device("anybody") == "auto"


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n", "place: {}\n"])
def test_an_empty_plan_is_no_plan(load, text):
    assert load(text).to_json() == Plan.one_process().to_json()


def test_the_record_says_all_of_it(load):
    assert load("pools: {a: {device: cpu}}\nplace: {actor: {pool: a}}\n").to_json() == {
        "pools": {"a": {"device": "cpu"}},
        "place": {"actor": {"pool": "a", "backend": "hf"}},
    }


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        ("pool:\n  main: {}\n", 1, "a plan has no 'pool'.", "Did you mean 'pools'?"),
        ("pools: {main: {}}\nmesh: 4\n", 2, "a plan has no 'mesh'.", "Take it out;"),
        ("pools:\n  main: {devise: cpu}\n", 2, "pool 'main' has no 'devise'.", "Did you mean 'device'?"),
        (
            "pools:\n  main:\n    device: gpu\n",
            3,
            "pool 'main': 'gpu' is no device.",
            "Write auto, cpu, cuda, or cuda:1.",
        ),
        ("pools:\n  main: {device: [0, 1]}\n", 2, "a single word is expected here.", None),
        ("pools: {}\n", 1, "a plan needs a pool.", "Write main: {device: auto}."),
        ("pools: [main]\n", 1, "pools is a mapping of names.", "Write key: value lines"),
        ("- pools\n", 1, "a plan is a mapping of names.", "Write key: value lines"),
        ("pools:\n  a: {}\n  a: {}\n", 3, "pools has 'a' twice.", "Take one out."),
        ("pools: {a: {}}\npools: {b: {}}\n", 2, "a plan has 'pools' twice.", "Take one out."),
        (
            "pools: {train: {}}\nplace:\n  actor: {pool: trian}\n",
            3,
            "'actor' is placed in pool 'trian', which the plan does not have.",
            "Did you mean 'train'?",
        ),
        ("place:\n  actor:\n    pol: main\n", 3, "the place of 'actor' has no 'pol'.", "Did you mean 'pool'?"),
        ("place:\n  actor: main\n", 2, "the place of 'actor' is a mapping of names.", "Write key: value lines"),
        ("pipeline:\n  stalenes: 0\n", 2, "pipeline has no 'stalenes'.", "Did you mean 'staleness'?"),
        ("pipeline:\n  staleness: 2\n", 2, "this version runs steps one after another", "Write staleness: 0."),
        ("pools:\n  main: {device: cpu\n", 3, "the plan is no YAML:", None),
    ],
)
def test_each_mistake_has_its_line(load, text, line, what, fix):
    with pytest.raises(PlanError) as found:
        load(text)
    error = found.value
    assert error.what.startswith(what)
    assert (error.at.file, error.at.line) == ("plan.yaml", line)
    assert error.fix is None if fix is None else error.fix.startswith(fix)
    if line <= len(text.splitlines()):
        assert error.at.text == text.splitlines()[line - 1].strip()


def test_a_place_of_nobody(load):
    plan = load("place:\n  actor: {pool: main}\n  rewrad: {pool: main}\n")
    plan.check_workers(["actor", "rewrad"], ["hf"])
    with pytest.raises(PlanError) as found:
        plan.check_workers(["actor", "reward"], ["hf"])
    assert found.value.report() == (
        "PlanError: the plan places 'rewrad', which is no worker of this flow.\n"
        "  at   plan.yaml:3   rewrad: {pool: main}\n"
        "  have actor, reward\n"
        "  fix  Did you mean 'reward'?"
    )


def test_a_backend_that_is_not_there(load):
    plan = load("place:\n  actor:\n    backend: hff\n")
    with pytest.raises(PlanError) as found:
        plan.check_workers(["actor"], ["hf", "vllm"])
    assert found.value.what == "'actor' is placed with backend 'hff', which is not there."
    assert (found.value.have, found.value.fix) == ("hf, vllm", "Did you mean 'hf'?")
    assert found.value.at.line == 3


def test_a_file_that_is_not_there(tmp_path):
    (tmp_path / "split.yaml").write_text(GOOD)
    with pytest.raises(PlanError) as found:
        Plan.load(tmp_path / "splt.yaml")
    assert found.value.fix == f"Did you mean {tmp_path / 'split.yaml'}?"
    with pytest.raises(PlanError, match="there is no plan"):
        Plan.load(tmp_path / "nowhere" / "x.yaml")


def test_a_place_by_hand():
    plan = Plan({"a": "cpu", "b": "cuda:1"}, {"actor": Place("b")})
    assert plan.device("actor") == "cuda:1" and plan.device("reward") == "cpu"
