"""What the code of a program names, and that of the user's functions behind it: a worker, or an iterator."""

from __future__ import annotations

import dis
import inspect
import linecache
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ...errors import At
from .site import is_users


class Named(NamedTuple):
    """Something outside of a program: ``Named("tasks.DECK.left", an iterator, first=the object tasks.DECK)``.

    ``first`` is the first part of the name that is no module.
    """

    name: str
    value: Any
    first: Any


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


def lines(program: Callable[..., Any], name: str) -> Iterator[At]:
    """The lines of a program and of the functions behind it that name a value, or what it is a part of.

    A variable of their own that is called like it is another one, and so is an attribute.
    """
    first = first_part(name)
    for fn in functions(program):
        for code in codes(fn.__code__):
            yield from _loads(code, {first}, {first}.intersection(fn.__code__.co_freevars))


def lines_of(program: Callable[..., Any], named: Named) -> Iterator[At]:
    """The lines that name this very value, or what it is a part of."""
    for fn in functions(program):
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False))
        for code in codes(fn.__code__):
            free = [n for n, cell in cells.items() if _leads(_content(cell), code.co_names, named)]
            known = {n: fn.__globals__[n] for n in code.co_names if n in fn.__globals__}
            there = [n for n, value in known.items() if _leads(value, code.co_names, named)]
            yield from _loads(code, there, free)


def _leads(value: Any, names: Sequence[str], named: Named, deep: int = 4) -> bool:
    """Whether a variable is a value, or that is a part of it; what a module has counts where some code names it too."""
    if value is named.value or value is named.first:
        return True
    if not deep or not isinstance(value, types.ModuleType) or not is_users(value):
        return False
    return any(_leads(vars(value)[n], names, named, deep - 1) for n in names if n in vars(value))


def _loads(code: types.CodeType, there: Container[str], free: Container[str]) -> Iterator[At]:
    """The lines of some code that take, or set, one of these variables of its module or of the functions around it."""
    for step in dis.get_instructions(code):
        line = step.positions.lineno if step.positions else None
        outside = "GLOBAL" in step.opname or (step.opname.endswith("_NAME") and step.opname != "IMPORT_NAME")
        closed = "DEREF" in step.opname or "CLOSURE" in step.opname
        if line is not None and ((outside and step.argval in there) or (closed and step.argval in free)):
            yield At(code.co_filename, line, linecache.getline(code.co_filename, line).strip())


def first_part(name: str) -> str:
    """Return ``TABLE`` of ``TABLE.rows['a']``."""
    return name.partition("[")[0].partition(".")[0]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _inside(value: Any) -> Iterator[Any]:
    """Yield what a function names, and what a container, a class or an object of the user's holds."""
    kind = cast("type[Any]", type(value))
    if isinstance(value, types.FunctionType):
        if is_users(value):
            known = {**value.__globals__, **inspect.getclosurevars(value).nonlocals}
            names = {name for code in codes(value.__code__) for name in (*code.co_names, *code.co_freevars)}
            found = [known[name] for name in names if name in known]
            yield from found
            for module in found:  # mytasks.score: what of a module the function may take
                if isinstance(module, types.ModuleType) and is_users(module):
                    yield from (vars(module)[name] for name in names if name in vars(module))
    elif kind in (list, tuple):
        yield from value
    elif kind is dict:
        yield from cast("Mapping[str, Any]", value).values()
    elif isinstance(value, type) and is_users(value):  # its methods
        for part in vars(value).values():
            yield cast("Any", part).__func__ if isinstance(part, (staticmethod, classmethod)) else part
    elif not isinstance(value, (type, types.ModuleType)) and is_users(kind):
        yield from getattr(value, "__dict__", {}).values()
