"""Which calls and sources depend on the values that the program's conditions read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from .decision_diagram import Diagram, Test, diagram, tests
from .tracing.call_identity import Found, Key, Place, as_given, carried, source_place, steady
from .tracing.trace_records import Trail


def add_control(
    edges: dict[Key, Found],
    there: Mapping[Place, set[int]],
    when: Mapping[Place, Diagram | None],
    which: Mapping[Key, Diagram | None],
    trails: Sequence[Trail],
    order: Sequence[Place],
) -> None:
    """Add an edge from what the program's conditions look at to each call and source that hangs on them.

    One hangs on a condition if it happens, reads other things, or is given other arguments with another outcome:
    ``if float(kl) > target: coef *= 1.5`` makes ``coef`` of the next step depend on ``kl``. A call that reads, or
    hangs on, what hangs on the same condition has no edge of its own. Nor has one that was made before what the
    condition looks at: it only hands on more or less.

    ``order``: the calls in program order.
    """
    rank = {place: number for number, place in enumerate(order)}
    asked: dict[Place, list[Test]] = {place: list(tests(found)) for place, found in when.items()}
    for (_, dst, _), found in which.items():
        asked[dst] += tests(found)
    for place, found in _chosen(trails).items():
        asked[place] += tests(found)
    control: dict[Place, dict[tuple[Place, str, str], None]] = {}
    for place, hangs in asked.items():
        loop = int(str(place[1] if place[0] == "data" else place[0]))
        mine = control.setdefault(place, {})
        for test in hangs:
            for index in sorted(test.decision.calls):
                maker = trails[test.trail].calls[index]
                kind = "carried" if carried(maker, loop, 2) else "control"
                if maker.place in there and (kind == "carried" or rank[maker.place] < rank.get(place, len(order))):
                    mine[(maker.place, kind, test.condition)] = None
    for trail in trails:
        for draw in trail.draws.values():
            for index in sorted(draw.count.calls) if draw.count and draw.iteration in (0, 2) else ():
                maker, place = trail.calls[index], source_place(draw)
                kind = "carried" if carried(maker, draw.loop, draw.iteration) else "control"
                if maker.place in there:
                    control.setdefault(place, {})[(maker.place, kind, draw.count.text if draw.count else "")] = None
    feeds: dict[Place, set[Place]] = defaultdict(set)
    for src, dst, kind in edges:
        if kind == "data":
            feeds[dst].add(src)
    for place, mine in control.items():
        before = (feeds[place] | {src for src, _, _ in mine}) - {place}
        for src, kind, text in mine:
            if any((src, kind, text) in control.get(other, {}) for other in before):
                continue
            found = edges[(src, place, kind)]
            found.trails |= there[place]
            found.fields.setdefault(text, "")


def _chosen(trails: Sequence[Trail]) -> dict[Place, Diagram | None]:
    """By the places of steady calls: the outcomes on which their plain arguments hang."""
    arguments_of: dict[Place, dict[int, str]] = defaultdict(dict)
    for number, trail in enumerate(trails):
        for call in steady(trail):
            arguments_of[call.place][number] = as_given(call)
    return {place: diagram(arguments, trails) for place, arguments in arguments_of.items()}
