"""Data sets of Hugging Face that are streamed: rows that come one after the other, and places to go on from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from .hub_store import Hf
from .orders import order_seed
from .stores import LOOK, Row, keys_of

if TYPE_CHECKING:
    from .source import Source


class Stream(Hf):
    """A data set that is read from its beginning on, never as a whole; ``buffer_size`` rows are shuffled at a time."""

    def __init__(self, name: Any, config: str | None, split: str, buffer_size: int) -> None:
        super().__init__(name, config, split)
        self.buffer_size = buffer_size

    def columns(self) -> dict[str, bool]:
        """From the description of the data set where it has one; else from its first rows."""
        features = self._described()
        if features is None:
            rows = self.begin().take(LOOK, 0)
            if not rows:
                raise DataError(f"{self.title} has no rows.", fix="Give it rows.")
            features = keys_of(rows)
        return features

    def open(self) -> None:
        """Nothing is opened before rows are drawn, by each cursor on its own."""

    def begin(self, place: Mapping[str, Any] | None = None) -> Reading:
        """Begin to read, where a place was taken or at the first row."""
        return Reading(self, self._ask(self._streamed), place)

    def _streamed(self, hub: Any) -> Any:
        data = self._load(hub, streaming=True)
        if data is self.given and hasattr(data, "state_dict"):
            raise DataError(
                "A stream that is loaded already has one place, and every run and every check has a place of its own.",
                fix="Give a function that returns it: fl.data.hf(load, streaming=True, ...).",
            )
        if hasattr(data, "state_dict"):
            return data
        if not len(data):
            raise DataError(f"{self.title} has no rows.", fix="Give it rows.")
        return data.to_iterable_dataset()

    def read(self, places: Sequence[int]) -> list[Row]:
        raise AssertionError("rows of a stream are read by its cursor")


class Reading:
    """One way through a stream: its rows, and the place of the next one."""

    def __init__(self, store: Stream, data: Any, place: Mapping[str, Any] | None) -> None:
        self._store, self._data = store, data
        self._first = data.state_dict()
        if place is not None:
            data.load_state_dict(dict(place))
        self.rows: Iterator[Mapping[str, Any]] = iter(data)

    def place(self) -> dict[str, Any]:
        """The place of the next row, as a JSON record that ``datasets`` understands."""
        return self._data.state_dict()

    def again(self) -> None:
        """Go back to the first row."""
        self._data.load_state_dict(self._first)
        self.rows = iter(self._data)

    def take(self, count: int, index: int) -> list[Row]:
        """The next rows, ``index`` the number of the first; fewer at the end. DataError where the stream breaks."""
        found: list[Row] = []
        try:
            found.extend(Row(values, index + i) for i, values in enumerate(islice(self.rows, count)))
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError(
                f"The stream {self._store.title} broke off: {type(error).__name__}: {first}.",
                at=self._store.at(index + len(found)),
                fix="Resume the run, which goes on at its last checkpoint; a row that cannot be read has to be mended.",
            ) from error
        return found


class StreamCursor:
    """A place in a stream: epoch, rows drawn in it, and where the rows of its buffer begin.

    The rows of a buffer are drawn in an order that depends on the seed, the epoch and the buffer's first row, so that
    a place needs no rows beside it: the buffer is read again.
    """

    def __init__(self, source: Source, store: Stream) -> None:
        self.source, self._store = source, store
        self.epoch = 0
        self.index = 0
        self._first = 0  # row number of the buffer's first one
        self._place: dict[str, Any] | None = None  # of that row; None: the beginning
        self._rows: list[Row] | None = None  # of the buffer, as they are drawn
        self._reading: Reading | None = None

    def state(self) -> dict[str, Any]:
        """Return the place, as a JSON record: ``{"epoch": 0, "index": 32, "buffer": {"first": 0, "size": 1000}}``."""
        buffer = {"first": self._first, "size": self._size, "place": self._place}
        return {"epoch": self.epoch, "index": self.index, "buffer": buffer}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a place that :meth:`state` gave. DataError where buffers have another size now."""
        buffer = state.get("buffer")
        if buffer is None or buffer["size"] != self._size:
            was = "data that is not streamed" if buffer is None else f"a stream with buffers of {buffer['size']} rows"
            raise DataError(
                f"This place is in {was}, and now it is one with buffers of {self._size}.",
                at=self.source.made_at,
                fix="Resume with the options that the run began with: streaming=, buffer_size=, shuffle=, and batch=.",
            )
        if self._rows is not None and (self.epoch, self._first) != (state["epoch"], buffer["first"]):
            self._rows = self._reading = None
        self.epoch, self.index = state["epoch"], state["index"]
        self._first, self._place = buffer["first"], buffer["place"]

    def draw(self, n: int | None = None) -> list[Row]:
        """Return the next n rows (a step's, if None); fewer, and then none, at the end of a source."""
        wanted = self.source.batch if n is None else n
        found: list[Row] = []
        with self.source.placing():
            while len(found) < wanted:
                rows = self._buffer()
                start = self.index - self._first
                if start < len(rows):
                    taken = rows[start : start + wanted - len(found)]
                    found += taken
                    self.index += len(taken)
                elif len(rows) == self._size:
                    self._next(self.epoch, self.index)
                elif not self.index:
                    raise DataError(f"{self._store.title} has no rows.", fix="Give it rows.")
                elif not self.source.reading.repeat:
                    break
                else:
                    self._next(self.epoch + 1, 0)
        return found

    @property
    def _size(self) -> int:
        reading = self.source.reading
        return self._store.buffer_size if reading.shuffle else reading.batch

    def _next(self, epoch: int, first: int) -> None:
        """Leave the buffer for the one that begins with a row of an epoch."""
        assert self._reading is not None, "the buffer before was read"
        if not first:
            self._reading.again()
        self.epoch, self.index, self._first = epoch, first, first
        self._place = self._reading.place() if first else None
        self._rows = None

    def _buffer(self) -> list[Row]:
        """The rows of the buffer, in the order in which they are drawn."""
        if self._rows is None:
            if self._reading is None:
                self._reading = self._store.begin(self._place)
            rows = self._reading.take(self._size, self._first)
            if self.source.reading.shuffle:
                seed = order_seed(self.source.reading.seed, self.epoch, self._first)
                random.Random(seed).shuffle(rows)
            self._rows = rows
        return self._rows
