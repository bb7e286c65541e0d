"""A worker on ranks, as the driver sees it: where it is, and which version its weights are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import getattr_static
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ...errors import RunError
from ...graph.ops.op import Op
from ...lowering.deployment import WorkerSpec
from ...workers.engine import Published
from ...workers.weights.weight_boxes import digest
from ..storage.checkpoints.snapshot import Captured
from ..transfer.plan_moves import Held, Moves, plan_moves
from .protocol import Blueprint
from .rank_parts import RankParts

if TYPE_CHECKING:
    from .rank_client import RankClient


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Staged:
    """Weights to publish: those of a group as they were set aside, or with no ``number`` as they are."""

    group: WorkerGroup
    number: int | None = None


@contextmanager
def loaded(*groups: WorkerGroup) -> Iterator[None]:
    """Load offloaded groups for this block, then offload them again."""
    gone = [g for g in groups if g.is_away]
    for group in gone:
        group.onload()
    try:
        yield
    finally:
        for group in gone:
            group.offload()


def _loaded(method: Callable[P, R]) -> Callable[P, R]:
    """Load a group for a method of it, and the groups among its arguments, then offload them again."""

    @wraps(method)
    def there(*args: P.args, **kwargs: P.kwargs) -> R:
        groups = [a for a in args if isinstance(a, WorkerGroup)]
        groups += [a.group for a in args if isinstance(a, Staged) and a.number is None]  # what is set aside is there
        with loaded(*groups):
            return method(*args, **kwargs)

    return there


class WorkerGroup:
    """The copy of a worker on the ranks of a pool that trains, or with ``spec.serving`` the one that generates.

    It has what the driver asks of a worker, such as ``version`` and ``install``. ``parts``: its ranks, and who of them
    has which rows.
    """

    def __init__(self, client: RankClient, blueprint: Blueprint, spec: WorkerSpec, parts: RankParts) -> None:
        self.client, self.blueprint, self.spec, self.parts = client, blueprint, spec, parts
        self.name, self.key = blueprint.name, spec.key
        self.version, self.dirty = 0, False
        self.stamp = 0  # grows whenever the state changes
        self.stamps: dict[int, int] = {}  # as the ranks count it: from anew where one is started again
        self.is_away = False
        self.changing = False  # an update is under way, or what it changed is not known yet
        self.swapping = False  # it is on its way out of memory, or back
        self.serves_rows = False  # environments have asked its ranks, which split its engine, since rows were ended
        self.installing = False
        self.published: Published | None = None  # what its engines said of the weights that it was last given
        self.received = 0  # bytes of the weights that it was last given, on all of its ranks
        self.owed = False  # ranks were started anew meanwhile, and have not got them
        self.aside: set[int] = set()  # numbers of weights that were set aside, and nobody has taken yet
        self.kept: tuple[Staged, int] | None = None  # what it was last given, still set aside, and of which version
        self.born: int | None = None  # the stamp of its state as it was opened
        self.held: dict[int, dict[str, Held]] = {}
        self._staging = itertools.count(1)

    def _hold_rows(self) -> None:
        """Have rows of environments stand still where ranks split an engine, before weights come to any of these: they
        make steps of them together. Those that ranks which died have asked for end."""
        if self.spec.serving and (beside := self.parts.beside()):
            held = self.client.send("hold_rows", {rank: (self.key, others) for rank, others in beside.items()})
            self.client.wait(held, f"{self.name}: rows that stand still")

    def end_rows(self) -> None:
        """Have rows end that environments on ranks that died have asked for: ranks that split an engine make steps of
        them together, and are told next what each does by itself."""
        if self.serves_rows:
            self.serves_rows = False
            self.client.call_all(
                self.parts.keepers, "end_rows", self.key, what=f"{self.name}: rows that nobody waits for"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it is on."""
        return self.parts.ranks

    def leave(self, gone: Collection[int]) -> None:
        """Be on the other ranks alone from here on, which have whole copies."""
        self.parts = self.parts.without(gone)
        self.held = {rank: held for rank, held in self.held.items() if rank in self.ranks}
        self.stamps = {rank: stamp for rank, stamp in self.stamps.items() if rank in self.ranks}

    def join(self, team: Sequence[int]) -> None:
        """Be on these ranks too from here on, which compute together if its own do."""
        self.parts = self.parts.on([*self.ranks, *team])

    @property
    def title(self) -> str:
        """As which it appears in records: ``actor``, ``actor.generate``."""
        return f"{self.name}.generate" if self.spec.serving else self.name

    @property
    def pool(self) -> str:
        """The pool whose ranks it is on."""
        return self.client.pool_of(self.ranks[0])

    @property
    def is_model(self) -> bool:
        """Whether it has an engine."""
        return hasattr(self.blueprint.cls, "build")

    @property
    def stateful(self) -> bool:
        """Whether it changes, and has no engine that would change on all ranks: then it is on the first one alone."""
        ops = (getattr_static(self.blueprint.cls, n) for n in dir(self.blueprint.cls))
        return not self.is_model and any(isinstance(op, Op) and op.updates for op in ops)

    @property
    def trains(self) -> bool:
        """Whether its weights are worth saving at the end of a run."""
        return self.blueprint.cls.is_trained(self.blueprint.arguments)

    # -- versions ---------------------------------------------------------------------------------------------------

    def read_version(self) -> int:
        """The version that a reader of the weights sees; updates since the last read are published by it."""
        if self.dirty:
            self.mark_published(self.version + 1)
        return self.version

    def mark_published(self, version: int) -> None:
        """Note that the weights as they are now are a version of their own."""
        if (version, False) != (self.version, self.dirty):
            self.stamp += 1
        self.version, self.dirty = version, False

    def opened(self, found: Mapping[int, Mapping[str, Any]]) -> None:
        """What ranks say of the worker once it is open there."""
        self.held |= {rank: said["held"] for rank, said in found.items()}
        self.stamps |= {rank: said["stamp"] for rank, said in found.items()}

    def note(self, said: Mapping[int, tuple[int, bool, int]]) -> None:
        """What ranks say of the state after a call: version, whether it was updated since, and a stamp.

        Versions are counted here: they go to ranks with their calls.
        """
        said = {rank: state for rank, state in said.items() if rank in self.ranks}  # others are gone
        if any(self.stamps.get(rank) != stamp for rank, (_, _, stamp) in said.items()):
            self.stamps |= _stamps(said)
            self.stamp += 1
            self.dirty = next(iter(said.values()))[1]

    @_loaded
    def program_starts(self) -> None:
        """A program is a stage of training. A copy of another worker takes its weights now."""
        answers = self.client.call_all(self.ranks, "program_starts", self.key, what=f"{self.name} at a program's start")
        self.note(answers)

    @_loaded
    def stage(self) -> Staged:
        """Set the weights aside, on the ranks where they are."""
        number = next(self._staging)
        self.aside.add(number)
        self.client.call_all(self.ranks, "set_aside", self.key, number, what=f"{self.name}: setting weights aside")
        return Staged(self, number)

    def in_use(self) -> Staged:
        """The weights as they are; nothing may change them before they are installed."""
        return Staged(self)

    def install(self, staged: Staged, version: int, *, keep_cache: bool = False) -> int:
        """Take weights of another group, box by box from where they are, and hold their digest against the source's.

        Rows that are sampled go on under them, with keys and values computed again unless they ``keep_cache``. Returns
        the bytes that the ranks have received, all together.
        """
        self.installing = self.owed = True
        try:
            while self.owed:
                self.client.retry(lambda: self._given(staged, version, keep_cache=keep_cache))
                with self.client.order:
                    self.installing = self.owed
        except BaseException:
            self.stamp += 1  # they may be written in part
            for how in ("give_up_rows", "leave_rows"):  # at once, and after what may still come to hold them
                self.client.send(how, dict.fromkeys(self.ranks, (self.key,)))
            raise
        finally:
            self.installing = self.owed = False
        self._let_go(staged, version)
        return self.received

    def _let_go(self, staged: Staged, version: int) -> None:
        """Forget weights that were set aside, once they are here. Where the plan keeps copies the latest ones stay
        there instead, for ranks that are lost with the others of their group, and those before are forgotten."""
        before, self.kept = self.kept, None
        gone = [] if before is None else [before[0]]
        if staged.number is not None:
            staged.group.aside.discard(staged.number)
            if self.client.copies > 1 and set(self.ranks).isdisjoint(staged.group.ranks):
                self.kept = staged, version
            else:
                gone.append(staged)
        for each in gone:
            what = f"{each.group.name}: forgetting weights that are published"
            self.client.call_all(each.group.ranks, "let_go", each.group.key, each.number, what=what)

    def forget_kept(self, ranks: Collection[int]) -> None:
        """Forget weights that were kept aside on ranks that are lost."""
        if self.kept is not None and not set(self.kept[0].group.ranks).isdisjoint(ranks):
            self.kept = None

    def _given(self, staged: Staged, version: int, *, keep_cache: bool) -> None:
        with self.client.order:
            self.owed, epoch = False, self.client.epoch
        with self.client.blaming_restarts(epoch, f"ranks were started again while '{self.name}' got its weights."):
            self.take(staged, version, keep_cache=keep_cache)

    @_loaded
    def take(self, staged: Staged, version: int, *, keep_cache: bool = False) -> None:
        """The same, once: whatever is lost meanwhile ends it."""
        source = staged.group
        route = self.client.routes.find(source, self)
        moves, numbers = route.moves, route.numbers
        what = f"publish of {source.name} version {version}"
        dtypes = {name: kind for name, (kind, _) in moves.dtypes.items()}
        wanted = source.digest(staged.number, dtypes)
        into = {rank: self.key if rank in self.ranks else None for rank in numbers}
        asked = {rank: (route.name, source.key, staged.number, key) for rank, key in into.items()}
        self._hold_rows()
        begun = self.client.send("move", asked)
        try:
            answers = self.client.wait(begun, what, lambda: self.client.routes.drop(source, self))
        except BaseException:
            self.client.routes.drop(source, self)
            raise
        received = {numbers[rank]: moved.received for rank, moved in answers.items() if moved.received}
        assert received == moves.received, f"{what} brought {received} bytes, planned were {moves.received}"
        self.client.note_move(what, moves, answers)
        self.received = moves.total
        # Ranks that split an engine ask each other as they take weights and as calls begin: each in one order.
        method = "weights_written_in_turn" if self.spec.collective and self.spec.serving else "weights_written"
        written = self.client.call_all(self.ranks, method, self.key, version, keep_cache, what=what)
        self.stamps |= _stamps({rank: stamped for rank, (stamped, _) in written.items()})
        self.published = Published.of_ranks(told for _, told in written.values())
        assert wanted is not None, "what is installed has a digest"
        for rank, found in self.digests(None, None).items():
            if found != wanted:
                raise RunError(
                    f"{what} came to rank {rank} of pool '{self.client.pool_of(rank)}' with other numbers: digest "
                    f"{found[:12]}, not {wanted[:12]}.",
                    fix="This is a fault of the transport or of an engine; report it with the plan.",
                )
        self.mark_published(version)
        self.stamp += 1

    # -- memory -----------------------------------------------------------------------------------------------------

    def offload(self) -> dict[int, int]:
        """Have weights and optimizer make way for others; bytes freed by rank."""
        return self._swap("offload", away=True)

    def onload(self) -> dict[int, int]:
        """Bring them back; bytes taken by rank."""
        return self._swap("onload", away=False)

    def _swap(self, method: str, *, away: bool) -> dict[int, int]:
        self.end_rows()
        with self.client.order:
            if self.is_away == away:
                return {}
            self.is_away, self.swapping = away, True
            begun = self.client.send(method, dict.fromkeys(self.ranks, (self.key,)))
        try:
            return self.client.wait(begun, f"{self.name}: {'making way' if away else 'coming back'}")
        finally:
            self.swapping = False

    # -- weights ----------------------------------------------------------------------------------------------------

    def digest(self, number: int | None = None, dtypes: Mapping[str, str] | None = None) -> str | None:
        """Return the digest of the weights, whatever their layout; None for a worker without a model.

        Raises RunError where whole copies of them differ.
        """
        if not self.is_model:
            return None
        with loaded(*([self] if number is None else [])):  # what is set aside is there
            digests = self.digests(number, dtypes)
        rank, first = next(iter(digests.items()))
        for other, its in digests.items():
            if its != first:
                raise RunError(f"the weights of '{self.name}' on rank {other} are not those on rank {rank}.")
        return first

    def digests(self, number: int | None, dtypes: Mapping[str, str] | None) -> dict[int, str]:
        """The digest of each whole copy, under its first rank."""
        parts = self.client.call_all(self.ranks, "sums", self.key, number, dtypes, what=f"{self.name}: digest")
        return {copy[0]: digest(parts[rank] for rank in copy) for copy in self.parts.copies}

    def plan_from(self, source: WorkerGroup, numbers: Mapping[int, int]) -> Moves:
        """The moves that bring the weights of ``source`` here, each from a rank of the same machine where one has it;
        ``numbers`` are the ranks' on the wire."""
        lacking = {n for held in self.held.values() for n in held} - {n for held in source.held.values() for n in held}
        if lacking:
            raise RunError(
                f"'{self.name}' cannot take the weights of '{source.name}': it has others, such as '{min(lacking)}'.",
                fix="Use the same model for both.",
            )
        where = self.client.link.where
        machine = {number: where[rank]["node"] for rank, number in numbers.items()}
        return plan_moves(
            {numbers[rank]: held for rank, held in source.held.items()},
            {numbers[rank]: held for rank, held in self.held.items()},
            node=machine.__getitem__ if len(set(machine.values())) > 1 else None,
        )

    # -- records ----------------------------------------------------------------------------------------------------

    @_loaded
    def save_model(self, folder: str) -> bool:
        """Save the model as a Hugging Face folder."""
        ranks = self.parts.copies[0]
        found = self.client.call_all(ranks, "save_model", self.key, folder, what=f"{self.name}: saving its model")
        return bool(next(iter(found.values())))

    def capture_state(self, folder: Path, file: str) -> Captured:
        """Copy the state, each rank its part, and begin to write it. What is out of memory stays there."""
        ranks = self.parts.copies[0]
        id, weights, epoch = self.client.new_id(), (self.version, self.dirty), self.client.epoch
        asked = {rank: (id, self.key, str(folder), file, part, weights) for part, rank in enumerate(ranks)}
        lacking = self.client.wait(self.client.send("capture_state", asked), f"{self.name}: copying its state")
        return self.client.write_captured(id, ranks, epoch, f"{self.name}: saving its state", max(lacking.values()))

    def part(self, ranks: Sequence[int]) -> WorkerGroup:
        """The same worker on some of its ranks: to take weights from there, or to bring them there."""
        part = WorkerGroup(self.client, self.blueprint, self.spec, self.parts.on(ranks))
        part.version, part.is_away = self.version, self.is_away
        part.held = {rank: held for rank, held in self.held.items() if rank in ranks}
        return part

    @_loaded
    def load_state(self, folder: Path, file: str) -> None:
        """Take a state back, whoever has written it."""
        what = f"{self.name}: loading its state"
        found = self.client.call_all(self.ranks, "load_state", self.key, str(folder), file, what=what)
        self.stamps |= _stamps(found)
        self.version, self.dirty, _ = next(iter(found.values()))
        self.stamp, self.born, self.kept = self.stamp + 1, None, None

    def close(self) -> None:
        """Nothing is open in the driver."""


def _stamps(said: Mapping[int, tuple[int, bool, int]]) -> dict[int, int]:
    return {rank: stamp for rank, (_, _, stamp) in said.items()}
