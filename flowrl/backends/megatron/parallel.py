"""The process groups of megatron-core for one mesh. They are globals of its, so each engine puts its own in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...errors import PlanError
from ...placement.cluster.mesh import Mesh
from ..team import rank_on
from .shim import on_cpu

#: Outermost last: what megatron-core calls the order of our axes (pp, dp, cp, ep, tp).
ORDER = "tp-cp-ep-dp-pp"
#: Whose warnings are about what it is made of.
_WARNERS = r"megatron\.|torch\.distributed\.|flowrl\.backends\.megatron\.shim"


@dataclass(frozen=True)
class Parallel:
    """Where a rank stands on a mesh, and megatron-core's groups for it: ``Parallel.of({"pp": 2, "tp": 2})``.

    Two engines of a process may have different meshes. What megatron-core does for one of them is done inside of
    :meth:`active`.
    """

    mesh: Mesh
    at: Mapping[str, int]
    globals: dict[str, Any] = field(repr=False, compare=False)
    world: Any = field(default=None, repr=False, compare=False)

    _made: ClassVar[dict[tuple[tuple[str, int], ...], Parallel]] = {}
    _blank: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def of(axes: Mapping[str, int]) -> Parallel:
        """The groups for a mesh of all ranks of ``torch.distributed``. Every rank has to call it; made once per mesh.

        Raises PlanError for ``fsdp``, and for ``cp`` together with ``ep``.
        """
        mesh = Mesh(axes)
        _check(mesh)
        key, rank, world = tuple(mesh.axes.items()), rank_on(mesh), torch.distributed.group.WORLD
        made = Parallel._made.get(key)
        if made is None or made.world is not world:  # there may be another world by now
            made = Parallel._made[key] = Parallel(mesh, mesh.coordinates(rank), _groups(mesh), world)
        return made

    def __getitem__(self, axis: str) -> int:
        """The place along an axis."""
        return self.at.get(axis, 0)

    @property
    def first(self) -> bool:
        """Whether this rank has the first stage of the pipeline."""
        return self["pp"] == 0

    @property
    def last(self) -> bool:
        """Whether it has the last stage."""
        return self["pp"] == self.mesh["pp"] - 1

    def group(self, axis: str) -> Any:
        """The process group of the ranks that differ along ``tp``, ``pp`` or ``cp`` alone."""
        name = {"tp": "_TENSOR_MODEL", "pp": "_PIPELINE_MODEL", "cp": "_CONTEXT"}[axis]
        return self.globals[f"{name}_PARALLEL_GROUP"]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, megatron-core works on this mesh, on the CPU where there is no CUDA, and without its warnings."""
        with on_cpu(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=_WARNERS)
            found = _swap(self.globals)
            try:
                yield
            finally:
                self.globals.update(_swap(found))


def _check(mesh: Mesh) -> None:
    if mesh["fsdp"] > 1:
        raise PlanError(
            f"The engine 'megatron' has no axis fsdp={mesh['fsdp']}.",
            fix=f"Write dp={mesh['fsdp'] * mesh['dp']}: its optimizer is distributed over it.",
        )
    if mesh.folded > 1:
        raise PlanError(f"The engine 'megatron' does not fold experts yet: {mesh}.", fix="Write ep, and less dp.")
    if mesh["cp"] > 1 and mesh["ep"] > 1:
        raise PlanError(
            f"The engine 'megatron' orders ranks differently along cp={mesh['cp']} and ep={mesh['ep']}.",
            fix="Use one of the two.",
        )


def _state() -> dict[str, Any]:
    """The globals of megatron-core that are about a mesh."""
    from megatron.core import parallel_state

    return {n: v for n, v in vars(parallel_state).items() if n.startswith("_") and n.isupper()}


def _swap(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Put these globals in place; gives those that were there."""
    from megatron.core import parallel_state

    before = _state()
    parallel_state.__dict__.update(wanted)
    return before


def _groups(mesh: Mesh) -> dict[str, Any]:
    """megatron-core's globals for a mesh."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    if not Parallel._blank:
        Parallel._blank.update(_state())
    initialize_rng_tracker(inference_rng_tracker=True)  # nothing is random here: no dropout, and weights are given
    before = _swap(Parallel._blank)
    try:
        with on_cpu():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=mesh["tp"],
                pipeline_model_parallel_size=mesh["pp"],
                context_parallel_size=mesh["cp"],
                expert_model_parallel_size=mesh["ep"],
                expert_tensor_parallel_size=mesh["tp"],
                order=ORDER,
                create_gloo_process_groups=False,
            )
        return _state()
    finally:
        _swap(before)
