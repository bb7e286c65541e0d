"""Strata of a source: its rows that have one value in a column, as a source of their own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..errors import At, DataError, near
from ..graph.script.site import caller
from .source import Source
from .stores import Generated, Listed, Row, Store, read_each
from .streamed import Stream

_log = logging.getLogger("flowrl.data")
_TOGETHER = 1024  # rows that are read at a time while a column is looked through


class Column:
    """Where each value of a column is: the numbers of its rows, found when they are first asked for."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self._places: dict[str, list[int]] | None = None

    def places(self, value: str) -> list[int]:
        """The numbers of the rows that have the value."""
        if self._places is None:
            self.store.open()
            found: dict[str, list[int]] = {}
            size = self.store.size
            assert size is not None, "a source without end has no strata"
            bad: list[Row] = []
            for first in range(0, size, _TOGETHER):
                for row in read_each(self.store, range(first, min(first + _TOGETHER, size))):
                    if row.error is None:
                        found.setdefault(str(row.get(self.name)), []).append(row.index)
                    else:
                        bad.append(row)
            if bad:
                self._tell(bad)
            self._places = found
        return self._places.get(value, [])

    def _tell(self, bad: Sequence[Row]) -> None:
        first = bad[0].error
        assert first is not None, "it cannot be read"
        where, title = first.at or self.store.at(bad[0].index), self.store.title
        text = "%d rows of %s are in no stratum, as they cannot be read; the first: %s  at   %s"
        _log.warning(text, len(bad), title, first.what, where)


class Stratum:
    """The rows of a store that have one value in a column, in their order."""

    def __init__(self, column: Column, value: str) -> None:
        self.column, self.value = column, value
        self.whole = column.store
        self.skips = self.whole.skips
        self.title = f"{self.whole.title} where {column.name} is {value}"
        self.size: int | None = None

    @property
    def made_by(self) -> Any:
        """The function that gives the rows, if one does."""
        return getattr(self.whole, "made_by", None)

    def columns(self) -> dict[str, bool]:
        return self.whole.columns()

    def look(self) -> Sequence[Mapping[str, Any]]:
        return [row for row in self.whole.look() if str(row.get(self.column.name)) == self.value]

    def open(self) -> None:
        self._places = self.column.places(self.value)
        self.size = len(self._places)

    def read(self, places: Sequence[int]) -> list[Row]:
        return self.whole.read([self._places[place] for place in places])

    def at(self, index: int) -> At:
        return self.whole.at(index)


def strata_of(
    source: Source, by: str, weights: Mapping[Any, float] | None
) -> tuple[dict[str, Source], dict[str, float] | None]:
    """A source for each value of a column, by its text, and the weights by the same texts. Raises DataError."""
    store, at = source.store, caller()
    if isinstance(store, Stream) or (isinstance(store, Generated) and store.size is None):
        streamed = isinstance(store, Stream)
        what = "is a stream" if streamed else "gives rows without end"
        fewer = "Leave out streaming=True" if streamed else "Give it a size="
        raise DataError(
            f"{store.title} {what}, and none of its rows is known before it is drawn.",
            at=at,
            fix=f"{fewer}, or write fl.data.mix({{...}}, exact=True) of a source for each value.",
        )
    have = store.columns()
    if by not in have:
        meant = near(by, have)
        fix = f"Write by='{meant}'." if meant else "Name a column of the data."
        raise DataError(f"{store.title} has no column '{by}'.", at=at, have=have, fix=fix)
    column = Column(store, by)
    values = _values(store, by, at) if weights is None else [str(value) for value in weights]
    options = {field.name: getattr(source.reading, field.name) for field in fields(source.reading)}
    defaults = {field.name: field.default for field in fields(source.reading)}
    given = {name: value for name, value in options.items() if value is not defaults[name]}
    parts = {value: Source(Stratum(column, value), given) for value in values}
    return parts, None if weights is None else {str(value): weight for value, weight in weights.items()}


def _values(store: Store, by: str, at: At | None) -> list[str]:
    """The values of a column of rows that are there, in the order in which they appear."""
    rows = store.rows if isinstance(store, Listed) else None
    if rows is None:
        raise DataError(
            f"Which values '{by}' has is not known before {store.title} is read.",
            at=at,
            fix='Name them: weights={"easy": 1, "hard": 1}.',
        )
    return list(dict.fromkeys(str(row.get(by)) for row in rows if isinstance(row, Mapping)))
