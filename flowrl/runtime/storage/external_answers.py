"""Calls that touch the world: every row is asked for once, and answered from the journal from then on.

What is kept is kept by row, so that a run may go on under another plan: with other chunks, or other processes for
rewards. A row has its answer where its key and what was read of it are those of then. An op that hands over rows which
it makes of its own, as an environment does its episodes, is called with all of its rows and those that it has handed
over before: it asks for none of these again, and the others come out as they would have among all.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ...batch import Batch, CallInfo, Column, Key
from ...column import raw_bytes
from ...errors import FlowError
from ...graph.ops.apply import merge
from ...graph.ops.op import Op
from ...graph.ops.partial_answers import handed_to
from ...graph.ops.signature import Signature
from ...graph.ops.update_metrics import Metrics
from .journal import Journal

MOMENT = 0.02  # seconds within which answers are written down together
_ROWS_NAMED = 4  # in a message


@dataclass(frozen=True)
class Fingerprints:
    """What a call has read of its rows: a digest of each row, and one of each of its fields for messages.

    ``Fingerprints(("9f2c...", ...), {"response_ids": ("a1b2c3d4", ...)})``
    """

    rows: tuple[str, ...]
    fields: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(batch: Batch, beside: str = "") -> Fingerprints:
        """Those of a batch; ``beside`` stands for what the call was given besides its rows."""
        names = sorted(batch.fields)
        contents = {name: _contents(name, batch[name]) for name in names}
        rows: list[str] = []
        for i in range(len(batch)):
            whole = hashlib.blake2b(beside.encode(), digest_size=16)
            for name in names:
                whole.update(contents[name][i])
            rows.append(whole.hexdigest())
        short = {n: tuple(hashlib.blake2b(c, digest_size=4).hexdigest() for c in contents[n]) for n in names}
        return Fingerprints(tuple(rows), short)


def once(
    journal: Journal,
    place: tuple[int, int],
    op: Op,
    worker: Any,
    arguments: Mapping[str, Any],
    into: Mapping[str, str],
    info: CallInfo,
    warn: Callable[[str], None],
) -> Any:
    """Run an external call for the rows that have no answer in the journal yet; those of all others come from there.

    ``place`` is the call's: the number of its program in the run, and its own in the program. Rows are asked for again
    as far as they depend on each other: alone, with those of their prompt, or all of the call (``pieces=`` of the op).
    """
    main = next((a for a in arguments.values() if isinstance(a, Batch)), None)
    if main is None:
        return op.run(worker, arguments, into, info)
    init = getattr(worker, "init_arguments", {})
    signature = op.signature(init, arguments, frozenset(main.fields))
    read = _read(op, signature, main)
    prints = Fingerprints.of(read, _beside(arguments))
    known = [line for line in journal.answers(*place) if _is_of(line, info)]
    if op.returns != "batch":
        return _value_once(journal, place, info, known, main, prints, lambda: op.run(worker, arguments, into, info))
    unit = "call" if op.rows == "regroup" else op.unit(init, arguments)
    found = _answered(known, main.keys, prints, unit, read)
    made = _made_of(known, main.keys, prints, found) if op.rows == "expand" and unit != "call" else None
    if made is not None and found:  # also those that were kept as a whole: the op is called with all of its rows
        made = made.concat(*(_taken(line, keys) for line, keys in _by_line(found)))
        found = {}
    lacking = [i for i, key in enumerate(main.keys) if key not in found]
    parents = set(main.keys)
    begun = {_parent(key, parents) for key in (made.keys if made is not None else ())}
    asked_for = [main.keys[i] for i in lacking if main.keys[i] not in begun]
    if asked_for and (said := _differences(known, main.keys, prints, asked_for)):
        warn(f"{op.title(worker)} of step {info.step}: {said}")
    answers = [_taken(line, keys) for line, keys in _by_line(found)]
    if lacking or not len(main):
        some = main if len(lacking) == len(main) else main.take(lacking)
        asked = {name: some if value is main else value for name, value in arguments.items()}
        kept = prints if some is main else _some(prints, lacking)
        apart = replace(op, rows="apart")  # what is handed over are fields of rows alone

        def complete(keys: Sequence[Key], adds: Mapping[str, Any]) -> Batch:
            return merge(apart, info.op, Batch(keys, {}), adds, signature, into)

        names = {new: name for name, new in into.items()}
        before = None if made is None else made.rename(**{n: names[n] for n in made.fields if n in names})
        book = _Book(journal, place, info, some, kept, complete, before, apart=unit != "call")
        with handed_to(book):
            try:
                result = op.run(worker, asked, into, info)
            except BaseException:
                book.end()
                raise
        fresh = _added(op, result, main)
        book.close(fresh)
        if some is main:
            return result
        answers.append(fresh)
    added = answers[0] if _is_whole(found, main.keys) else _in_order(answers, main.keys)
    if not op.inherits:
        return added
    rows = main if op.rows == "same" else main.take_keys(added.keys)
    return rows.with_columns(dict(added.columns))


def _is_of(line: Mapping[str, Any], info: CallInfo) -> bool:
    """Whether a line is of this op, and like this call of a step or of none; older lines do not say.

    In a run that is made longer, the call that stood after the loop has the number of one of the steps that follow.
    """
    return line.get("op", info.op) == info.op and line.get("outside", info.outside) == info.outside


def _value_once(
    journal: Journal,
    place: tuple[int, int],
    info: CallInfo,
    known: Sequence[Mapping[str, Any]],
    main: Batch,
    prints: Fingerprints,
    ask: Callable[[], Any],
) -> Any:
    """The same for a call that gives metrics, a number or nothing."""
    for line in known:
        if "value" in line and line["keys"] == main.keys and tuple(line["inputs"]) == prints.rows:
            return _plain(line["value"])
    value = ask()
    journal.keep(*place, main.keys, prints.rows, prints.fields, of=info, value=value)
    return value


def _plain(value: Any) -> Any:
    return Metrics(value) if isinstance(value, dict) else value


class _Book:
    """The answers of one call to ``rows``, written down as they come, those of a moment together.

    ``complete`` gives rows of the fields that the op adds to them. ``known`` are answers of before, by the names that
    the op gives its fields. ``apart``: rows do not depend on all others of the call, so that some may be kept alone.
    """

    def __init__(
        self,
        journal: Journal,
        place: tuple[int, int],
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
            mine = _by(lambda key: _parent(key, self._numbers) or key, where)
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
        mine = _by(lambda key: _parent(key, self._numbers) or key, adds.keys)
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
        kept = _some(self.prints, [self._numbers[_parent(key, self._numbers) or key] for key in keys])
        self.journal.keep(*self.place, tuple(keys), kept.rows, kept.fields, of=self.info, adds=adds, failed=failed)


def _together(
    came: Sequence[tuple[Sequence[Key], Mapping[str, Any]]],
) -> list[tuple[list[Key], Mapping[str, Any]]]:
    """Answers that are lists put together, one after the other; none of none."""
    if not came:
        return []
    names = came[0][1]
    keys = [key for some, _ in came for key in some]
    return [(keys, {name: [value for _, adds in came for value in adds[name]] for name in names})]


def _added(op: Op, made: Batch, main: Batch) -> Batch:
    """What a call has made, without what its batch had before."""
    return made.select(*(n for n in made.fields if not op.inherits or n not in main.fields)).with_call(None)


def _read(op: Op, signature: Signature, main: Batch) -> Batch:
    """The rows with the fields that the call reads: what its answer depends on, and what a rank has of them."""
    fields = signature.reads.get(op.batch_parameter)
    return main if fields is None else main.select(*(n for n in fields if n in main))


def _beside(arguments: Mapping[str, Any]) -> str:
    """The plain arguments of a call besides its rows, as a text."""

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return {str(k): plain(v) for k, v in value.items()} if isinstance(value, dict) else None

    said = {name: plain(value) for name, value in arguments.items()}
    return json.dumps({n: v for n, v in said.items() if v is not None}, sort_keys=True)


def _answered(
    known: Sequence[Mapping[str, Any]], keys: Sequence[Key], prints: Fingerprints, unit: str, read: Batch
) -> dict[Key, Mapping[str, Any]]:
    """The rows of a call that lines of the journal answer, each with the newest such line; ``known`` begins with it."""
    now = dict(zip(keys, prints.rows, strict=True))
    group: Callable[[Key], Any] = {"row": lambda k: k, "prompt": lambda k: k[0]}.get(unit, lambda k: 0)
    asked = _by(group, keys)
    found: dict[Key, Mapping[str, Any]] = {}
    for line in (line for line in known if "adds" in line):
        if "keys" not in line:  # as journals were once written: by call
            mine = keys if line["inputs"] == read.digest() else ()
            found = dict.fromkeys(mine, line) | found
            continue
        same = {key for key, of in zip(line["keys"], line["inputs"], strict=True) if now.get(key) == of}
        for of, journalled in _by(group, line["keys"]).items():
            mine = asked.get(of, ())
            if mine and mine[0] not in found and set(mine) <= same and set(journalled) == set(mine):
                found.update(dict.fromkeys(mine, line))
    return found


def _made_of(
    known: Sequence[Mapping[str, Any]], keys: Sequence[Key], prints: Fingerprints, found: Collection[Key]
) -> Batch | None:
    """Rows that were handed over one by one, made of rows of a call that no line answers as a whole."""
    now, seen, taken = dict(zip(keys, prints.rows, strict=True)), set[Key](), list[Batch]()
    for line in (line for line in known if "adds" in line and "keys" in line):
        mine: list[Key] = []
        for key, of in zip(line["keys"], line["inputs"], strict=True):
            parent = _parent(key, now)
            if parent is not None and parent != key and parent not in found and key not in seen and now[parent] == of:
                mine.append(key)
        if mine:
            seen |= set(mine)
            taken.append(_taken(line, mine))
    return taken[0].concat(*taken[1:]) if taken else None


def _by_line(found: Mapping[Key, Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[Key]]]:
    """The lines that answer rows, each with the rows that it answers."""
    lines: dict[int, tuple[Mapping[str, Any], list[Key]]] = {}
    for key, line in found.items():
        lines.setdefault(id(line), (line, []))[1].append(key)
    return list(lines.values())


def _by(group: Callable[[Key], Any], keys: Iterable[Key]) -> dict[Any, list[Key]]:
    found: dict[Any, list[Key]] = {}
    for key in keys:
        found.setdefault(group(key), []).append(key)
    return found


def _taken(line: Mapping[str, Any], keys: Sequence[Key]) -> Batch:
    """What a line of the journal has for some of its rows."""
    added = Batch.from_record(line["adds"])
    if "keys" not in line or len(keys) == len(line["keys"]):
        return added
    wanted = set(keys)
    return added.take([i for i, key in enumerate(added.keys) if _parent(key, wanted) is not None])


def _parent(key: Key, among: Any) -> Key | None:
    """The row that a row was made of: the longest beginning of its key that is one."""
    return next((key[:n] for n in range(len(key), 0, -1) if key[:n] in among), None)


def _is_whole(found: Mapping[Key, Mapping[str, Any]], keys: Sequence[Key]) -> bool:
    """Whether one line has all rows of a call, in its order."""
    line = found.get(keys[0]) if keys else None
    return line is not None and line.get("keys", tuple(keys)) == tuple(keys) and all(found.get(k) is line for k in keys)


def _in_order(answers: Sequence[Batch], keys: Sequence[Key]) -> Batch:
    """Answers put together, in the order of the rows that they are for."""
    made = answers[0].concat(*answers[1:])
    place = {key: i for i, key in enumerate(keys)}
    order = {key: (place[_parent(key, place) or key], key) for key in made.keys}
    return made.take(sorted(range(len(made)), key=lambda i: order[made.keys[i]]))


def _some(prints: Fingerprints, rows: Sequence[int]) -> Fingerprints:
    return Fingerprints(
        tuple(prints.rows[i] for i in rows), {n: tuple(f[i] for i in rows) for n, f in prints.fields.items()}
    )


def _differences(
    known: Sequence[Mapping[str, Any]], keys: Sequence[Key], prints: Fingerprints, lacking: Sequence[Key]
) -> str:
    """What is not as it was when rows were answered before; empty where none of them was."""
    before: dict[Key, dict[str, str]] = {}  # the newest answer to each row, or to one made of it
    among = set(keys)
    for line in known:
        for i, key in enumerate(line.get("keys", ())):
            before.setdefault(_parent(key, among) or key, {name: of[i] for name, of in line["fields"].items()})
    if not before:
        return "its answers were journalled by an older flowrl for other rows; it is asked again" if known else ""
    now = {key: {name: of[i] for name, of in prints.fields.items()} for i, key in enumerate(keys)}
    again = [key for key in lacking if key in before]
    differ = [key for key in again if before[key] != now[key]] or again
    if not again:
        return ""
    names = sorted({name for key in differ for name, of in now[key].items() if before[key].get(name) != of})
    what = f"other {', '.join(names)}" if names else "other rows beside them, or other arguments,"
    some = ", ".join(str(key) for key in differ[:_ROWS_NAMED]) + (", ..." if len(differ) > _ROWS_NAMED else "")
    asked = f"{len(lacking)} {'row is' if len(lacking) == 1 else 'rows are'} asked again"
    return f"{len(differ)} of {len(keys)} rows have {what} than when they were answered ({some}); {asked}"


def _contents(name: str, column: Column) -> list[bytes]:
    """The contents of a column, row by row."""
    head = f"{name}:{column.type}:".encode()
    if isinstance(column.values, list):
        return [head + json.dumps(value, sort_keys=True).encode() for value in column.values]
    if column.lengths is None:
        return [head + raw_bytes(column.values[i : i + 1]) for i in range(len(column))]
    ends = column.offsets.tolist()
    return [head + raw_bytes(column.values[a:b]) for a, b in pairwise(ends)]
