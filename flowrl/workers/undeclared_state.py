"""What the ops of a worker class change, as far as their source shows, held against what they declare."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import textwrap
from collections.abc import Iterator
from typing import Any, cast

from ..errors import At, FlowError, WorkerError, near
from ..graph.ops.op import Op
from ..graph.script.site import defined_at
from ..graph.tracing.trace_records import Lint
from .base import Worker
from .model_worker import ModelWorker
from .packed_state import undeclared

#: Methods of containers and tensors that change them.
_CHANGING = re.compile(
    r"append(left)?|extend(left)?|insert|pop(left|item)?|remove|discard|clear|add|update|setdefault|sort|reverse|rotate"
    r"|subtract|\w+_update|(fill|zero|copy|add|sub|mul|div|clamp|lerp)_"
)


def state_findings(cls: type[Worker]) -> tuple[list[FlowError], list[Lint]]:
    """Errors of ops that change what the class keeps and do not say so, or say what it does not keep; lints of those
    that change what would be lost with their process."""
    errors: list[FlowError] = []
    lints: list[Lint] = []
    if cls.__module__.partition(".")[0] == "flowrl":
        return errors, lints
    for op in ops_of(cls):
        errors += _wrongly_declared(cls, op)
        for name, at in _changes(op):
            if op.updates:
                continue
            if name in cls.keeps:
                errors.append(undeclared(f"{cls.__name__}.{op.name}", name, cls.__name__, at))
            elif not name.startswith("_") and not issubclass(cls, ModelWorker):
                said = f"{cls.__name__}.{op.name} changes '{name}', which is not kept"
                what = f'{said}: it is lost when a run is resumed. keeps = ("{name}",) and updates="{name}" keep it.'
                lints.append(Lint("state", what, at))
    return errors, lints


def ops_of(cls: type[Worker]) -> list[Op]:
    """The ops of a class that the user has written."""
    found = (inspect.getattr_static(cls, name) for name in dir(cls))
    return [op for op in found if isinstance(op, Op) and not op.fn.__module__.startswith("flowrl.")]


def _wrongly_declared(cls: type[Worker], op: Op) -> Iterator[WorkerError]:
    if not op.updates or cls.state is not Worker.state:
        return
    title, at = f"{cls.__name__}.{op.name}", defined_at(op.fn)
    if op.external:
        yield WorkerError(
            f"{title} touches the world and updates '{op.updates}': a resumed run takes its answer from the journal, "
            "and the state stays as it was.",
            at=at,
            fix="Update it in another op, which reads what this one adds.",
        )
    named = [name.strip() for name in op.updates.split(",")]
    lost = [name for name in named if name not in cls.keeps and not (name == "weights" and cls.keeps)]
    if lost:
        meant = near(lost[0], cls.keeps)
        fix = f'Write updates="{meant}".' if meant else f'Write keeps = ("{lost[0]}",) in the class.'
        what = f"{title} updates '{lost[0]}', which {cls.__name__} does not keep."
        yield WorkerError(what, at=at, have=cls.keeps, fix=fix)


def _changes(op: Op) -> list[tuple[str, At]]:
    """The attributes of ``self`` that an op's own lines set or change, each with its first line."""
    try:
        lines, first = inspect.getsourcelines(op.fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):  # without its source
        return []
    file = op.fn.__code__.co_filename
    found: dict[str, At] = {}
    for node in ast.walk(tree):
        for name in _changed_by(node):
            line = first + cast("Any", node).lineno - 1
            found.setdefault(name, At(file, line, linecache.getline(file, line).strip()))
    return list(found.items())


def _changed_by(node: ast.AST) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _CHANGING.fullmatch(node.func.attr):
        targets = [node.func.value] if not _is_self(node.func.value) else []
    for target in targets:
        for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
            if (name := _attribute(part)) is not None:
                yield name


def _attribute(node: ast.expr) -> str | None:
    """The attribute of self that an expression is, or is a part of: ``self.seen[key].total`` is ``seen``."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            return node.attr
        node = node.value
    return None


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
