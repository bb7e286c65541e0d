"""The plan of a move of weights, made from what all processes say that they hold and are to have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...errors import PlanError
from ...placement.reshard.boxes import Box
from ...placement.reshard.senders import Move, Node, plan_boxes

if TYPE_CHECKING:
    from ...workers.weights.weight_boxes import Shard


@dataclass(frozen=True)
class Held:
    """The boxes of one weight in one process: ``Held("bfloat16", 2, (64, 32), (((0, 16), (0, 32)),))``.

    ``size`` is that of one number in bytes, ``shape`` that of the whole weight.
    """

    dtype: str
    size: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


#: What one process holds or is to have, by weight: small enough to be told to all others.
Holdings = Mapping[str, Held]


@dataclass(frozen=True)
class Moves:
    """What goes where, and as what: ``Moves((Move("w", 1, 0, ((0, 4),)),), {"w": ("bfloat16", 2)})``.

    ``dtypes``: by weight the dtype that it travels in, which is the target's, and the bytes of one number.
    """

    moves: tuple[Move, ...]
    dtypes: Mapping[str, tuple[str, int]]

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes from others by process, those that get nothing left out."""
        return self._bytes(lambda m: None if m.local else m.target)

    @cached_property
    def sent(self) -> dict[int, int]:
        """Bytes to others by process, those that send nothing left out."""
        return self._bytes(lambda m: None if m.local else m.source)

    @cached_property
    def local(self) -> dict[int, int]:
        """Bytes that a process takes from itself, by process."""
        return self._bytes(lambda m: m.target if m.local else None)

    @property
    def total(self) -> int:
        """Bytes that go from process to process."""
        return sum(self.received.values())

    def _bytes(self, who: Callable[[Move], int | None]) -> dict[int, int]:
        found: Counter[int] = Counter()
        for move in self.moves:
            rank = who(move)
            if rank is not None:
                found[rank] += move.numbers * self.dtypes[move.name][1]
        return dict(sorted(found.items()))


def holdings(shards: Iterable[Shard]) -> dict[str, Held]:
    """What a process tells the others of its shards."""
    found: dict[str, Held] = {}
    for shard in shards:
        before = found[shard.name].boxes if shard.name in found else ()
        dtype = str(shard.tensor.dtype).removeprefix("torch.")
        found[shard.name] = Held(dtype, shard.tensor.itemsize, tuple(shard.shape), (*before, shard.box))
    return found


def plan_moves(held: Mapping[int, Holdings], wanted: Mapping[int, Holdings], *, node: Node | None = None) -> Moves:
    """Plan from what the processes hold to what they are to have; keys are the processes of one :class:`Wire`.

    The same in every process that is given the same. Raises PlanError where a weight has another shape or another
    dtype in one process than in another, or nobody holds what is wanted. Source and target may differ in dtype.
    """
    there = _check(held, what="held", dtypes=False)
    asked = _check(wanted, what="wanted", dtypes=True)
    for name, (rank, one) in asked.items():
        if name in there and there[name][1].shape != one.shape:
            other, two = there[name]
            raise PlanError(
                f"{name} is {list(one.shape)} where it goes (process {rank}) and {list(two.shape)} where it comes "
                f"from (process {other}).",
                fix="Describe weights in the shapes of the checkpoint, without padding.",
            )
    moves = tuple(plan_boxes(_boxes(held), _boxes(wanted), node=node).moves())
    return Moves(moves, {name: (one.dtype, one.size) for name, (_, one) in sorted(asked.items())})


def _check(by_rank: Mapping[int, Holdings], *, what: str, dtypes: bool) -> dict[str, tuple[int, Held]]:
    """Each weight as the first process has it; raise PlanError where another has it otherwise."""
    found: dict[str, tuple[int, Held]] = {}
    for rank, weights in sorted(by_rank.items()):
        for name, one in weights.items():
            first, known = found.setdefault(name, (rank, one))
            if known.shape != one.shape:
                raise PlanError(
                    f"{name} as {what} is {list(known.shape)} in process {first}, {list(one.shape)} in process {rank}."
                )
            if dtypes and known.dtype != one.dtype:
                raise PlanError(
                    f"{name} as {what} is {known.dtype} in process {first} and {one.dtype} in process {rank}.",
                    fix="Open all processes of a worker with the same dtype.",
                )
    return found


def _boxes(by_rank: Mapping[int, Holdings]) -> dict[int, dict[str, tuple[Box, ...]]]:
    return {rank: {name: one.boxes for name, one in weights.items()} for rank, weights in by_rank.items()}
