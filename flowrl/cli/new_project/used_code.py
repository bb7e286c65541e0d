"""The part of a module that others use: its source without the functions, classes and names that nobody asks for."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def names_asked_of(source: str, module: str) -> set[str] | None:
    """Return the names that a source takes from a module that it imports; None where it may take any.

    >>> sorted(names_asked_of("from tasks import sums\\nx = sums.MODEL, sums.prompts(4)", "tasks.sums"))
    ['MODEL', 'prompts']
    """
    tree = ast.parse(source)
    package, _, last = module.rpartition(".")
    asked: set[str] = set()
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == module:
            asked |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            own |= {alias.asname or alias.name for alias in node.names if alias.name == last}
    based = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own:
            asked.add(node.attr)
        elif isinstance(node, ast.Name) and node.id in own and id(node) not in based:
            return None
    return asked


def keep_used(source: str, asked: set[str]) -> str:
    """Return a module's source with what is asked for, what that uses, and no more.

    >>> print(keep_used("import os, re\\nA = 1\\ndef f(): return A\\ndef g(): return os, re\\n", {"f"}), end="")
    A = 1
    def f(): return A
    """
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    makers = {name: node for node in tree.body for name in _made_by(node)}
    wanted, waiting = set[ast.stmt](), [makers[name] for name in asked if name in makers]
    while waiting:
        node = waiting.pop()
        if node not in wanted:
            wanted.add(node)
            waiting += [makers[name] for name in _used_by(node) if name in makers]
    used = {name for node in wanted for name in _used_by(node)}
    kept: list[str] = []
    last = 0
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            statement = _import_of(node, used)
            kept += [*lines[last : node.lineno - 1], statement] if statement else []
        elif node in wanted or not list(_made_by(node)):
            kept += lines[last : node.end_lineno]
        last = node.end_lineno or last
    return "".join(kept)


def _made_by(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module gives a value."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def _used_by(node: ast.stmt) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _import_of(node: ast.Import | ast.ImportFrom, used: set[str]) -> str:
    """Return the statement of an import with the names that are used; nothing where none is."""
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return ast.unparse(node) + "\n"
    node.names = [a for a in node.names if (a.asname or a.name).partition(".")[0] in used]
    return ast.unparse(node) + "\n" if node.names else ""
