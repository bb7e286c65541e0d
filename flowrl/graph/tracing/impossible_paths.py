"""Whether any run takes a path of a trace: none does where its conditions on one number hold for no number.

The trace takes every outcome of a condition, also ``step >= 20`` where it has taken ``not (step >= 10)``. Python's own
errors on such a path are remarks; so are those that flowrl finds there. What cannot be computed counts as possible.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ..stand_ins.values import PYTHON
from .follow_branches import Decision, Path
from .trace_records import Rows

MOST_STEPS = 50_000  # that are tried
_COMPARED = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
_OF_STEPS = _COMPARED | {"add", "sub", "mul", "truediv", "floordiv", "mod", "neg"}
_NAMES = re.compile(r"\b(step\d+|c\d+)((?:\.\w+)*)")
_STEP = re.compile(r"step\d+__(\d+)")


class Condition(NamedTuple):
    """A condition on one number ``x``: ``Condition("step1__2", tree of "ge(x, 10)", a decision)``.

    ``of`` tells these numbers apart. A ``whole`` one is at ``least`` so large, and at ``most``.
    """

    of: Hashable
    tree: ast.expr
    decision: Decision
    whole: bool = False
    least: int = 0
    most: int | None = None

    def holds(self, x: float) -> bool:
        """Whether it comes out as decided for this number."""
        return bool(_computed(self.tree, x)) == self.decision.outcome


def contradiction(path: Path, counted: Mapping[int, Rows], *, begins: bool = False) -> list[Decision]:
    """The decisions of a path on one number that hold for no number, else none. ``counted``: the rows that calls count.

    Only decisions count whose other outcome is tried too, so that other paths stand for what a run does instead. If it
    ``begins``, the first iteration is step 0, else any step: those before it may have left what it has begun with.
    """
    asked = (d for d, free in zip(path.taken, path.free, strict=True) if free and d.exit is None)
    several: dict[Hashable, list[Condition]] = {}
    for condition in _conditions(asked, counted, begins):
        several.setdefault(condition.of, []).append(condition)
    for conditions in several.values():
        try:
            possible = any(all(c.holds(x) for c in conditions) for x in _numbers(conditions))
        except (ArithmeticError, ValueError):
            continue
        if not possible:
            return [condition.decision for condition in conditions]
    return []


def _conditions(decisions: Iterable[Decision], counted: Mapping[int, Rows], begins: bool) -> Iterator[Condition]:
    """The conditions that are computed of one step, or hold a value against a constant."""
    for decision in decisions:
        try:
            tree = ast.parse(_NAMES.sub(lambda found: found[0].replace(".", "__"), decision.key), mode="eval").body
        except (SyntaxError, ValueError):
            continue
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - PYTHON.keys()
        name = names.pop() if len(names) == 1 else ""
        if step := _STEP.fullmatch(name):
            if all(map(_is_of_steps, ast.walk(tree))):
                least = 0 if step[1] == "1" else 1
                most = 0 if begins and least == 0 else None
                yield Condition(name, _with_x(tree, name), decision, True, least, most)
        elif (value := _looked_at(tree)) is not None:
            written = ast.unparse(value)
            index = re.fullmatch(r"c(\d+)", written)
            rows = counted.get(int(index[1])) if index else None
            of: Hashable = written if rows is None else ("count", rows)
            yield Condition(of, _with_x(tree, written), decision, rows is not None)


def _is_of_steps(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _OF_STEPS or _STEP.fullmatch(node.id) is not None
    return isinstance(node, (ast.Call, ast.Load, ast.USub)) or _constant(node) is not None


def _looked_at(tree: ast.expr) -> ast.expr | None:
    """Return what a condition holds against a constant, or what it is."""
    if not isinstance(tree, ast.Call):
        return tree if isinstance(tree, ast.Name) else None
    if not isinstance(tree.func, ast.Name) or tree.func.id not in _COMPARED or len(tree.args) != 2:
        return None
    values = [arg for arg in tree.args if _constant(arg) is None]
    return values[0] if len(values) == 1 and isinstance(values[0], (ast.Name, ast.Call)) else None


def _with_x(tree: ast.expr, written: str) -> ast.expr:
    """An expression with ``x`` in the place of what is written so."""
    if ast.unparse(tree) == written:
        return ast.Name("x")
    if isinstance(tree, ast.Call):
        return ast.Call(tree.func, [_with_x(arg, written) for arg in tree.args], [])
    return tree


def _constant(node: ast.AST) -> int | float | None:
    """Return the finite number that is written there."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _constant(node.operand)
        return None if number is None else -number
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _constants(conditions: Iterable[Condition]) -> list[int | float]:
    nodes = (node for condition in conditions for node in ast.walk(condition.tree))
    return sorted({c for node in nodes if (c := _constant(node)) is not None})


def _numbers(conditions: list[Condition]) -> Iterable[int | float]:
    """All numbers that conditions may tell apart. Raises ValueError where these are too many."""
    one = conditions[0]
    simple = [c for c in conditions if isinstance(_looked_at(c.tree), ast.Name)]
    constants = [0, *_constants(simple)]
    if not one.whole:
        ends = [min(constants) - 1, max(constants) + 1]
        near = sorted({*constants, *ends})
        return [*near, *((a + b) / 2 for a, b in pairwise(near))]
    if one.most is not None:
        return range(one.least, one.most + 1)
    # What is computed of a step repeats itself after as many steps as its numbers multiplied.
    others = _constants(c for c in conditions if c not in simple)
    repeats = math.prod(1 + math.ceil(max(abs(c), 1 / abs(c))) for c in others if c)
    bound = math.ceil(max(constants)) + 2 * repeats + 2
    if bound > MOST_STEPS:
        raise ValueError(f"{bound} steps")
    return range(one.least, bound)


def _computed(tree: ast.expr, x: float) -> Any:
    """An expression for a number ``x``."""
    if isinstance(tree, ast.Name):
        return x
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        return PYTHON[tree.func.id](*(_computed(arg, x) for arg in tree.args))
    return _constant(tree)
