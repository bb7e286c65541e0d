"""What rows are filtered by beside numbers: fields of few short values, such as a finish reason or a source."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

FIRST = ("finish_reason", "outcome", "source", "opponent")  # come first, and are kept however many others there are
NAMES = 12  # labels of a program
VALUES = 24  # of a label: a field with more is none
LONGEST = 60  # characters of a value: a field with a longer one is none
LARGEST = 1 << 62  # number of a value: one beyond it is shown as this
KINDS = 4000  # of the rows of a program, by its labels: where there are more, that with the most values is given up
#: Fields that are listed or found otherwise, or are measures.
NEVER = frozenset(
    (
        "program",
        "step",
        "key",
        "prompt",
        "response",
        "reward",
        "rewards",
        "temperature",
        "sampled_tokens",
        "delivered_tokens",
    )
)

Labels = tuple[tuple[str, str], ...]


class KindsOfRows:
    """Gives rows the number of their kind: rows of one program and equal labels are of one kind.

    So a filter by labels is one by a few numbers, however many labels there are.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._ids: dict[tuple[str, Labels], int] = {}
        self._met: dict[tuple[str, Labels], int] = {}  # the same, with labels as rows have them in their order
        self._values: dict[str, dict[str, set[str]]] = {}  # by program and name
        self._none: dict[str, set[str]] = {}  # names of a program that turned out to be no labels
        self._rows: Counter[int] = Counter()  # that were added to each kind
        self._last = 0  # number that was given to a kind
        for program, name in connection.execute("SELECT program, name FROM no_labels"):
            self._none.setdefault(program, set()).add(name)
        for id, program, labels in connection.execute("SELECT id, program, labels FROM kinds"):
            found = tuple((name, value) for name, value in json.loads(labels))
            self._ids[program, found] = id
            self._last = max(self._last, id)
            for name, value in found:
                if name not in self._none.get(program, ()):
                    self._values.setdefault(program, {}).setdefault(name, set()).add(value)
        self._kinds = Counter(program for program, found in self._ids if self._are_labels(program, found))

    def kind_of(self, program: str, record: Mapping[str, Any]) -> int:
        """Return the number of the kind of a row."""
        found = program, tuple(self._labels(program, record))
        id = self._met.get(found)
        if id is None:
            labels = tuple(sorted(found[1]))
            id = self._ids.get((program, labels))
            if id is None:
                if labels and self._kinds[program] >= KINDS:
                    values = self._values[program]
                    self._give_up(program, max(values, key=lambda name: (len(values[name]), name)))
                    return self.kind_of(program, record)
                self._ids[program, labels] = id = self._last = self._last + 1
                self._kinds[program] += 1
            self._met[found] = id
        self._rows[id] += 1
        return id

    def _are_labels(self, program: str, found: Labels) -> bool:
        """Whether none of these was given up."""
        none = self._none.get(program, ())
        return not any(name in none for name, _ in found)

    def write(self) -> None:
        """Write which kinds there are, with how many rows, and which names are no labels."""
        self._connection.executemany(
            "INSERT INTO kinds VALUES (?, ?, ?, ?) ON CONFLICT(id) DO UPDATE SET rows = rows + excluded.rows",
            [(id, program, json.dumps(labels), self._rows[id]) for (program, labels), id in self._ids.items()],
        )
        self._connection.executemany(
            "INSERT OR IGNORE INTO no_labels VALUES (?, ?)",
            [(program, name) for program, names in self._none.items() for name in names],
        )

    def _labels(self, program: str, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        none, known = self._none.setdefault(program, set()), self._values.setdefault(program, {})
        for name, value in record.items():
            kind = type(value)
            if (kind is not str and kind is not bool and kind is not int) or name in NEVER or name in none:
                continue
            if kind is str:
                text: str = value
            else:
                text = str(max(-LARGEST, min(value, LARGEST))).lower()
            if not text:
                continue
            values = known.get(name)
            if values is None or text not in values:
                if not self._takes(program, name, text):
                    continue
                known.setdefault(name, set()).add(text)
            yield name, text

    def _takes(self, program: str, name: str, text: str) -> bool:
        """Whether a further value makes no difference to its name being a label."""
        known = self._values[program]
        if not _storable(name):
            return False
        if name not in known and name not in FIRST and sum(each not in FIRST for each in known) >= NAMES:
            return False
        long = len(text) > LONGEST or len(name) > LONGEST
        if long or len(known.get(name, ())) >= VALUES or not _storable(text):
            self._give_up(program, name)
            return False
        return True

    def _give_up(self, program: str, name: str) -> None:
        if self._values[program].pop(name, None) is not None:
            gone = sum(of == program and self._are_labels(of, f) and name in dict(f) for of, f in self._ids)
            self._kinds[program] -= gone
        self._none.setdefault(program, set()).add(name)


def labels_of(connection: sqlite3.Connection, program: str) -> dict[str, dict[str, int]]:
    """The labels of a program's rows by name: each value with how many rows have it, the most frequent first.

    >>> connection = sqlite3.connect(":memory:")
    >>> _ = connection.execute("CREATE TABLE kinds(id INTEGER PRIMARY KEY, program TEXT, labels TEXT, rows INTEGER)")
    >>> _ = connection.execute("CREATE TABLE no_labels(program TEXT, name TEXT)")
    >>> kinds = KindsOfRows(connection)
    >>> rows = [{"source": "math", "finish_reason": "stop"}, {"source": "code", "finish_reason": "stop"}]
    >>> [kinds.kind_of("grpo", row) for row in (*rows, rows[1])]
    [1, 2, 2]
    >>> kinds.write()
    >>> labels_of(connection, "grpo")
    {'finish_reason': {'stop': 3}, 'source': {'code': 2, 'math': 1}}
    """
    none = {name for (name,) in connection.execute("SELECT name FROM no_labels WHERE program = ?", (program,))}
    found: dict[str, Counter[str]] = {}
    for labels, rows in connection.execute("SELECT labels, rows FROM kinds WHERE program = ?", (program,)):
        for name, value in json.loads(labels):
            if name not in none:
                found.setdefault(name, Counter())[value] += rows
    names = sorted(found, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    return {name: dict(sorted(found[name].items(), key=lambda each: (-each[1], each[0]))) for name in names}


def kinds_with(
    connection: sqlite3.Connection, program: str, asked: Mapping[str, Sequence[str]]
) -> tuple[list[int], int]:
    """The kinds whose rows have, of each name that is asked for, one of the values; and how many rows these are."""
    kinds, count = list[int](), 0
    for id, labels, rows in connection.execute("SELECT id, labels, rows FROM kinds WHERE program = ?", (program,)):
        found = dict(json.loads(labels))
        if all(found.get(name) in values for name, values in asked.items()):
            kinds.append(id)
            count += rows
    return kinds, count


def _storable(text: str) -> bool:
    """Whether a database takes a text: no half of a surrogate pair is in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
