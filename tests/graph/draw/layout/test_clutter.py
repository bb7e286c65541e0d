"""Words at lines cover nothing, and the index of lines finds what a look at every point finds."""

from __future__ import annotations

import math
import random

import pytest
from draw_samples import PLACED

from flowrl.graph.draw.layout import labels
from flowrl.graph.draw.layout.box_sizes import sizes
from flowrl.graph.draw.layout.choose_layout import arrange
from flowrl.graph.draw.layout.clutter import edges_of, enters, flat, meet, word_rect
from flowrl.graph.draw.layout.graphviz_positions import Rect
from flowrl.graph.draw.layout.labels import settle_labels
from flowrl.graph.draw.picture import draw
from flowrl.graph.record import Graph


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
