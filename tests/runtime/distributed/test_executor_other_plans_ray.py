"""A run that goes on under another plan each time, on Ray: other layouts, backends, numbers of ranks and staleness."""

from __future__ import annotations

import json

import pytest
from flows import module_of

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

pytestmark = pytest.mark.nightly
SHOWN = {"quiet": True, "trajectories": 4, "trajectories_every": 1}


def plan(mesh: str, backend: str, generate: int, **pipeline) -> Plan:
    """The actor on a mesh of ranks, and on so many replicas that generate; without any it does both there."""
    train = Mesh.of(mesh)
    pools = {"train": Pool("train", devices=tuple(range(train.size))), "cpu": Pool("cpu", processes=1)}
    place: dict = {"actor": Place("train", train, backend), "reward": Place("cpu"), "ref": Place("train")}
    if generate:
        pools["rollout"] = Pool("rollout", devices=tuple(range(train.size, train.size + generate)))
        place["actor"] = {"train": place["actor"], "generate": Place("rollout")}
    return Plan(pools, place, cluster=Cluster.of(f"cpu:1x{train.size + generate}"), pipeline=Pipeline(**pipeline))


def go_on(out, plans):
    """Run a step under each plan; None is one process without one."""
    flow = module_of("stale_flow").flow
    for number, here in enumerate(plans):
        how = {"runtime": "ray", "plan": here} if here else {}
        flow.run("stale", out=out, resume=number > 0, parameters={"stale": {"steps": number + 1}}, **SHOWN, **how)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_ledger(out, steps):
    rows = json.loads((out / "run.json").read_text())["ledger"]["stale"]["rows"]
    assert rows == {"admitted": 12 * steps, "trained": 12 * steps, "dropped": {}, "live": 0}


def test_layouts_and_backends(tmp_path):
    """From hf to fsdp2 and megatron and back, on more and fewer ranks: the tokens and losses of one process."""
    pytest.importorskip("megatron.core", reason="the extra [megatron] is not installed")
    plans = [None, plan("fsdp=2", "fsdp2", 3), plan("tp=2", "megatron", 1), plan("fsdp=4", "fsdp2", 0), None]
    go_on(tmp_path / "hops", plans)
    go_on(tmp_path / "whole", [None] * len(plans))
    hops, whole = (lines(tmp_path / name / "trajectories.jsonl") for name in ("hops", "whole"))
    assert [row["response_ids"] for row in hops] == [row["response_ids"] for row in whole]
    for found, wanted in zip(*(lines(tmp_path / name / "metrics.jsonl") for name in ("hops", "whole")), strict=True):
        assert found["reward"] == wanted["reward"] and abs(found["loss"] - wanted["loss"]) < 1e-4
    check_ledger(tmp_path / "hops", len(plans))


def test_staleness_with_layouts(tmp_path):
    pytest.importorskip("megatron.core", reason="the extra [megatron] is not installed")
    ahead = {"staleness": 1, "publish": "interrupt"}
    plans = [plan("fsdp=2", "fsdp2", 1), plan("tp=2", "megatron", 2, **ahead), plan("fsdp=2", "fsdp2", 1, staleness=2)]
    go_on(tmp_path, [*plans, None])
    check_ledger(tmp_path, 4)
