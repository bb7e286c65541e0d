"""The parameters of a program that only say how long it goes on, such as ``steps``: a run may be made longer."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import At
from .site import defined_at


def lengths(program: Callable[..., Any]) -> dict[str, At | None]:
    """Parameters that bound the outermost loops of a program, each with another line that uses it, if one does.

    ``{"steps": None}`` for ``for step, batch in flow.steps(source, steps)`` and ``for i in range(steps)``. A program
    without such a loop has one elsewhere; of it ``steps`` is taken for one.
    """
    names = set(inspect.signature(program).parameters)
    node = definition(program)
    bounds = [b for loop in _outermost(node) for b in _bounds(loop.iter)] if node is not None else []
    if node is None or not bounds:
        return dict.fromkeys(names & {"steps"})
    inside = {id(n) for bound in bounds for n in ast.walk(bound)}
    first, uses = defined_at(program), [n for part in node.body for n in ast.walk(part) if isinstance(n, ast.Name)]
    found: dict[str, At | None] = {}
    for name in names & {n.id for n in uses if id(n) in inside}:
        others = [n.lineno for n in uses if n.id == name and id(n) not in inside]
        found[name] = At(first.file, first.line + others[0] - node.lineno) if others else None
    return found


def steps_of_only_loop(program: Callable[..., Any]) -> str | None:
    """The parameter that is the number of steps of a program's only loop over steps; None where there is no such.

    ``"steps"`` for a program with ``for step, batch in flow.steps(source, steps)`` and no other call of ``steps``, that
    gives the name no other value.
    """
    node = definition(program)
    if node is None:
        return None
    nodes = list(ast.walk(node))
    asked = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "steps"]
    bounds = [bound for loop in _outermost(node) if _is_over_steps(loop.iter) for bound in _bounds(loop.iter)]
    if len(asked) != 1 or len(bounds) != 1 or not isinstance(bounds[0], ast.Name):
        return None
    name = bounds[0].id
    changed = any(isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load) for n in nodes)
    return name if name in inspect.signature(program).parameters and not changed else None


def definition(program: Callable[..., Any]) -> ast.FunctionDef | None:
    """The function as it is written; None where its text is not at hand."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(program)))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((n for n in tree.body if isinstance(n, ast.FunctionDef)), None)


def _outermost(node: ast.AST) -> Iterator[ast.For]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For):
            yield child
        elif not isinstance(child, (ast.While, ast.expr)):
            yield from _outermost(child)


def _bounds(iterated: ast.expr) -> list[ast.expr]:
    """Return the expressions that say how often ``flow.steps(source, n)`` or ``range(n)`` goes round."""
    if not isinstance(iterated, ast.Call):
        return []
    if _is_over_steps(iterated):
        return [*iterated.args[1:], *(k.value for k in iterated.keywords if k.arg == "steps")]
    return iterated.args if isinstance(iterated.func, ast.Name) and iterated.func.id == "range" else []


def _is_over_steps(iterated: ast.expr) -> bool:
    called = iterated.func if isinstance(iterated, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr == "steps"
