"""Where a program gives numbers to plain Python, and what depends on them: found by a trace with other numbers.

A symbol answers arithmetic and comparisons. An index, a key, a text or a function of another library needs a plain
number, and what is done with that the trace does not see. So each path with such a place is run again with another
number there. Where that changes a call, the number is a condition like any other (``int(reward.mean) == 1``): both
sides are followed, and the graph has an edge from what made the number to what changed. Where it changes nothing, a
remark says that the trace cannot know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...errors import FlowError
from ..stand_ins.symbols import KEY, OTHER, STORED, TEXT
from .call_identity import as_given, source_place
from .follow_branches import NUMBERS, Exit, Numbers, Path
from .trace_records import Lint, Trail
from .tracer import Tracer

FURTHER = (2, 3, 4, 5, 10)  # what is tried besides, where the first numbers show nothing
_SHOWN = frozenset((TEXT, STORED))


class Run(NamedTuple):
    """One path as it was run: what ended it, whether that was Python's error, and which symbols a library refused.

    ``held``: those that a library was given as it failed, which may or may not be why.
    """

    tracer: Tracer
    failure: FlowError | None = None
    crashed: bool = False
    refused: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()

    @property
    def errors(self) -> list[FlowError]:
        """The errors of flowrl on it."""
        return [*self.tracer.errors, *([] if self.crashed or self.failure is None else [self.failure])]


Again = Callable[[tuple[bool, ...], Numbers], Run]  # runs a path that is told these outcomes, with these numbers


def forks(trails: Sequence[Trail], run: Again, numbers: Numbers) -> frozenset[Exit]:
    """The places where another number changes what a path does; ``numbers`` then has that number as their second.

    All places of a path are changed at once, to their second number and then to each of FURTHER, but for texts that are
    only shown; where that changes anything they are changed one by one.
    """

    def changes(trail: Trail, exits: Collection[Exit], further: int | None = None) -> bool:
        told = flipped(trail.path, exits)
        used = numbers if further is None else numbers.with_second(exits, further)
        other = run(told, used)
        while further is None and _spoiled(other) and numbers.give_up(other.tracer.trail.path, first=False):
            other = run(told, used)
        return not _spoiled(other) and _content(trail) != _content(other.tracer.trail)

    found: set[Exit] = set()
    for trail in trails:
        for further in (None, *FURTHER):
            open_ = {e for e, ways in trail.path.exits.items() if further is None or set(ways) - _SHOWN} - found
            if not open_ or not changes(trail, open_, further):
                continue
            if changes(trail, ()):  # it is never the same: nothing can be learned from it
                break
            mine = {exit for exit in open_ if changes(trail, (exit,), further)} or open_
            if further is not None:
                numbers.choices.update(numbers.with_second(mine, further).choices)
            found |= mine
    return frozenset(found)


def beyond(trails: Sequence[Trail], known: Collection[FlowError], run: Again, numbers: Numbers) -> list[Lint]:
    """Return what else goes wrong where a number on which calls hang is one of FURTHER; no run may ever have it."""
    told = {error.report() for error in known}
    lints: list[Lint] = []
    for exit in sorted(numbers.forks, key=lambda exit: (exit.at.file, exit.at.line, exit.text)):
        trail = next(trail for trail in trails if exit in trail.path.exits)
        for number in FURTHER:
            done = run(flipped(trail.path, (exit,)), numbers.with_second((exit,), number))
            for error in [] if done.crashed else done.errors:
                if error.report() not in told:
                    told.add(error.report())
                    what = f"where '{exit.text}' is {number}: {error.what}"
                    lints.append(Lint("number", what, error.at or exit.at))
    return lints


def flipped(path: Path, exits: Collection[Exit]) -> tuple[bool, ...]:
    """The outcomes of a path, with the other number at these places."""
    return tuple(d.outcome ^ (d.exit in exits) for d in path.taken)


def _spoiled(done: Run) -> bool:
    """Whether nothing can be learned from a path: it failed, perhaps on a number that no run has."""
    return done.crashed or bool(done.errors and _given_away(done))


def _given_away(done: Run) -> list[Exit]:
    """Return where other code was given a number: what it makes of that may be a number that no run has."""
    return [exit for exit, ways in done.tracer.trail.path.exits.items() if OTHER in ways]


def certain(done: Run, run: Again, numbers: Numbers) -> list[FlowError]:
    """The errors of a path that do not hang on a number which other code was given."""
    errors, doubtful = done.errors, _given_away(done)
    told = tuple(d.outcome or d.exit in doubtful for d in done.tracer.trail.path.taken)
    for number in NUMBERS if doubtful else ():
        if errors:
            others = dict.fromkeys(doubtful, (number,))
            also = {e.report() for e in run(told, replace(numbers, choices={**numbers.choices, **others})).errors}
            errors = [error for error in errors if error.report() in also]
    return errors


def remarks(trails: Sequence[Trail], numbers: Numbers) -> list[Lint]:
    """Return what is said of each place: what the graph shows of it, or that it cannot."""
    ways: dict[Exit, dict[str, None]] = {}
    for trail in trails:
        for exit, more in trail.path.exits.items():
            ways.setdefault(exit, {}).update(more)
    lints: list[Lint] = []
    for exit, several in ways.items():
        uses = [way for way in several if way not in _SHOWN]
        if exit in numbers.forks:
            tried = " and of ".join(map(str, numbers.of(exit)[:2]))
            what = f"the graph shows what comes of {tried}; other numbers are met in the run"
            lints.append(Lint("number", f"'{exit.text}' is {(uses or [TEXT])[0]} here: {what}.", exit.at))
        elif uses:
            advice = _COMPARE if uses[0] == KEY else _COMPUTE
            what = "and what hangs on it is not in the graph"
            lints.append(Lint("number", f"'{exit.text}' is {uses[0]} here, {what}. {advice}", exit.at))
    return lints


_COMPUTE = "Arithmetic, comparisons, min, max, round and math on it are; so is what an op makes of it."
_COMPARE = "A comparison is, such as x == 10 or x in (10, 20)."


def _content(trail: Trail) -> Hashable:
    """Return what a path did: its calls, what they were given, its draws and its conditions."""
    return (
        tuple((c.place, c.uses, as_given(c)) for c in trail.calls),
        tuple((source_place(d), d.iteration) for d in trail.draws.values()),
        tuple((d.condition, d.outcome, d.iteration) for d in trail.path.taken if d.exit is None),
    )
