"""The formats in which a graph is shown: valid, complete, escaped, the same every time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from draw_samples import EVERY, PLACED, SAMPLES, WILD, drawn, once, with_class

from flowrl.errors import FlowError, UsageError
from flowrl.graph.draw import FORMATS, legend, render
from flowrl.graph.draw import plan_in_words as placed
from flowrl.graph.draw.layout.fonts import width
from flowrl.graph.draw.picture import draw, shorten, version_rule
from flowrl.graph.record import Edge, Graph, Node, WorkerInfo

# -- all formats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "graph", [SAMPLES["ppo"], SAMPLES["guess"], PLACED["ppo apart"]], ids=["ppo", "guess", "ppo apart"]
)
@pytest.mark.parametrize("format", FORMATS)
def test_same_graph_same_drawing(graph: Graph, format: str) -> None:
    assert once(graph, format) == render(Graph.from_json(json.loads(json.dumps(graph.to_json()))), format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "graph",
    [
        Graph("empty", (), ()),
        Graph("one", (Node("a.b", "a", "b"),), (), (WorkerInfo("a", "A"), WorkerInfo("idle", "B"))),
    ],
    ids=["empty", "one"],
)
def test_small_graphs(graph: Graph, format: str) -> None:
    assert graph.program in render(graph, format) or format == "mermaid"


def test_an_unknown_format_is_refused_with_the_near_one() -> None:
    with pytest.raises(UsageError, match="no graph format 'mermade'") as caught:
        render(SAMPLES["grpo"], "mermade")
    assert caught.value.fix == "Use --format mermaid."


def test_svg_without_pygraphviz_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    with pytest.raises(FlowError, match="needs pygraphviz") as caught:
        render(SAMPLES["grpo"], "svg")
    assert "pip install pygraphviz" in str(caught.value)


def test_drawing_is_light() -> None:
    """Text needs nothing; svg and html bring in pygraphviz and nothing else that is heavy."""
    code = """
import sys
from flowrl.graph.record import Graph, Node
from flowrl.graph.draw import FORMATS, render
graph = Graph("p", (Node("a.b", "a", "b"),), ())
for format in FORMATS[:4]: render(graph, format)
print(sorted({"torch", "numpy", "networkx", "ray", "transformers", "pygraphviz"} & set(sys.modules)))
for format in FORMATS[4:]: render(graph, format)
print(sorted({"torch", "numpy", "networkx", "ray", "transformers", "pygraphviz"} & set(sys.modules)))
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.splitlines() == ["[]", "['pygraphviz']"], done.stderr


# -- Mermaid -----------------------------------------------------------------------------------------------

_QUOTED = r'"[^"<>`]*(?:<br/>[^"<>`]*)*"'
_NODE = re.compile(
    rf"^n\d+(?:\[{_QUOTED}\]|\(\[{_QUOTED}\]\)|\[/{_QUOTED}/\]|\[\[{_QUOTED}\]\]|\{{\{{{_QUOTED}\}}\}})$"
)
_EDGE = re.compile(rf"^[ng]\d+ (?:-->|-\.->|==>|--o)(?:\|{_QUOTED}\|)? n\d+$")
_STYLE = re.compile(
    r"^(?:classDef \w+ [\w#:,. -]+|class n\d+(?:,n\d+)* \w+|style g\d+ [\w#:,]+|linkStyle \d+ [\w#:,. -]+)$"
)


@WILD
def test_mermaid_is_made_of_valid_lines(graph: Graph) -> None:
    first, *rows = render(graph, "mermaid").splitlines()
    rows = [row.strip() for row in rows]
    assert first == "flowchart TB"
    kinds: Counter[str] = Counter()
    for row in rows:
        if re.match(rf"^subgraph g\d+\[{_QUOTED}\]$", row):
            kinds["subgraph"] += 1
        elif row == "end":
            kinds["end"] += 1
        else:
            kind = next((k for k, p in (("node", _NODE), ("edge", _EDGE), ("style", _STYLE)) if p.match(row)), None)
            assert kind, row
            kinds[kind] += 1
    picture = draw(graph)
    assert kinds["node"] == len(picture.boxes) and kinds["edge"] == len(picture.lines)
    assert kinds["subgraph"] == kinds["end"] == len(picture.groups)
    used = {name for row in rows if _EDGE.match(row) for name in re.findall(r"^[ng]\d+|n\d+$", row)}
    defined = {name for row in rows for name in re.findall(r"^n\d+(?=[\[({])|(?<=^subgraph )g\d+", row)}
    assert used <= defined


# -- Graphviz source ---------------------------------------------------------------------------------------


@WILD
def test_dot_is_read_by_graphviz(graph: Graph) -> None:
    import pygraphviz

    read = pygraphviz.AGraph(string=render(graph, "dot"))
    picture = draw(graph)
    assert {str(n) for n in read.nodes()} == {
        box.id.replace("\\", "\\\\").replace("\n", "\\n").replace("\0", "") for box in picture.boxes
    }
    assert len(read.edges()) == len(picture.lines)
    assert len(read.subgraphs()) == len(picture.groups)
    assert read.draw(format="json0", prog="dot")


def test_dot_styles_follow_the_kind() -> None:
    rows = render(SAMPLES["ppo_adaptive"], "dot").splitlines()
    (weights,) = (row for row in rows if '"actor.generate" -> "actor.update"' in row and "weights" in row)
    assert "dir=back" in weights and "style=dashed" in weights and '"≤ 1 version old"' in weights
    assert any("style=dotted" in row and '"actor.update" -> "actor.save"' in row for row in rows)
    serves = next(row for row in render(SAMPLES["guess"], "dot").splitlines() if "lhead" in row)
    assert 'lhead="cluster_actor"' in serves and "arrowtail=odiamond" in serves


# -- JSON --------------------------------------------------------------------------------------------------


@EVERY
def test_json_is_the_record(graph: Graph) -> None:
    record = json.loads(render(graph, "json"))
    assert Graph.from_json(record) == graph
    assert {"id", "worker", "op", "line", "file", "reads", "adds", "updates", "rows"} <= record["nodes"][0].keys()
    placed = {"bytes", "transport", "version"} if graph.pools else set[str]()
    assert {"src", "dst", "kind", "fields", "lag", "branch", "made", "repeats"} | placed == record["edges"][0].keys()


# -- what the pictures share -------------------------------------------------------------------------------


def test_a_worker_that_only_serves_has_a_box() -> None:
    graph = Graph(
        "p",
        (Node("a.go", "a", "go"),),
        (Edge("judge", "a.go", "serves"),),
        (WorkerInfo("a", "A"), WorkerInfo("judge", "B")),
    )
    assert [(box.id, box.role) for box in draw(graph).boxes] == [("judge", "worker"), ("a.go", "op")]
    assert with_class(drawn(graph), "serves")


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ((), ()),
        (("tokens", "values"), ("tokens", "values")),
        (("a" * 12, "b" * 12, "c" * 12, "d" * 12), ("a" * 12, "b" * 12, "c" * 12 + " +1")),
        (
            ("tokens", "mask", "values", "returns", "advantages"),
            ("tokens, mask, values", "returns, advantages"),
        ),
    ],
)
def test_long_lists_of_fields_are_shortened(fields: tuple[str, ...], rows: tuple[str, ...]) -> None:
    assert shorten(fields) == rows


@pytest.mark.parametrize(
    ("lag", "words"),
    [(0, "newest version"), (1, "≤ 1 version old"), (3, "≤ 3 versions old"), (None, "weights")],
)
def test_version_rule(lag: int | None, words: str) -> None:
    assert version_rule(lag) == words


def test_widths_are_those_of_helvetica() -> None:
    assert width("Hello", 10) == pytest.approx(10 * (0.722 + 0.556 + 0.222 + 0.222 + 0.556))
    assert width("Hello", 10, "bold") > width("Hello", 10)
    assert width("e\u0301", 10) == width("e", 10)


@pytest.mark.parametrize("graph", [SAMPLES["guess"], PLACED["guess served"]], ids=["guess", "guess served"])
def test_the_json_schema_is_documented(graph: Graph) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reading_graphs.md").read_text(encoding="utf-8")
    record = graph.to_json()
    parts = [record[part][0] for part in ("nodes", "edges", "workers", "sources")] + record.get("pools", [])[:1]
    for key in (*record, *(key for part in parts for key in part)):
        assert f"`{key}`" in page, f"docs/reading_graphs.md does not say what '{key}' is"


# -- with a plan -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("graph", PLACED.values(), ids=PLACED)
def test_every_format_shows_pools_meshes_bytes_and_transports(graph: Graph, format: str) -> None:
    said = once(graph, format).replace("\\u00b7", "·")
    for pool in graph.pools:
        assert pool.name in said and (pool.devices or pool.describes) in said
    for node in graph.nodes:
        if node.mesh and node.kind == "op":
            assert node.mesh in said or placed.spaced(node.mesh) in said
    weights = next(e for e in graph.edges if e.kind == "weights" and e.bytes)
    assert f"{weights.bytes:.1f}" in said if format == "json" else placed.bytes_text(weights.bytes or 0) in said
    assert weights.transport in said or weights.transport == "same pool"
    version = next(e for e in graph.edges if e.version)
    assert (version.version or "?") in said.replace("#40;", "(")


@pytest.mark.parametrize("format", ["text", "mermaid", "dot", "json", "svg"])
@pytest.mark.parametrize("graph", SAMPLES.values(), ids=SAMPLES)
def test_without_a_plan_nothing_speaks_of_one(graph: Graph, format: str) -> None:
    said = once(graph, format)
    assert not re.search(r"\b(pools?|mesh|transport|bytes|publish|hexagon)\b", said)


def test_boxes_stand_in_their_pools_in_the_colours_of_their_workers() -> None:
    picture = draw(PLACED["ppo apart"])
    assert [group.name for group in picture.groups] == ["pool rollout", "pool train", "pool cpu"]
    assert picture.box("actor.generate").group == "pool rollout" and picture.box("actor.update").group == "pool train"
    assert picture.box("actor.generate").hue == picture.box("actor.update").hue == 0
    assert picture.box("actor.generate").title == "actor.generate" and picture.box("rl.gae").group is None


def test_a_publish_stands_between_the_pools_and_a_reshard_in_its_own() -> None:
    apart, together = draw(PLACED["ppo apart"]), draw(PLACED["ppo together"])
    assert (apart.box("actor.publish").role, apart.box("actor.publish").group) == ("move", None)
    assert (together.box("actor.reshard").role, together.box("actor.reshard").group) == ("move", "pool all")
    for graph, id in ((PLACED["ppo apart"], "actor.publish"), (PLACED["ppo together"], "actor.reshard")):
        (box,) = with_class(drawn(graph), "move")
        assert box.get("data-id") == id and box[1].tag.endswith("path")
        assert "shape=hexagon" in render(graph, "dot") and '{{"' + id in render(graph, "mermaid")


def test_a_worker_that_serves_stands_in_its_pool_and_gets_the_weights() -> None:
    picture = draw(PLACED["guess served"])
    actor = picture.box("actor")
    assert (actor.role, actor.group, actor.place) == ("worker", "pool rollout", ("mesh dp=4, tp=2",))
    (serves,) = (line.edge for line in picture.lines if line.edge.kind == "serves")
    assert (serves.src, serves.dst) == ("actor", "game.rollout")
    (reads,) = (line for line in picture.lines if line.edge.version)
    assert (reads.edge.src, reads.edge.dst, reads.label) == ("actor.publish", "actor", ("v(k-2), lag ≤ 2",))


def test_a_worker_that_serves_without_a_word_of_the_plan_stands_where_its_weights_go() -> None:
    graph = PLACED["guess served"]
    bare = replace(graph, workers=tuple(replace(w, pool=None, mesh=None) for w in graph.workers))
    assert draw(bare).box("actor").group == "pool rollout"


def test_pools_without_calls_and_pools_that_only_a_call_names_are_drawn() -> None:
    picture = draw(PLACED["guess served"])
    assert picture.box("pool spare: no calls").group == "pool spare"
    graph = replace(PLACED["grpo split"], pools=())
    assert [group.name for group in draw(graph).groups] == ["pool rollout", "pool train"]


def test_the_legend_says_only_what_is_there() -> None:
    kinds = {name: {kind for kind, _ in legend.entries(draw(graph))} for name, graph in (SAMPLES | PLACED).items()}
    assert kinds["ppo"] == {"data", "weights"}
    assert {"worker 0", "move", "bytes", "version"} <= kinds["grpo split"] and "share" not in kinds["grpo split"]
    assert "share" in kinds["ppo apart"]
    meanings = dict(legend.entries(draw(PLACED["ppo apart"])))
    assert meanings["worker 1"] == "critic: Critic"


def test_bars_are_as_long_as_the_shares() -> None:
    graph = PLACED["ppo apart"]
    for node in with_class(drawn(graph), "node"):
        bars = [float(e.get("width", "")) for e in node if e.get("class") == "bar"]
        share = next((n.share for n in graph.nodes if n.id == node.get("data-id")), None)
        assert bars == [] if share is None else bars[1] / bars[0] == pytest.approx(share, abs=0.01)
    busy = [
        [float(e.get("width", "")) for e in g if e.get("class") == "bar"]
        for g in with_class(drawn(graph), "group-title")
    ]
    assert [b[1] / b[0] for b in busy] == pytest.approx([p.busy for p in graph.pools], abs=0.01)


def test_placed_pictures_are_of_bearable_size() -> None:
    for graph in PLACED.values():
        _, _, wide, high = map(float, drawn(graph).get("viewBox", "").split())
        assert wide < 1390 and high < 1050


def test_the_record_says_what_its_times_rest_on() -> None:
    graph = replace(PLACED["ppo apart"], plan="Times: roofline.")
    for format in ("text", "json", "svg", "html"):
        assert "Times: roofline." in render(graph, format)
