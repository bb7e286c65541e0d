"""Whether any run takes a path of a trace: none does where its conditions on one number hold for no number.

The trace takes every outcome of a condition, also ``step >= 20`` where it has taken ``not (step >= 10)``. Python's own
errors on such a path are remarks; so are those that flowrl finds there. What cannot be computed counts as possible.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from ..stand_ins.values import PYTHON
from .follow_branches import Decision, Path
from .trace_records import Rows

MOST_STEPS = 50_000  # that are tried
_COMPARED = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
_OF_STEPS = _COMPARED | {"add", "sub", "mul", "truediv", "floordiv", "mod", "neg"}
_NAMES = re.compile(r"\b(step\d+|c\d+)((?:\.\w+)*)")
_STEP = re.compile(r"step(\d+)__(\d+)")


class Pace(NamedTuple):
    """How a number goes with ``x = 0, 1, 2, ...``: ``x // 10 + 3`` as ``Pace(Fraction(1, 10), Fraction(4), 10)``.

    It is ``rises * x`` and something that is at most ``within``, and the same again after ``every`` of them; both from
    ``since`` on. If ``exact`` it is computed of whole numbers alone.
    """

    rises: Fraction = Fraction(1)
    within: Fraction = Fraction(0)
    every: int = 1
    since: int = 0
    exact: bool = True


class Condition(NamedTuple):
    """A condition on one number ``x``: ``Condition("step1__2", tree of "ge(x, 10)", a decision)``.

    ``of`` tells these numbers apart. One with a ``pace`` is whole. It is at ``least`` and at ``most`` so large. A
    ``real`` one may be NaN.
    """

    of: Hashable
    tree: ast.expr
    decision: Decision
    pace: Pace | None = None
    least: int = 0
    most: int | None = None
    real: bool = False

    def holds(self, x: float) -> bool:
        """Whether it comes out as decided for this number."""
        return bool(_computed(self.tree, x)) == self.decision.outcome


def contradiction(path: Path, counted: Mapping[int, Rows], *, begins: int = 0) -> list[Decision]:
    """The decisions of a path on one number that hold for no number, else none. ``counted``: the rows that calls count.

    Only decisions count whose other outcome is tried too, so that other paths stand for what a run does instead. The
    first iteration of the loop that ``begins`` is step 0, that of others any step: those before it may have left what
    it has begun with.
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


def _conditions(decisions: Iterable[Decision], counted: Mapping[int, Rows], begins: int) -> Iterator[Condition]:
    """The conditions that are computed of one step, or hold a value against a constant."""
    for decision in decisions:
        try:
            tree = ast.parse(_NAMES.sub(lambda found: found[0].replace(".", "__"), decision.key), mode="eval").body
        except (SyntaxError, ValueError):
            continue
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - PYTHON.keys()
        name = names.pop() if len(names) == 1 else ""
        if step := _STEP.fullmatch(name):
            if not all(map(_is_of_steps, ast.walk(tree))):
                continue
            of_x, least = _with_x(tree, name), 0 if step[2] == "1" else 1
            pace, most = _pace(of_x), 0 if int(step[1]) == begins and least == 0 else None
            if pace is not None or most is not None:
                yield Condition(name, of_x, decision, pace, least, most)
        elif (value := _looked_at(tree)) is not None:
            written = ast.unparse(value)
            index = re.fullmatch(r"c(\d+)", written)
            rows = counted.get(int(index[1])) if index else None
            of: Hashable = written if rows is None else ("count", rows)
            of_x = _with_x(tree, written)
            real = not _is_whole(value, counted)
            yield Condition(of, of_x, decision, None if rows is None else _pace(of_x), real=real)


def _is_of_steps(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _OF_STEPS or _STEP.fullmatch(node.id) is not None
    return isinstance(node, (ast.Call, ast.Load, ast.USub)) or _constant(node) is not None


def _is_whole(value: ast.expr, counted: Mapping[int, Rows]) -> bool:
    """Whether a value is an ``int(...)``, an outcome, or computed of steps and numbers of rows without a division."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        name, of_whole = value.func.id, all(_is_whole(arg, counted) for arg in value.args)
        return name == "int" or name in _COMPARED or (name in _OF_STEPS and name != "truediv" and of_whole)
    if isinstance(value, ast.Name):
        index = re.fullmatch(r"c(\d+)", value.id)
        return _STEP.fullmatch(value.id) is not None or (index is not None and int(index[1]) in counted)
    return isinstance(_constant(value), int)


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


def _pace(tree: ast.expr) -> Pace | None:
    """How a condition goes with ``x``; None where that is not known, as ``x`` is there twice, or divides."""
    try:
        return _compared(_goes(tree), 0)
    except (ArithmeticError, ValueError):
        return None


def _goes(tree: ast.expr) -> Pace:
    """How a number goes with ``x``. Raises ValueError where that is not known."""
    if isinstance(tree, ast.Name):
        return Pace()
    assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name), "a number is computed of x by calls"
    of_x = [arg for arg in tree.args if _constant(arg) is None]
    if len(of_x) != 1:
        raise ValueError("x is there twice")  # what is computed of both may come near to a limit, or go to and fro
    pace, name = _goes(of_x[0]), tree.func.id
    c = next((c for arg in tree.args if (c := _constant(arg)) is not None), 0)
    if name in _COMPARED:
        return _compared(pace, c)
    if name == "neg" or (name == "sub" and of_x[0] is not tree.args[0]):
        pace = pace._replace(rises=-pace.rises)
    exact, by = pace.exact and isinstance(c, int), Fraction(c)
    if name in ("add", "sub", "neg"):
        return pace._replace(within=pace.within + abs(by), exact=exact)
    if name == "mul":
        return pace._replace(rises=pace.rises * by, within=pace.within * abs(by), exact=exact)
    if of_x[0] is not tree.args[0]:
        raise ValueError("it is divided by x")
    return _divided(pace, name, c)


def _compared(pace: Pace, c: float) -> Pace:
    """The outcome of a comparison with a constant: one that rises passes it for good. Two more are for rounding."""
    if not pace.rises:
        return pace._replace(within=Fraction(1), exact=True)
    passes = math.floor((pace.within + abs(Fraction(c))) / abs(pace.rises)) + 2
    return Pace(Fraction(0), Fraction(1), 1, max(pace.since, passes))


def _divided(pace: Pace, name: str, c: float) -> Pace:
    """What is divided by a constant. Raises ValueError for what is left over of a number that rises and is rounded."""
    rises, within = pace.rises / Fraction(c), pace.within / abs(Fraction(c))
    if name == "truediv":
        return pace._replace(rises=rises, within=within, exact=False)
    exact = pace.exact and isinstance(c, int)
    if pace.rises and not exact:
        raise ValueError("rounding may add up")
    every = pace.every * (rises * pace.every).denominator  # after so many it is higher by a multiple of c
    if name == "mod":
        return Pace(Fraction(0), abs(Fraction(c)), every, pace.since, exact)
    return Pace(rises, within + 1, every, pace.since, exact)


def _numbers(conditions: list[Condition]) -> Iterable[int | float]:
    """All numbers that conditions may tell apart. Raises ValueError where these are too many."""
    one = conditions[0]
    if one.most is not None:
        return range(one.least, one.most + 1)
    paces = [c.pace for c in conditions if c.pace is not None]
    if not paces:
        nodes = (node for condition in conditions for node in ast.walk(condition.tree))
        constants = {0, *(c for node in nodes if (c := _constant(node)) is not None)}
        near = sorted({*constants, min(constants) - 1, max(constants) + 1})
        return [*near, *((a + b) / 2 for a, b in pairwise(near)), *([math.nan] if one.real else [])]
    bound = max(one.least, *(pace.since for pace in paces)) + math.lcm(*(pace.every for pace in paces))
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
