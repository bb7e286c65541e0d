"""What a backend or an engine cannot do with a worker where it is placed: told by check, before a rank finds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import At, PlanError
from ..backends import Backend, backend, listed
from ..cluster.mesh import FOLDED
from ..cost.work import Role
from ..plan.plan import Place

_PLACED = {"pp": "in stages (pp={})"}  # how weights lie along an axis, where a word says it


@dataclass(frozen=True)
class Refusal:
    """``Refusal("it trains on one device, and is placed on 4.", fix="Give the pool one device.")``."""

    what: str
    fix: str
    have: str | None = None

    def error(self, title: str, at: At | None) -> PlanError:
        """Return the error that names the worker and the line of its place."""
        return PlanError(f"{title}: {self.what}", at=at, have=self.have, fix=self.fix)


def refusals(place: Place, role: Role, device: str, *, use: str) -> Iterator[Refusal]:
    """Yield what the backend of a place, on that kind of ``device``, does not do with a worker of known size."""
    refused = list(refusals_of_use(place, use=use, trained=role.trains))
    yield from refused
    if not refused:
        yield from _of_worker(backend(place.backend), place, role)
        if device == "cpu":
            yield from _without_cuda(backend(place.backend), place, role)


def refusals_of_use(place: Place, *, use: str, trained: bool, size: int = 0) -> Iterator[Refusal]:
    """Yield what the backend of a place does not do there, whatever the model.

    ``use``: ``generate``, or ``train`` for any other op; ``trained``: the program updates the worker. ``size``: the
    devices of the pool, where they are more than those of the mesh.
    """
    row, mesh = backend(place.backend), place.mesh
    size, axes = max(size, mesh.size), mesh.said
    if not row.does(use):
        yield _unable(row, use, trained=trained)
    elif wrong := [axis for axis in axes if axis not in row.axes]:
        yield _axes(row, place, wrong, use)
    elif use == "train" and trained and size > 1 and not row.collective:
        what = f"{row.name} trains on one device, and is placed on {size}."
        yield Refusal(what, f"Write backend: {listed('train', collective=True)}, or give the pool one device.")
    elif use == "generate" and trained and not row.publishes:
        fix = f"Write engine: {listed(use)}."
        yield Refusal(f"{row.name} never takes new weights, and the program updates them.", fix)
    for pair in row.excludes:
        if all(mesh[axis] > 1 for axis in pair):
            both = " and ".join(f"{axis}={mesh[axis]}" for axis in pair)
            what = f"{row.name} orders ranks differently along {both}, and does not have both."
            folds = "ep" in pair and FOLDED in row.axes
            yield Refusal(what, "Use one of the two, or folded_ep in place of ep." if folds else "Use one of the two.")


def _unable(row: Backend, use: str, *, trained: bool) -> Refusal:
    if use == "generate":
        return Refusal(f"{row.name} does not generate.", f"Write generate: {{engine: {listed(use)}}}.")
    what = "the program updates it" if trained else "the program calls more than its generate"
    return Refusal(f"{row.name} only generates, and {what}.", f"Add train: {{backend: {listed(use)}}}.")


def _axes(row: Backend, place: Place, wrong: list[str], use: str) -> Refusal:
    word = "engine" if use == "generate" else "backend"
    if row.collective:
        what = f"{row.name} does not split a model along {' and '.join(wrong)}."
        return Refusal(what, f"Use its axes, or another {word}.", ", ".join(row.axes))
    what = f"{row.name} holds whole models, and the mesh splits them by "
    what += " and ".join(f"{axis}={place.mesh.said[axis]}" for axis in wrong) + "."
    return Refusal(what, f"Write {word}: {listed(use, collective=True)}, or mesh: {{dp: {place.mesh.size}}}.")


def _of_worker(row: Backend, place: Place, role: Role) -> Iterator[Refusal]:
    """Adapters and frozen weights, which are nothing but weights to an engine that does not train."""
    if not row.trains:
        return
    better = f"or write backend: {listed('train', collective=True, adapters=('dp', 'fsdp'))}."
    if role.lora and not row.adapters:
        yield Refusal(f"{row.name} has no adapters (lora=).", f"Leave lora= out, {better}")
    elif role.lora:
        for axis in (a for a in place.mesh.axes if a not in row.adapters):
            what = f"{row.name} does not split adapters (lora=) by {axis}={place.mesh[axis]}."
            yield Refusal(what, f"Write {row.adapters[-1]} in place of {axis}, or leave lora= out.")
    if not (role.frozen and role.optimized) or (role.lora and not row.adapters):
        return
    if not row.freezes:
        yield Refusal(f"{row.name} trains all weights (freeze=).", f"Leave freeze= out, {better}")
    for axis in (a for a in place.mesh.axes if row.freezes and a not in row.freezes):
        where = _PLACED.get(axis, f"by {axis}={{}}").format(place.mesh[axis])
        what = f"{row.name} does not have frozen weights (freeze=) {where}."
        yield Refusal(what, f"Write fsdp in place of {axis}, or leave freeze= out.")


def _without_cuda(row: Backend, place: Place, role: Role) -> Iterator[Refusal]:
    mesh = place.mesh
    for what, fix in row.unrun(mesh.said, place.options):
        yield Refusal(what, fix)
    for axis in (a for a in row.cuda_axes if mesh[a] > 1):
        yield Refusal(f"{row.name} has {axis}={mesh[axis]} on CUDA alone.", f"Write dp in place of {axis}.")
    for axis in (a for a in row.cuda_expert_axes if mesh[a] > 1):
        if role.model is not None and role.model.experts:
            what = f"{row.name} splits a mixture of experts by {axis}={mesh[axis]} on CUDA alone."
            yield Refusal(what, f"Write ep in place of {axis}.")
