"""Calls of flowrl's functions that a page writes in a line of text: `` `rl.ppo_clip(kl=0.1)` ``."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import flowrl as fl
from flowrl import rl

HERE = {"fl": fl, "rl": rl}


def wrong_arguments(text: str) -> list[str]:
    """The calls of ``fl`` and ``rl`` between backticks that name a function or an argument which is not there."""
    return [call for code in re.findall(r"`([^`\n]+)`", text) for call in _wrong(code)]


def _wrong(code: str) -> list[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _named(node.func)]
    return [ast.unparse(call) for call in calls if not _fits(call)]


def _named(node: ast.expr) -> list[str]:
    """The parts of ``fl.data.rows``; empty for what is no name below ``fl`` or ``rl``."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) and node.id in HERE and parts else []


def _fits(call: ast.Call) -> bool:
    name, *parts = _named(call.func)
    found: Any = HERE[name]
    for part in parts:
        if (found := getattr(found, part, None)) is None:
            return False
    parameters = inspect.signature(found).parameters
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    return given <= set(parameters) or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
