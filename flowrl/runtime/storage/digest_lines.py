"""``digests.jsonl``: what each call of a step made, in so few bytes that two runs can be compared to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...batch import Key
from ...schedule.events import Begun, Groups, KeptTokens
from ..values.row_digests import RowDigests, keys_of_text, keys_to_text
from ..values.step_records import Made
from .run_record import records_within


@dataclass(frozen=True)
class CallDigest:
    """One call as it was recorded: ``CallDigest("grpo", 3, "reward.score", 17, keys=((48, 0), ...))``.

    ``by_row``: four hexadecimal digits for each row, empty where it made no fields. ``values`` are the numbers that it
    gave, ``versions`` those of the weights that it was started with. ``outside``: of the steps, before the one of that
    number.
    """

    program: str
    step: int
    node: str
    call: int
    outside: bool = False
    keys: tuple[Key, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    by_row: str = ""
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    versions: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])

    def row(self, number: int) -> str:
        """The digits of a row."""
        return self.by_row[4 * number : 4 * number + 4]


def digest_lines(made: Mapping[int, Made]) -> Iterator[dict[str, Any]]:
    """Yield a line for each call of a step, such as ``{"node": "reward.score", "call": 17, "rows": "48.0-7", ...}``.

    What is empty is left out, and ``rows`` where they are those of the line before. Arithmetic on fields has none.
    """
    last = None
    for call, record in sorted(made.items()):
        if not record.parts and not record.values:
            continue
        line: dict[str, Any] = {"node": record.node, "call": call, **({"outside": True} if record.outside else {})}
        if record.parts:
            whole = RowDigests.merged(record.parts)
            rows = keys_to_text(whole.keys)
            if rows != last:
                line["rows"] = last = rows
            line["fields"] = {name: f"{value:016x}" for name, value in whole.fields.items()}
            line["by_row"] = whole.rows.hex()
        if record.values:
            line["values"] = record.values
        if record.versions:
            line["versions"] = record.versions
        yield line


def read_begun(run: Path, program: str) -> tuple[list[Begun], dict[int, Groups]]:
    """Return what pools that sample began with in a program, each in its order, and the groups that calls have got.

    Nothing of a run that an older flowrl has recorded in another form.
    """
    begun: list[Begun] = []
    taken: dict[int, Groups] = {}
    for line in records_within(run / "digests.jsonl"):
        if "begun" in line and line["program"] == program:
            begun += [begun_of(each) for each in line["begun"] if isinstance(each[0], str)]
            taken |= {int(call): groups_of(groups) for call, groups in line["taken"].items()}
    return begun, taken


def begun_line(begun: Begun) -> list[Any]:
    """Return one of ``begun`` as a line has it, without what is empty at its end.

    >>> begun_line(Begun("rollout", 7, 0, {0: 17}))
    ['rollout', 7, 0, {0: 17}]
    """
    said: list[Any] = list(begun)
    while len(said) > 4 and not said[-1]:
        said.pop()
    return said


def begun_of(said: Sequence[Any]) -> Begun:
    """Return what a line of ``begun`` says: ``["rollout", 7, 0, {"0": 17}]``."""
    pool, number, part, after = said[:4]
    rest: list[Any] = [*said[4:], *((), "", ())[len(said) - 4 :]]
    ranks, worker, kept = rest
    steps = None if after is None else _by_number(after)
    known = tuple(KeptTokens(call, of, _by_number(tokens), *how) for call, of, tokens, *how in kept)
    return Begun(pool, number, part, steps, tuple(ranks), worker, known)


def _by_number(said: Mapping[str, int]) -> dict[int, int]:
    return {int(number): count for number, count in said.items()}


def groups_of(said: Sequence[Sequence[int]]) -> Groups:
    """Return groups as they are recorded: ``[[7, 0], [8, 2]]``."""
    return tuple((call, group) for call, group in said)


def read_digests(run: Path) -> Iterator[CallDigest]:
    """Yield the calls that a run has recorded, in their order; none for a run of an older flowrl."""
    where, keys = None, tuple[Key, ...]()
    for line in records_within(run / "digests.jsonl"):
        if "begun" in line:
            continue
        if where != (where := (line["program"], line["step"])):
            keys = ()
        if "rows" in line:
            keys = tuple(keys_of_text(line["rows"]))
        versions = {name: tuple(seen) for name, seen in line.get("versions", {}).items()}
        has_rows = "fields" in line
        yield CallDigest(
            line["program"],
            line["step"],
            line["node"],
            line["call"],
            line.get("outside", False),
            keys if has_rows else (),
            line.get("fields", {}),
            line.get("by_row", ""),
            line.get("values", {}),
            versions,
        )
