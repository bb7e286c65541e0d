"""What a source of data is called in a graph: by the variable that holds it, else by the expression that makes it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any, cast

from .site import own_stack

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
Key = tuple[object, ...]


def named(source: Any, form: str, program: object) -> tuple[Key, str]:
    """Identity and name of a source that the program, whose code is ``program``, gives to ``flow.<form>``.

    Both are the same on every path of the program: the identity is the variable that holds the source, of the module,
    of the program or of a function that it calls, in this order; or the place of the expression that makes it.
    """
    stack = own_stack(program)
    for frame in stack[-1:]:
        if name := _variable(source, frame.f_globals):
            return ("variable", frame.f_code.co_filename, name), name
    for frame in reversed(stack):  # the program's own variables first: a function calls its parameter `source`
        if name := _variable(source, frame.f_locals):
            return ("variable", frame.f_code.co_filename, frame.f_code.co_name, name), name
    if not stack:
        return ("unknown", form), "prompts"
    expression = _expression(stack[0], form)
    return ("expression", stack[0].f_code.co_filename, stack[0].f_lineno, form, expression), expression or "prompts"


def described(source: Any) -> str:
    """Return what a source says of itself, in a line: ``train.jsonl, 16 rows a step``."""
    text = repr(source)
    if _ADDRESS.search(text):
        return type(source).__name__
    return text.removeprefix("<").removesuffix(">")


def _variable(source: Any, scope: Mapping[str, Any]) -> str:
    """The variable that holds a source, or a place in the list or the dict that does: ``LEVELS[1]``."""
    names = [name for name in scope if not name.startswith("_")]
    plain = (name for name in names if scope[name] is source)
    inside = (f"{name}[{key!r}]" for name in names for key, item in _items(scope[name]) if item is source)
    return next(plain, "") or next(inside, "")


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if type(value) in (list, tuple):
        yield from enumerate(cast("Sequence[Any]", value))
    elif type(value) is dict:
        yield from cast("dict[Any, Any]", value).items()


def _expression(frame: FrameType, form: str) -> str:
    """The last word of the first argument of ``flow.<form>(...)``: ``prompts`` of ``tasks.prompts(8)``."""
    for call in _calls(frame.f_code.co_filename):
        if call.lineno <= frame.f_lineno <= (call.end_lineno or call.lineno) and _last(call.func) == form:
            given = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "source")]
            if given:
                return _last(given[0])
    return ""


def _last(tree: ast.expr) -> str:
    if isinstance(tree, ast.Call):
        return _last(tree.func)
    if isinstance(tree, ast.Subscript):
        return _last(tree.value)
    return tree.attr if isinstance(tree, ast.Attribute) else tree.id if isinstance(tree, ast.Name) else ""


@lru_cache(maxsize=32)
def _calls(file: str) -> tuple[ast.Call, ...]:
    """The calls in a script, in the order of their lines; none where its text is not at hand."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return tuple(sorted(calls, key=lambda call: (call.lineno, call.col_offset)))
