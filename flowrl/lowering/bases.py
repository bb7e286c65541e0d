"""Which workers of a plan have the weights under their adapters in memory once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..graph.stand_ins.values import is_handle
from ..graph.tracing.trace_records import HandleLike
from ..placement.backends import REFERENCE
from ..placement.plan.plan import Plan
from ..workers.actor import Actor
from ..workers.model_options import Lora
from ..workers.reference import Reference
from .roles import dtypes_of


def bases_of(handles: Sequence[HandleLike], plan: Plan) -> Mapping[str, str]:
    """By worker, the one whose weights it works with and has no copy of, as it is when all are in one process.

    An actor or a reference of an actor with adapters (``of=``), both in one pool, with the reference engine and
    the same dtypes. A reference reads weights under adapters that are none yet, so not under saved ones.
    """
    return {h.name: h.arguments["of"].name for h in handles if _has_none_of_its_own(h, plan)}


def _has_none_of_its_own(handle: HandleLike, plan: Plan) -> bool:
    of: Any = handle.arguments.get("of")
    if not issubclass(handle.cls, (Actor, Reference)) or not is_handle(of):
        return False
    lora: Any = of.arguments.get("lora")
    begun = isinstance(lora, Lora) and lora.path is not None
    if lora is None or (begun and issubclass(handle.cls, Reference)):
        return False
    mine, theirs = plan.place_of(handle.name), plan.place_of(of.name)
    plain = all(place.backend == REFERENCE and place.mesh.size == 1 for place in (mine, theirs))
    return plain and mine.pool == theirs.pool and dtypes_of(handle, plan) == dtypes_of(of, plan)
