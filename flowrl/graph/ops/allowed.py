"""What values an argument may have: ``number(above=0, most=1)``, ``whole(least=1) | None``, ``one_of("a", "b")``.

Rules stand in ``@fl.takes`` beside a function (:mod:`flowrl.graph.ops.check_arguments`), or beside the fields of a
record.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, cast

from ...errors import FlowError, ModelError, ProgramError, near
from ..script.site import caller
from ..stand_ins.values import BatchValue, MetricsValue, find, is_handle

__all__ = ["Allowed", "flag", "instance", "number", "numbers", "one_of", "text", "whole", "worker"]


@dataclass(frozen=True)
class Allowed:
    """What an argument may be: ``Allowed("number", above=0, most=1)``, a number above 0 and at most 1.

    ``kind``: ``number``, ``whole``, ``flag``, ``text``, ``word``, ``kind`` (an instance of a class, by name),
    ``numbers`` or ``worker``. ``none``: None is allowed too. ``fixes``: what to write for a value that other
    libraries take. ``fix``: what to write for any other.

    >>> rule = fl.allowed.whole(least=1)
    >>> rule.accepts(3), rule.accepts(0), str(rule)
    (True, False, 'a whole number of at least 1')
    """

    kind: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    finite: bool = True
    words: tuple[str, ...] = ()  # of a word; the class and its bases, of a kind; what a worker must have
    length: int | None = None  # of numbers
    form: str = ""  # how such a value is written
    none: bool = False
    fixes: Mapping[Any, str] = field(default_factory=dict[Any, str])
    fix: str = ""

    def __or__(self, other: None) -> Allowed:
        """``whole(least=1) | None``: or None."""
        return replace(self, none=True)

    def accepts(self, value: Any) -> bool:
        """Return whether a value is one of those. What the program computes is not looked at."""
        if value is None:
            return self.none
        if next(find(value), None) is not None:
            return not isinstance(value, (BatchValue, MetricsValue))
        if self.kind in ("number", "whole"):
            return self._number(value)
        if self.kind == "flag":
            return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
        if self.kind == "text":
            return isinstance(value, str)
        if self.kind == "word":
            return isinstance(value, str) and value in self.words
        if self.kind == "numbers":
            return self._numbers(value)
        if self.kind == "worker":
            return self._worker(value)
        return any(c.__name__ == self.words[0] for c in type(value).__mro__)

    def _number(self, value: Any) -> bool:
        if not isinstance(value, Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()  # a tensor or an array of one number
        if isinstance(value, bool) or not isinstance(value, Integral if self.kind == "whole" else Real):
            return False
        number = float(value)
        return not (
            (self.finite and not math.isfinite(number))
            or (self.least is not None and not number >= self.least)
            or (self.most is not None and not number <= self.most)
            or (self.above is not None and not number > self.above)
            or (self.below is not None and not number < self.below)
        )

    def _numbers(self, value: Any) -> bool:
        if not isinstance(value, (tuple, list)):
            return False
        entries = tuple(cast("Any", value))
        one = replace(self, kind="number")
        return len(entries) == (self.length or len(entries)) and all(one._number(entry) for entry in entries)

    def _worker(self, value: Any) -> bool:
        if is_handle(value) and not hasattr(value, "cls"):  # on a rank it is a name; the driver has looked at it
            return True
        cls = cast("type", value.cls if is_handle(value) else type(value))
        return all(inspect.getattr_static(cls, name, None) is not None for name in self.words)

    def __str__(self) -> str:
        """``a number above 0 and at most 1``."""
        bounds = self._bounds()
        words = {
            "number": f"a number{bounds}",
            "whole": f"a whole number{bounds}",
            "word": f"one of {', '.join(self.words)}",
            "numbers": f"{self.length} numbers" + (f", each{bounds}" if bounds else ""),
            "flag": "True or False",
            "text": "text",
        }
        return words.get(self.kind, self.form) + (", or None" if self.none else "")

    def _bounds(self) -> str:
        if self.least is not None and self.most is not None:
            return f" from {self.least:g} to {self.most:g}"
        lower = ((self.above, "above"), (self.least, "of at least"))
        upper = ((self.below, "below"), (self.most, "at most" if self.above is not None else "of at most"))
        words = [f"{word} {bound:g}" for bound, word in (*lower, *upper) if bound is not None]
        return f" {' and '.join(words)}" if words else ""

    def mend(self, name: str, value: Any) -> str:
        """Return what to write instead of a value."""
        known = None if isinstance(value, bool) else next((f for g, f in self.fixes.items() if g == value), None)
        if known is not None:
            return known
        if self.kind in ("number", "whole"):
            meant = _meant_number(value, whole=self.kind == "whole")
            if meant is not None and self._number(meant):
                return f"Write {name}={meant!r}."
        if self.kind == "word":
            return f'Write {name}="{near(str(value), self.words) or self.words[0]}".'
        return self.fix or f"Give {name}= {self}."


def number(
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    finite: bool = True,
    fixes: Mapping[Any, str] | None = None,
    fix: str = "",
) -> Allowed:
    """Allow a number within bounds; whole ones count, True and False do not. ``finite=False``: infinity too.

    >>> str(fl.allowed.number(above=0, most=1)), fl.allowed.number(above=0).accepts(0.0)
    ('a number above 0 and at most 1', False)
    """
    return Allowed("number", least, most, above, below, finite, fixes=fixes or {}, fix=fix)


def whole(
    *,
    least: float | None = None,
    most: float | None = None,
    fixes: Mapping[Any, str] | None = None,
    fix: str = "",
) -> Allowed:
    """Allow a whole number within bounds.

    >>> str(fl.allowed.whole(least=1) | None)
    'a whole number of at least 1, or None'
    """
    return Allowed("whole", least, most, fixes=fixes or {}, fix=fix)


def flag() -> Allowed:
    """Allow True and False.

    >>> fl.allowed.flag().accepts(True), fl.allowed.flag().accepts(1)
    (True, False)
    """
    return Allowed("flag")


def text() -> Allowed:
    """Allow a text.

    >>> str(fl.allowed.text())
    'text'
    """
    return Allowed("text")


def one_of(*words: str) -> Allowed:
    """Allow one of these words.

    >>> str(fl.allowed.one_of("mean", "sum"))
    'one of mean, sum'
    """
    return Allowed("word", words=words)


def numbers(
    length: int,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    fix: str = "",
) -> Allowed:
    """Allow a tuple of so many numbers, each within bounds.

    >>> str(fl.allowed.numbers(2, least=0)), fl.allowed.numbers(2).accepts((0.9, 0.99))
    ('2 numbers, each of at least 0', True)
    """
    return Allowed("numbers", least, above=above, below=below, length=length, fix=fix)


def instance(name: str, *, form: str, fix: str = "") -> Allowed:
    """Allow an instance of the class of that name, or of a subclass; ``form`` says how one is written.

    >>> rule = fl.allowed.instance("Lora", form="fl.Lora(r=16, alpha=32)")
    >>> str(rule), rule.accepts(fl.Lora(r=8, alpha=16))
    ('fl.Lora(r=16, alpha=32)', True)
    """
    return Allowed("kind", words=(name,), form=form, fix=fix)


def worker(*having: str, form: str, fix: str = "") -> Allowed:
    """Allow the handle of a worker whose class has these ops or attributes; ``form`` says what such a worker is.

    >>> rule = fl.allowed.worker("generate", form="the handle of an actor")
    >>> str(rule), rule.accepts(fl.Actor)
    ('the handle of an actor', False)
    """
    return Allowed("worker", words=having, form=form, fix=fix)


def check_values(
    title: str, values: Mapping[str, Any], rules: Mapping[str, Allowed], kind: type[FlowError] = ProgramError
) -> None:
    """Hold values against the rules of their names. Raises ``kind`` at the line of the user's code.

    For what no ``@takes`` can stand above: options that travel in a mapping, a check that needs another one first.
    """
    for name, rule in rules.items():
        if name in values and not rule.accepts(value := values[name]):
            raise kind(f"{title}: {problem(name, value, rule)}", at=caller(), fix=rule.mend(name, value))


def check_record(record: Any, rules: Mapping[str, Allowed]) -> None:
    """Hold the fields of a frozen record against rules. Raises ModelError at the line that made it."""
    check_values(type(record).__name__, {name: getattr(record, name) for name in rules}, rules, ModelError)


def problem(name: str, value: Any, rule: Allowed) -> str:
    """``n=0 is not a whole number of at least 1.``"""
    if rule.kind == "word":
        return f"{name}={_shown(value)} is none of {', '.join(rule.words)}."
    return f"{name}={_shown(value)} is not {rule}."


def _meant_number(value: Any, *, whole: bool) -> int | float | None:
    """The number that a text, or a float that is whole, was meant to be."""
    if not isinstance(value, (str, float)):
        return None
    try:
        meant = float(value)
    except ValueError:
        return None
    return int(meant) if meant.is_integer() and whole else None if whole else meant


def _shown(value: Any) -> str:
    if isinstance(value, (BatchValue, MetricsValue)):
        return "a batch" if isinstance(value, BatchValue) else "metrics"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
