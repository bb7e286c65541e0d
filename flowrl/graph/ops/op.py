"""What an op is: a function that declares the fields it reads and adds, and what it does to its rows and worker."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from importlib import import_module
from inspect import isgeneratorfunction
from typing import TYPE_CHECKING, Any, cast

from ...errors import FlowError, WorkerError
from ...marks import Marks
from ..stand_ins import current_session as sessions
from ..stand_ins.values import find
from .apply import run, run_asking
from .field_types import FieldType, parse_fields
from .function_parameters import Parameters, parameters_of
from .function_spec import Spec
from .signature import CallShape, Declared, Pieces, Signature

if TYPE_CHECKING:
    from ...batch import CallInfo

_ARITHMETIC = "flowrl.graph.ops.batch_ops"


@dataclass(frozen=True, repr=False)
class Op:
    """An op of a worker or of a library. Called on a plain worker or plain batches it just runs."""

    name: str
    owner: str
    fn: Callable[..., Any]
    reads: Declared
    adds: Declared
    updates: str | None = None
    rows: str = "same"
    cost: str = "none"
    external: bool = False
    returns: str = "batch"  # batch | metrics | scalar | none; raw: whatever the function returns
    pieces: Pieces = False
    children: str = ""  # the parameter of a batch whose rows were made of those of the first one
    joins: bool = False  # what it asks of a handle joins that worker's engine, row by row
    marks: Callable[[CallShape], Mapping[str, Marks]] | None = None

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return partial(self._plain, instance)

    def __repr__(self) -> str:
        return f"{self.owner}.{self.name}"

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "owner", owner.__name__)

    def __reduce__(self) -> tuple[Any, ...]:
        """By its name where it is one of this package, as a whole otherwise."""
        module, name = getattr(self.fn, "__module__", ""), getattr(self.fn, "__qualname__", "")
        if self.owner == "batch":  # a reflected one has the name of its like
            module = _ARITHMETIC
            prefix = "" if _named(_ARITHMETIC, f"OPS.{self.name}") is self else "r"
            name = f"OPS.{prefix}{self.name}"
        if module.partition(".")[0] == "flowrl" and _named(module, name) is self:
            return _named, (module, name)
        return Op, tuple(getattr(self, f.name) for f in fields(self))

    @property
    def parameters(self) -> Parameters:
        """The parameters of its function."""
        return parameters_of(self.fn)

    @property
    def inherits(self) -> bool:
        """Whether the fields of its batch are there in what it returns."""
        return self.rows not in ("apart", "regroup")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call a library op (``rl.gae(batch)``): deferred on a program's values, at once on plain batches."""
        value = next(iter(find((args, kwargs))), None)
        if value is not None:
            return value.session.call(self, None, args, kwargs)
        return self._by_hand(None, args, kwargs)

    def _plain(self, worker: Any, *args: Any, **kwargs: Any) -> Any:
        session = sessions.current()
        value = next(iter(find((args, kwargs))), None)
        if session is not None and value is not None:
            raise WorkerError(
                f"{type(worker).__name__}.{self.name}: a worker made by hand was called inside a program.",
                at=sessions.caller(),
                fix=f"Declare it with flow.worker({type(worker).__name__}, ...).",
            )
        return self._by_hand(worker, args, kwargs)

    def _by_hand(self, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run it on plain values where the user calls it: that is the line of an error that knows no other."""
        try:
            return self.apply(worker, args, kwargs)
        except FlowError as error:
            error.at = error.at or sessions.caller()
            raise

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name, defaults filled in, without ``self``. Raises TypeError like Python."""
        return self.parameters.bind(args, kwargs)

    def signature(
        self,
        init: Mapping[str, Any],
        arguments: Mapping[str, Any],
        have: frozenset[str],
        *,
        rows_each: int | None = None,
        sampled_by: str = "",
    ) -> Signature:
        """Return what this call reads and adds. ``reads`` of argument specs (a loss) count as the op's own."""
        specs = [value for value in arguments.values() if isinstance(value, Spec)]
        if self._declared is not None and not specs:
            return self._declared
        shape = CallShape(init, arguments, have, rows_each, sampled_by)
        parsed = self._read(self.reads(shape) if callable(self.reads) else self.reads)
        for spec in specs:
            parsed.setdefault(self.batch_parameter, {}).update(parse_fields(spec.reads))
        return Signature(parsed, self.added(shape), self.rows)

    @cached_property
    def _declared(self) -> Signature | None:
        """What every call reads and adds without a spec; None where that depends on the call."""
        if callable(self.reads) or callable(self.adds):
            return None
        return Signature(self._read(self.reads), _types(self.adds), self.rows)

    def _read(self, declared: str | Mapping[str, str] | None) -> dict[str, dict[str, FieldType | None]]:
        by_parameter = {self.batch_parameter: declared} if isinstance(declared, str) else declared or {}
        return {parameter: parse_fields(text) for parameter, text in by_parameter.items()}

    def added(self, shape: CallShape) -> dict[str, FieldType]:
        """The fields that a call adds, with their types."""
        return _types(self.adds(shape) if callable(self.adds) else self.adds)

    def in_pieces(self, init: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
        """Whether this call may be run prompt by prompt."""
        return self.unit(init, arguments) != "call"

    def unit(self, init: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """Within what rows of this call depend on each other: ``row``, ``prompt``, or the whole ``call``."""
        pieces = self.pieces
        if callable(pieces):
            pieces = pieces(CallShape(init, arguments, frozenset()))
        return pieces if isinstance(pieces, str) else "prompt" if pieces else "call"

    @property
    def batch_parameter(self) -> str:
        """The parameter that holds the batch whose fields flow through: the first one."""
        return self.parameters.first

    def apply(self, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: CallInfo | None = None) -> Any:
        """Run the op on real values, as they are written in a call. Raises TypeError like Python, and what
        :meth:`run` does."""
        given = dict(kwargs)
        into: Mapping[str, str] = given.pop("into", None) or {}
        return self.run(worker, self.bind(args, given), into, call)

    def run(
        self,
        worker: Any,
        arguments: Mapping[str, Any],
        into: Mapping[str, str] | None = None,
        call: CallInfo | None = None,
    ) -> Any:
        """Run the op on real values by parameter: hand it the fields it reads, merge what it adds.

        Raises FieldError when a read field is missing or an added one is there already or of another type.
        """
        return run(self, worker, arguments, into or {}, call)

    @property
    def asks(self) -> bool:
        """Whether it yields what it asks of its engine: then its rows may leave the engine one by one."""
        return self.cost == "generate" and not self.external and isgeneratorfunction(self.fn)

    def run_asking(
        self, worker: Any, arguments: Mapping[str, Any], into: Mapping[str, str], call: CallInfo | None
    ) -> Generator[Any, Any, Any]:
        """Run an op that :attr:`asks`: yields what it asks, is sent the answers, and returns what :meth:`run` does."""
        return run_asking(self, worker, arguments, into, call)

    def title(self, worker: Any) -> str:
        name = getattr(worker, "name", None) or self.owner
        return f"{name}.{self.name}"


def _named(module: str, name: str) -> Any:
    """Return what a module has under a dotted name, of a mapping the entry; None where there is nothing."""
    thing: Any = import_module(module)
    for part in name.split("."):
        thing = cast("Any", thing).get(part) if isinstance(thing, Mapping) else getattr(thing, part, None)
    return thing


def _types(adds: str | Mapping[str, str] | None) -> dict[str, FieldType]:
    return {n: t or FieldType("any") for n, t in parse_fields(adds if isinstance(adds, str) else "").items()}
