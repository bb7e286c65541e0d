"""Whether the code of a program names a worker, so that other parameters may lead to a call of it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from .site import is_users
from .surroundings import codes


def mentions(program: Callable[..., Any], worker: Any) -> bool:
    """Whether a program, or a function of the user's that it names, names what is or holds a worker's handle."""
    waiting: list[Any] = [program]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if value is worker:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            waiting.extend(_inside(value))
    return False


def _inside(value: Any) -> Iterator[Any]:
    """Yield what a function names, and what a container or an object of the user's holds."""
    kind = cast("type[Any]", type(value))
    if isinstance(value, types.FunctionType):
        if is_users(value):
            known = {**value.__globals__, **inspect.getclosurevars(value).nonlocals}
            names = {name for code in codes(value.__code__) for name in (*code.co_names, *code.co_freevars)}
            yield from (known[name] for name in names if name in known)
    elif kind in (list, tuple):
        yield from value
    elif kind is dict:
        yield from cast("Mapping[Any, Any]", value).values()
    elif not isinstance(value, (type, types.ModuleType)) and is_users(kind):
        yield from getattr(value, "__dict__", {}).values()
