"""Symbols: the numbers of a trace that the program has read, and its steps, which answer as far as Python lets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..script.site import own_call
from ..tracing.trace_records import LONGEST, TNumber, together
from .current_session import Session
from .scalars import BITS, ROUNDING, Number, ScalarValue

#: What asks for a plain number.
INDEX, KEY, OTHER, TEXT = "an index or a count", "a key", "a plain number to other code", "part of a text"
STORED = "where something is put"


class Tracing(Session, Protocol):
    """What symbols ask of the trace."""

    def number(self, value: ScalarValue, way: str) -> int:
        """The plain number in the place of a symbol; ``way`` says what asks for it, empty where it is known."""
        ...

    def symbol(self, ref: TNumber) -> Any:
        """The symbol of a number, or the plain number where a library takes no other."""
        ...

    def hashes(self) -> None:
        """A symbol is about to be looked up, in a dict or a set."""
        ...

    def looks_up(self) -> bool:
        """Whether a comparison is part of the look-up that has just asked for a hash."""
        ...


class Symbol(ScalarValue):
    """A number that the program has read, or a step: arithmetic gives symbols, a comparison asks the oracle.

    Where Python insists on a plain number or a text it is given one, which the path chooses and keeps
    (:meth:`~flowrl.graph.tracing.follow_branches.Path.number`).
    """

    __slots__ = ()
    session: Tracing  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def stands_for(self) -> type:
        """What the run has in its place: int or float."""
        return int if self.ref.whole else float

    def plain(self, way: str) -> Any:
        """The number in its place, of its own type; ``way`` says what asks for it."""
        return self.stands_for(self.session.number(self, way))

    def __float__(self) -> float:
        return float(self.plain(OTHER))

    def __int__(self) -> int:
        return int(self.plain(OTHER))

    def __index__(self) -> int:
        return int(self.plain(INDEX))

    def __complex__(self) -> complex:
        return complex(float(self))

    def __hash__(self) -> int:
        self.session.hashes()
        return hash(self.plain("" if own_call() else KEY))

    def __eq__(self, other: Any) -> Any:
        if self.session.looks_up():  # in a dict or a set, which compares what has the same hash
            number = other.session.read(other, Number) if isinstance(other, ScalarValue) else other
            return self.plain("") == (number.plain("") if type(number) is Symbol else number)
        return self._call("eq", other)

    def __format__(self, spec: str) -> str:
        if own_call():
            return self.ref.text
        number = self.plain(TEXT)
        try:
            return format(number, spec)
        except ValueError:  # the program knows better whether it is whole
            return format(int(number), spec)

    def __str__(self) -> str:
        return self.ref.text if own_call() else str(self.plain(TEXT))

    def __repr__(self) -> str:
        return f"<Symbol {self.ref.text}>" if own_call() else repr(self.plain(TEXT))

    def __reduce__(self) -> Any:
        return self.stands_for, (self.plain(OTHER),)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self.stands_for, name):
            return super().__getattr__(name)
        return getattr(self.plain(OTHER), name)


def _applied(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    """The method for an operator or a function that gives whole numbers, as ``round`` does without digits."""

    def method(self: Symbol, *others: Any) -> Any:
        whole = name != "round" or not others
        return applied(name, *((*others, self) if reflected else (self, *others)), whole=whole)

    return method


for _name in (*BITS, *ROUNDING):
    setattr(Symbol, f"__{_name}__", _applied(_name))
for _name in BITS:
    setattr(Symbol, f"__r{_name}__", _applied(_name, reflected=True))


def applied(name: str, *args: Any, whole: bool = False) -> Any:
    """A function of numbers, of which one at least is a symbol, as a symbol: ``applied("round", x, 2)``."""
    symbols = [x for x in args if isinstance(x, Symbol)]
    text, key = (f"{name}({', '.join(_operand(x, form) for x in args)})" for form in ("text", "key"))
    return symbols[0].session.symbol(together([x.ref for x in symbols], text, key, whole))


def _operand(value: Any, form: str) -> str:
    """A number as it is written, or its key: ``form`` is text or key. A text that grows from step to step ends."""
    written = getattr(value.ref, form) if isinstance(value, Symbol) else repr(value)
    return written if form == "key" or len(written) <= LONGEST else "..."


def symbols_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of plain numbers as one that gives a symbol for a symbol, and reads what is not there yet.

    One that gives two numbers stays as it is, and asks for a plain one.
    """
    name = fn.__name__
    if name in _PAIRS:
        return fn

    def call(*args: Any, **kwargs: Any) -> Any:
        numbers = [x.session.read(x, float) if isinstance(x, ScalarValue) else x for x in args]
        plain = all(isinstance(x, (Symbol, int, float)) for x in numbers)
        if kwargs or not plain or not any(isinstance(x, Symbol) for x in numbers):
            return fn(*numbers, **kwargs)
        return applied(name, *numbers, whole=name in _WHOLE)

    return call


#: Functions that give two numbers, which one symbol cannot be.
_PAIRS = frozenset(("modf", "frexp"))
#: Functions of ``math`` that give whole numbers.
_WHOLE = frozenset(("ceil", "floor", "trunc", "isqrt", "gcd", "lcm", "comb", "perm", "factorial"))
