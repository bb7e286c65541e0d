"""The user's code that a program can reach: its functions, classes and constants, each by a digest of what it says.

Comments, docstrings and white space say nothing; what no program of the run names is left out.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ...errors import At
from .site import is_typed, is_users
from .syntax import Text, bare, begins, chains, is_called, is_literal, names, written

_SHORT = 60  # characters of a value that is kept as it is written
_PLAIN = (type(None), bool, int, float, str)
_MISSING = object()


@dataclass(frozen=True)
class Code:
    """What a piece of code says: ``Code("9f2c41d07a3e", At("tasks/arithmetic.py", 31))``; a short value as a text."""

    says: str
    at: At


def reached(roots: Iterable[Any], *, programs: Iterable[Callable[..., Any]] = ()) -> dict[str, Code]:
    """The user's code behind ``roots`` (functions, classes, objects that hold some), by name and file.

    ``programs`` are roots too, whose defaults and decorators do not count: they are parameters of a run.
    """
    walk = _Walk()
    for program in programs:
        walk.programs.add(program)
        walk.waiting.append(program)
    walk.waiting.extend(roots)
    while walk.waiting:
        walk.look_at(walk.waiting.popleft())
    return walk.found


class _Walk:
    """From object to object by the names in their code; a tuple waits for a name at module level: (module, name)."""

    def __init__(self) -> None:
        self.found: dict[str, Code] = {}
        self.programs: set[Any] = set()
        self.waiting: deque[Any] = deque()
        self._seen: dict[Any, Any] = {}  # kept, so that no other object gets its id
        self._texts: dict[str, Text] = {}

    def look_at(self, thing: Any) -> None:
        key = cast("Any", thing) if isinstance(thing, tuple) else id(thing)
        if key in self._seen:
            return
        self._seen[key] = thing
        if isinstance(thing, tuple):
            self._name(*cast("tuple[str, str]", thing))
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, type):
            self._class(thing)
        else:
            self.waiting.extend(_inside(thing))

    def _function(self, fn: types.FunctionType) -> None:
        if "__wrapped__" in fn.__dict__:
            self.waiting.append(fn.__dict__["__wrapped__"])
        if not is_users(fn):
            return
        text, line = self._text(fn.__code__.co_filename), fn.__code__.co_firstlineno
        nodes = [n for n in text.functions if begins(n) == line and is_called(n, fn.__name__)]
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False)
        closed = {name: _content(cell) for name, cell in cells}
        for value in (*closed.values(), *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self.waiting.extend(_inside(value))
        if nodes:
            bodies = [bare(n) if fn in self.programs else n for n in nodes]
            self._keep(fn.__qualname__.replace("<locals>.", ""), text, bodies)
            self._follow(bodies, fn.__globals__, closed)
        self._module(fn.__module__, text)

    def _class(self, cls: type) -> None:
        if not is_users(cls):
            return
        module = sys.modules.get(cls.__module__)
        file = getattr(module, "__file__", None) or _file_of(cls)
        if file is None:
            return
        text = self._text(file)
        nodes = [n for n in text.classes if n.name == cls.__name__]
        if nodes:
            self._keep(cls.__qualname__.replace("<locals>.", ""), text, nodes)
            self._follow(nodes, vars(module) if module is not None else {}, {})
        self.waiting.extend(cls.__bases__)
        self._module(cls.__module__, text)

    def _module(self, name: str, text: Text) -> None:
        """Keep what a module that is reached does as it is loaded, such as a call that sets something.

        What else a cell of a notebook does counts for nothing: cells are run in any order, and again.
        """
        if is_typed(text.file):
            return
        scope = vars(sys.modules[name]) if name in sys.modules else {}
        loose = [s for s in text.loose if not any(_is_flow(scope.get(n)) for n in names(s))]
        if loose and ("loose", text.file) not in self._seen:
            self._seen["loose", text.file] = text
            self._keep("what is called", text, loose)
            self._follow(loose, scope, {})

    def _name(self, module: str, name: str) -> None:
        """Look at a name at module level that holds no function and no class."""
        scope = vars(sys.modules[module])
        file = getattr(sys.modules[module], "__file__", None)
        if file is None:
            return
        text = self._text(file)
        statements = text.bound.get(name, [])
        value = scope.get(name)
        if not statements or _is_flow(value):
            return
        came = [s for s in statements if isinstance(s, ast.ImportFrom)]
        if came and len(came) == len(statements):
            for origin, original in _origins(came, name, scope):
                self.waiting.append((origin, original))
            return
        lambdas = any(isinstance(n, ast.Lambda) for s in statements for n in ast.walk(s))
        if lambdas or not getattr(cast("Any", value), "is_handle", False):  # a worker's arguments are looked at apart
            self._keep(name, text, statements, _value(statements, value))
        self._follow(statements, scope, {})
        self._module(module, text)

    def _follow(self, nodes: Iterable[ast.AST], scope: Mapping[str, Any], closed: Mapping[str, Any]) -> None:
        """Look at what these nodes name later."""
        module = scope.get("__name__")
        for chain in (c for node in nodes for c in chains(node)):
            first, *rest = chain
            if first in closed:
                self.waiting.extend(_inside(closed[first]))
                continue
            value, owner, name = scope.get(first, _MISSING), module, first
            while isinstance(value, types.ModuleType) and is_users(value) and rest:
                owner, name, *rest = value.__name__, *rest
                value = vars(value).get(name, _MISSING)
            if value is _MISSING or (isinstance(value, types.ModuleType) and not is_users(value)):
                continue
            if isinstance(value, types.ModuleType):  # handed around: anything of it
                self.waiting.extend((value.__name__, n) for n in self._text(value.__file__ or "").bound)
            self.waiting.extend(_inside(value))
            if not isinstance(value, (types.FunctionType, type)) and owner in sys.modules:
                self.waiting.append((owner, name))

    def _keep(self, name: str, text: Text, nodes: list[Any], value: str | None = None) -> None:
        where = "a cell" if is_typed(text.file) else os.path.basename(text.file)  # a cell's file is another each time
        key = f"{name} in {where}"
        self.found[key] = Code(value or digest("\n".join(map(written, nodes))), text.at(nodes[0]))

    def _text(self, file: str) -> Text:
        if file not in self._texts:
            self._texts[file] = Text(file)
        return self._texts[file]


def digest(text: str) -> str:
    """A short digest of a text."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def plain_text(value: Any) -> str | None:
    """A plain value of any nesting as a text, or a digest of a long one; None for what holds anything else."""
    if not _is_plain(value):
        return None
    text = json.dumps(_jsonable(value), sort_keys=True)
    return text if len(text) <= _SHORT else digest(text)


def _value(statements: list[ast.stmt], value: Any) -> str | None:
    """Return what a variable holds, where it is plain: as it is written, or as it was read from somewhere."""
    if len(statements) != 1 or not isinstance(statements[0], (ast.Assign, ast.AnnAssign)):
        return None
    written = statements[0].value
    if written is None or is_literal(written):
        text = ast.unparse(written) if written is not None else ""
        return text if len(text) <= _SHORT else None
    return plain_text(value)


def _is_plain(value: Any) -> bool:
    kind = cast("type[Any]", type(value))
    if kind in _PLAIN:
        return True
    if kind in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return kind is dict and all(_is_plain(k) and _is_plain(v) for k, v in value.items())


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, cast("set[Any]", value)))
    return [_jsonable(v) for v in cast("list[Any]", value)] if isinstance(value, (list, tuple)) else value


def _origins(statements: Iterable[ast.ImportFrom], name: str, scope: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The user's modules that a name was imported from, and what it is called there."""
    for statement in statements:
        inside = scope.get("__package__") or ""
        parts = inside.split(".")[: len(inside.split(".")) - statement.level + 1] if statement.level else []
        module = ".".join([*parts, *([statement.module] if statement.module else [])])
        if module in sys.modules and is_users(sys.modules[module]):
            yield from ((module, a.name) for a in statement.names if (a.asname or a.name) == name)


def _inside(value: Any, depth: int = 4) -> Iterator[Any]:
    """The functions and classes in a value: of containers, partials, methods, and the class of a user's object."""
    kind = cast("type[Any]", type(value))
    held: Iterable[Any] = ()
    if isinstance(value, (types.FunctionType, type)):
        yield value
    elif isinstance(value, partial):
        held = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        held = (value.__func__, type(value.__self__))
    elif kind in (list, tuple, set, frozenset):
        held = value
    elif kind is dict:
        held = cast("dict[Any, Any]", value).values()
    elif hasattr(kind, "__wrapped__") or (hasattr(value, "__wrapped__") and callable(value)):
        held = (getattr(value, "__wrapped__", None),)
    elif not isinstance(value, types.ModuleType) and is_users(kind):
        held = (kind, *getattr(value, "__dict__", {}).values())
    for item in held if depth else ():
        if type(item) not in _PLAIN:
            yield from _inside(item, depth - 1)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _is_flow(value: Any) -> bool:
    kind = cast("type[Any]", type(value))
    return hasattr(kind, "use_model") and hasattr(kind, "find_program")


def _file_of(cls: type) -> str | None:
    """The file of a class whose module is unknown: that of one of its methods."""
    codes = (getattr(v, "__code__", None) for v in vars(cls).values())
    return next((c.co_filename for c in codes if c is not None), None)
