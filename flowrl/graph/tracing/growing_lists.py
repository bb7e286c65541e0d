"""What grows from step to step: lists of earlier results, which a third step has more of than the second."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..may_see_older_weights import gives_rows
from .call_identity import Key, Place, source_place
from .trace_records import Draw, Trail


@dataclass(frozen=True)
class Growth:
    """What happens more often, or reaches further back, the more steps there were."""

    places: frozenset[Place] = frozenset()
    edges: frozenset[Key] = frozenset()


def growth(longer: Trail | None) -> Growth:
    """Return what only a third step has: further calls of a loop over a list that grows, and values two steps old."""
    if longer is None:
        return Growth()
    count: dict[int, Counter[Place]] = {2: Counter(), 3: Counter()}
    edges: set[Key] = set()
    for call in longer.calls:
        if call.iteration in count:
            count[call.iteration][call.place[:-1]] += 1
        for use in call.uses if call.iteration == 3 else ():
            maker = longer.draws[use.draw] if use.call is None else longer.calls[use.call]
            rows = isinstance(maker, Draw) or gives_rows(maker.op)  # numbers pile up in symbols
            if rows and maker.loop == call.loop and maker.iteration == 1:
                place = source_place(maker) if isinstance(maker, Draw) else maker.place
                edges.add((place, call.place, "carried"))
    grown = [place for place, times in count[3].items() if 0 < count[2][place] < times]
    return Growth(frozenset((*place, count[2][place]) for place in grown), frozenset(edges))
