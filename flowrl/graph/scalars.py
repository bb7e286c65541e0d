"""Numbers that are not there yet: what a program, Python and NumPy may do with one before and after it is read."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any, Self

from .values import PYTHON, Arithmetic


class Number:
    """How a value is read that stays as it is, whole or not."""

    def __new__(cls, found: Any) -> Any:
        return found


class ScalarValue(Arithmetic):
    """A number that is not there yet. ``float(x)``, ``if x > 0`` wait for it, and so does whatever needs a number."""

    __slots__ = ()

    def __float__(self) -> float:
        return float(self.session.read(self, float))  # in a trace that is a symbol, to be asked in its turn

    def __int__(self) -> int:
        return int(self.session.read(self, int))

    def __index__(self) -> int:
        return operator.index(self.session.read(self, Number))

    def __hash__(self) -> int:
        return hash(self.session.read(self, Number))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.session.read(self, Number), digits)

    def __floor__(self) -> Any:
        return math.floor(self.session.read(self, Number))

    def __ceil__(self) -> Any:
        return math.ceil(self.session.read(self, Number))

    def __trunc__(self) -> Any:
        return math.trunc(self.session.read(self, Number))

    def __pos__(self) -> Self:
        return self

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __format__(self, spec: str) -> str:
        return format(self.session.read(self, Number), spec)

    def __str__(self) -> str:
        return str(self.session.read(self, str))

    def __reduce__(self) -> Any:
        number = self.session.read(self, Number)
        return type(number), (number,)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        del copy  # it is always a new one
        numpy: Any = sys.modules["numpy"]  # which asks
        return numpy.asarray(float(self), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy's functions: ``numpy.float64(2) * x`` is arithmetic as ``2 * x`` is, ``numpy.sqrt(x)`` reads ``x``."""
        from .symbols import symbols_of

        plain = [x.item() if getattr(x, "shape", None) == () else x for x in inputs]
        if method == "__call__" and not kwargs and all(isinstance(x, (int, float, ScalarValue)) for x in plain):
            operation = PYTHON.get(_UFUNCS.get(ufunc.__name__, ""))
            return operation(*plain) if operation else symbols_of(ufunc)(*plain)
        inputs = tuple(float(x) if isinstance(x, ScalarValue) else x for x in inputs)
        return getattr(ufunc, method)(*inputs, **kwargs)


def _read_first(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    """The method for an operator on whole numbers, which are read for it."""

    def operate(self: ScalarValue, other: Any) -> Any:
        mine = self.session.read(self, Number)
        return getattr(operator, name)(*((other, mine) if reflected else (mine, other)))

    return operate


BITS = ("lshift", "rshift", "xor")
for _name in BITS:
    setattr(ScalarValue, f"__{_name}__", _read_first(_name))
    setattr(ScalarValue, f"__r{_name}__", _read_first(_name, reflected=True))


#: NumPy's functions that are operators, by name.
_UFUNCS = {
    **{"add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv"},
    **{"floor_divide": "floordiv", "remainder": "mod"},
    **{"power": "pow", "negative": "neg", "absolute": "abs", "less": "lt", "greater": "gt"},
    **{"less_equal": "le", "greater_equal": "ge", "equal": "eq", "not_equal": "ne"},
}
