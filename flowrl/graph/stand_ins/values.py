"""What flows through a program: stand-ins for batches, fields, numbers and metrics that are not there yet."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from ...column import Column
from ...errors import ProgramError, did_you_mean
from ..script.site import asks_to_call, caller, users_line
from .argument_trees import find_in, rebuild

if TYPE_CHECKING:
    from .current_session import Session


class NoSuchName(ProgramError, AttributeError):
    """A name that a value or a handle has not; also an AttributeError, so that ``hasattr`` and ``getattr`` work."""


NoSuchName.__name__ = "ProgramError"  # as it is reported
_WRITE_OP = "Use arithmetic, comparisons, .mean() and the like; or write an op, whose batch has tensors."
_REDUCE = "Reduce it with .mean(), .sum(), .min() or .max(); or write an op, whose batch has rows."


class Value:
    """A result that is not there yet. ``ref`` is what its session knows of it.

    Printed, it is what ``ref.said`` says of a value of its ``_kind``; while it waits, ``_look`` says how to look at it.
    """

    __slots__ = ("__weakref__", "ref", "session")
    _kind = "value"
    _look = ""

    def __init__(self, session: Session, ref: Any) -> None:
        self.session = session
        self.ref = ref

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        from ..ops.batch_ops import OPS

        return self.session.call(OPS[name], None, (self, *args), kwargs)

    def __bool__(self) -> bool:
        return self.session.read(self, bool)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __repr__(self) -> str:
        waits = getattr(self.ref, "waits", False)
        return f"<{self.ref.said(self._kind)}" + (f", not there yet; {self._look} waits for it>" if waits else ">")


def _no_method(what: str, value: Value, name: str, otherwise: str) -> NoReturn:
    """Raise NoSuchName for a name that is called, and is no method of a value."""
    methods = [n for n in dir(type(value)) if not n.startswith("_") and n not in Value.__slots__]
    fix = did_you_mean(name, methods, otherwise, form="Did you mean .{}()?")
    raise NoSuchName(f"{what} has no method '{name}'.", at=caller(), have=methods or None, fix=fix)


class BatchValue(Value):
    """A batch that is not there yet. Its fields are attributes; ``a | b`` joins on keys."""

    __slots__ = ()
    _kind = "batch"
    _look = "len(batch), or .mean() of a field,"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if asks_to_call():
            _no_method("a batch", self, name, "Fields have no parentheses; rows are kept with batch.filter(mask).")
        return self.session.field(self, name)

    def __getitem__(self, name: Any) -> Any:
        if not isinstance(name, str):
            raise ProgramError(
                "a batch is not sliced or indexed by rows in a program.",
                at=caller(),
                fix="Keep rows with batch.filter(mask) or rl.first_groups(batch, n), or change batch= of the source.",
            )
        return self.session.field(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Value.__slots__:
            object.__setattr__(self, name, value)
        else:
            self._unchanging(name)

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        self._unchanging(name)

    def _unchanging(self, name: str) -> NoReturn:
        fix = f'Write batch = batch.with_columns({{"{name}": ...}}).'
        raise ProgramError(f"a batch never changes: '{name}' cannot be assigned.", at=caller(), fix=fix)

    def __iter__(self) -> Iterator[Any]:
        fix = "Use arithmetic on its fields, or write an op, whose batch has rows."
        raise ProgramError("a program does not go through the rows of a batch.", at=caller(), fix=fix)

    def __contains__(self, name: str) -> bool:
        raise ProgramError(
            f"whether a batch has '{name}' cannot be asked in a program.",
            at=caller(),
            fix="The fields of a batch do not depend on the run: name the field, and check says whether it is there.",
        )

    def __or__(self, other: Any) -> Any:
        return self._call("join", other)

    def __add__(self, other: Any) -> NoReturn:
        fix = "Write a.concat(b) for the rows of both, a | b for the fields of both on the same rows."
        raise ProgramError("batches are not added.", at=caller(), fix=fix)

    def filter(self, mask: Any) -> Any:
        """The rows where ``mask`` (a bool field) is true."""
        return self._call("filter", mask)

    def select(self, *names: str) -> Any:
        """Only these fields."""
        return self._call("select", names)

    def drop(self, *names: str) -> Any:
        """All fields but these."""
        return self._call("drop", names)

    def rename(self, **names: str) -> Any:
        """Fields under other names: ``batch.rename(rewards="costs")`` calls the rewards costs."""
        return self._call("rename", names)

    def with_columns(self, columns: Mapping[str, Any]) -> Any:
        """Further fields of the same rows: ``batch.with_columns({"shaped": batch.rewards - 0.5})``."""
        return self._call("with_columns", columns)

    def concat(self, *others: Any) -> Any:
        """The rows of this batch and of ``others``, which have other keys and the same fields."""
        return self._call("concat", *others)

    def group_mean(self, name: str) -> Any:
        """Mean of a number per row over the rows of the same prompt, given to each of them."""
        return self._call("group_mean", name)

    def group_std(self, name: str) -> Any:
        """Standard deviation over the rows of the same prompt, without Bessel's correction."""
        return self._call("group_std", name)

    def count(self) -> Any:
        """The number of rows, as a number that is not there yet."""
        return self._call("count")

    def __len__(self) -> int:
        return self.session.read(self.count(), int)

    def __bool__(self) -> bool:
        return self.session.read(self.count(), bool)


class Arithmetic(Value):
    """Arithmetic and comparisons, deferred."""

    __slots__ = ()

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return self.session.read(self, bool)

    def __getattr__(self, name: str) -> Any:
        """Raise NoSuchName, with the line; Python's own error would name a class of flowrl."""
        if name.startswith("_"):
            raise AttributeError(name)
        known = [n for n in dir(type(self)) if not n.startswith("_") and n not in Value.__slots__]
        fix = None if known else "It is one number already: use it as it is."
        raise NoSuchName(
            f"{'a field' if known else 'a number'} has no '{name}'.",
            at=caller(),
            have=known or None,
            fix=did_you_mean(name, known, fix, form="Did you mean .{}()?"),
        )


def _deferred(name: str) -> Callable[..., Any]:
    """The method for one of Python's operators."""

    def operate(self: Value, *others: Any) -> Any:
        return self._call(name, *others)  # pyright: ignore[reportPrivateUsage]

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Arithmetic, f"__{_name}__", _deferred(_name))
    setattr(Arithmetic, f"__r{_name}__", _deferred(f"r{_name}"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "neg", "abs", "invert"):
    setattr(Arithmetic, f"__{_name}__", _deferred(_name))


class FieldValue(Arithmetic):
    """A field of a batch that is not there yet. Arithmetic is per element, reductions give numbers."""

    __slots__ = ()
    _kind = "field"
    _look = ".mean()"

    def __iter__(self) -> Iterator[Any]:
        raise ProgramError("a program does not go through the values of a field.", at=caller(), fix=_REDUCE)

    def __getitem__(self, index: Any) -> Any:
        raise ProgramError("a field is not indexed by rows in a program.", at=caller(), fix=_REDUCE)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        what = "NumPy takes no field: its values are not there in a program."
        raise ProgramError(what, at=users_line(), fix=_WRITE_OP)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """``numpy.float64(2) * field`` is arithmetic as ``2 * field`` is; no other function of NumPy takes a field."""
        plain = [x.item() if getattr(x, "shape", None) == () else x for x in inputs]
        operation = PYTHON.get(UFUNCS.get(ufunc.__name__, "")) if method == "__call__" and not kwargs else None
        if operation is None or not all(isinstance(x, (bool, int, float, Arithmetic)) for x in plain):
            self.__array__()
        return operation(*plain)

    @classmethod
    def __torch_function__(cls, fn: Any, *args: Any, **kwargs: Any) -> NoReturn:
        what = f"torch.{fn.__name__} takes no field: its values are not there in a program."
        raise ProgramError(what, at=users_line(), fix=_WRITE_OP)

    def __float__(self) -> float:
        return float(self.session.read(self, float))  # says that a field is no number

    def __int__(self) -> int:
        return int(self.session.read(self, int))


def _without_arguments(cls: type[Value], name: str, doc: str | None) -> None:
    """Give a class the deferred form of a method that takes nothing."""

    def method(self: Value) -> Any:
        return self._call(name)  # pyright: ignore[reportPrivateUsage]

    method.__name__, method.__qualname__, method.__doc__ = name, f"{cls.__name__}.{name}", doc
    setattr(cls, name, method)


for _name in ("mean", "sum", "min", "max", "std", "row_sum", "row_mean", "lengths_column"):
    _without_arguments(FieldValue, _name, getattr(Column, _name).__doc__)


class MetricsValue(Value):
    """What an update will report. An entry is an attribute: ``metrics.loss``."""

    __slots__ = ()
    _kind = "metrics"
    _look = "an entry such as metrics.loss"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if asks_to_call():
            fix = "An entry is an attribute, metrics.loss; flow.log(step, metrics) logs all of them."
            _no_method("what an update reports", self, name, fix)
        return self.session.field(self, name)

    def __getitem__(self, name: str) -> Any:
        return self.session.field(self, name)

    def __bool__(self) -> bool:
        return True  # an update always reports something


def is_handle(value: Any) -> bool:
    """Whether a value is the handle of a worker."""
    cls = cast("Any", type(value))
    return getattr(cls, "is_handle", False) is True


def find(tree: Any) -> Iterator[Value]:
    """Yield all values inside arguments: see :mod:`flowrl.graph.stand_ins.argument_trees`."""
    return find_in(tree, Value)


def replace_values(tree: Any, change: Callable[[Value], Any]) -> Any:
    """Return the same arguments with every value changed."""
    return rebuild(tree, lambda item: change(item) if isinstance(item, Value) else item)


#: Python's own functions for the deferred arithmetic, by name.
PYTHON: dict[str, Callable[..., Any]] = {
    **{n: getattr(operator, n) for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{n: getattr(operator, n) for n in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert")},
    "and": getattr(operator, "and_"),  # noqa: B009  typed as what it is given
    "or": getattr(operator, "or_"),  # noqa: B009
}

#: NumPy's functions that are operators, by name.
UFUNCS = {
    **{"add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv"},
    **{"floor_divide": "floordiv", "remainder": "mod"},
    **{"power": "pow", "negative": "neg", "absolute": "abs", "less": "lt", "greater": "gt"},
    **{"less_equal": "le", "greater_equal": "ge", "equal": "eq", "not_equal": "ne"},
}
