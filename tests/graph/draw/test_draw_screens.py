"""Pictures on the screens that people have: words that can be read at 1440 and at 390 points, by day and by night."""

from __future__ import annotations

import re
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from draw_samples import SAMPLES

from flowrl.analysis.placed_graph import placed_graph
from flowrl.cli.arguments.script import load_script
from flowrl.graph.draw import palette, render
from flowrl.graph.draw.fold_arithmetic import folded
from flowrl.graph.draw.layout.single_column import column
from flowrl.graph.draw.picture import draw, wrapped
from flowrl.graph.record import Edge, Graph, Node

ROOT = Path(__file__).parents[3]
DRIVERS = sorted((ROOT / "algorithms").glob("*.py"))
PLANS = ("ppo_disaggregated_16", "ppo_colocated_8", "ppo_split_16")
LEAST = 11.0  # pixels of the smallest words


@cache
def drawn(name: str) -> Graph:
    """The graph of a driver, or that of PPO under a plan, with the times of a simulation."""
    if name in PLANS:
        flow = load_script(str(ROOT / "algorithms" / "ppo.py"))
        study = flow.study(ROOT / "algorithms" / "plans" / f"{name}.yaml")
        return placed_graph(study, flow.graph(), study.simulate(2))
    return load_script(str(ROOT / "algorithms" / f"{name}.py")).graph()


every = pytest.mark.parametrize("name", [*(path.stem for path in DRIVERS), *PLANS])


@every
@pytest.mark.parametrize(("narrow", "screen"), [(False, 1440), (True, 390)])
def test_words_are_large_enough_on_the_screen(name: str, narrow: bool, screen: int) -> None:
    root = ElementTree.fromstring(render(drawn(name), "svg", narrow=narrow))
    _, _, wide, _ = map(float, root.get("viewBox", "").split())
    scale = min(1.0, (screen - 24) / wide)
    sizes = [float(e.get("font-size", "")) for e in root.iter() if e.tag.endswith("text")]
    assert sizes and min(sizes) * scale >= LEAST, (wide, min(sizes))


@every
def test_a_column_has_every_call_and_its_words_stay_inside(name: str) -> None:
    graph = drawn(name)
    root = ElementTree.fromstring(render(graph, "svg", narrow=True))
    _, _, wide, high = map(float, root.get("viewBox", "").split())
    boxes = [e for e in root.iter() if (e.get("class") or "").startswith("node")]
    assert [e.get("data-id") for e in boxes] == [box.id for box in draw(graph).boxes]
    low = 0.0
    for box in boxes:
        frame = next(e for e in box if e.tag.endswith(("rect", "path")))
        if frame.tag.endswith("rect"):
            left, top, across, down = (float(frame.get(k, "")) for k in ("x", "y", "width", "height"))
            assert left > 0 and left + across < wide and low < top and top + down < high
            low = top + down
            for word in (e for e in box if e.tag.endswith("text")):
                start = float(word.get("x", ""))
                assert left < start and start + float(word.get("textLength", 0)) < left + across
                assert top < float(word.get("y", "")) < top + down


def test_lines_of_a_column_share_a_lane_only_where_they_come_from_the_same_call() -> None:
    root = ElementTree.fromstring(render(drawn("safe_rlhf"), "svg", narrow=True))
    runs: dict[str, list[tuple[float, float, tuple[str, str]]]] = {}
    for edge in (e for e in root.iter() if (e.get("class") or "").startswith("edge")):
        path = next(e for e in edge if e.get("class") == "stroke").get("d", "")
        found = re.fullmatch(r"M[\d.]+ ([\d.]+)H([\d.]+)V([\d.]+)H[\d.]+", path)
        assert found, path
        ends = sorted((float(found[1]), float(found[3])))
        runs.setdefault(found[2], []).append((*ends, (edge.get("data-src", ""), edge.get("class", ""))))
    for lane in runs.values():
        for number, (start, end, whose) in enumerate(lane):
            assert all(whose == other or end <= a or b <= start for a, b, other in lane[:number])


def test_every_colour_has_one_for_the_night() -> None:
    for name in ("ppo_disaggregated_16", "safe_rlhf", "dpo"):
        for narrow in (False, True):
            text = render(drawn(name), "svg", narrow=narrow)
            body = text.replace(palette.STYLE, "")
            used = set(re.findall(r'(?:fill|stroke)="(#\w+)"', body)) - {"#000"}
            dark = set(re.findall(r'\[fill="(#\w+)"\]', palette.STYLE))
            assert "prefers-color-scheme: dark" in text and used <= dark, used - dark


def _contrast(one: str, other: str) -> float:
    """Contrast of two colours (WCAG 2.2): 4.5 is enough for small words."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    a, b = sorted((light(one), light(other)))
    return (b + 0.05) / (a + 0.05)


def test_words_stand_out_by_day_and_by_night() -> None:
    night = dict(re.findall(r'\[fill="(#\w+)"\]\{fill:(#\w+)\}', palette.STYLE))
    for hue in (*palette.HUES, palette.POOL, palette.NEUTRAL):
        for ground in (hue.tint, palette.PAPER):
            for ink in (hue.ink, palette.INK, palette.FAINT):
                assert _contrast(ink, ground) >= 4.5, (ink, ground)
                assert _contrast(night[ink], night[ground]) >= 4.5, (ink, ground, "night")
        assert len(set(astuple(hue))) == 3
    assert _contrast(palette.CARRIED, palette.PAPER) >= 4.5
    assert _contrast(night[palette.CARRIED], night[palette.PAPER]) >= 4.5


def test_arithmetic_is_one_box_with_its_expression() -> None:
    graph = drawn("safe_rlhf")
    parts = [n.id for n in graph.nodes if n.worker == "batch"]
    picture = draw(graph)
    whole = next(box for box in picture.boxes if box.id == "batch.truediv")
    said = "(reward_advantages - cost_advantages * rl.lagrange) / (rl.lagrange + 1)"
    assert " ".join(whole.title.split("\n")) == said
    left = [box.id for box in picture.boxes if box.id in parts]
    assert left == ["batch.mean", "batch.truediv", "batch.mean#2", "batch.mean#3"]
    into = {(line.edge.src, line.edge.fields) for line in picture.lines if line.edge.dst == "batch.truediv"}
    assert into == {
        ("rl.gae#2", ("reward_advantages",)),
        ("rl.gae", ("cost_advantages",)),
        ("rl.lagrange", ("value",)),
    }


def test_a_part_of_two_expressions_has_a_box_of_its_own() -> None:
    def arithmetic(id: str, expression: str) -> Node:
        return Node(id, "batch", id.partition(".")[2], expression=expression)

    nodes = (
        arithmetic("batch.sub", "a - b"),
        arithmetic("batch.mul", "(a - b) * 2"),
        arithmetic("batch.add", "a - b + 1"),
    )
    edges = tuple(Edge("batch.sub", node.id, "data", ("value",)) for node in nodes[1:])
    assert folded(Graph("p", nodes, edges)).nodes == nodes
    one = folded(Graph("p", nodes[:2], edges[:1]))
    assert [node.id for node in one.nodes] == ["batch.mul"] and one.edges == ()


def test_long_conditions_are_broken_into_lines() -> None:
    assert wrapped("if step % 50 == 0") == ("if step % 50 == 0",)
    rows = wrapped("if " + " or ".join(f"step == {n}" for n in range(30)))
    assert len(rows) == 3 and rows[-1].endswith("…") and all(len(row) < 40 for row in rows)


def test_a_graph_that_no_screen_can_hold_is_a_column() -> None:
    nodes = tuple(Node(f"a.op{n}", "a", "o" * 40 + str(n)) for n in range(12))
    edges = tuple(Edge("a.op0", node.id, "data", ("x" * 20,)) for node in nodes[1:])
    root = ElementTree.fromstring(render(Graph("p", nodes, edges), "svg"))
    assert "column" in root.get("class", "") and float(root.get("width", "")) < 1388


def test_a_column_says_workers_and_pools_in_its_boxes() -> None:
    said = {box.id: (box.title, *box.rows) for box in column(drawn("ppo_disaggregated_16")).boxes}
    assert said["actor.update"][0] == "actor.update" and "in pool train" in said["actor.update"]
    assert {box.title for box in column(SAMPLES["grpo"]).boxes} >= {"actor.generate", "ref.logprobs", "reward.score"}


def test_a_loop_back_to_the_same_call_is_drawn() -> None:
    node = Node("actor.update", "actor", "update", updates="weights")
    graph = Graph("p", (node,), (Edge(node.id, node.id, "carried", ("kl",)),))
    for narrow in (False, True):
        assert 'class="edge carried"' in render(replace(graph), "svg", narrow=narrow)
