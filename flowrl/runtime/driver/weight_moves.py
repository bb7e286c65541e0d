"""Weights on their way: set aside and installed where they generate, out of the memory of a pool and back into it."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from ...schedule.events import GoOn, Publish, Setup, Stage, Start
from ..executor import Executor
from ..values.call import Call
from .monitoring.step_notes import StepNotes


class WeightMoves:
    """``WeightMoves(executor, setup, workers, servers, notes)``; the workers are those of the dispatcher."""

    def __init__(
        self,
        executor: Executor,
        setup: Setup,
        workers: Mapping[str, Any],
        servers: Mapping[str, Any],
        notes: StepNotes,
    ) -> None:
        self._executor, self._setup, self._notes = executor, setup, notes
        self._workers, self._servers = workers, servers
        self._staged: dict[tuple[str, int], Any] = {}

    def move(self, command: Stage | Publish) -> int:
        """Set weights aside, or install them where they generate. Returns the bytes that went there."""
        name, version = command.worker, command.version
        if isinstance(command, Stage):
            self._staged[name, version] = self._executor.stage(name)
            self._workers[name].mark_published(version)  # from here on it is trained as the next one
            return 0
        if (name, version) in self._staged:
            keep = self._setup.publish == "continue"
            return self._executor.install(name, version, self._staged.pop((name, version)), keep_cache=keep)
        self._workers[name].mark_published(version)
        return self._executor.install(name, version) if name in self._servers else 0

    def make_room(self, call: Call | None, command: Start | GoOn) -> None:
        """Have workers leave the memory of their pools, and those of a call come back, as the schedule says; None: what
        there is to note of it belongs to no call."""
        memory, executor = self._setup.memory, self._executor
        swaps = (("offload", executor.offload, command.offload), ("onload", executor.onload, command.onload))
        for what, swap, moves in swaps:
            for pool, resident in moves:
                start = perf_counter()
                swap(resident, memory[pool].sizes[resident])
                if call is not None:
                    self._notes.note_swap(call, f"{resident}.{what}", pool, start, perf_counter())
