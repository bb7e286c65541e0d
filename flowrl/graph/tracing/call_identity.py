"""How calls and sources of a program are told apart on all paths, and which of them a steady step makes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..stand_ins.symbols import Symbol
from ..stand_ins.values import Value, replace_values
from .trace_records import Draw, TCall, TNumber, Trail

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object that says no more of itself
Place = tuple[object, ...]
Key = tuple[Place, Place, str]  # from, to, kind


@dataclass
class Found:
    """What the paths say of one node, source or edge."""

    trails: set[int] = field(default_factory=set[int])
    fields: dict[str, str] = field(default_factory=dict[str, str])  # with the names that they had where they were made
    repeats: bool = False


def source_place(draw: Draw) -> Place:
    """The place of the source that rows are drawn from."""
    return ("data", draw.loop, *draw.key)


def steady(trail: Trail) -> list[TCall]:
    """The calls of a path that a steady step makes, and those outside of steps."""
    return [c for c in trail.calls if c.iteration in (0, 2)]


def carried(made: TCall | Draw, loop: int, iteration: int) -> bool:
    """Whether something was made in the step before the one that uses it."""
    return made.loop == loop and 0 < made.iteration < iteration


def written_out(value: Any) -> Any:
    """Return what stands for a value of the program where only its expression counts."""
    return as_written(getattr(value.ref, "text", "") or "...")


def as_written(text: str) -> Any:
    """A number that is known by its expression alone, to stand for it where arguments are written or compared."""
    nowhere: Any = None
    return Symbol(nowhere, TNumber(frozenset(), text, text))


def as_given(call: TCall) -> str:
    """Return what a call is given besides results of other calls, as it is written."""
    plain = {
        name: replace_values(value, written_out)
        for name, value in call.arguments.items()
        if isinstance(value, Symbol) or not isinstance(value, Value)
    }
    return _ADDRESS.sub("", repr(plain)) + call.text
