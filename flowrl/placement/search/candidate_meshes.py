"""Which meshes a use of a model can run on: those that divide its heads, layers and vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ..backends import REFERENCE, Backend, proposed
from ..backends import backend as row_of
from ..cluster.mesh import Mesh
from ..model.model_shape import ModelShape


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def splits(model: ModelShape, *, tp: int, pp: int) -> bool:
    """Whether tp divides heads, feed-forward and vocabulary, and pp the layers.

    Fewer key-value heads than tp are replicated, so one of the two has to divide the other.
    """
    heads = model.heads % tp == 0 and (model.kv_heads % tp == 0 or (model.kv_heads > 0 and tp % model.kv_heads == 0))
    wide = model.intermediate % tp == 0 and model.expert_intermediate % tp == 0 and model.vocab % tp == 0
    return heads and wide and model.layers % pp == 0


def meshes(
    model: ModelShape, use: str, size: int, *, node: int, rows: int, backend: str = "", any_split: bool = False
) -> list[tuple[Mesh, str]]:
    """Return (mesh, backend) of exactly ``size`` devices in nodes of ``node``; a pool's meshes take all of its devices.

    tp stays inside a node, pp only crosses nodes, the rest splits rows. ``rows`` are those of an optimizer step, or of
    the whole call: meshes that split them evenly, or else those that give a row to every replica, or else any.
    ``any_split`` leaves out what the model and its rows ask for: what would be there if they did not.
    """
    found = list(_meshes(model, use, size, node=node, backend=backend, any_split=any_split))
    if any_split:
        return found
    even = [m for m in found if rows % m[0].data == 0]
    return even or [m for m in found if rows >= m[0].data] or found


def _meshes(
    model: ModelShape, use: str, size: int, *, node: int, backend: str, any_split: bool
) -> Iterator[tuple[Mesh, str]]:
    said = row_of(backend) if backend else None
    for tp in divisors(size):
        if tp > node or (size >= node and node % tp):
            continue
        for pp in divisors(size // tp):
            if pp > max(1, size // node) or not (any_split or splits(model, tp=tp, pp=pp)):
                continue
            data = size // tp // pp
            if use != "generate":
                yield from _train(model, tp, pp, data, node=node, said=said)
            else:
                row = said or proposed(use)[0]
                if row.collective or size == data:
                    yield Mesh({"tp": tp, "pp": pp, "dp": data}), row.name


def _train(
    model: ModelShape, tp: int, pp: int, data: int, *, node: int, said: Backend | None
) -> Iterator[tuple[Mesh, str]]:
    """Weights sharded over the rows' devices, over those of a node alone, or replicated, as a backend does it."""
    if tp * pp * data == 1 or (said and not said.collective):
        if tp * pp == 1:
            yield Mesh({"dp": data}), said.name if said else REFERENCE
        return
    for row in (said,) if said else proposed("train"):
        if "fsdp" not in row.axes:
            yield from ((mesh, row.name) for mesh in _replicated(model, tp, pp, data, node=node, row=row))
        elif pp == 1:
            inside = max(1, node // tp)
            yield Mesh({"fsdp": data, "tp": tp}), row.name
            if data > inside and data % inside == 0:
                yield Mesh({"dp": data // inside, "fsdp": inside, "tp": tp}), row.name


def _replicated(model: ModelShape, tp: int, pp: int, data: int, *, node: int, row: Backend) -> Iterator[Mesh]:
    """Copies of all weights for the rows, those of experts split over some of them."""
    yield Mesh({"pp": pp, "dp": data, "tp": tp})
    for ep in divisors(data) if model.experts and "ep" in row.axes else ():
        if 1 < ep <= node and model.experts % ep == 0:
            yield Mesh({"pp": pp, "dp": data // ep, "ep": ep, "tp": tp})
