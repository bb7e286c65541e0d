"""What the code of a program names, and that of the user's functions behind it: a worker, or an iterator."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from .site import is_users


def mentions(program: Callable[..., Any], worker: Any) -> bool:
    """Whether a program, or a function of the user's that it names, names what is or holds a worker's handle.

    Then other parameters may lead to a call of it.
    """
    return any(value is worker for value in named(program))


def functions(program: Callable[..., Any]) -> Iterator[types.FunctionType]:
    """Yield a program, and the functions of the user's that it names, or that these name."""
    for value in named(program):
        if isinstance(value, types.FunctionType) and (value is program or is_users(value)):
            yield value


def named(program: Callable[..., Any]) -> Iterator[Any]:
    """Yield a program, what it names, and what is in that or is named by it, each once."""
    waiting: list[Any] = [program]
    seen: dict[int, Any] = {}  # kept, so that no other object gets its id
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            yield value
            waiting.extend(_inside(value))


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of functions and comprehensions inside of it."""
    yield code
    for inside in code.co_consts:
        if isinstance(inside, types.CodeType):
            yield from codes(inside)


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
        yield from cast("Mapping[str, Any]", value).values()
    elif not isinstance(value, (type, types.ModuleType)) and is_users(kind):
        yield from getattr(value, "__dict__", {}).values()
