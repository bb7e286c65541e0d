"""``flowrl eval --plan FILE --engine NAME``: which engine opens the policy, and what is refused before it does."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from flowrl.cli.arguments.policy_engine import find_engine
from flowrl.errors import PlanError, UsageError
from flowrl.placement.backends import BACKENDS, Backend, Option

PLAN = """\
pools: {train: {device: cpu}, rollout: {device: cpu}, many: {processes: 4}}
place:
  actor:
    train: {pool: train}
    generate: {pool: rollout, engine: fake, rows: 8}
"""


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    options = (Option("rows", 4, "rows", 1), Option("draft", 0, "of no run", run=False))
    row = Backend("fake", "a table", module=__name__, generates=True, options=options)
    monkeypatch.setitem(BACKENDS, "fake", row)


@pytest.fixture
def plan(tmp_path):
    def write(text=PLAN, **changes):
        for old, new in changes.items():
            text = text.replace(old, new)
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        return str(path)

    return write


def found(*said):
    spec = find_engine(*said)
    return spec.backend, spec.device, dict(spec.options)


def test_without_a_plan_it_is_the_reference_engine_or_the_one_that_is_named():
    assert found(None, None) == ("hf", "auto", {})
    assert found(None, "fake") == ("fake", "auto", {})


def test_it_is_where_a_plan_has_its_worker_generate(plan):
    assert found(plan(), None) == ("fake", "cpu", {"rows": 8})
    assert found(plan(**{", rows: 8": ""}), "hf")[0] == "hf", "--engine takes the place of its engine"
    assert found("one_process", None) == ("hf", "auto", {})


def test_of_several_workers_it_is_the_place_of_the_policy(plan):
    two = PLAN + "  judge:\n    generate: {pool: rollout}\n"
    with pytest.raises(PlanError, match="actor and judge generate, and one policy is evaluated") as info:
        find_engine(plan(two), None)
    assert info.value.at.line == 7 and "'policy'" in info.value.fix
    assert found(plan(two + "  policy: {pool: train}\n"), None) == ("hf", "cpu", {})


@pytest.mark.parametrize(
    ("pools", "places", "said"),
    [
        ("cpu: {processes: 1}", "reward: {pool: cpu}", "has no worker generate"),
        ("many: {processes: 4}", "reward: {pool: many}", "has no worker generate"),
        (
            "cpu: {device: cpu}",
            "judge: {generate: {pool: cpu, engine: fake}}",
            "has judge alone generate, which does not train",
        ),
    ],
)
def test_a_place_for_no_use_may_be_that_of_the_policy_or_not(plan, pools, places, said):
    text = f"pools: {{{pools}, gpu: {{device: auto}}}}\nplace:\n  actor: {{pool: gpu}}\n  {places}\n"
    with pytest.raises(PlanError, match=f"the plan {said}: it does not say where the policy is") as info:
        find_engine(plan(text), "fake")
    assert info.value.at.line == 3 and info.value.fix == "Add policy: {generate: {pool: ...}}."
    assert found(plan(f"{text}  policy: {{generate: {{pool: gpu, engine: fake}}}}\n"), None)[0] == "fake"
    assert found("one_process", None) == ("hf", "auto", {}), "it places nothing"


@pytest.mark.parametrize(
    ("changes", "engine", "said", "line"),
    [
        ({"rows: 8": "rowz: 8"}, None, "rowz", 5),
        ({}, "hf", "rows", 5),
        ({"rows: 8": "draft: 2"}, None, "fake has draft in no run yet", 5),
        (
            {"pool: rollout": "pool: many"},
            None,
            r"actor.generate: flowrl eval opens one engine, and pool 'many' has 4 ranks",
            5,
        ),
        ({"rollout: {device: cpu}": "rollout: {device: 'cuda:77'}"}, None, "pool 'rollout': .*cuda:77", 1),
    ],
)
def test_what_it_cannot_have_is_refused_with_the_line(plan, changes, engine, said, line):
    with pytest.raises(PlanError, match=said) as info:
        find_engine(plan(**changes), engine)
    assert info.value.at.line == line and info.value.fix


def test_an_engine_that_does_not_generate_is_refused():
    with pytest.raises(UsageError, match="--engine fsdp2 is no engine that generates") as info:
        find_engine(None, "fsdp2")
    assert all(name in info.value.have for name in ("hf", "vllm", "sglang")) and "megatron" not in info.value.have
    with pytest.raises(UsageError, match="--engine vlm") as info:
        find_engine(None, "vlm")
    assert info.value.fix == "Write --engine vllm."
    with pytest.raises(UsageError, match="there is no plan nowhere.yaml"):
        find_engine("nowhere.yaml", None)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_that_is_not_installed_is_told_before_anything_is_opened():
    with pytest.raises(PlanError, match="The engine 'vllm' needs vLLM, which is not installed"):
        find_engine(None, "vllm")
