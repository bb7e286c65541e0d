"""What a backend or an engine cannot do with a worker on a mesh: told by check, before a rank finds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..placement.cost.work import Role
from ..placement.plan.plan import Place

#: Axes that a backend can split a model along. One that is not here, ``hf``, holds whole models.
AXES_OF = {
    "fsdp2": ("pp", "dp", "fsdp", "tp"),
    "megatron": ("pp", "dp", "cp", "ep", "tp"),
    "vllm": ("pp", "dp", "ep", "tp"),
    "sglang": ("pp", "dp", "ep", "tp"),
}


@dataclass(frozen=True)
class Refusal:
    """``Refusal("megatron has no adapters (lora=).", fix="Leave lora= out, or write backend: fsdp2.")``."""

    what: str
    fix: str
    have: str | None = None


def refusals(place: Place, role: Role, device: str, *, use: str) -> Iterator[Refusal]:
    """What the backend of a place does not do with that worker there. ``device``: the kind of its devices."""
    axes = AXES_OF.get(place.backend)
    wrong = [axis for axis in place.mesh.axes if axes is not None and axis not in axes]
    if axes is not None and wrong:
        another = "engine" if use == "generate" else "backend"
        what = f"{place.backend} does not split a model along {' and '.join(wrong)}."
        yield Refusal(what, f"Use its axes, or another {another}.", ", ".join(axes))
    elif place.backend == "megatron":
        yield from _megatron(place, role, device)
    elif place.backend == "fsdp2":
        yield from _fsdp2(place, role)


def _megatron(place: Place, role: Role, device: str) -> Iterator[Refusal]:
    mesh = place.mesh
    if mesh["cp"] > 1 and mesh["ep"] > 1:
        what = f"megatron orders ranks differently along cp={mesh['cp']} and ep={mesh['ep']}, and does not have both."
        yield Refusal(what, "Use one of the two.")
    if role.lora:
        yield Refusal("megatron has no adapters (lora=).", "Leave lora= out, or write backend: fsdp2.")
    elif role.frozen and role.optimized:
        yield Refusal("megatron trains all weights (freeze=).", "Leave freeze= out, or write backend: fsdp2.")
    if device != "cpu":
        return
    if mesh["cp"] > 1:
        yield Refusal(f"megatron has cp={mesh['cp']} on CUDA alone.", "Write dp in place of cp.")
    if mesh["tp"] > 1 and role.model is not None and role.model.experts:
        what = f"megatron splits a mixture of experts by tp={mesh['tp']} on CUDA alone."
        yield Refusal(what, "Write ep in place of tp.")


def _fsdp2(place: Place, role: Role) -> Iterator[Refusal]:
    for axis in ("pp", "tp"):
        if role.lora and place.mesh[axis] > 1:
            what = f"fsdp2 does not split adapters (lora=) by {axis}={place.mesh[axis]}."
            yield Refusal(what, f"Write fsdp in place of {axis}, or leave lora= out.")
    if role.frozen and role.optimized and place.mesh["pp"] > 1:
        what = f"fsdp2 does not have frozen weights (freeze=) in stages (pp={place.mesh['pp']})."
        yield Refusal(what, "Write fsdp in place of pp, or leave freeze= out.")
