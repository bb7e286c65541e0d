"""Which meshes a use of a worker can run on: all that its model divides over and that a backend does not refuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from ...errors import PlanError
from ..backends import REFERENCE, Backend, LayoutRules, proposed
from ..backends import backend as row_of
from ..cluster.mesh import FOLDED, Mesh
from ..cost.work import Role
from ..model.model_shape import ModelShape
from ..model.weight_layout import check_layout
from ..plan.plan import Place
from .engine_refusals import refusals

_STAGES = 16  # of a pipeline, where there are not more nodes


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def meshes(
    role: Role,
    use: str,
    size: int,
    *,
    node: int,
    device: str = "",
    backend: str = "",
    any_split: bool = False,
    cp: bool = False,
) -> Iterator[tuple[Mesh, str]]:
    """Yield (mesh, backend) of exactly ``size`` devices in nodes of ``node``; a pool's meshes take all of its devices.

    Those that ``flowrl check`` accepts on a ``device`` of that kind, whatever divides the model or not. Left out as
    slow: tp across nodes, more than 16 stages on fewer nodes, stages of sharded weights, weights sharded over a part
    of the ranks that is neither all of them nor a node, and ``cp`` unless it is asked for. ``any_split`` leaves out
    what the model asks for: what would be there, up to tp=8, if it did not.
    """
    for row in _rows(use, size, device, backend):
        for mesh in _of_row(row, role, size, node=node, cp=cp):
            place = Place("", mesh, row.name)
            fits = mesh["tp"] <= 8 if any_split else _divides(role, mesh, row.layout)
            if fits and not any(refusals(place, role, device, use=use)):
                yield mesh, row.name


def _rows(use: str, size: int, device: str, backend: str) -> Iterable[Backend]:
    """The backends to choose from: what is asked for; the plain one on one device or a CPU; else those proposed."""
    if backend:
        return (row_of(backend),)
    if use == "generate":
        return (row_of(REFERENCE),) if device == "cpu" else proposed(use)[:1]
    plain = [row for row in proposed(use) if device != "cpu" or not row.extra]
    return (row_of(REFERENCE),) if size == 1 else plain


def _of_row(row: Backend, role: Role, size: int, *, node: int, cp: bool) -> Iterator[Mesh]:
    """Meshes along the axes that a backend has."""
    if not row.collective:
        yield Mesh({"dp": size})
        return
    model = role.model
    assert model is not None, f"{role.name} takes no devices"
    for tp in divisors(size):
        if tp > node or (size >= node and node % tp):
            continue
        for pp in divisors(size // tp):
            most = min(model.layers, max(_STAGES, size // node)) if "pp" in row.axes and "fsdp" not in row.axes else 1
            if pp <= most:
                yield from _data(row, model, tp, pp, size // tp // pp, node=node, cp=cp)


def _data(row: Backend, model: ModelShape, tp: int, pp: int, data: int, *, node: int, cp: bool) -> Iterator[Mesh]:
    """Ranks that see other rows: with weights sharded over all of them or over those of a node, or replicated."""
    if "fsdp" in row.axes:
        inside = max(1, node // tp)
        yield Mesh({"pp": pp, "fsdp": data, "tp": tp})
        if data > inside and data % inside == 0:
            yield Mesh({"pp": pp, "dp": data // inside, "fsdp": inside, "tp": tp})
        return
    yield Mesh({"pp": pp, "dp": data, "tp": tp})
    for ep in divisors(data) if model.experts and "ep" in row.axes else ():
        if ep > 1 and model.experts % ep == 0:
            yield Mesh({"pp": pp, "dp": data // ep, "ep": ep, "tp": tp})
    for along in divisors(data) if cp and "cp" in row.axes else (1,):
        mesh = {"pp": pp, "dp": data // along, "cp": along, "tp": tp}
        if 1 < along <= node:
            yield Mesh(mesh)
        if along <= node and along * tp > 1 and model.experts and FOLDED in row.axes:
            yield from (Mesh({**mesh, FOLDED: ep}) for ep in _folds(model.experts, data * tp, node))


def _folds(experts: int, ranks: int, node: int) -> Iterator[int]:
    """Into how many parts experts fold: as many as a node has ranks, twice as many, and so on up to all of them."""
    yield from (n for n in divisors(ranks) if n > 1 and experts % n == 0 and (n % node == 0 or n == min(ranks, node)))


def _divides(role: Role, mesh: Mesh, rules: LayoutRules) -> bool:
    assert role.model is not None
    return _model_divides(role.model, mesh["tp"], mesh["ep"], mesh["pp"], mesh.folded, rules)


@lru_cache(maxsize=4096)
def _model_divides(model: ModelShape, tp: int, ep: int, pp: int, folded: int, rules: LayoutRules) -> bool:
    """Whether the weights of a model can lie on such a mesh."""
    try:
        check_layout(model, Mesh({"tp": tp, "ep": ep, "pp": pp, "dp": folded, FOLDED: folded}), rules)
    except PlanError:
        return False
    return True
