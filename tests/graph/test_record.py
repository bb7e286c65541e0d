"""The graph as a record: JSON in its documented form, networkx and back, nothing lost."""

import json
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl import rl
from flowrl.graph.record import EDGE_KINDS, NODE_KINDS, Edge, Graph, Node, PoolInfo, WorkerInfo

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


class Game(fl.Env):
    """A game."""


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="a/model")
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.RewardModel, model="a/judge")
game = flow.worker(Game)


@flow.program
def grpo(steps: int = 10):
    baseline = 0.0
    for step, batch in flow.steps(prompts, steps):
        if step % 50 == 0:
            played = game.rollout(batch, policy=actor, n=2)
            flow.log(step, played=played.rewards.mean())
        batch = ref.logprobs(reward.score(actor.generate(batch, n=2)))
        baseline = 0.9 * baseline + 0.1 * batch.rewards.mean()
        batch = rl.group_advantages(batch.filter(batch.rewards > baseline))
        if batch.rewards.mean() > 0:
            flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=0.1)))


text = st.text(max_size=6)
texts = st.lists(text, max_size=3).map(tuple)
maybe = st.none() | text
amounts = st.none() | st.floats(0, 1e15)
where = {"pool": maybe, "mesh": maybe, "layout": maybe}
nodes = st.builds(
    Node,
    text,
    text,
    text,
    text,
    st.integers(0, 99),
    text,
    texts,
    texts,
    st.dictionaries(text, text, max_size=2),
    kind=st.sampled_from(NODE_KINDS),
    seconds=amounts,
    share=amounts,
    **where,
)
edges = st.builds(
    Edge,
    text,
    text,
    st.sampled_from(EDGE_KINDS),
    texts,
    st.none() | st.integers(0, 9),
    maybe,
    amounts,
    maybe,
    maybe,
)
pools = st.builds(PoolInfo, text, text, text, text, st.integers(0, 99), amounts, amounts)
graphs = st.builds(
    Graph,
    text,
    st.lists(nodes, max_size=3).map(tuple),
    st.lists(edges, max_size=3).map(tuple),
    st.lists(st.builds(WorkerInfo, text, text, text, st.integers(0, 99), text, **where), max_size=2).map(tuple),
    texts,
    st.integers(0, 9),
    st.booleans(),
    st.lists(pools, max_size=2).map(tuple),
    text,
)


@given(graphs)
@settings(max_examples=50)
def test_json_and_back(graph):
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


@given(graphs, st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=50)
def test_what_no_plan_fills_is_left_out_and_nothing_is_lost(graph, empty):
    """Nodes, edges, workers or pools without a plan, in any mixture."""
    bare = {
        "nodes": tuple(Node(n.id, n.worker, n.op) for n in graph.nodes),
        "edges": tuple(Edge(e.src, e.dst, e.kind) for e in graph.edges),
        "workers": tuple(WorkerInfo(w.name, w.kind) for w in graph.workers),
        "pools": (),
    }
    graph = replace(graph, **{name: parts for (name, parts), no in zip(bare.items(), empty, strict=True) if no})
    record = graph.to_json()
    assert Graph.from_json(json.loads(json.dumps(record))) == graph
    if all(empty):
        assert not {"pool", "mesh", "layout", "seconds", "share"} & {key for n in record["nodes"] for key in n}
        assert not {"bytes", "transport", "version"} & {key for e in record["edges"] for key in e}
        assert "pools" not in record


@given(graphs)
@settings(max_examples=50)
def test_networkx_keeps_what_a_plan_says(graph):
    nodes = tuple(replace(node, id=f"a.{number}") for number, node in enumerate(graph.nodes))
    graph = replace(graph, nodes=nodes, edges=())
    assert Graph.from_networkx(graph.to_networkx()) == graph


def test_with_pools_every_part_has_the_keys_of_a_plan():
    graph = flow.graph()
    record = replace(graph, pools=(PoolInfo("train", devices="0-7", kind="h100-80", count=8),)).to_json()
    for node in record["nodes"]:
        assert {"kind", "pool", "mesh", "layout", "seconds", "share"} <= set(node) and node["pool"] is None
    for edge in record["edges"]:
        assert {"bytes", "transport", "version"} <= set(edge)
    assert record["pools"] == [
        {
            "name": "train",
            "describes": "",
            "devices": "0-7",
            "kind": "h100-80",
            "count": 8,
            "busy": None,
            "seconds": None,
        }
    ]


def test_the_record_has_the_documented_form():
    record = flow.graph().to_json()
    assert list(record) == [
        "schema",
        "program",
        "nodes",
        "edges",
        "workers",
        "sources",
        "source_fields",
        "paths",
        "capped",
    ]
    assert (record["schema"], record["program"], record["capped"]) == (1, "grpo", False)
    for node in record["nodes"]:
        assert {"id", "worker", "op", "file", "line", "reads", "adds", "updates", "rows"} <= set(node)
        assert isinstance(node["line"], int) and node["id"].split("#")[0] == f"{node['worker']}.{node['op']}"
    for edge in record["edges"]:
        assert set(edge) == {"src", "dst", "kind", "fields", "lag", "branch", "made", "repeats"}
        assert edge["kind"] in EDGE_KINDS
        assert (edge["lag"] is not None) == (edge["kind"] == "weights")
    assert {e["kind"] for e in record["edges"]} == set(EDGE_KINDS)
    assert {n["worker"] for n in record["nodes"]} == {"actor", "ref", "reward", "game", "rl", "batch"}
    assert [w["name"] for w in record["workers"]] == ["actor", "ref", "reward", "game"]
    assert not record["workers"][0]["file"].startswith("/"), "files are named as the nodes name them"


def test_edges_join_nodes_and_serving_workers():
    graph = flow.graph()
    ids = {n.id for n in graph.nodes}
    for edge in graph.edges:
        assert edge.dst in ids
        drawn = edge.kind in ("data", "carried") and edge.src in {s.id for s in graph.sources}
        assert edge.src in ids or drawn or (edge.kind == "serves" and edge.src in {w.name for w in graph.workers})


def test_a_record_that_knew_one_source_for_all_is_read():
    record = flow.graph().to_json()
    drawn = {(e["dst"], *e["fields"]) for e in record["edges"] if e["src"] == "data.prompts"}
    before = {k: v for k, v in record.items() if k != "sources"}
    before["edges"] = [e for e in record["edges"] if e["src"] != "data.prompts"]
    graph = Graph.from_json(before)
    assert [(s.id, s.fields) for s in graph.sources] == [("data.source", tuple(record["source_fields"]))]
    found = {(e.dst, *e.fields) for e in graph.edges if e.src == "data.source"}
    assert {dst for dst, *_ in found} == {dst for dst, *_ in drawn}


def test_a_record_of_another_schema_is_refused():
    with pytest.raises(ValueError, match="schema 99"):
        Graph.from_json({**flow.graph().to_json(), "schema": 99})


def test_networkx_and_back():
    graph = flow.graph()
    there = graph.to_networkx()
    assert isinstance(there, nx.MultiDiGraph)
    assert "actor" in there and there.has_edge("actor", "game.rollout")
    assert Graph.from_networkx(there).to_json() == graph.to_json()


def test_networkx_answers_questions_about_a_graph():
    there = flow.graph().to_networkx()
    data = nx.MultiDiGraph((s, d) for s, d, e in there.edges(data="edge") if e.kind == "data")
    assert nx.is_directed_acyclic_graph(data)
    assert nx.has_path(data, "reward.score", "actor.update")
    assert not nx.has_path(data, "actor.update", "reward.score")


def test_a_changed_networkx_graph_is_read_with_its_changes():
    there = flow.graph().to_networkx()
    there.remove_node("game.rollout")
    changed = Graph.from_networkx(there)
    assert "game.rollout" not in {n.id for n in changed.nodes}
    assert changed.edges_of("serves") == ()


def test_nodes_and_edges_are_found():
    graph = flow.graph()
    assert graph.node("reward.score").op == "score"
    with pytest.raises(KeyError):
        graph.node("reward.scores")
    assert [e.dst for e in graph.edges_of("serves")] == ["game.rollout"]
