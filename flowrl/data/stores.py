"""Where rows lie, and how they are read by number: what every such store has, and those of a list and of a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from ..errors import At, DataError
from ..graph.script.site import caller

LOOK = 32  # rows of a file or list whose keys are its columns


class Row(dict[str, Any]):
    """A row as the data has it; ``index`` is its number there, ``error`` why it could not be read, if so."""

    __slots__ = ("error", "index")

    def __init__(self, values: Mapping[str, Any], index: int, error: DataError | None = None) -> None:
        super().__init__(values)
        self.index = index
        self.error = error


class Store(Protocol):
    """Rows by number. ``open`` makes ``size`` and ``read`` ready; ``columns`` and ``look`` are cheap, and come before.

    ``columns`` gives the names, and for each whether it holds lists. ``look`` gives a few rows, none where it would
    have to read more than these. With ``skips`` both pass over rows that cannot be read.
    """

    title: str
    size: int | None  # None: without end
    skips: bool

    def columns(self) -> dict[str, bool]: ...
    def look(self) -> Sequence[Mapping[str, Any]]: ...
    def open(self) -> None: ...
    def read(self, places: Sequence[int]) -> list[Row]: ...
    def at(self, index: int) -> At: ...


def read_each(store: Store, places: Sequence[int]) -> list[Row]:
    """Return rows by number. Where the store skips, one that cannot be read is there with its error."""
    try:
        return store.read(places)
    except DataError as error:
        if not store.skips:
            raise
        return [Row({}, places[0], error)] if len(places) == 1 else [read_each(store, [i])[0] for i in places]


class Listed:
    """Rows of a list, or of a function that gives them."""

    title = "the list of rows"
    skips = False

    def __init__(self, data: Any) -> None:
        self._data: Any = data
        if not callable(data) and (isinstance(data, str) or not isinstance(data, Sequence)):
            raise DataError(
                f"fl.data.rows takes a list of dicts or a function that gives one; this is a {type(data).__name__}.",
                at=caller(),
                fix="Give list(data), of a DataFrame data.to_dict('records'), of a data set fl.data.hf(data, ...), "
                "of a file fl.data.jsonl(path, ...).",
            )
        self._rows: Sequence[Any] | None = None if callable(data) else data
        self.size: int | None = None if callable(data) else len(data)
        if callable(data):
            self.title = f"{getattr(data, '__name__', 'the function')}()"

    @property
    def rows(self) -> Sequence[Any] | None:
        """The rows, where they are there already."""
        return self._rows

    @property
    def made_by(self) -> Any:
        """The function that gives them, if one does."""
        return self._data if callable(self._data) else None

    def columns(self) -> dict[str, bool]:
        return keys_of(self._head())

    def _head(self) -> list[Mapping[str, Any]]:
        if self._rows is None:
            given = self._data()
            if isinstance(given, Sequence):  # no need to ask again
                self._rows, self.size = given, len(given)
            return check_rows(self.title, list(islice(iter(given), LOOK)), skip=self.skips)
        return check_rows(self.title, list(self._rows[:LOOK]), skip=self.skips)

    def look(self) -> Sequence[Mapping[str, Any]]:
        if self._rows is None:
            return self._head()
        apart = max(1, len(self._rows) // LOOK)
        return check_rows(self.title, list(self._rows[::apart][:LOOK]), skip=self.skips)

    def open(self) -> None:
        if self._rows is None:
            self._rows = list(self._data())
        self.size = len(self._rows)

    def read(self, places: Sequence[int]) -> list[Row]:
        assert self._rows is not None, "open comes first"
        return [Row(check_row(self._rows[i], self.at(i)), i) for i in places]

    def at(self, index: int) -> At:
        return At(f"<{self.title}, row {index}>", 0)


class Generated:
    """Rows of a pure function of their number."""

    skips = False

    def __init__(self, fn: Callable[[int], Mapping[str, Any]], size: int | None) -> None:
        self.size = size
        self.title = f"{getattr(fn, '__name__', 'the function')}(index)"
        self.made_by = self._fn = fn

    def columns(self) -> dict[str, bool]:
        if self.skips:
            return keys_of(self.look())
        return keys_of(check_rows(self.title, [self._fn(0)] if self.size != 0 else []))

    def look(self) -> Sequence[Mapping[str, Any]]:
        rows = range(LOOK if self.size is None else min(LOOK, self.size))
        return check_rows(self.title, [self._fn(i) for i in rows], skip=self.skips)

    def open(self) -> None:
        pass

    def read(self, places: Sequence[int]) -> list[Row]:
        return [Row(check_row(self._fn(i), self.at(i)), i) for i in places]

    def at(self, index: int) -> At:
        return At(f"<{self.title}, index {index}>", 0)


def keys_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Return all keys, in the order in which they appear, and whether they hold lists."""
    names: dict[str, bool] = {}
    for row in rows:
        for name, value in row.items():
            names[str(name)] = names.get(str(name), False) or isinstance(value, (list, tuple))
    return names


def check_rows(title: str, rows: list[Any], *, skip: bool = False) -> list[Mapping[str, Any]]:
    """Return rows that are objects. Raises DataError where there are none, or one is something else.

    ``skip`` leaves out those that are something else, as long as one is left.
    """
    if not rows:
        raise DataError(f"{title} has no rows.", fix="Give it rows.")
    if skip and (objects := [row for row in rows if isinstance(row, Mapping)]):
        return objects
    return [check_row(row, At(f"<{title}, row {i}>", 0)) for i, row in enumerate(rows)]


def check_row(row: Any, at: At | None, *, fix: str | None = None) -> Mapping[str, Any]:
    """Return a row that is an object. Raises DataError."""
    if not isinstance(row, Mapping):
        what = f"A row is {type(row).__name__}, not an object with columns."
        raise DataError(what, at=at, fix=fix or 'Write rows as {"prompt": "..."}.')
    return row
