"""Which rows of a call the lines of a journal answer: those with the same key, of which the same was read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ....batch import Batch, CallInfo, Column, Key
from ....column import of_each, raw_bytes

_ROWS_NAMED = 4  # in a message
_as_json = json.JSONEncoder(sort_keys=True).encode  # one for all rows: json.dumps makes one for each


@dataclass(frozen=True)
class Fingerprints:
    """What a call has read of its rows: a digest of each row, and one of each of its fields for messages.

    ``Fingerprints(("9f2c...", ...), {"response_ids": ("a1b2c3d4", ...)})``
    """

    rows: tuple[str, ...]
    fields: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(batch: Batch, beside: str = "") -> Fingerprints:
        """Return those of a batch; ``beside`` stands for what the call was given besides its rows."""
        contents = {name: _contents(name, batch[name]) for name in sorted(batch.fields)}
        first = hashlib.blake2b(beside.encode(), digest_size=16)
        rows: list[str] = []
        for row in zip(*contents.values(), strict=True) if contents else ((),) * len(batch):
            whole = first.copy()
            whole.update(b"".join(row))
            rows.append(whole.hexdigest())
        return Fingerprints(tuple(rows), {name: tuple(of_each(c, _short)) for name, c in contents.items()})


def some_prints(prints: Fingerprints, rows: Sequence[int]) -> Fingerprints:
    """Return the fingerprints of some rows."""
    return Fingerprints(
        tuple(prints.rows[i] for i in rows), {n: tuple(f[i] for i in rows) for n, f in prints.fields.items()}
    )


def _short(contents: bytes) -> str:
    return hashlib.blake2b(contents, digest_size=4).hexdigest()


def _contents(name: str, column: Column) -> list[bytes]:
    """The contents of a column, row by row."""
    head = f"{name}:{column.type}:".encode()
    if isinstance(column.values, list):
        return of_each(column.values, lambda value: head + _as_json(value).encode())
    raw, count = raw_bytes(column.values), len(column.values)
    size = len(raw) // max(1, count)  # of an element along the first dim
    ends = range(count + 1) if column.lengths is None else column.offsets.tolist()
    return [head + raw[a * size : b * size] for a, b in pairwise(ends)]


def plain_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the plain arguments of a call besides its rows, as a text."""

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return {str(k): plain(v) for k, v in value.items()} if isinstance(value, dict) else None

    said = {name: plain(value) for name, value in arguments.items()}
    return json.dumps({n: v for n, v in said.items() if v is not None}, sort_keys=True)


class KnownAnswers:
    """What the lines of a journal say of a call: the newest line comes first, ``keys`` and ``prints`` are of its rows.

    Lines of another op are left out, and those of a call of a step where this one is of none: in a run that is made
    longer, the call that stood after the loop has the number of one of the steps that follow. Older lines do not say.
    """

    def __init__(
        self, lines: Iterable[Mapping[str, Any]], info: CallInfo, keys: Sequence[Key], prints: Fingerprints
    ) -> None:
        self.keys, self.prints = keys, prints
        self.lines = [
            line
            for line in lines
            if line.get("op", info.op) == info.op and line.get("outside", info.outside) == info.outside
        ]

    def lines_of_rows(self, unit: str, read: Batch) -> dict[Key, Mapping[str, Any]]:
        """Return the rows that are answered, each with the newest line that does so.

        ``unit`` says which rows depend on each other: ``row``, ``prompt`` or ``call``.
        """
        now = dict(zip(self.keys, self.prints.rows, strict=True))
        group: Callable[[Key], Any] = {"row": lambda k: k, "prompt": lambda k: k[0]}.get(unit, lambda k: 0)
        asked = by_group(group, self.keys)
        found: dict[Key, Mapping[str, Any]] = {}
        for line in (line for line in self.lines if "adds" in line):
            if "keys" not in line:  # as journals were once written: by call
                mine = self.keys if line["inputs"] == read.digest() else ()
                found = dict.fromkeys(mine, line) | found
                continue
            same = {key for key, of in zip(line["keys"], line["inputs"], strict=True) if now.get(key) == of}
            for of, journalled in by_group(group, line["keys"]).items():
                mine = asked.get(of, ())
                if mine and mine[0] not in found and set(mine) <= same and set(journalled) == set(mine):
                    found.update(dict.fromkeys(mine, line))
        return found

    def rows_made_of(self, found: Collection[Key]) -> Batch | None:
        """Return rows that were handed over one by one, made of rows that are not ``found`` as a whole."""
        now, seen, taken = dict(zip(self.keys, self.prints.rows, strict=True)), set[Key](), list[Batch]()
        for line in (line for line in self.lines if "adds" in line and "keys" in line):
            mine: list[Key] = []
            for key, of in zip(line["keys"], line["inputs"], strict=True):
                parent = parent_row(key, now)
                if (
                    parent is not None
                    and parent != key
                    and parent not in found
                    and key not in seen
                    and now[parent] == of
                ):
                    mine.append(key)
            if mine:
                seen |= set(mine)
                taken.append(answers_of(line, mine))
        return taken[0].concat(*taken[1:]) if taken else None

    def describe_differences(self, lacking: Sequence[Key]) -> str:
        """Return what is not as it was when rows were answered before; empty where none of them was."""
        before: dict[Key, dict[str, str]] = {}  # the newest answer to each row, or to one made of it
        among = set(self.keys)
        for line in self.lines:
            for i, key in enumerate(line.get("keys", ())):
                before.setdefault(parent_row(key, among) or key, {name: of[i] for name, of in line["fields"].items()})
        if not before:
            return (
                "its answers were journalled by an older flowrl for other rows; it is asked again" if self.lines else ""
            )
        now = {key: {name: of[i] for name, of in self.prints.fields.items()} for i, key in enumerate(self.keys)}
        again = [key for key in lacking if key in before]
        differ = [key for key in again if before[key] != now[key]] or again
        if not again:
            return ""
        names = sorted({name for key in differ for name, of in now[key].items() if before[key].get(name) != of})
        what = f"other {', '.join(names)}" if names else "other rows beside them, or other arguments,"
        some = ", ".join(str(key) for key in differ[:_ROWS_NAMED]) + (", ..." if len(differ) > _ROWS_NAMED else "")
        asked = f"{len(lacking)} {'row is' if len(lacking) == 1 else 'rows are'} asked again"
        return f"{len(differ)} of {len(self.keys)} rows have {what} than when they were answered ({some}); {asked}"


def answers_in(found: Mapping[Key, Mapping[str, Any]]) -> list[Batch]:
    """Return what lines of a journal have for the rows that they answer, one batch for each line."""
    lines: dict[int, tuple[Mapping[str, Any], list[Key]]] = {}
    for key, line in found.items():
        lines.setdefault(id(line), (line, []))[1].append(key)
    return [answers_of(line, keys) for line, keys in lines.values()]


def answers_of(line: Mapping[str, Any], keys: Sequence[Key]) -> Batch:
    """Return what a line of the journal has for some of its rows."""
    added = Batch.from_record(line["adds"])
    if "keys" not in line or len(keys) == len(line["keys"]):
        return added
    wanted = set(keys)
    return added.take([i for i, key in enumerate(added.keys) if parent_row(key, wanted) is not None])


def is_whole(found: Mapping[Key, Mapping[str, Any]], keys: Sequence[Key]) -> bool:
    """Whether one line has all rows of a call, in its order."""
    line = found.get(keys[0]) if keys else None
    return line is not None and line.get("keys", tuple(keys)) == tuple(keys) and all(found.get(k) is line for k in keys)


def in_order_of(answers: Sequence[Batch], keys: Sequence[Key]) -> Batch:
    """Return answers put together, in the order of the rows that they are for."""
    made = answers[0].concat(*answers[1:])
    place = {key: i for i, key in enumerate(keys)}
    order = {key: (place[parent_row(key, place) or key], key) for key in made.keys}
    return made.take(sorted(range(len(made)), key=lambda i: order[made.keys[i]]))


def parent_row(key: Key, among: Any) -> Key | None:
    """Return the row that a row was made of: the longest beginning of its key that is one."""
    return key if key in among else next((key[:n] for n in range(len(key) - 1, 0, -1) if key[:n] in among), None)


def by_group(group: Callable[[Key], Any], keys: Iterable[Key]) -> dict[Any, list[Key]]:
    """Return keys by their group."""
    found: dict[Any, list[Key]] = {}
    for key in keys:
        found.setdefault(group(key), []).append(key)
    return found
