"""The text of a file of the user's as a syntax tree: what its statements bind, what a node names, what it says."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from typing import Any, cast

from ...errors import At

_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BINDING = (ast.Import, ast.ImportFrom, ast.Global, ast.Pass)


class Text:
    """The syntax tree of a file, and what its statements bind."""

    def __init__(self, file: str) -> None:
        self.file = file
        try:
            self.tree = ast.parse("".join(linecache.getlines(file)))
        except (SyntaxError, ValueError):
            self.tree = ast.Module([], [])
        everything = list(ast.walk(self.tree))
        self.functions = [n for n in everything if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
        self.classes = [n for n in everything if isinstance(n, ast.ClassDef)]
        self.bound: dict[str, list[ast.stmt]] = {}
        self.loose: list[ast.stmt] = []
        for statement in self.tree.body:
            mine = set(_bound(statement))
            for name in mine:
                self.bound.setdefault(name, []).append(statement)
            if not mine and not isinstance(statement, _BINDING) and not _is_text(statement) and not _is_main(statement):
                self.loose.append(statement)

    def at(self, node: ast.AST) -> At:
        line = getattr(node, "lineno", 0)
        return At(self.file, line, linecache.getline(self.file, line).strip())


def is_literal(node: ast.AST) -> bool:
    """Whether an expression says all of its value, such as ``[]`` and ``set()``, which a program may fill."""
    calls = [n for n in ast.walk(node) if isinstance(n, (ast.Call, ast.comprehension, ast.Attribute, ast.Subscript))]
    return all(isinstance(n, ast.Call) and not n.args and not n.keywords for n in calls)


def written(node: ast.AST) -> str:
    """The code of a node, without docstrings."""
    copied = ast.parse(ast.unparse(node))
    for inside in ast.walk(copied):
        body = getattr(inside, "body", None)
        if isinstance(inside, (*_NAMED, ast.Module)) and isinstance(body, list) and body and _is_text(body[0]):
            del cast("list[Any]", body)[0]
    return ast.unparse(copied)


def bare(node: Any) -> ast.AST:
    """A function without decorators and defaults, which are told as parameters."""
    function = ast.parse(ast.unparse(node)).body[0]
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return node
    function.decorator_list = []
    given = function.args
    given.defaults = [ast.Constant(0) for _ in given.defaults]
    given.kw_defaults = [None if d is None else ast.Constant(0) for d in given.kw_defaults]
    return ast.copy_location(function, node)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement at module level binds."""
    for node in ast.walk(statement) if not isinstance(statement, _NAMED) else ():
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, _NAMED):
            yield node.name
    if isinstance(statement, _NAMED):
        yield statement.name


def chains(node: ast.AST) -> Iterator[list[str]]:
    """The names in a node, each with the attributes that are asked of it: ``["tasks", "arithmetic", "MODEL"]``."""
    inner: set[int] = set()
    for found in ast.walk(node):
        if id(found) in inner:
            continue
        names: list[str] = []
        at = found
        while isinstance(at, ast.Attribute):
            names.append(at.attr)
            at = at.value
            inner.add(id(at))
        if isinstance(at, ast.Name):
            yield [at.id, *reversed(names)]


def names(node: ast.AST) -> Iterator[str]:
    """The names in a node."""
    return (n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def begins(node: ast.AST) -> int:
    """The line of a definition that Python takes for its first: of its decorators, if it has some."""
    decorators = getattr(node, "decorator_list", ())
    return min([getattr(node, "lineno", 0), *(d.lineno for d in decorators)])


def is_called(node: ast.AST, name: str) -> bool:
    """Whether a node defines a function of that name."""
    if isinstance(node, ast.Lambda):
        return name == "<lambda>"
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name


def _is_text(statement: Any) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in names(statement.test)
