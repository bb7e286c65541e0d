"""The picture as SVG: every call, worker and edge, words in their boxes, boxes in their groups."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from draw_samples import EVERY, SAMPLES, WILD, drawn, with_class

from flowrl.graph.draw.picture import draw
from flowrl.graph.record import Graph


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
