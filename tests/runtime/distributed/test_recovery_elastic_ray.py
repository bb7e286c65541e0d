"""Pools that have fewer ranks than the plan says, on Ray: a replica that is killed, and one whose node is gone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest
from flows import module_of

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

pytestmark = pytest.mark.nightly
HOW = {"quiet": True, "runtime": "ray", "trajectories": 8, "trajectories_every": 1}


def plan_of(ranks: int, least: int = 0, **pipeline) -> Plan:
    pools = {"train": Pool("train", processes=1), "rollout": Pool("rollout", processes=ranks, least=least)}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}}
    return Plan(pools, place, pipeline=Pipeline(**pipeline))


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def tokens(out):
    return {(line["step"], tuple(line["key"])): line["response_ids"] for line in read(out / "trajectories.jsonl")}


def when(steps, out, action):
    """Do something in a thread once so many steps are recorded."""

    def wait():
        until = time.monotonic() + 300
        while len(read(out / "metrics.jsonl")) < steps and time.monotonic() < until:
            time.sleep(0.05)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def kill_rank(out, rank):
    os.kill(json.loads((out / "ranks.json").read_text())[str(rank)]["pid"], signal.SIGKILL)


def test_a_replica_that_is_not_waited_for(tmp_path):
    """With ``restart: 0`` the run goes on at once; the rank that is left has the rows of both."""
    flow, parameters = module_of("stale_flow").flow, {"stale": {"steps": 6}}
    flow.run("stale", out=tmp_path / "whole", plan=plan_of(2), parameters=parameters, **HOW)
    out = tmp_path / "run"
    thread = when(2, out, lambda: kill_rank(out, 2))
    flow.run("stale", out=out, plan=plan_of(2, restart=0), parameters=parameters, **HOW)
    thread.join(10)
    kinds = [event["kind"] for event in read(out / "events.jsonl")]
    assert [kind for kind in kinds if kind in ("lost", "renewed", "resized", "recovered")] == ["lost", "resized"]
    assert tokens(out) == tokens(tmp_path / "whole")
    said = json.loads((out / "run.json").read_text())
    assert said["replicas"] == {"rollout": {"ranks": 1, "planned": 2}} and said["ranks"] == 2


@pytest.fixture
def nodes():
    """A Ray of two nodes on this machine: the first has room for two ranks, the second comes when it is asked for."""
    import ray
    from ray.cluster_utils import Cluster

    assert not ray.is_initialized()
    cluster = Cluster(
        initialize_head=True, shutdown_at_exit=False, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_ranks_that_split_an_engine_lie_on_one_node(nodes):
    """Two nodes with room for three ranks each, and two teams of two: Ray would put three of the four on the first."""
    import ray

    from flowrl.runtime.distributed.ray.cluster_room import ClusterRoom, PoolOfRanks

    nodes.add_node(num_cpus=3)
    nodes.add_node(num_cpus=3)
    ray.init(address=nodes.address, log_to_driver=False)

    pool = PoolOfRanks("rollout", (0, 1, 2, 3), team=2, near=True)
    room = ClusterRoom([pool], nodes.address)
    room.reserve(pool)
    at = [room.of(pool, place) for place in range(4)]
    node = [ray.util.placement_group_table(group)["bundles_to_node_id"][number] for group, number in at]
    room.release()
    assert node[0] == node[1] and node[2] == node[3]


def test_a_node_that_comes_and_one_that_is_gone(tmp_path, nodes):
    """A run begins with one replica; a node comes with room for another, and goes again: tokens are those of two."""
    flow, out = module_of("paced_flow").flow, tmp_path / "run"
    flow.run(out=tmp_path / "whole", **{**HOW, "runtime": "local"})
    plan = plan_of(2, least=1, restart=3)
    seen: list[str] = []

    def come_and_go():
        node = nodes.add_node(num_cpus=1)
        until = time.monotonic() + 200
        while not resized(out, "has all its ranks") and time.monotonic() < until:
            time.sleep(0.1)
        seen.append("came")
        nodes.remove_node(node, allow_graceful=False)

    thread = when(2, out, come_and_go)
    flow.run(out=out, plan=plan, address=nodes.address, **HOW)
    thread.join(10)
    assert seen == ["came"]
    said = [event["text"] for event in read(out / "events.jsonl") if event["kind"] == "resized"]
    assert said[0] == "pool 'rollout' begins with 1 of 2 ranks"
    assert said[1] == "pool 'rollout' has all its ranks: rank 3 has come"
    assert said[2] == "pool 'rollout' goes on with 1 rank: rank 3 could not be started again within 3 s"
    assert "recovered" not in [event["kind"] for event in read(out / "events.jsonl")]
    assert tokens(out) == tokens(tmp_path / "whole")


def resized(out, words):
    return any(event["kind"] == "resized" and words in event["text"] for event in read(out / "events.jsonl"))
