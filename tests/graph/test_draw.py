"""The formats in which a graph is shown: valid, complete, escaped, the same every time."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flowrl.errors import FlowError, UsageError
from flowrl.graph.draw import FORMATS, render
from flowrl.graph.draw.fonts import width
from flowrl.graph.draw.picture import draw, shorten, source_edges, version_rule
from flowrl.graph.record import Edge, Graph, Node, WorkerInfo

SAMPLES: dict[str, Graph] = runpy.run_path(str(Path(__file__).with_name("draw_samples.py")))["SAMPLES"]
EVERY = pytest.mark.parametrize("graph", SAMPLES.values(), ids=SAMPLES)

_DRAWN: dict[str, str] = {}

EVIL = "</script><img src=x onerror=pwned()>\"'&\\N {a|b} `$program` ]]> %s\n\x00 é漢"
HOSTILE = Graph(
    EVIL,
    (
        Node(
            f"{EVIL}.go",
            EVIL,
            f"go{EVIL}",
            file=f"{EVIL}.py",
            line=3,
            source=EVIL,
            reads=(EVIL,),
            adds=(f"{EVIL}2",),
            types={EVIL: EVIL},
            branch=EVIL,
            signature=EVIL,
        ),
        Node("batch.mean", "batch", "mean", reads=(f"{EVIL}2",)),
    ),
    (
        Edge(f"{EVIL}.go", "batch.mean", "data", (f"{EVIL}2",), branch=f"not {EVIL}"),
        Edge(EVIL, "batch.mean", "serves"),
    ),
    (WorkerInfo(EVIL, EVIL, describes=EVIL),),
    (EVIL,),
)


def once(graph: Graph, format: str) -> str:
    """The drawing, made once for all tests of a graph."""
    key = format + json.dumps(graph.to_json())
    if key not in _DRAWN:
        _DRAWN[key] = render(graph, format)
    return _DRAWN[key]


def drawn(graph: Graph) -> ElementTree.Element:
    return ElementTree.fromstring(once(graph, "svg"))


def with_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in root.iter() if name in e.get("class", "").split()]


# -- all formats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [SAMPLES["ppo"], SAMPLES["guess"]], ids=["ppo", "guess"])
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
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.splitlines() == ["[]", "['pygraphviz']"], done.stderr


# -- text --------------------------------------------------------------------------------------------------


def test_text_of_a_program_with_an_environment() -> None:
    rows = [row.partition("  #")[0].rstrip() for row in render(SAMPLES["guess"], "text").splitlines()]
    assert (
        "\n".join(rows)
        == """\
program guess {
  worker actor: Actor
  worker game: GuessingGame
  source -> prompt_ids, secret
  game.rollout(prompt_ids, secret) -> response_ids, tokens, response_mask, rollout_logprobs, \
sampling_logprobs, versions, rewards rows=expand external serves<-actor weights<-actor.update lag=2
  rl.group_advantages(rewards, response_mask) -> advantages cost=local
  actor.update(tokens, response_mask, rollout_logprobs, advantages) updates=weights cost=train
  batch.mean(rewards) cost=local
  types {
    prompt_ids: i32[*prompt]
    secret: f32[]
    response_ids: i32[*response]
    tokens: i32[*token]
    response_mask: bool[*response]
    rollout_logprobs: f32[*response]
    sampling_logprobs: f32[*response]
    versions: i32[*response]
    rewards: f32[]
    advantages: f32[*response]
  }
}"""
    )


def test_text_marks_conditions_carried_values_and_what_happens_once() -> None:
    text = render(SAMPLES["ppo_adaptive"], "text")
    assert "  if step % 50 == 0 {\n    actor.generate#2(prompt_ids@source)" in text
    assert "-> token_rewards cost=local carried<-batch.mul#2  #" in text
    assert "  batch.mul(@batch.sub)" in text
    assert "  once {\n    actor.save() weights<-actor.update lag=0 order<-actor.update" in text
    assert re.search(r"batch\.mean#2\(rewards\).*# :29\n", text), "the rewards of the step, not those of the branch"
    assert text.splitlines()[0].endswith("# algorithms/ppo_adaptive.py, 2 paths")


def test_text_says_where_a_field_comes_from_when_it_is_not_the_last_one_above() -> None:
    grpo = SAMPLES["grpo"]
    again = replace(grpo.node("reward.score"), id="reward.score#2", line=20)
    nodes = (*grpo.nodes[:2], again, *grpo.nodes[2:])
    assert "batch.mean(rewards@reward.score)" in render(replace(grpo, nodes=nodes), "text")
    lost = replace(grpo, edges=tuple(e for e in grpo.edges if e.src != "rl.group_advantages"))
    assert "ref_logprobs, ?advantages)" in render(lost, "text")


def test_text_follows_a_field_through_other_rows() -> None:
    """After generate the prompt is that of the expanded rows; after a filter the tokens are the kept ones."""
    grpo = SAMPLES["grpo"]
    assert "reward.score(prompt, answer, response_ids) ->" in render(grpo, "text")
    kept = Node("batch.filter", "batch", "filter", reads=("tokens",), rows="filter")
    nodes = (*grpo.nodes[:2], kept, *grpo.nodes[2:])
    edges = [replace(e, src=kept.id) if e.dst == "ref.logprobs" else e for e in grpo.edges]
    text = render(
        replace(grpo, nodes=nodes, edges=(*edges, Edge("actor.generate", kept.id, "data", ("tokens",)))), "text"
    )
    assert "batch.filter(tokens) rows=filter" in text and "ref.logprobs(tokens, response_mask) ->" in text
    assert "rl.group_advantages(rewards@reward.score, response_mask@actor.generate) ->" in text


def test_a_changed_rule_changes_one_line_of_text() -> None:
    grpo = SAMPLES["grpo"]
    relaxed = replace(grpo, edges=tuple(replace(e, lag=1) if e.kind == "weights" else e for e in grpo.edges))
    before, after = (render(g, "text").splitlines() for g in (grpo, relaxed))
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(changed) == 1 and "lag=0" in changed[0][0] and "lag=1" in changed[0][1]


@pytest.mark.parametrize("graph", [*SAMPLES.values(), HOSTILE], ids=[*SAMPLES, "hostile"])
def test_text_has_a_line_per_call(graph: Graph) -> None:
    rows = render(graph, "text").splitlines()
    for node in graph.nodes:
        start = " ".join(f"{node.id}(".splitlines())
        assert sum(row.strip().startswith(start) for row in rows) == 1


# -- Mermaid -----------------------------------------------------------------------------------------------

_QUOTED = r'"[^"<>`]*(?:<br/>[^"<>`]*)*"'
_NODE = re.compile(rf"^n\d+(?:\[{_QUOTED}\]|\(\[{_QUOTED}\]\)|\[/{_QUOTED}/\]|\[\[{_QUOTED}\]\])$")
_EDGE = re.compile(rf"^[ng]\d+ (?:-->|-\.->|==>|--o)(?:\|{_QUOTED}\|)? n\d+$")
_STYLE = re.compile(
    r"^(?:classDef \w+ [\w#:,. -]+|class n\d+(?:,n\d+)* \w+|style g\d+ [\w#:,]+|linkStyle \d+ [\w#:,. -]+)$"
)


@pytest.mark.parametrize("graph", [*SAMPLES.values(), HOSTILE], ids=[*SAMPLES, "hostile"])
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
    defined = {name for row in rows for name in re.findall(r"^n\d+(?=[\[(])|(?<=^subgraph )g\d+", row)}
    assert used <= defined


# -- Graphviz source ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [*SAMPLES.values(), HOSTILE], ids=[*SAMPLES, "hostile"])
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
    assert {"src", "dst", "kind", "fields", "lag", "branch"} == record["edges"][0].keys()


# -- SVG ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [*SAMPLES.values(), HOSTILE], ids=[*SAMPLES, "hostile"])
def test_svg_holds_every_call_worker_and_edge(graph: Graph) -> None:
    root, picture = drawn(graph), draw(graph)
    clean = {box.id: "".join(c for c in box.id if c != "\0") for box in picture.boxes}
    assert [_flat(e.get("data-id")) for e in with_class(root, "node")] == [_flat(i) for i in clean.values()]
    assert len(with_class(root, "edge")) == len(source_edges(graph)) + len(graph.edges)
    assert len(with_class(root, "group")) == len(picture.groups)
    for thing in (*with_class(root, "node"), *with_class(root, "edge"), *with_class(root, "group")):
        assert thing[0].tag.endswith("title") and thing[0].text


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


@pytest.mark.parametrize("graph", [*SAMPLES.values(), HOSTILE], ids=[*SAMPLES, "hostile"])
def test_svg_stands_alone(graph: Graph) -> None:
    root = drawn(graph)
    allowed = {"svg", "g", "rect", "path", "text", "title", "desc"}
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= allowed
    names = {name for element in root.iter() for name in element.attrib}
    assert not any("href" in name or name.startswith("on") or name in ("style", "src", "id") for name in names)
    assert not any("url(" in value for element in root.iter() for value in element.attrib.values())


@EVERY
def test_svg_words_stay_in_their_boxes(graph: Graph) -> None:
    for box in with_class(drawn(graph), "node"):
        rect = next(e for e in box if e.tag.endswith("rect"))
        left, top, wide, high = (float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
        for text in (e for e in box if e.tag.endswith("text")):
            middle, half = float(text.get("x", "")), float(text.get("textLength", "")) / 2
            assert left + 4 < middle - half and middle + half < left + wide - 4
            assert top < float(text.get("y", "")) < top + high - 3


@EVERY
def test_svg_boxes_stay_in_their_groups_and_apart(graph: Graph) -> None:
    root, picture = drawn(graph), draw(graph)
    boxes, groups = ({e.get("data-id"): _area(e) for e in with_class(root, kind)} for kind in ("node", "group"))
    for box in picture.boxes:
        a = boxes[box.id]
        for name, g in groups.items():
            inside = g[0] < a[0] and g[1] < a[1] and a[2] < g[2] and a[3] < g[3]
            assert inside if name == box.group else (a[2] < g[0] or g[2] < a[0] or a[3] < g[1] or g[3] < a[1])


def _area(element: ElementTree.Element) -> tuple[float, float, float, float]:
    rect = next(e for e in element if e.tag.endswith("rect"))
    x, y, wide, high = (float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
    return x, y, x + wide, y + high


def test_svg_of_ppo_reads_downwards_in_bearable_size() -> None:
    root = drawn(SAMPLES["ppo"])
    boxes = {e.get("data-id"): _area(e) for e in with_class(root, "node")}
    for edge in SAMPLES["ppo"].edges_of("data"):
        assert boxes[edge.src][1] < boxes[edge.dst][1]
    _, _, wide, high = map(float, root.get("viewBox", "").split())
    assert wide < 1000 and high < 800


def test_svg_says_version_rules_conditions_and_what_is_carried() -> None:
    words = [e.text for e in drawn(SAMPLES["ppo_adaptive"]).iter() if e.tag.endswith("text")]
    assert {
        "≤ 1 version old",
        "newest version",
        "if step % 50 == 0",
        "next step",
        "once, outside the steps",
    } <= {*words}
    tips = [e[0].text or "" for e in with_class(drawn(SAMPLES["ppo"]), "node")]
    assert "algorithms/ppo.py:19   batch = critic.values(batch)" in "\n".join(tips)
    assert "(tokens: i32[*token], response_mask: bool[*response]) -> (values: f32[*response])" in "\n".join(tips)


# -- HTML --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [*SAMPLES.values(), HOSTILE], ids=[*SAMPLES, "hostile"])
def test_html_fetches_nothing(graph: Graph) -> None:
    page = once(graph, "html")
    assert set(re.findall(r"https?://[^\s\"']*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:img|iframe|object|embed|audio|video|base)\b|<script[^>]*\ssrc|@import|url\(", page)
    assert re.findall(r"<link [^>]*>", page) == ['<link rel="icon" href="data:,">']
    assert "default-src 'none'" in page


@pytest.mark.parametrize("graph", [*SAMPLES.values(), HOSTILE], ids=[*SAMPLES, "hostile"])
def test_html_has_a_card_and_a_row_for_every_call(graph: Graph) -> None:
    page = once(graph, "html")
    found = re.search(r'<script type="application/json" id="cards">(.*?)</script>', page, re.DOTALL)
    assert found
    record = json.loads(found[1])
    for node in graph.nodes:
        assert record["cards"][node.id]["source"] == node.source and node.id in record["order"]
    assert page.count("<tr data-row=") == len(graph.nodes)
    assert page.count("</script>") == 2 == page.count("<script")


# -- what the pictures share -------------------------------------------------------------------------------


def test_source_edges_carry_what_no_call_adds() -> None:
    found = {edge.dst: edge.fields for edge in source_edges(SAMPLES["grpo"])}
    assert found == {"actor.generate": ("prompt_ids",)}
    found = {edge.dst: edge.branch for edge in source_edges(SAMPLES["ppo_adaptive"])}
    assert found == {"actor.generate": None, "actor.generate#2": "step % 50 == 0"}


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


def test_the_json_schema_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reading_graphs.md").read_text(encoding="utf-8")
    record = SAMPLES["guess"].to_json()
    for key in (*record, *record["nodes"][0], *record["edges"][0], *record["workers"][0]):
        assert f"`{key}`" in page, f"docs/reading_graphs.md does not say what '{key}' is"
