"""Which fields a user's function reads by name, from its source text: what it reads undeclared is found before it runs.

``x["rewards"]`` of a parameter counts, where the name is a constant and the parameter is not given another value; so
does ``x.rewards`` where attributes are fields. A name that the function asks for first does not count: with ``in``, or,
where attributes are fields, as any other text, such as that of ``hasattr``. A function whose source is not there, or
that is inside of another decorator, reads nothing that is known.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ...errors import At


def fields_read(
    fn: Callable[..., Any], parameter: str, *, inside: tuple[str, ...] = (), besides: Collection[str] | None = None
) -> dict[str, At]:
    """The names that ``fn`` looks up in that parameter, or in its attributes ``inside``, each with its first line.

    Attributes of the parameter are names too where ``besides`` lists those that are none.
    """
    if inspect.unwrap(fn) is not fn:
        return {}
    try:
        lines, first = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return {}
    if not tree.body or not isinstance(function := tree.body[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {}
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    if any(_gives_another(node, parameter) for node in nodes):
        return {}
    asked = _asked_with_in(nodes) if besides is None else _texts(nodes) | _tried(nodes, parameter, inside)
    read: dict[str, At] = {}
    for node, name in _look_ups(nodes, parameter, inside, besides):
        if name not in asked:
            line = first + node.lineno - 1
            file = fn.__code__.co_filename
            read.setdefault(name, At(file, line, linecache.getline(file, line).strip()))
    return read


def _gives_another(node: ast.AST, parameter: str) -> bool:
    """Whether a name is given another value, or is a parameter of a function inside."""
    if isinstance(node, ast.arg):
        return node.arg == parameter
    return isinstance(node, ast.Name) and node.id == parameter and not isinstance(node.ctx, ast.Load)


def _look_ups(
    nodes: list[ast.AST], parameter: str, inside: tuple[str, ...], besides: Collection[str] | None
) -> Iterator[tuple[ast.expr, str]]:
    """Yield each look-up in the parameter, with the name that it asks for."""
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            name, of = node.slice.value, node.value
            if isinstance(of, ast.Attribute) and of.attr in inside:
                of = of.value
        elif isinstance(node, ast.Attribute) and besides is not None and id(node) not in called:
            name, of = node.attr, node.value
            if name in besides or name.startswith("_"):
                continue
        else:
            continue
        if isinstance(name, str) and isinstance(of, ast.Name) and of.id == parameter and isinstance(node.ctx, ast.Load):
            yield node, name


def _asked_with_in(nodes: list[ast.AST]) -> set[Any]:
    """What the function asks for with ``in``."""
    return {
        node.left.value
        for node in nodes
        if isinstance(node, ast.Compare) and any(isinstance(o, (ast.In, ast.NotIn)) for o in node.ops)
        if isinstance(node.left, ast.Constant)
    }


def _texts(nodes: list[ast.AST]) -> set[Any]:
    """All constants but those that look something up, and the keys of dicts."""
    keys = {id(node.slice) for node in nodes if isinstance(node, ast.Subscript)}
    keys |= {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    return {node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in keys}


def _tried(nodes: list[ast.AST], parameter: str, inside: tuple[str, ...]) -> set[Any]:
    """What is looked up where an error is caught: it need not be there."""
    tried = [n for node in nodes if _catches(node) for part in getattr(node, "body", ()) for n in ast.walk(part)]
    return {name for _, name in _look_ups(tried, parameter, inside, ())}


def _catches(node: ast.AST) -> bool:
    """Whether this is a ``try``, or a ``with suppress(...)``."""
    if isinstance(node, ast.With):
        return any("suppress" in ast.dump(item.context_expr) for item in node.items)
    return isinstance(node, (ast.Try, ast.TryStar))
