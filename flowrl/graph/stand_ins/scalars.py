"""Numbers that are not there yet: what a program, Python and NumPy may do with one before and after it is read."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any, Self

from .values import PYTHON, UFUNCS, Arithmetic


class Number:
    """How a value is read that stays as it is, whole or not."""

    def __new__(cls, found: Any) -> Any:
        return found


class ScalarValue(Arithmetic):
    """A number that is not there yet. ``float(x)``, ``if x > 0`` wait for it, and so does whatever needs a number."""

    __slots__ = ()
    _kind = "number"
    _look = "float(...)"

    def __float__(self) -> float:
        return float(self.session.read(self, float))  # in a trace that is a symbol, to be asked in its turn

    def __int__(self) -> int:
        return int(self.session.read(self, int))

    def __index__(self) -> int:
        return operator.index(self.session.read(self, Number))

    def __hash__(self) -> int:
        return hash(self.session.read(self, Number))

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
        single = method == "__call__" and ufunc.nout == 1 and not kwargs
        if single and all(isinstance(x, (int, float, ScalarValue)) for x in plain):
            operation = PYTHON.get(UFUNCS.get(ufunc.__name__, ""))
            return operation(*plain) if operation else symbols_of(ufunc)(*plain)
        inputs = tuple(float(x) if isinstance(x, ScalarValue) else x for x in inputs)
        return getattr(ufunc, method)(*inputs, **kwargs)


def _read_first(fn: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    """The method for a function of plain numbers, for which the value is read."""

    def method(self: ScalarValue, *others: Any) -> Any:
        mine = self.session.read(self, Number)
        return fn(*others, mine) if reflected else fn(mine, *others)

    return method


BITS = {name: getattr(operator, name) for name in ("lshift", "rshift", "xor")}
ROUNDING = {"round": round, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}
for _name, _fn in {**BITS, **ROUNDING}.items():
    setattr(ScalarValue, f"__{_name}__", _read_first(_fn))
for _name, _fn in BITS.items():
    setattr(ScalarValue, f"__r{_name}__", _read_first(_fn, reflected=True))
