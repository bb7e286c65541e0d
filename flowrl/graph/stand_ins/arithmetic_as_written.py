"""How arithmetic on values is written, in Python's own notation: as in the program, with the parentheses it needs."""

from __future__ import annotations

import ast
from collections.abc import Sequence

SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip
_SIGNS = {"neg": "-", "invert": "~"}

#: How tightly operators bind (Python's reference, section 6.17); names, numbers and calls are _WHOLE.
_COMPARE, _OR, _AND, _SUM, _PRODUCT, _SIGN, _POWER, _WHOLE = range(1, 9)
_BINDS: dict[type[ast.AST], int] = {
    ast.Compare: _COMPARE,
    ast.BitOr: _OR,
    ast.BitAnd: _AND,
    **dict.fromkeys((ast.Add, ast.Sub), _SUM),
    **dict.fromkeys((ast.Mult, ast.Div, ast.FloorDiv, ast.Mod), _PRODUCT),
    ast.UnaryOp: _SIGN,
    ast.Pow: _POWER,
}
_STRENGTH = {
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), _COMPARE),
    "or": _OR,
    "and": _AND,
    **dict.fromkeys(("add", "sub"), _SUM),
    **dict.fromkeys(("mul", "truediv", "floordiv", "mod"), _PRODUCT),
    "pow": _POWER,
}


def written(name: str, parts: Sequence[str]) -> str:
    """An operation on operands that are written already: ``written("mul", ("a + b", "2"))`` is ``(a + b) * 2``."""
    if name in _STRENGTH and len(parts) == 2:
        left, right = parts
        mine = _STRENGTH[name]
        first = _held(left, binds(left) < mine or (binds(left) == mine and name in _RIGHT))
        second = _held(right, binds(right) <= mine and not (name == "pow" and binds(right) == _SIGN))
        return f"{first} {SYMBOLS[name]} {second}"
    if name in _SIGNS and len(parts) == 1:
        return _SIGNS[name] + _held(parts[0], binds(parts[0]) < _SIGN)
    return f"{name}({', '.join(parts)})"


def method(of: str, name: str) -> str:
    """A method called on an operand: ``method("a - b", "mean")`` is ``(a - b).mean()``."""
    return f"{_held(of, binds(of) < _WHOLE)}.{name}()"


def binds(text: str) -> int:
    """How tightly the outermost operator of an expression binds; what is no expression counts as a name."""
    tree = _tree(text)
    return _BINDS.get(type(tree.op if isinstance(tree, ast.BinOp) else tree), _WHOLE)


_RIGHT = ("pow", "lt", "le", "gt", "ge", "eq", "ne")  # a ** b ** c is a ** (b ** c); comparisons would chain


def _tree(text: str) -> ast.AST:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return ast.Name(text)


def _held(text: str, hold: bool) -> str:
    return f"({text})" if hold else text
