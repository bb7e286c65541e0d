"""Calls in this process: run with the open worker, or answered from the journal where they touched the world."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from ...batch import Batch
from ...schedule.events import Command, Memory, Start
from ...schedule.scheme import Scheme
from ...workers.notes import Notes
from ..driver.python_warnings import heard
from ..driver.user_calls import user_call
from ..storage.external import once
from ..storage.journal import Journal
from ..values.call import Call


class Here:
    """Runs the calls of program ``number`` of a run where the driver is."""

    def __init__(self, number: int, journal: Journal, warn: Callable[[str], None], notes: Notes | None = None) -> None:
        self.number, self.journal, self.warn, self.notes = number, journal, warn, notes or Notes()

    def home(self, workers: Mapping[str, Any], scheme: Scheme) -> Container[str]:
        """The pools that the driver's thread serves: that of the first model (docs/design/0006-home-pool.md)."""
        models = (scheme.train[n] for n, w in workers.items() if hasattr(w, "build"))
        return frozenset((next(models, next(iter(scheme.setup.pools), "main")),))

    def far(self, command: Command) -> bool:
        """Whether a call without a pool is done elsewhere: none is."""
        return False

    def swap(self, command: Start, groups: Callable[[str], Any], memory: Mapping[str, Memory]) -> None:
        """Nobody makes way in this process."""

    def drawn(self, batch: Batch) -> Batch:
        """Rows of a data source, as calls take them."""
        return batch

    def readable(self, value: Any) -> Any:
        """A value as records take it."""
        return value

    def begin(self, call: Call, chunk: int, worker: Any, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """What runs a call: nothing is done before."""
        return lambda: self.run(call, worker, arguments)

    def run(self, call: Call, worker: Any, arguments: Mapping[str, Any]) -> Any:
        """Run a call. One that touches the world is answered from the journal where it was made before."""
        with (
            user_call(call.op, worker, arguments.values(), call.info, self.notes, self.warn),
            heard(self.warn, call.info),
        ):
            if not call.op.external:
                return call.op.run(worker, arguments, call.into, call.info)
            place = (self.number, call.index)
            return once(self.journal, place, call.op, worker, arguments, call.into, call.info, self.warn)
