"""The names that a traced program sees in place of Python's own, so that ``float(x)`` gives a symbol."""

from __future__ import annotations

import builtins
import math
import types
from collections.abc import Callable
from typing import Any

from .terms import Symbol, TNumber
from .values import BatchValue, ScalarValue


class _Like(type):
    """A class that answers ``isinstance`` and attributes like the built-in it stands for."""

    real: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)


class _Float(metaclass=_Like):
    real = float

    def __new__(cls, x: Any = 0.0) -> Any:
        return x.session.read(x, float) if isinstance(x, ScalarValue) else float(x)


class _Int(metaclass=_Like):
    real = int

    def __new__(cls, x: Any = 0, *base: Any) -> Any:
        return x.session.read(x, int) if isinstance(x, ScalarValue) else int(x, *base)


def _len(x: Any) -> Any:
    return x.session.read(x.count(), int) if isinstance(x, BatchValue) else len(x)


def _print(*args: Any, **kwargs: Any) -> None:
    """A trace prints nothing."""


class _Math(types.ModuleType):
    """The module ``math``, whose functions give a symbol for a symbol: ``math.exp(kl)`` still depends on ``kl``."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(math, name)
        return _of_symbols(found) if callable(found) else found


def _of_symbols(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        numbers = [x.session.read(x, float) if isinstance(x, ScalarValue) else x for x in args]
        symbols = [x for x in numbers if isinstance(x, Symbol)]
        if not symbols:
            return fn(*args)
        refs: list[TNumber] = [x.ref for x in symbols]
        text, key = (
            f"{fn.__name__}({', '.join(getattr(x.ref, said) if isinstance(x, Symbol) else repr(x) for x in numbers)})"
            for said in ("text", "key")
        )
        labels = {ref.label for ref in refs if ref.calls}
        label = labels.pop() if len(labels) == 1 else "value"
        calls = frozenset[int]().union(*(ref.calls for ref in refs))
        return Symbol(symbols[0].session, TNumber(calls, text, key, label))

    return call


_MATH = _Math("math")
_SHIMS = {**vars(builtins), "float": _Float, "int": _Int, "len": _len, "print": _print}


def shimmed(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program with these names, and with a copy of its module's globals, so that a trace leaves no marks there.

    Functions of the same module that it calls see them too.
    """
    home = program.__globals__
    scope: dict[str, Any] = {**home, "__builtins__": _SHIMS}
    for name, value in home.items():
        if isinstance(value, types.FunctionType) and value.__globals__ is home:
            scope[name] = _rebuilt(value, scope)
        elif value is math:
            scope[name] = _MATH
        elif isinstance(value, types.BuiltinFunctionType) and value.__module__ == "math":
            scope[name] = _of_symbols(value)
    return _rebuilt(program, scope)


def _rebuilt(fn: Any, scope: dict[str, Any]) -> Any:
    made = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__dict__.update(fn.__dict__)
    return made
