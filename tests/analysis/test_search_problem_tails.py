"""The search where rows have lengths of their own: steps in flight fill the engines, and the simulator decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.analysis.row_lengths import Tokens
from flowrl.analysis.search_problem import find_plan
from flowrl.cli.arguments.script import load_script
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

GRPO = str(Path(__file__).parents[2] / "algorithms" / "grpo.py")
CLUSTER = Cluster.of("h100-80:4x8")
TRAIN = Place("train", Mesh.of("fsdp=16"), "fsdp2")
BY_HAND = Plan(
    {
        "train": Pool("train", devices=tuple(range(16))),
        "rollout": Pool("rollout", devices=tuple(range(16, 32))),
        "cpu": Pool("cpu", processes=32),
    },
    {
        "actor": {"train": TRAIN, "generate": Place("rollout", Mesh.of("dp=2,tp=8"), "vllm")},
        "ref": {"train": TRAIN},
        "reward": {"train": Place("cpu")},
    },
    cluster=CLUSTER,
    pipeline=Pipeline(staleness=4),
)


@pytest.fixture(scope="module")
def asked():
    flow = load_script(GRPO)
    for handle in flow.handles:
        if handle.arguments.get("model") is not None:
            flow.use_model(handle.name, "qwen3-8b")
    tokens = Tokens(512.0, "lognormal", (2000.0, 1.0, 16384.0))
    study = flow.study(Plan(cluster=CLUSTER), "grpo", tokens=tokens, steps=20, prompts_per_step=64)
    return study, find_plan(study, flow.graph("grpo", steps=20, prompts_per_step=64), CLUSTER, (4,))


def test_a_plan_made_by_hand_is_not_faster(asked):
    study, found = asked
    assert found.step_seconds <= study.under(BY_HAND).simulate().step_seconds * (1 + 1e-9)


def test_the_step_is_that_of_the_simulator_and_its_bottleneck_no_longer(asked):
    study, found = asked
    assert found.step_seconds == pytest.approx(study.under(found.plan).simulate().step_seconds, rel=1e-9)
    slow = found.best.bottleneck
    assert slow.title == "actor.generate" and 0.5 * found.step_seconds < slow.seconds <= found.step_seconds


def test_a_bound_is_told_and_holds(asked):
    _, found = asked
    assert found.bound is not None and 0 < found.bound <= found.step_seconds
    assert found.gap == pytest.approx(found.step_seconds / found.bound - 1)
