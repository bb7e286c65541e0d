"""What values an argument may have: declared beside a function, held against what it is given.

``@takes(n=whole(least=1), top_p=number(above=0, most=1))`` stands above a function, an op or an ``__init__``. Plain
annotations (``int``, ``float``, ``bool``, ``str``, each with ``| None``) say the type where no rule says more. In the
trace the values that are known are looked at; one that the program computes is looked at by the call itself.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, TypeVar, cast

from ..errors import FlowError, ModelError, ProgramError, WorkerError, near
from .site import caller
from .values import BatchValue, MetricsValue, find, is_handle

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Allowed:
    """What an argument may be: ``Allowed("number", above=0, most=1)``, a number above 0 and at most 1.

    ``kind``: ``number``, ``whole``, ``flag``, ``text``, ``word``, ``kind`` (an instance of a class, by name),
    ``numbers`` or ``worker``. ``none``: None is allowed too. ``fixes``: what to write for a value that other
    libraries take. ``fix``: what to write for any other.
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
        """Whether a value is one of those. What the program computes is not looked at."""
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
        if self.kind in ("number", "whole"):
            said = ("a whole number" if self.kind == "whole" else "a number") + self._bounds()
        elif self.kind == "word":
            said = f"one of {', '.join(self.words)}"
        elif self.kind == "numbers":
            said = f"{self.length} numbers" + (f", each{self._bounds()}" if self._bounds() else "")
        else:
            said = {"flag": "True or False", "text": "text"}.get(self.kind, self.form)
        return f"{said}, or None" if self.none else said

    def _bounds(self) -> str:
        if self.least is not None and self.most is not None:
            return f" from {self.least:g} to {self.most:g}"
        lower = ((self.above, "above"), (self.least, "of at least"))
        upper = ((self.below, "below"), (self.most, "at most" if self.above is not None else "of at most"))
        said = [f"{word} {bound:g}" for bound, word in (*lower, *upper) if bound is not None]
        return f" {' and '.join(said)}" if said else ""

    def mend(self, name: str, value: Any) -> str:
        """What to write instead."""
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
    """A number within bounds; whole ones count, True and False do not. ``finite=False``: infinity too."""
    return Allowed("number", least, most, above, below, finite, fixes=fixes or {}, fix=fix)


def whole(
    *,
    least: float | None = None,
    most: float | None = None,
    fixes: Mapping[Any, str] | None = None,
    fix: str = "",
) -> Allowed:
    """A whole number within bounds."""
    return Allowed("whole", least, most, fixes=fixes or {}, fix=fix)


def flag() -> Allowed:
    """True or False."""
    return Allowed("flag")


def text() -> Allowed:
    """A text."""
    return Allowed("text")


def one_of(*words: str) -> Allowed:
    """One of these words."""
    return Allowed("word", words=words)


def numbers(length: int, *, least: float | None = None, below: float | None = None, fix: str = "") -> Allowed:
    """A tuple of so many numbers, each within bounds."""
    return Allowed("numbers", least, below=below, length=length, fix=fix)


def instance(name: str, *, form: str, fix: str = "") -> Allowed:
    """An instance of the class of that name, or of a subclass; ``form`` says how one is written."""
    return Allowed("kind", words=(name,), form=form, fix=fix)


def worker(*having: str, form: str, fix: str = "") -> Allowed:
    """The handle of a worker whose class has these ops or attributes; ``form`` says what such a worker is."""
    return Allowed("worker", words=having, form=form, fix=fix)


#: What plain annotations say. They are the user's too, so a number may be infinite.
_ANNOTATED = {"int": whole(), "float": number(finite=False), "bool": flag(), "str": text()}


def takes(**rules: Allowed) -> Callable[[F], F]:
    """Declare what values the arguments of a function may have; a wrong one raises ProgramError at the caller's line.

    Above ``__init__`` of a worker it raises WorkerError. Below ``@fl.op`` the op holds it against every call. The
    default of a parameter is always allowed::

        @fl.op(reads="rewards", adds="powered: f32[]")
        @fl.takes(power=fl.allowed.number(above=0))
        def powered(batch, *, power: float = 2.0):
            return {"powered": batch.rewards**power}
    """

    def declare(fn: F) -> F:
        if not inspect.isfunction(fn):
            raise ProgramError(
                f"takes declares arguments of a function, and stands above {fn!r}.",
                at=caller(),
                fix="Write @fl.takes(...) below @fl.op(...), next to the def.",
            )
        known = _signature(fn).parameters
        for name in rules:
            if name not in known:
                meant = near(name, known)
                raise ProgramError(
                    f"takes: {fn.__qualname__} has no parameter '{name}'.",
                    at=caller(),
                    have=[n for n in known if n != "self"],
                    fix=f"Did you mean '{meant}'?" if meant else "Name a parameter of the function.",
                )

        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = _signature(fn).bind(*args, **kwargs).arguments
            except TypeError:
                return fn(*args, **kwargs)  # Python says what is wrong
            for name, value in arguments.items():
                if (error := wrong_value(fn, name, value, _title(fn, args))) is not None:
                    error.at = caller()
                    raise error
            return fn(*args, **kwargs)

        cast("Any", fn).__takes__ = cast("Any", checked).__takes__ = rules
        return cast("F", checked)

    return declare


def unchecked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function below ``takes``: whoever calls it holds the rules against its arguments."""
    return cast("Any", fn).__wrapped__ if hasattr(fn, "__takes__") and hasattr(fn, "__wrapped__") else fn


def rule_of(fn: Callable[..., Any], name: str) -> Allowed | None:
    """What a parameter of a function may be: as ``takes`` says, else as its annotation does, else None."""
    return _rules(fn).get(name)


def wrong_value(fn: Callable[..., Any], name: str, value: Any, title: str) -> FlowError | None:
    """What is wrong with an argument of a function, if anything. The default of its parameter is always right."""
    rule = rule_of(fn, name)
    if rule is None or rule.accepts(value):
        return None
    default = _signature(fn).parameters[name].default
    if value is default or (type(value) is type(default) and value == default):
        return None
    cls = WorkerError if getattr(fn, "__name__", "") == "__init__" else ProgramError
    return cls(f"{title}: {problem(name, value, rule)}", fix=rule.mend(name, value))


def check_record(record: Any, rules: Mapping[str, Allowed]) -> None:
    """Hold the fields of a frozen record against rules. Raises ModelError at the line that made it."""
    for name, rule in rules.items():
        if not rule.accepts(value := getattr(record, name)):
            what = f"{type(record).__name__}: {problem(name, value, rule)}"
            raise ModelError(what, at=caller(), fix=rule.mend(name, value))


def problem(name: str, value: Any, rule: Allowed) -> str:
    """``n=0 is not a whole number of at least 1.``"""
    if rule.kind == "word":
        return f"{name}={_shown(value)} is none of {', '.join(rule.words)}."
    return f"{name}={_shown(value)} is not {rule}."


@functools.lru_cache(maxsize=4096)
def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(fn)


@functools.lru_cache(maxsize=4096)
def _rules(fn: Callable[..., Any]) -> dict[str, Allowed]:
    declared = cast("Mapping[str, Allowed]", getattr(fn, "__takes__", {}))
    found: dict[str, Allowed] = {}
    for name, parameter in _signature(fn).parameters.items():
        if name in declared:
            found[name] = declared[name]
        elif parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            said = parameter.annotation
            words = (said if isinstance(said, str) else inspect.formatannotation(said)).replace(" ", "").split("|")
            kinds = [w for w in words if w != "None"]
            if len(kinds) == 1 and kinds[0] in _ANNOTATED:
                rule = _ANNOTATED[kinds[0]]
                found[name] = rule | None if "None" in words else rule
    return found


def _title(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The name of a function in a message: ``rl.ppo_clip``, and the class for an ``__init__``."""
    if fn.__name__ == "__init__":
        return type(args[0]).__name__ if args else fn.__qualname__.rpartition(".")[0]
    if not fn.__module__.startswith("flowrl.rl"):
        return fn.__qualname__
    return "rl.gates." + fn.__name__ if fn.__module__.endswith(".gates") else "rl." + fn.__name__


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
    said = repr(value)
    return said if len(said) <= 60 else said[:57] + "..."
