"""The answers of one external call, written into the journal as they come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ....batch import Batch, CallInfo, Column, Key
from ....column import concat
from ....errors import FlowError
from ..journal import Journal
from .known_answers import Fingerprints, by_group, parent_row, some_prints

MOMENT = 0.02  # seconds within which answers are written down together


class AnswerBook:
    """The answers of one call to ``rows``, written down as they come, those of a moment together.

    ``complete`` gives rows of the fields that the op adds to them. ``known`` are answers of before, by the names that
    the op gives its fields. ``apart``: rows do not depend on all others of the call, so that some may be kept alone.
    """

    def __init__(
        self,
        journal: Journal,
        place: tuple[int, float],
        info: CallInfo,
        rows: Batch,
        prints: Fingerprints,
        complete: Callable[[Sequence[Key], Mapping[str, Any]], Batch],
        known: Batch | None,
        *,
        apart: bool,
    ) -> None:
        self.journal, self.place, self.info, self.rows, self.prints = journal, place, info, rows, prints
        self.known, self.apart = known, apart
        self._complete = complete
        self._numbers = {key: i for i, key in enumerate(rows.keys)}
        self._lock = threading.Lock()
        self._came: list[tuple[Sequence[Key], Mapping[str, Any]]] = []  # and is not written yet
        self._written: list[Batch] = []
        self._failed: set[Key] = set()
        self._timer: threading.Timer | None = None
        self._open = True

    def keep(self, keys: Sequence[Key], adds: Mapping[str, Any]) -> None:
        """Have it written down what some rows were given. What comes after the end of the call is forgotten."""
        if not self.apart:
            return
        with self._lock:
            if self._open:
                self._came.append((keys, adds))
                if self._timer is None:
                    self._timer = threading.Timer(MOMENT, self._flush)
                    self._timer.daemon = True
                    self._timer.start()

    def fail(self, keys: Sequence[Key]) -> None:
        """Have rows count as failed."""
        self._failed |= set(keys)

    def _flush(self) -> None:
        with self._lock:
            self._timer = None
            if self._open:
                self._write_what_came()

    def end(self) -> None:
        """The call has failed: write down what came."""
        with self._lock:
            self._end()
            self._write_what_came()

    def close(self, adds: Batch) -> None:
        """The call has ended: write down the rest, and what another answer has replaced since it came."""
        with self._lock:
            self._end()
            where = {key: i for i, key in enumerate(adds.keys)} if self._written or self.known is not None else {}
            done = set(self.known.keys) if self.known is not None else set[Key]()
            for kept in self._written:
                at = [where[key] for key in kept.keys if key in where]
                if len(at) == len(kept) and adds.take(at).digest() == kept.digest():
                    done |= set(kept.keys)
            mine = by_group(lambda key: parent_row(key, self._numbers) or key, where)
            rest = [i for i, key in enumerate(self.rows.keys) if key not in mine or not done.issuperset(mine[key])]
            if not self.apart and self._failed:  # one answer to all of them
                self._failed = set(self.rows.keys)
            for failed in (False, True):
                some = [i for i in rest if (self.rows.keys[i] in self._failed) is failed]
                if some or (not failed and not len(self.rows)):
                    keys = [self.rows.keys[i] for i in some]
                    self._write(keys, adds if len(some) == len(self.rows) else self._of(keys, adds), failed=failed)

    def _end(self) -> None:
        self._open = False
        if self._timer is not None:
            self._timer.cancel()

    def _of(self, keys: Sequence[Key], adds: Batch) -> Batch:
        """What was added to some rows, in their order."""
        mine = by_group(lambda key: parent_row(key, self._numbers) or key, adds.keys)
        where = {key: i for i, key in enumerate(adds.keys)}
        return adds.take([where[made] for key in keys for made in mine.get(key, ())])

    def _write_what_came(self) -> None:
        came, self._came = self._came, []
        for keys, adds in _together(came):
            with suppress(FlowError, OSError):  # as of a full disk: the end of the call meets it too, and says so
                made = self._complete(keys, adds)
                self._write(keys, made)
                self._written.append(made)

    def _write(self, keys: Sequence[Key], adds: Batch, *, failed: bool = False) -> None:
        kept = some_prints(self.prints, [self._numbers[parent_row(key, self._numbers) or key] for key in keys])
        self.journal.keep(*self.place, tuple(keys), kept.rows, kept.fields, of=self.info, adds=adds, failed=failed)


def _together(
    came: Sequence[tuple[Sequence[Key], Mapping[str, Any]]],
) -> list[tuple[list[Key], Mapping[str, Any]]]:
    """Answers put together, one after the other; none of none."""
    if not came:
        return []
    keys = [key for some, _ in came for key in some]
    return [(keys, {name: _joined(name, [adds[name] for _, adds in came]) for name in came[0][1]})]


def _joined(name: str, parts: Sequence[Any]) -> Any:
    """What several answers have of a field: lists, or columns with their marks."""
    if all(isinstance(part, Column) for part in parts):
        return concat(name, list(parts), {})
    return [value for part in parts for value in part]
