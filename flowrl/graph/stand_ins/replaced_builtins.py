"""The names that a traced program sees in place of Python's own, so that ``float(x)`` gives a symbol."""

from __future__ import annotations

import math
import sys
import threading
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from ..script.site import is_users
from . import current_session as sessions
from .scalars import ScalarValue
from .symbols import Symbol, symbols_of
from .values import BatchValue


class _Like(type):
    """The class of a subclass that passes for the built-in that it stands for, also where symbols are asked about.

    It is equal to that one and has its hash, and NumPy takes it for the same dtype; ``is`` tells them apart.
    """

    stands_for: type

    def __instancecheck__(cls, instance: object) -> bool:
        if type(instance) is Symbol:
            return instance.stands_for is cls.stands_for
        return isinstance(instance, cls.stands_for)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.stands_for)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.stands_for

    def __hash__(cls) -> int:
        return hash(cls.stands_for)

    @property
    def dtype(cls) -> Any:
        """What NumPy asks of a class for its dtype."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            raise AttributeError("dtype")
        return numpy.dtype(cls.stands_for)


class _Float(float, metaclass=_Like):
    stands_for = float

    def __new__(cls, x: Any = 0.0, /) -> Any:
        return x.session.read(x, float) if isinstance(x, ScalarValue) else float(x)


class _Int(int, metaclass=_Like):
    stands_for = int

    def __new__(cls, x: Any = 0, /, *args: Any, **kwargs: Any) -> Any:
        return x.session.read(x, int) if isinstance(x, ScalarValue) else int(x, *args, **kwargs)


def _len(x: Any) -> Any:
    return x.session.read(x.count(), int) if isinstance(x, BatchValue) else len(x)


def _print(*args: Any, **kwargs: Any) -> None:
    """A trace prints nothing; other threads do."""
    if sessions.current() is None:
        print(*args, **kwargs)  # noqa: T201  it is theirs


class _Math(types.ModuleType):
    """The module ``math``, whose functions give a symbol for a symbol: ``math.exp(kl)`` still depends on ``kl``."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(math, name)
        return symbols_of(found) if callable(found) else found


_MATH = _Math("math")
_SHIMS: dict[str, Any] = {"float": _Float, "int": _Int, "len": _len, "print": _print}
_ABSENT = object()
_LOCK = threading.RLock()


@contextmanager
def shims(program: Callable[..., Any]) -> Generator[None]:
    """Inside the block the user's modules that a program leads to see these names. One thread at a time.

    They stand in the modules themselves, so that methods and closures see them too. A name of the module's own stays.
    """
    with _LOCK:
        back: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for home in _homes(program):
                for name, shim in {**{n: s for n, s in _SHIMS.items() if n not in home}, **_of_math(home)}.items():
                    back.append((home, name, home.get(name, _ABSENT)))
                    home[name] = shim
            yield
        finally:
            for home, name, was in reversed(back):
                if was is _ABSENT:
                    home.pop(name, None)
                else:
                    home[name] = was


def _of_math(home: dict[str, Any]) -> dict[str, Any]:
    """Return what a module has of ``math``: itself, and its functions under names of their own."""
    shims_of: dict[str, Any] = {}
    for name, value in home.items():
        if value is math:
            shims_of[name] = _MATH
        elif isinstance(value, types.BuiltinFunctionType) and value.__module__ == "math":
            shims_of[name] = symbols_of(value)
    return shims_of


def _homes(program: Callable[..., Any]) -> list[dict[str, Any]]:
    """The globals of a program, and of the user's modules whose functions, classes and objects are found from there."""
    homes = [program.__globals__]
    seen = {id(homes[0])}
    for home in homes:
        for value in list(home.values()):
            module = _module(value)
            if module is None or id(vars(module)) in seen:
                continue
            seen.add(id(vars(module)))
            if is_users(module):
                homes.append(vars(module))
    return homes


def _module(value: Any) -> types.ModuleType | None:
    """A module, that of a function or a class, or that of the class of an object."""
    if isinstance(value, types.ModuleType):
        return value
    of: Any = value if isinstance(value, (types.FunctionType, type)) else type(value)
    return sys.modules.get(of.__module__) if isinstance(of.__module__, str) else None
