"""What does the work of a run: it opens workers, starts calls, and brings back what is lost. One protocol for all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..errors import RankLost
from ..schedule.events import KeptTokens
from ..workers.decode_passes import DecodePasses
from ..workers.decode_slots import DecodeSlots
from ..workers.engine import Published
from ..workers.environment_waits import EnvironmentWaits
from ..workers.headway import Headway
from ..workers.user_code.rows_in_progress import Notes
from .storage.checkpoints.checkpoint_folder import Begun
from .storage.failed_rows import FailedRows
from .storage.journal import Journal
from .values.call import Call
from .values.process_memory import ProcessMemory
from .values.step_records import RankTime


class PendingCall(Protocol):
    """A call that was started."""

    @property
    def rank_times(self) -> tuple[RankTime, ...]:
        """When each rank was at it, as far as it has answered; none in one process."""
        ...

    def take_passes(self) -> Sequence[DecodePasses]:
        """Return how long passes of its engine took, once its result is there: those since it was asked last."""
        ...

    def result(self) -> Any:
        """Wait for the call. Returns what it gives; raises what it raised, or RankLost where it cannot be done."""
        ...


@runtime_checkable
class CountedCall(PendingCall, Protocol):
    """A call that counts which decode slots of an engine it has used, and how long its environments took, once its
    result is there."""

    @property
    def slots(self) -> DecodeSlots: ...

    @property
    def waits(self) -> EnvironmentWaits: ...


@runtime_checkable
class SteppedCall(PendingCall, Protocol):
    """A call whose rows leave the engine one by one, beside those of others: it goes on step by step."""

    @property
    def has_entered(self) -> bool:
        """Whether all its rows have a place in the batch of the engine."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that sample it; none in one process."""
        ...

    def step(self) -> bool:
        """Go on by a token, unless the call is over; return whether it is. Raises what the call raised."""
        ...


@dataclass(frozen=True)
class Ready:
    """A call whose result is there: ``Ready(0.25)``."""

    value: Any
    rank_times: tuple[RankTime, ...] = ()

    def take_passes(self) -> Sequence[DecodePasses]:
        """None: nothing was sampled."""
        return ()

    def result(self) -> Any:
        """Return it."""
        return self.value


@dataclass(frozen=True)
class RowsAgain:
    """Rows that a rank begins again: ``RowsAgain(2, 17, (KeptTokens(7, 0, {0: 12, 1: 9}),))`` has rank 2 go on with
    those of call 7 from 12 and 9 tokens. Its engine had said that it has made 17 steps.
    """

    rank: int
    steps: int
    kept: tuple[KeptTokens, ...]


@dataclass(frozen=True)
class RunServices:
    """What a run has for its executor: where answers of the world are kept, and whom to tell what.

    ``on_loss`` is told of ranks that were lost within a program, before they are started again, and raises it where
    that is too much; ``on_restart`` is told which ones were started. ``on_resize`` is told that a pool has fewer ranks
    now, or more, and how many each pool has that is not whole, ``on_kept`` of rows that go on from the tokens that a
    lost rank had told. The run calls all of ``on_commit`` with the number of each step that is committed.
    """

    journal: Journal | None = None
    notes: Notes = field(default_factory=Notes)  # of the rows that user code is at
    warn: Callable[[str], None] = lambda text: None
    on_loss: Callable[[RankLost], None] = lambda lost: None
    on_restart: Callable[[str], None] = lambda ranks: None
    on_resize: Callable[[str, Mapping[str, Mapping[str, int]]], None] = lambda text, replicas: None
    on_kept: Callable[[str], None] = lambda text: None
    on_commit: list[Callable[[int], None]] = field(default_factory=list[Callable[[int], None]])
    failed: FailedRows = field(default_factory=FailedRows)


class Executor(Protocol):
    """Opens the workers of a run where its plan has them, and runs their calls.

    ``workers`` are the open ones that train, or never change; ``servers`` the copies that only generate, for those that
    have one. In the memory of a device they are residents, named ``actor.train`` and ``actor.generate``.
    """

    @property
    def workers(self) -> Mapping[str, Any]: ...
    @property
    def servers(self) -> Mapping[str, Any]: ...

    def attach(self, run: RunServices) -> None:
        """Use the services of a run from here on."""
        ...

    # -- workers ----------------------------------------------------------------------------------------------------

    def open(self, name: str) -> Any:
        """Return the worker of that name; opens it the first time."""
        ...

    def open_server(self, name: str) -> Any:
        """Return the copy of a worker that generates; opens it the first time, with the weights of the trained one."""
        ...

    def tokenizer(self, said: Any) -> Any:
        """Return the tokenizer of a handle, a function, a name or a folder; of the flow's actor for None."""
        ...

    def start_program(self, names: Iterable[str], *, resumed: bool) -> None:
        """Get workers ready for a program. Unless it is ``resumed``, they :meth:`begin_anew`."""
        ...

    def begin_anew(self, names: Iterable[str]) -> None:
        """Have optimizers begin anew, and copies of other workers take their weights."""
        ...

    # -- calls ------------------------------------------------------------------------------------------------------

    def start(self, call: Call, chunk: int, worker: Any, arguments: Mapping[str, Any]) -> PendingCall:
        """Start a call, or a chunk of it, on an open worker; None for an op of a library.

        ``arguments`` are by parameter: plain values, open workers, and values that calls or :meth:`put` gave. Raises
        what is wrong with them as far as it can be known before the call runs. One that ``streams`` may be a
        :class:`SteppedCall`.
        """
        ...

    def put(self, value: Any) -> Any:
        """Return rows that the driver has made or read as calls take them; other values as they are."""
        ...

    def get(self, value: Any) -> Any:
        """Return what a call gave as plain rows and numbers, brought here."""
        ...

    # -- engines that calls share -----------------------------------------------------------------------------------

    def engine_steps(self, name: str) -> dict[int, tuple[int, bool]]:
        """Return by rank how many steps the engine of a worker has made for calls that share it, and whether rows run.

        In one process it is rank 0. Where no call has shared it yet there is none.
        """
        ...

    def hold_engines(self, name: str, steps: Mapping[int, int] | None) -> None:
        """Have the engines of a worker make no more than so many steps in all; None, or none for a rank: as many
        as they like."""
        ...

    def choose_ranks(self, name: str, ranks: tuple[int, ...]) -> None:
        """Have the next prompt groups that finish one by one go to these ranks, one each."""
        ...

    def rows_begun_again(self, name: str) -> list[RowsAgain]:
        """Return, once, which rows of a worker its ranks have begun again, as they were lost in the midst of them."""
        ...

    def keep_open(self, name: str, parts: Collection[tuple[int, int, int]]) -> None:
        """Take no answer of these parts of a worker's calls, (rank, call, part), until they are begun again."""
        ...

    def begin_rows_again(self, name: str, again: RowsAgain) -> None:
        """Have a rank begin rows again from some of the tokens that they have, as if it had been lost."""
        ...

    # -- weights, memory and state ----------------------------------------------------------------------------------

    def stage(self, name: str) -> Any:
        """Copy a worker's weights as they are now, for an :meth:`install` while training goes on. Returns a handle."""
        ...

    def install(self, name: str, version: int, weights: Any = None, *, keep_cache: bool = False) -> int:
        """Give the copy that generates ``weights`` that were staged, or those that the worker has. Returns the bytes
        that moved.

        Rows that it samples go on under them, with keys and values computed again, unless they ``keep_cache``.
        """
        ...

    def published(self, name: str) -> Published | None:
        """Return what the engine that generates said of the weights that it was last given: what loading and the proof
        took, and the gap of the probe; None of one that has nothing to say.
        """
        ...

    def offload(self, resident: str, forecast: float | None = None) -> None:
        """Take weights and optimizer of a worker out of its device's memory. ``forecast``: the bytes of the plan."""
        ...

    def onload(self, resident: str, forecast: float | None = None) -> None:
        """Bring them back."""
        ...

    def capture(self, folder: Path, manifest: Mapping[str, Any], live: Mapping[int, Any], *, after: int = -1) -> Begun:
        """Copy the state of all open workers, and values that calls gave: the workers may go on when it returns.

        Returns what :func:`flowrl.runtime.storage.checkpoints.checkpoint_folder.write` makes a checkpoint of.
        ``after``: the number of the last one that was begun.
        """
        ...

    def sync(self) -> None:
        """Have the disk hold all answers of the world so far."""
        ...

    def restore(self, manifest: Mapping[str, Any]) -> None:
        """Take back what :meth:`capture` has noted in a manifest besides the workers; of an empty one, forget it."""
        ...

    def recover(self, lost: RankLost) -> None:
        """Start again what was lost, without its state. Raises ``lost`` where that cannot be."""
        ...

    def reset(self) -> None:
        """Close all workers, to be opened as they were made."""
        ...

    def unanswered(self) -> list[dict[str, Any]]:
        """Return what ranks were asked and have not answered, as
        :class:`flowrl.runtime.storage.wait_record.WaitingRank`; asked by another thread."""
        ...

    def headway(self) -> Mapping[str, Headway]:
        """Return how far each process has come, by its name: ``driver``, ``rank 0``; those that do not answer are left
        out. Asked by another thread."""
        ...

    def memory(self) -> Mapping[str, ProcessMemory]:
        """Return the memory of the driver, and what each rank had when it answered last, by its name: ``rank 0``."""
        ...

    def record(self) -> Mapping[str, Any]:
        """Return what the record of a run keeps of where it ran."""
        ...

    def close(self) -> None:
        """Close all workers, and end what was started for them."""
        ...


def open_copies(executor: Executor) -> dict[str, Any]:
    """Return all open workers by the name that they have in a checkpoint: ``actor``, ``actor.generate``."""
    return {**executor.workers, **{f"{name}.generate": worker for name, worker in executor.servers.items()}}
