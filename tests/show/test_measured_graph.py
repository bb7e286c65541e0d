"""The graph of a run has the versions and the lag that were measured on the edges along which weights go."""

from __future__ import annotations

from pathlib import Path

from show_runs import lines

from flowrl.graph.record import Edge, Graph, Node, WorkerInfo
from flowrl.show.measured_graph import newest_versions, with_versions

NODES = (Node("actor.generate", "actor", "generate"), Node("actor.update", "actor", "update"))
EDGES = (
    Edge("actor.update", "actor.generate", "weights", lag=1, version="v(k-1)"),
    Edge("actor.generate", "actor.update", "data", ("tokens",)),
)
GRAPH = Graph("grpo", NODES, EDGES, (WorkerInfo("actor", "Actor"),), ())


def test_weights_have_the_version_that_was_seen_last_and_the_lag(tmp_path: Path) -> None:
    for step in range(3):
        line = {"program": "grpo", "step": step, "node": "actor.generate", "versions": {"actor": [step, step + 1]}}
        lines(tmp_path, "digests", line, {**line, "program": "other", "versions": {"actor": [99]}})
    versions = newest_versions(tmp_path / "digests.jsonl", "grpo")
    assert versions == {"actor.generate": {"actor": [2, 3]}}
    weights, data = with_versions(GRAPH, versions, {0: 5, 1: 2, 7: 0}).edges
    assert (weights.version, weights.lag) == ("v3, lag 0 to 1", None) and data == EDGES[1]
    assert with_versions(GRAPH, versions, {2: 1}).edges[0].version == "v3, lag 2"
    assert with_versions(GRAPH, versions, {}).edges[0].version == "v3"
    assert with_versions(GRAPH, {}, {0: 5}) == GRAPH, "nothing was measured: it is as the plan says"
