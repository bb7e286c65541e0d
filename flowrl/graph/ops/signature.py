"""What one call of an op reads and adds, and what a declaration may ask of a call to say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...marks import Marks
from .field_types import Fields, FieldType


@dataclass(frozen=True)
class Signature:
    """What one call reads and adds: ``Signature({"batch": {"values": f32[*response]}}, adds={"returns": ...})``."""

    reads: Mapping[str, Fields]  # by the name of the batch parameter
    adds: Mapping[str, FieldType]
    rows: str = "same"

    def __str__(self) -> str:
        reads = ", ".join(f"{n}: {t}" if t else n for fields in self.reads.values() for n, t in fields.items())
        adds = ", ".join(f"{n}: {t}" for n, t in self.adds.items())
        return f"({reads}) -> ({adds})" + ("" if self.rows == "same" else f" rows={self.rows}")


#: ``reads`` or ``adds`` of an op: text, text by batch parameter, or a function of the call that gives either.
Declared = str | Mapping[str, str] | Callable[["CallShape"], "str | Mapping[str, str]"] | None


@dataclass(frozen=True)
class CallShape:
    """What a ``reads=``, ``adds=`` or ``marks=`` function may look at: arguments of the worker and the call, fields.

    ``rows_each``: how many rows a prompt has at most, where a trace knows it, of rows that a call sampled;
    ``sampled_by`` is that call, ``actor.generate (line 12)``. Only ``marks=`` is given ``worker``, who computes or is
    the policy that is handed on, the name of its ``tokenizer``, and the ``marks`` of the fields at hand.
    """

    init: Mapping[str, Any]
    call: Mapping[str, Any]
    have: frozenset[str]
    rows_each: int | None = None
    sampled_by: str = ""
    worker: str = ""
    tokenizer: str = ""
    marks: Mapping[str, Marks] = field(default_factory=dict[str, Marks])


#: Whether an op may be run prompt by prompt, as its rows do not depend on those of other prompts; ``"row"``: on none.
Pieces = bool | str | Callable[[CallShape], "bool | str"]
