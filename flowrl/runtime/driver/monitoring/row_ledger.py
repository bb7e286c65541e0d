"""The ledger of rows: what was admitted is trained on, was dropped by the program for a reason, or is still held.

It is kept by keys alone, from what calls are given and give: no op takes part in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ....batch import Batch, Key
from ....errors import ResumeError, RunError
from ...values.remote_batch import RemoteBatch
from ...values.row_digests import keys_of_text, keys_to_text
from .length_bias import KEPT, GroupLengths, length_bias

NO_UPDATE = "given to no update"
EVERY = 50  # steps from one statistic of lengths to the next
_NAMED = 8  # prompts in a message


@dataclass
class Totals:
    """How many came in, and what became of them: ``Totals(64, 60, {"batch.filter, dapo.py:41": 4})``."""

    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict[str, int])

    def live(self) -> int:
        """Those of which nothing is decided yet."""
        return self.admitted - self.trained - sum(self.dropped.values())

    def drop(self, why: str) -> None:
        """Count one that was dropped."""
        self.dropped[why] = self.dropped.get(why, 0) + 1

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {**asdict(self), "live": self.live()}


@dataclass
class _Group:
    """The rows of a prompt: those of which nothing is decided, by the reason for which they may be dropped."""

    open: dict[Key, str] = field(default_factory=dict[Key, str])
    trained: bool = False
    why: str = NO_UPDATE
    lengths: dict[Key, int] = field(default_factory=dict[Key, int])
    failed: dict[Key, str] = field(default_factory=dict[Key, str])  # what ended episodes that failed
    taken: set[Key] = field(default_factory=set[Key])


class RowLedger:
    """Counts prompts and rows of one program. Whoever calls it holds the lock of the program's records.

    A prompt is admitted as it is drawn from the source of a loop. What was drawn are its rows until others are sampled
    from them.
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self.prompts, self.rows = Totals(), Totals()
        self._groups: dict[int, _Group] = {}  # of which a row is open
        self._drawn = 0  # prompts below this number have been drawn
        self._finished: deque[GroupLengths] = deque(maxlen=KEPT)
        self._faults: list[RunError] = []  # to be raised in the thread of the driver

    # -- what happens -----------------------------------------------------------------------------------------------

    def draw(self, keys: Sequence[Key], *, admit: bool) -> None:
        """Rows were drawn from a source; with ``admit`` it is that of the loop. Raises RunError for one of before."""
        again = [key[0] for key in keys if key[0] < self._drawn]
        if again:
            raise RunError(f"{self.program}: the source gave numbers to rows that others have: {_prompts(again)}.")
        self._drawn = max([self._drawn, *(key[0] + 1 for key in keys)])
        for key in keys if admit else ():  # a source of pairs has several rows for a prompt
            if key[0] not in self._groups:
                self._groups[key[0]] = _Group()
                self.prompts.admitted += 1
            self._groups[key[0]].open[key] = NO_UPDATE
            self.rows.admitted += 1

    def sample(self, keys: Sequence[Key], lengths: Sequence[int], failed: Mapping[Key, str] | None = None) -> None:
        """Rows were sampled that are to be trained on; a prompt is no row of its own any more.

        ``failed`` are the outcomes of episodes that failed: where their rows are dropped, that is a part of the reason.
        """
        for i, key in enumerate(keys):
            group = self._groups.get(key[0])
            if group is None:
                continue  # of a source aside, or again of a prompt that is done
            parent = key[:-1]
            if parent and group.open.pop(parent, None) is not None:
                self.rows.admitted -= 1
            if key not in group.open and key not in group.taken:
                group.open[key] = NO_UPDATE
                self.rows.admitted += 1
            if lengths:
                group.lengths[key] = lengths[i]
            if failed and key in failed:
                group.failed[key] = failed[key]

    def leave_out(self, given: Iterable[Key], kept: Collection[Key], by: str) -> None:
        """A call was given rows that its result has not. One that is sampled from stands for those made of it."""
        there = _with_parents([kept])
        for key in given:
            group = self._groups.get(key[0])
            if group is not None and key in group.open and key not in there:
                group.open[key] = by

    def compare(self, title: str, given: Collection[Key], made: Collection[Key]) -> None:
        """Have :meth:`check` raise where a call that keeps its rows has not made all of them, or has made others."""
        if given is made:
            return
        lost, new = set(given) - set(made), set(made) - set(given)
        if lost or new:
            what = "has no result for rows of" if lost else "has results for rows that it was not given, of"
            self._faults.append(RunError(f"{title} {what} {_prompts(key[0] for key in lost or new)}."))

    def train(self, keys: Iterable[Key]) -> None:
        """An update was given rows. One with the key of a prompt stands for all of it, one made of a row for that."""
        for key in keys:
            group = self._groups.get(key[0])
            if group is None:
                continue
            mine = [key] if key in group.open else _parent_or_children(key, group.open)
            for row in mine:
                del group.open[row]
                group.taken.add(row)
                self.rows.trained += 1
            group.trained = group.trained or bool(mine)

    def settle(self, held: Iterable[Collection[Key]], under_way: Collection[int] = ()) -> None:
        """Decide of what no value of the program holds any more; check what that gives.

        ``held`` are the keys of these values. A row of which others were made is held as long as one of them is; those
        of prompts that are ``under_way`` are held in any case: calls are at them.
        """
        left = any(group.open for group in self._groups.values())
        live = _with_parents(held) if left else set[Key]()
        for number, group in list(self._groups.items()):
            if number in under_way:
                continue
            for key in [key for key in group.open if key not in live]:
                group.why = group.open.pop(key)
                if key in group.failed:
                    group.why = f"{group.failed[key]}: {group.why}"
                self.rows.drop(group.why)
            if not group.open:
                self._finish(number, group)
        self.check()

    def check(self) -> None:
        """Raise RunError, which names prompts, unless every row and prompt is in one place exactly."""
        if self._faults:
            raise self._faults[0]
        rows = sum(len(group.open) for group in self._groups.values())
        for what, totals, live in (("prompts", self.prompts, len(self._groups)), ("rows", self.rows, rows)):
            if totals.live() != live:
                raise RunError(
                    f"{self.program}: the ledger of {what} does not close: {totals.admitted} admitted, "
                    f"{totals.trained} trained, {sum(totals.dropped.values())} dropped, {live} live "
                    f"({_prompts(self._groups) if self._groups else 'no prompt'}). This is a bug of flowrl."
                )

    def _finish(self, number: int, group: _Group) -> None:
        del self._groups[number]
        if group.trained:
            self.prompts.trained += 1
        else:
            self.prompts.drop(group.why)
        if group.lengths:
            keys = list(group.lengths)
            taken = [key in group.taken for key in keys]
            self._finished.append(GroupLengths([group.lengths[key] for key in keys], taken))

    # -- records ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The ledger as run.json has it."""
        return {"prompts": self.prompts.to_json(), "rows": self.rows.to_json()}

    def line(self, step: int) -> dict[str, Any]:
        """What the records keep after a step; every so many steps with the statistic of lengths."""
        if (step + 1) % EVERY == 0:
            return {**self.to_json(), "lengths": self.lengths()}
        return self.to_json()

    def lengths(self) -> dict[str, Any] | None:
        """How far the lengths of trained rows are from those of all; None where no group with lengths is done."""
        found = length_bias(list(self._finished))
        return None if found is None else asdict(found)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        groups = {str(number): _to_record(group) for number, group in self._groups.items()}
        return {"prompts": asdict(self.prompts), "rows": asdict(self.rows), "drawn": self._drawn, "groups": groups}

    def restore(self, state: Mapping[str, Any], held: Iterable[Collection[Key]]) -> None:
        """Go on from a checkpoint. Raises ResumeError, which names prompts, where it lacks rows that were live."""
        self.prompts, self.rows, self._drawn = Totals(**state["prompts"]), Totals(**state["rows"]), state["drawn"]
        self._groups = {int(number): _of_record(said) for number, said in state["groups"].items()}
        there = _with_parents(held)
        lost = [number for number, group in self._groups.items() if not group.open.keys() <= there]
        if lost:
            raise ResumeError(
                f"{self.program}: the checkpoint lacks rows of {_prompts(lost)}, which were live when it was taken.",
                fix="This is a bug of flowrl: please report it with the checkpoint's manifest.json.",
            )
        self.check()


def _parent_or_children(key: Key, there: Collection[Key]) -> list[Key]:
    """The row that one was made of, where it is there; else those that were made of it."""
    parent = next((key[:n] for n in range(len(key) - 1, 0, -1) if key[:n] in there), None)
    return [parent] if parent is not None else [row for row in there if row[: len(key)] == key]


def _with_parents(some: Iterable[Collection[Key]]) -> set[Key]:
    """All keys of rows, and of the rows that they were made of."""
    return {key[:n] for keys in some for key in keys for n in range(1, len(key) + 1)}


def keys_of(values: Iterable[Any]) -> Iterator[Collection[Key]]:
    """Yield the keys of values that are rows."""
    for value in values:
        if isinstance(value, (Batch, RemoteBatch)):
            yield value.keys


def _to_record(group: _Group) -> dict[str, Any]:
    rows = sorted(group.lengths)
    return {
        "open": keys_to_text(sorted(group.open)),
        "why": [group.open[key] for key in sorted(group.open)],
        "trained": group.trained,
        "taken": keys_to_text(sorted(group.taken)),
        "rows": keys_to_text(rows),
        "lengths": [group.lengths[key] for key in rows],
        "failed": {keys_to_text([key]): outcome for key, outcome in sorted(group.failed.items())},
    }


def _of_record(said: Mapping[str, Any]) -> _Group:
    return _Group(
        dict(zip(keys_of_text(said["open"]), said["why"], strict=True)),
        said["trained"],
        lengths=dict(zip(keys_of_text(said["rows"]), said["lengths"], strict=True)),
        failed={keys_of_text(key)[0]: outcome for key, outcome in said.get("failed", {}).items()},
        taken=set(keys_of_text(said["taken"])),
    )


def _prompts(numbers: Iterable[int]) -> str:
    """Prompts in a message."""
    found = sorted(set(numbers))
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"prompt{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:_NAMED]))}{more}"
