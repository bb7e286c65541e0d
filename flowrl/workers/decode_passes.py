"""How long an engine takes to give each row that runs a token, by how many rows there are."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard


@dataclass(frozen=True)
class DecodePasses:
    """Passes of about as many rows, each of which has given every row a token.

    ``rows`` and ``context`` are sums over the passes: of rows, and of the tokens which these had by then. A pass in
    which rows begin is not among them: their prompts are computed in it.

    >>> DecodePasses(count=40, rows=1250, context=61_000, seconds=0.21)
    DecodePasses(count=40, rows=1250, context=61000, seconds=0.21)
    """

    count: int
    rows: int
    context: int
    seconds: float

    def plus(self, other: DecodePasses) -> DecodePasses:
        """Return both together."""
        rows, context = self.rows + other.rows, self.context + other.context
        return DecodePasses(self.count + other.count, rows, context, self.seconds + other.seconds)


class TellsPasses(Protocol):
    """An engine that tells how long its passes took."""

    def take_passes(self) -> Sequence[DecodePasses]:
        """Return those that were made since it was asked last."""
        ...


def tells_passes(engine: object) -> TypeGuard[TellsPasses]:
    """Return whether an engine tells how long its passes took."""
    return hasattr(engine, "take_passes")


class PassMeter:
    """Adds up passes, those of 1, of 2 to 3, of 4 to 7 rows and so on.

    >>> meter = PassMeter()
    >>> for rows in (2, 3, 9):
    ...     meter.add(DecodePasses(1, rows, 10 * rows, 0.5))
    >>> [passes.rows for passes in meter.take()]
    [5, 9]
    >>> meter.take()
    ()

    An engine tells it of each pass as it ends, with its rows, the tokens that these had, and the time:

    >>> for rows, now in (("ab", 1.0), ("ab", 1.5), ("abc", 2.5), ("bc", 3.0)):
    ...     meter.note(rows, 20, now)  # "c" begins in the third one
    >>> meter.take()
    (DecodePasses(count=2, rows=4, context=40, seconds=1.0),)
    """

    def __init__(self) -> None:
        self._passes: dict[int, DecodePasses] = {}  # by the bits of their number of rows
        self._last: tuple[float, frozenset[Hashable]] | None = None  # when a pass ended, and its rows, if it goes on

    def note(self, rows: Iterable[Hashable], context: int, now: float, *, goes_on: bool = True) -> None:
        """Note a pass from the end of the one before it, unless rows have begun in it or nothing ran between."""
        before, these = self._last, frozenset(rows)
        if before is not None and these and these <= before[1]:
            self.add(DecodePasses(1, len(these), context, now - before[0]))
        self._last = (now, these) if goes_on else None

    def rest(self) -> None:
        """Leave out the next pass: something else is done before it, or in it."""
        self._last = None

    def add(self, passes: DecodePasses) -> None:
        """Add passes with one number of rows."""
        key = (passes.rows // passes.count).bit_length()
        known = self._passes.get(key)
        self._passes[key] = passes if known is None else known.plus(passes)

    def take(self) -> tuple[DecodePasses, ...]:
        """Return what was added since it was asked last, the fewest rows first."""
        found, self._passes = self._passes, {}
        return tuple(found[key] for key in sorted(found))
