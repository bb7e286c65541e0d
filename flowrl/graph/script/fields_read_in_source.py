"""Which fields a user's function reads by name, from its source text: what it reads undeclared is found before it runs.

``x["rewards"]`` of the first parameter counts, where the name is a constant, is not asked for with ``in`` or ``get``,
and the parameter is not given another value. A function whose source is not there reads nothing that is known.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from typing import Any

from ...errors import At


def fields_read(fn: Callable[..., Any], parameter: str, *, inside: tuple[str, ...] = ()) -> dict[str, At]:
    """The names that ``fn`` looks up in that parameter, or in its attributes ``inside``, each with its first line."""
    try:
        lines, first = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return {}
    nodes = list(ast.walk(tree))
    if any(isinstance(n, ast.Name) and n.id == parameter and isinstance(n.ctx, ast.Store) for n in nodes):
        return {}
    asked = {
        left.value
        for n in nodes
        if isinstance(n, ast.Compare) and any(isinstance(o, (ast.In, ast.NotIn)) for o in n.ops)
        for left in [n.left]
        if isinstance(left, ast.Constant)
    }
    read: dict[str, At] = {}
    for node in nodes:
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)):
            continue
        name, of = node.slice.value, node.value
        if isinstance(of, ast.Attribute) and of.attr in inside:
            of = of.value
        if isinstance(name, str) and name not in asked and isinstance(of, ast.Name) and of.id == parameter:
            line = first + node.lineno - 1
            file = fn.__code__.co_filename
            read.setdefault(name, At(file, line, linecache.getline(file, line).strip()))
    return read
