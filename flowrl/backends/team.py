"""The ranks that share the rows of a call: what they add up, compare and tell each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError, ProgramError
from ..placement.cluster.mesh import DATA_AXES, Mesh
from .messages import gather_json


class Team:
    """One process alone: ``Team()`` has all rows, so sums are what they are.

    ``data`` is into how many parts rows are split, ``place`` which of them this rank has. Every rank of a team makes
    the same calls in the same order.
    """

    data: int = 1
    place: int = 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each; ``value`` stays as it is."""
        return value

    def most(self, number: int) -> int:
        """The largest over the ranks."""
        return self.largest([number])[0]

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest over the ranks, of each of several numbers."""
        return list(numbers)

    def gather(self, item: Any) -> list[Any]:
        """What each rank gave, in the order of their places: anything that JSON can say."""
        return [item]


class Ranks(Team):
    """This rank and those that differ from it along some axes alone: ``Ranks.of({"fsdp": 2, "tp": 2})``.

    The axes are those that split rows, unless others are given. Ranks that differ along other axes have the same
    ``place``, and are in teams of their own.
    """

    def __init__(self, data: int, place: int, group: Any) -> None:
        self.data, self.place, self.group = data, place, group

    @staticmethod
    def of(axes: Mapping[str, int], along: Sequence[str] = DATA_AXES) -> Ranks:
        """The team of this rank on a mesh of all the ranks of ``torch.distributed``. Every rank has to call it.

        Raises ProgramError before ``torch.distributed`` is initialized, PlanError where its ranks do not fill the mesh.
        """
        mesh = Mesh(axes)
        rank = rank_on(mesh)
        group, members = None, (rank,)
        for ranks in mesh.groups(*along):
            made = torch.distributed.new_group(list(ranks)) if len(ranks) > 1 else None
            if rank in ranks:
                group, members = made, ranks
        return Ranks(len(members), members.index(rank), group)

    def sum(self, value: Tensor) -> Tensor:
        total = value.clone()
        if self.data > 1:
            torch.distributed.all_reduce(total, group=self.group)
        return total

    def largest(self, numbers: Sequence[int]) -> list[int]:
        if self.data == 1:
            return list(numbers)
        found = torch.tensor(numbers)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.group)
        return found.tolist()

    def gather(self, item: Any) -> list[Any]:
        if self.data == 1:
            return [item]
        return gather_json(item, self.group)


def open_team(axes: Mapping[str, int], along: Sequence[str] = DATA_AXES) -> Team:
    """The team of this rank: of one process where there are no axes, else :meth:`Ranks.of`, made once for a mesh."""
    mesh = Mesh(axes)
    return once(("team", mesh, tuple(along)), lambda: Ranks.of(axes, along)) if mesh.size > 1 else Team()


_MADE: dict[Any, tuple[Any, Any]] = {}


def once(key: Hashable, make: Callable[[], Any]) -> Any:
    """What ``make`` gave when this process first asked for ``key``: process groups are shared by all engines on a mesh.

    It is made anew after ``torch.distributed`` was. Every rank has to ask in the same order.
    """
    world = torch.distributed.group.WORLD
    held, made = _MADE.get(key, (None, None))
    if held is None or held is not world:
        _MADE[key] = held, made = world, make()
    return made


def rank_on(mesh: Mesh) -> int:
    """The number of this rank on a mesh. Raises as :meth:`Ranks.of` says."""
    if not torch.distributed.is_initialized():
        raise ProgramError(
            f"A mesh {mesh} needs {mesh.size} ranks, and this process is in no process group.",
            fix="Call torch.distributed.init_process_group on every rank before the engine is opened.",
        )
    size = torch.distributed.get_world_size()
    if size != mesh.size:
        raise PlanError(f"A mesh {mesh} needs {mesh.size} ranks, and there are {size}.", fix="Change an axis size.")
    return torch.distributed.get_rank()
