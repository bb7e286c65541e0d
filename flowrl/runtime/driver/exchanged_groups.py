"""Prompt groups of the open steps that finish one by one, kept until a step takes them: ``order: window``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ...batch import Batch, Key
from ..executor import PendingCall, SteppedCall
from ..values.call import Call
from ..values.chunks import join_chunks
from ..values.remote_batch import RemoteBatch


class GroupCall:
    """A prompt group of a generate on its way: ``GroupCall(3, rows, pending)``. ``rows`` are those that it is given."""

    def __init__(self, number: int, rows: Batch | RemoteBatch, pending: PendingCall) -> None:
        self.number, self.rows, self.pending = number, rows, pending

    def step(self) -> bool:
        """Go on by a token; return whether it is over."""
        return self.pending.step() if isinstance(self.pending, SteppedCall) else True

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that sample it; none in one process."""
        return self.pending.ranks if isinstance(self.pending, SteppedCall) else ()

    @property
    def has_entered(self) -> bool:
        """Whether all its rows have a place in the batch."""
        return not isinstance(self.pending, SteppedCall) or self.pending.has_entered


class ExchangedGroups:
    """What groups have come to, by (call, group), until they are taken.

    Whoever uses it has the lock of :class:`.under_way.UnderWay`.
    """

    def __init__(self) -> None:
        self._untaken: dict[tuple[int, int], Any] = {}  # rows that it is given, then those that it makes, or an error

    def begin(self, call: Call, parts: Sequence[Batch | RemoteBatch]) -> None:
        """Note the groups of a call."""
        for number, rows in enumerate(parts):
            self._untaken[call.index, number] = rows

    def finish(self, call: Call, number: int, made: Any) -> None:
        """Note what a group has come to: its rows, or an error."""
        self._untaken[call.index, number] = made

    def take(self, groups: Sequence[tuple[int, int]]) -> Any:
        """Return the rows of groups, in this order. Raises the error of one that has failed."""
        made = [self._untaken.pop(group) for group in groups]
        error = next((each for each in made if isinstance(each, BaseException)), None)
        if error is not None:
            raise error
        return join_chunks(made)

    def keys(self) -> Iterator[Collection[Key]]:
        """Yield the keys of the rows of groups that nobody has taken."""
        for rows in list(self._untaken.values()):
            if isinstance(rows, (Batch, RemoteBatch)):
                yield rows.keys


def count_groups(call: Call) -> int:
    """Return how many prompts a call samples for; 0 where its rows are not known as it is made."""
    if len(call.values) != 1 or call.arguments.get(call.op.batch_parameter) is not call.values[0]:
        return 0
    source = call.values[0].ref
    rows = source.result if isinstance(source, Call) and source.done else None
    return len(rows.groups()) if isinstance(rows, (Batch, RemoteBatch)) else 0
