"""What let each call and publish begin: the event that the machine answered with it, back to a call with a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ....schedule.events import Entered, Event, Finished, Grouped, Issued, Publish, Stage, Start
from ...values.call import Call, maker
from ...values.step_records import Release

PROGRAM = Release("program")


class Releases:
    """Says what let commands of the machine begin. ``issued`` are the calls that are not done, ``servers`` the copies
    that generate; whoever uses it has the lock of :class:`..under_way.UnderWay`.

    Some things have no line in the timeline, such as arithmetic on fields: what begins after one of them was let begin
    by what came before it.
    """

    def __init__(self, issued: Mapping[int, Call], servers: Collection[str]) -> None:
        self._issued, self._servers = issued, servers
        self._behind: dict[int, Release] = {}  # what has no line, and is under way: what let it begin

    def find(self, event: Event, command: Start | Stage | Publish, freed: Collection[str] = ()) -> Release:
        """Return what let a command begin with which the machine answers an event; ``freed`` are the pools that are
        free since then."""
        found = self._find(event, command, freed)
        if not self._has_line(command):
            self._behind[command.id] = found
        return found

    def forget(self, event: Event) -> None:
        """Forget a call that is over, once all that it let begin is found."""
        if isinstance(event, Finished):
            self._behind.pop(event.id, None)

    def _has_line(self, command: Start | Stage | Publish) -> bool:
        if isinstance(command, Start):
            call = self._issued.get(command.id)
            return call is None or call.worker is not None or call.op.owner not in ("batch", "data")
        return isinstance(command, Publish) and command.worker in self._servers

    def _find(self, event: Event, command: Start | Stage | Publish, freed: Collection[str]) -> Release:
        if isinstance(event, (Entered, Grouped)):
            return Release("pool" if isinstance(event, Entered) else "order", event.id)
        if isinstance(event, Issued):
            return PROGRAM if isinstance(command, Start) and command.id == event.call.id else Release("order")
        if not isinstance(event, Finished):
            return PROGRAM
        kind = self._kind(event.id, command, freed)
        behind = self._behind.get(event.id)
        if behind is None:
            return Release(kind, event.id)
        return behind if behind.call is None else Release(kind, behind.call)

    def _kind(self, id: int, command: Start | Stage | Publish, freed: Collection[str]) -> str:
        call = self._issued.get(command.id) if isinstance(command, Start) else None
        samples = call is not None and call.op.cost == "generate"
        if isinstance(command, (Publish, Stage)) or (id < 0 and samples):
            return "weights"
        if call is not None and any(maker(value.ref).index == id for value in call.values):
            return "rows"
        return "pool" if set(freed) & set(command.pools) else "order"
