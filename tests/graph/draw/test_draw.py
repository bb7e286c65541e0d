"""The formats in which a graph is shown: valid, complete, escaped, the same every time."""

from __future__ import annotations

import json
import math
import random
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
from flowrl.graph.draw import FORMATS, labels, legend, render
from flowrl.graph.draw import plan_in_words as placed
from flowrl.graph.draw.box_sizes import sizes
from flowrl.graph.draw.choose_layout import arrange
from flowrl.graph.draw.clutter import edges_of, enters, flat, meet, word_rect
from flowrl.graph.draw.fonts import width
from flowrl.graph.draw.graphviz_positions import Rect
from flowrl.graph.draw.labels import settle_labels
from flowrl.graph.draw.picture import draw, shorten, version_rule
from flowrl.graph.record import Edge, Graph, Node, PoolInfo, SourceInfo, WorkerInfo

_MADE = runpy.run_path(str(Path(__file__).with_name("draw_samples.py")))
SAMPLES: dict[str, Graph] = _MADE["SAMPLES"]
PLACED: dict[str, Graph] = _MADE["PLACED"]
EVERY = pytest.mark.parametrize("graph", [*SAMPLES.values(), *PLACED.values()], ids=[*SAMPLES, *PLACED])

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
    sources=(SourceInfo(f"data.{EVIL}", EVIL, EVIL, (EVIL,), {EVIL: EVIL}, branch=EVIL),),
)
HOSTILE_PLACED = replace(
    HOSTILE,
    nodes=(
        replace(HOSTILE.nodes[0], pool=EVIL, mesh=EVIL, layout=EVIL, seconds=1.0, share=2.0),
        Node(f"{EVIL}.publish", EVIL, "publish", kind="publish", pool=EVIL),
        HOSTILE.nodes[1],
    ),
    edges=(replace(HOSTILE.edges[0], bytes=1e30, transport=EVIL, version=EVIL), HOSTILE.edges[1]),
    pools=(PoolInfo(EVIL, EVIL, EVIL, EVIL, 3, 1.5, 0.0),),
    plan=EVIL,
)
WILD = pytest.mark.parametrize(
    "graph",
    [*SAMPLES.values(), HOSTILE, *PLACED.values(), HOSTILE_PLACED],
    ids=[*SAMPLES, "hostile", *PLACED, "hostile placed"],
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


# -- text --------------------------------------------------------------------------------------------------


def test_text_of_a_program_with_an_environment() -> None:
    rows = [row.partition("  #")[0].rstrip() for row in render(SAMPLES["guess"], "text").splitlines()]
    assert (
        "\n".join(rows)
        == """\
program guess {
  worker actor: Actor
  worker game: GuessingGame
  data.prompts -> prompt_ids, secret
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
    assert "  if step % 50 == 0 {\n    actor.generate#2(prompt_ids@data.prompts)" in text
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


@WILD
def test_text_has_a_line_per_call(graph: Graph) -> None:
    rows = render(graph, "text").splitlines()
    for node in graph.nodes:
        start = " ".join(f"{node.id}(".splitlines())
        assert sum(row.strip().startswith(start) for row in rows) == 1


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


# -- SVG ---------------------------------------------------------------------------------------------------


@WILD
def test_svg_holds_every_call_worker_and_edge(graph: Graph) -> None:
    root, picture = drawn(graph), draw(graph)
    clean = {box.id: "".join(c for c in box.id if c != "\0") for box in picture.boxes}
    assert [_flat(e.get("data-id")) for e in with_class(root, "node")] == [_flat(i) for i in clean.values()]
    assert len(with_class(root, "edge")) == len(graph.edges)
    assert len(with_class(root, "group")) == (0 if "column" in root.get("class", "") else len(picture.groups))
    for thing in (*with_class(root, "node"), *with_class(root, "edge"), *with_class(root, "group")):
        assert thing[0].tag.endswith("title") and thing[0].text


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


@WILD
def test_svg_stands_alone(graph: Graph) -> None:
    root = drawn(graph)
    allowed = {"svg", "g", "rect", "path", "text", "title", "desc", "style"}
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= allowed
    names = {name for element in root.iter() for name in element.attrib}
    assert not any("href" in name or name.startswith("on") or name in ("style", "src", "id") for name in names)
    values = [value for element in root.iter() for value in (*element.attrib.values(), element.text or "")]
    assert not any("url(" in value or "@import" in value for value in values)


@EVERY
def test_svg_words_stay_in_their_boxes(graph: Graph) -> None:
    for box in with_class(drawn(graph), "node"):
        left, top, right, low = _area(box)
        for text in (e for e in box if e.tag.endswith("text")):
            middle, half = float(text.get("x", "")), float(text.get("textLength", "")) / 2
            assert left + 4 < middle - half and middle + half < right - 4
            assert top < float(text.get("y", "")) < low - 3


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
    rect = next(e for e in element if e.tag.endswith(("rect", "path")))
    if rect.tag.endswith("path"):  # a box with pointed ends
        corners = re.findall(r"([\d.]+) ([\d.]+)", rect.get("d", ""))
        across, down = [float(x) for x, _ in corners], [float(y) for _, y in corners]
        return min(across), min(down), max(across), max(down)
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


@WILD
def test_html_fetches_nothing(graph: Graph) -> None:
    page = once(graph, "html")
    assert set(re.findall(r"https?://[^\s\"']*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:img|iframe|object|embed|audio|video|base)\b|<script[^>]*\ssrc|@import|url\(", page)
    assert re.findall(r"<link [^>]*>", page) == ['<link rel="icon" href="data:,">']
    assert "default-src 'none'" in page


@WILD
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


def test_a_plan_adds_blocks_to_the_text_and_a_line_for_the_weights_on_their_way() -> None:
    before, after = ([row.partition("  #")[0].rstrip() for row in render(g, "text").splitlines()] for g in _PAIR)
    added = [row for row in after if row not in before]
    assert [row for row in before if row not in after] == [row for row in before if row.startswith("  actor.generate")]
    assert (
        "\n".join(added[1:])
        == """\
  actor.publish() publish weights<-actor.update lag=0
  pools {
    rollout: devices 8-15 · 8 × h100-80
    train: devices 0-7 · 8 × h100-80
  places {
    actor.generate on rollout[dp=4,tp=2]: rows over dp; weights over tp
    reward.score on rollout
    ref.logprobs on train[fsdp=8]: rows over fsdp; weights over fsdp
    actor.update on train[fsdp=4,tp=2]: rows over fsdp; weights over fsdp x tp
    actor.publish on rollout
  moves {
    data.prompts -> actor.generate: data 4.1 kB (same pool)
    actor.generate -> reward.score: data 38 MB (same pool)
    actor.generate -> ref.logprobs: data 38 MB (network)
    reward.score -> rl.group_advantages: data 4.1 kB (same pool)
    actor.generate -> rl.group_advantages: data 38 MB (same pool)
    actor.generate -> actor.update: data 38 MB (network)
    rl.group_advantages -> actor.update: data 4.1 kB (same pool)
    ref.logprobs -> actor.update: data 4.1 kB (same pool)
    reward.score -> batch.mean: data 4.1 kB (same pool)
    actor.update -> actor.publish: weights 16 GB (network)
    actor.publish -> actor.generate: weights v(k)"""
    )


_PAIR = (SAMPLES["grpo"], PLACED["grpo split"])


def test_text_says_times_in_comments() -> None:
    rows = render(PLACED["ppo apart"], "text").splitlines()
    assert any(re.search(r"rollout: devices 8-15 .*# 91 % busy$", row) for row in rows)
    assert any(re.search(r"actor\.update on train\[.*# 2\.6 s · 36 %$", row) for row in rows)


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


@pytest.mark.parametrize("graph", PLACED.values(), ids=PLACED)
def test_words_at_lines_cover_neither_boxes_nor_titles_nor_each_other(graph: Graph) -> None:
    picture = draw(graph)
    room = sizes(picture)
    layout = settle_labels(arrange(picture, room), picture, room)
    words = [edges_of(word_rect(r.label, room[id])) for id, r in layout.routes.items() if r.label]
    fixed = [edges_of(rect) for rect in layout.boxes.values()]
    fixed += [edges_of(word_rect(at, room[f"title of {name}"])) for name, at in layout.titles.items()]
    for number, word in enumerate(words):
        assert not any(meet(word, other) for other in (*words[:number], *fixed))
        assert word[0] >= 0 and word[2] <= layout.width and word[1] >= 0 and word[3] <= layout.height


def test_the_index_of_lines_finds_what_a_look_at_every_point_finds() -> None:
    """Rectangles on and beside random walks, on both sides of 0, and of no size."""
    chance = random.Random(0)
    walks = {f"e{n}": _walk(chance, chance.randrange(1, 60)) for n in range(25)}
    index = labels._Lines(walks)
    for _ in range(600):
        x, y = chance.uniform(-300, 300), chance.uniform(-300, 300)
        rect = Rect(x, y, chance.choice((0.0, 7.0, 64.0, 130.0)), chance.choice((0.0, 12.0, 32.0)))
        assert index.entering(rect) == sum(enters(points, rect) for points in walks.values())


def _walk(chance: random.Random, length: int) -> list[tuple[float, float]]:
    x, y = chance.uniform(-200, 200), chance.uniform(-200, 200)
    return [(x := x + chance.uniform(-9, 9), y := y + chance.uniform(-9, 9)) for _ in range(length)]


def test_words_of_a_crowded_graph_stand_where_a_look_at_every_place_puts_them() -> None:
    """The search stops at a bound; what it finds is the least of all."""
    picture = draw(PLACED["ppo apart"])
    room = sizes(picture)
    layout = arrange(picture, room)
    ground = labels._Ground(layout, labels._Lines({id: flat(r) for id, r in layout.routes.items()}), ())
    for id, route in layout.routes.items():
        if route.label:
            tried = [route.label, *labels._beside(ground.lines.points[id], room[id])]
            costs = [ground.cost(id, word_rect(p, room[id]), ()) + 0.01 * math.dist(p, route.label) for p in tried]
            found = labels._best(id, route.label, ground, (), room[id])
            cost = ground.cost(id, word_rect(found, room[id]), ()) + 0.01 * math.dist(found, route.label)
            assert cost == pytest.approx(min(costs)) or (found == route.label and costs[0] < labels._FINE)


def test_placed_pictures_are_of_bearable_size() -> None:
    for graph in PLACED.values():
        _, _, wide, high = map(float, drawn(graph).get("viewBox", "").split())
        assert wide < 1390 and high < 1050


def test_html_has_a_row_for_every_pool_and_columns_for_places_and_times() -> None:
    page = once(PLACED["ppo apart"], "html")
    assert re.findall(r'<tr data-pool="(\w+)">', page) == ["rollout", "train", "cpu"]
    assert '<th scope="col">where</th><th scope="col">time</th>' in page and "2.6\u00a0s\u00a0·\u00a036\u00a0%" in page
    assert '<th scope="col">time</th>' not in once(PLACED["grpo split"], "html")
    assert "data-pool" not in once(SAMPLES["ppo"], "html") and "where</th>" not in once(SAMPLES["ppo"], "html")


def test_the_record_says_what_its_times_rest_on() -> None:
    graph = replace(PLACED["ppo apart"], plan="Times: roofline.")
    for format in ("text", "json", "svg", "html"):
        assert "Times: roofline." in render(graph, format)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999.4, "999 B"),
        (1234, "1.2 kB"),
        (99.6e3, "100 kB"),
        (16.4e9, "16 GB"),
        (999.9e9, "1 TB"),
        (4e15, "4000 TB"),
    ],
)
def test_bytes(size: float, words: str) -> None:
    assert placed.bytes_text(size) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (2e-7, "0.2 µs"),
        (59e-6, "59 µs"),
        (0.4, "400 ms"),
        (0.9996, "1 s"),
        (6.24, "6.2 s"),
        (119, "119 s"),
        (210, "3.5 min"),
    ],
)
def test_seconds(seconds: float, words: str) -> None:
    assert placed.seconds_text(seconds) == words


@pytest.mark.parametrize(("part", "words"), [(0, "0 %"), (0.001, "< 1 %"), (0.614, "61 %"), (1.0, "100 %")])
def test_parts(part: float, words: str) -> None:
    assert placed.part_text(part) == words


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (PoolInfo("a", devices="0-7", kind="h100-80", count=8), "devices 0-7 · 8 × h100-80"),
        (PoolInfo("a", "16 processes", kind="cpu", count=16), "16 processes"),
        (PoolInfo("a", kind="cpu", count=4), "4 × cpu"),
        (PoolInfo("a"), ""),
    ],
)
def test_what_a_pool_has(pool: PoolInfo, words: str) -> None:
    assert placed.pool_text(pool) == words


def test_long_layouts_are_cut_and_said_in_full_where_there_is_room() -> None:
    node = Node("a.b", "a", "b", pool="p", mesh="fsdp=4,tp=2", layout="; ".join(["rows over fsdp"] * 6))
    assert placed.place_rows(node) == (
        "mesh fsdp=4, tp=2",
        "rows over fsdp, rows over fsdp",
        "rows over fsdp, rows over fsdp +2",
    )
    assert placed.place_lines(node) == ("pool p, mesh fsdp=4, tp=2", node.layout)
