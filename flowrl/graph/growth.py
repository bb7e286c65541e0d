"""What grows from step to step: lists of earlier results, which a third step has more of than the second."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .places import Key, Place, source_place
from .relaxed import gives_rows
from .terms import Draw, Trail


@dataclass(frozen=True)
class Growth:
    """What happens more often, or reaches further back, the more steps there were."""

    places: frozenset[Place] = frozenset()
    edges: frozenset[Key] = frozenset()


def growth(longer: Trail | None) -> Growth:
    """What a third step has more than the second: calls in a loop over a list that grows, and values two steps old."""
    if longer is None:
        return Growth()
    count: dict[int, Counter[Place]] = {2: Counter(), 3: Counter()}
    edges: set[Key] = set()
    for call in longer.calls:
        if call.iteration in count:
            count[call.iteration][call.place[:-1]] += 1
        for use in call.uses if call.iteration == 3 else ():
            made = longer.draws[use.draw] if use.call is None else longer.calls[use.call]
            rows = isinstance(made, Draw) or gives_rows(made.op)  # numbers pile up in symbols
            if rows and made.loop == call.loop and made.iteration == 1:
                place = source_place(made) if isinstance(made, Draw) else made.place
                edges.add((place, call.place, "carried"))
    grown = [place for place, times in count[3].items() if 0 < count[2][place] < times]
    return Growth(frozenset((*place, count[2][place]) for place in grown), frozenset(edges))
