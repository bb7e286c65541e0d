"""Calls in this process: run with the open worker, or answered from the journal where they touched the world."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from ..batch import Batch
from ..schedule.events import Command, Memory, Start
from ..schedule.scheme import Scheme
from .call import Call
from .external import once
from .journal import Journal


class Here:
    """Runs the calls of program ``number`` of a run where the driver is."""

    def __init__(self, number: int, journal: Journal, warn: Callable[[str], None]) -> None:
        self.number, self.journal, self.warn = number, journal, warn

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

    def begin(
        self, call: Call, piece: int, worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """What runs a call: nothing is done before."""
        return lambda: self.apply(call, worker, args, kwargs)

    def apply(self, call: Call, worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call. One that touches the world is answered from the journal where it was made before."""
        if not call.op.external:
            return call.op.apply(worker, args, kwargs, call.info)
        return once(self.journal, (self.number, call.index), call.op, worker, args, kwargs, call.info, self.warn)
