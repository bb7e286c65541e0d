"""Calls that touch the world: every row is asked for once, and answered from the journal from then on.

What is kept is kept by row, so that a run may go on under another plan: with other chunks, or other processes for
rewards. A row has its answer where its key and what was read of it are those of then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..batch import Batch, CallInfo, Column, Key
from ..column import _bytes_of
from ..graph.op import Metrics, Op
from .journal import Journal

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
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    info: CallInfo,
    warn: Callable[[str], None],
) -> Any:
    """Run an external call for the rows that have no answer in the journal yet; those of all others come from there.

    ``place`` is the call's: the number of its program in the run, and its own in the program. Rows are asked for again
    as far as they depend on each other: alone, with those of their prompt, or all of the call (``pieces=`` of the op).
    """
    main = next((a for a in (*args, *kwargs.values()) if isinstance(a, Batch)), None)
    if main is None:
        return op.apply(worker, args, kwargs, info)
    arguments = op.bind(worker, args, {k: v for k, v in kwargs.items() if k != "into"})
    init = getattr(worker, "init_arguments", {})
    read = _read(op, init, arguments, main)
    prints = Fingerprints.of(read, _beside(arguments))
    known = [line for line in journal.answers(*place) if line.get("op", info.op) == info.op]  # older ones do not say
    if op.returns != "batch":
        return _value_once(journal, place, info.op, known, main, prints, lambda: op.apply(worker, args, kwargs, info))
    unit = "call" if op.rows == "regroup" else op.unit(init, arguments)
    found = {key: line for line in known for key in _answered(line, main.keys, prints, unit, read)}
    lacking = [i for i, key in enumerate(main.keys) if key not in found]
    if lacking and (said := _differences(known, main.keys, prints, [main.keys[i] for i in lacking])):
        warn(f"{op.title(worker)} of step {info.step}: {said}")
    answers = [_taken(line, [k for k in found if found[k] is line]) for line in _distinct(found.values())]
    if lacking or not len(main):
        some = main if len(lacking) == len(main) else main.take(lacking)
        asked = [some if a is main else a for a in args], {k: some if v is main else v for k, v in kwargs.items()}
        result = op.apply(worker, tuple(asked[0]), asked[1], info)
        fresh = result.select(*(n for n in result.fields if not op.inherits or n not in main.fields)).with_call(None)
        kept = prints if some is main else _some(prints, lacking)
        journal.keep(*place, some.keys, kept.rows, kept.fields, op=info.op, adds=fresh)
        if some is main:
            return result
        answers.append(fresh)
    added = answers[0] if _is_whole(found, main.keys) else _in_order(answers, main.keys)
    if not op.inherits:
        return added
    rows = main if op.rows == "same" else main.take_keys(added.keys)
    return rows.with_columns(dict(added.columns))


def _value_once(
    journal: Journal,
    place: tuple[int, int],
    title: str,
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
    journal.keep(*place, main.keys, prints.rows, prints.fields, op=title, value=value)
    return value


def _plain(value: Any) -> Any:
    return Metrics(value) if isinstance(value, dict) else value


def _read(op: Op, init: Mapping[str, Any], arguments: Mapping[str, Any], main: Batch) -> Batch:
    """The rows with the fields that the call reads: what its answer depends on, and what a rank has of them."""
    signature = op.signature(init, arguments, frozenset(main.fields))
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


def _answered(line: Mapping[str, Any], keys: Sequence[Key], prints: Fingerprints, unit: str, read: Batch) -> list[Key]:
    """The rows of a call that a line of the journal answers."""
    if "adds" not in line:
        return []
    if "keys" not in line:  # as journals were once written: by call
        return list(keys) if line["inputs"] == read.digest() else []
    known = dict(zip(line["keys"], line["inputs"], strict=True))
    same = {key for key, of in zip(keys, prints.rows, strict=True) if known.get(key) == of}
    if unit == "row":
        return [key for key in keys if key in same]
    group = (lambda key: key[0]) if unit == "prompt" else (lambda key: 0)
    asked, journalled = _by(group, keys), _by(group, line["keys"])
    return [
        k for g, mine in asked.items() if set(mine) <= same and set(journalled.get(g, ())) == set(mine) for k in mine
    ]


def _by(group: Callable[[Key], int], keys: Sequence[Key]) -> dict[int, list[Key]]:
    found: dict[int, list[Key]] = {}
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


def _distinct(lines: Any) -> list[Any]:
    return list({id(line): line for line in lines}.values())


def _differences(
    known: Sequence[Mapping[str, Any]], keys: Sequence[Key], prints: Fingerprints, lacking: Sequence[Key]
) -> str:
    """What is not as it was when rows were answered before; empty where none of them was."""
    before: dict[Key, dict[str, str]] = {}  # the newest answer to each row
    for line in known:
        for i, key in enumerate(line.get("keys", ())):
            before.setdefault(key, {name: of[i] for name, of in line["fields"].items()})
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
        return [head + _bytes_of(column.values[i : i + 1]) for i in range(len(column))]
    ends = column.offsets.tolist()
    return [head + _bytes_of(column.values[a:b]) for a, b in pairwise(ends)]
