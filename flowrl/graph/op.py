"""What an op is: a function that declares the fields it reads and adds, and how it is called on plain values."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

from ..batch import Batch, Column
from ..errors import FieldError, FlowError, ProgramError, RowsError, WorkerError, near
from ..marks import OWN, UNMARKED, Marks, foreign_rows, other_ids, other_temperature, unlike, values
from . import session as sessions
from .allowed import Allowed, problem, unchecked, wrong_value
from .habits import PLACE, is_place, meant_argument
from .site import defined_at
from .types import Fields, FieldType, TypeTextError, parse_fields
from .values import BatchValue, FieldValue, MetricsValue, ScalarValue, find

if TYPE_CHECKING:
    from ..batch import CallInfo
    from .calls import Declare

ROWS = ("same", "expand", "filter", "apart", "regroup")
COSTS = ("none", "local", "forward", "generate", "train", "external")
_ARITHMETIC = "flowrl.graph.arithmetic"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Init:
    """How a worker was declared: its class and the arguments it will be made with, before it is made."""

    cls: type
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def arguments(self) -> dict[str, Any]:
        """Constructor arguments by parameter name, defaults filled in."""
        bound = inspect.signature(self.cls).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


@dataclass(frozen=True)
class Signature:
    """What one call reads and adds: ``Signature({"batch": {"values": f32[*response]}}, adds={"returns": ...})``."""

    reads: Mapping[str, Fields]  # by the name of the batch parameter
    adds: Mapping[str, FieldType]
    rows: str = "same"

    def __str__(self) -> str:
        reads = ", ".join(f"{n}: {t}" if t else n for fields in self.reads.values() for n, t in fields.items())
        adds = ", ".join(f"{n}: {t}" for n, t in self.adds.items())
        return f"({reads}) -> ({adds})" + ("" if self.rows == "same" else f" rows={self.rows}")


#: ``reads`` or ``adds`` of an op: text, text by batch parameter, or a function of the call that gives either.
Declared = str | Mapping[str, str] | Callable[["CallShape"], "str | Mapping[str, str]"] | None


@dataclass(frozen=True)
class CallShape:
    """What a ``reads=``, ``adds=`` or ``marks=`` function may look at: arguments of the worker and the call, fields.

    ``rows_each``: how many rows a prompt has at most, where a trace knows it, of rows that a call sampled;
    ``sampled_by`` is that call, ``actor.generate (line 12)``. Only ``marks=`` is given ``worker``, who computes or is
    the policy that is handed on, the name of its ``tokenizer``, and the ``marks`` of the fields at hand.
    """

    init: Mapping[str, Any]
    call: Mapping[str, Any]
    have: frozenset[str]
    rows_each: int | None = None
    sampled_by: str = ""
    worker: str = ""
    tokenizer: str = ""
    marks: Mapping[str, Marks] = field(default_factory=dict[str, Marks])


#: Whether an op may be run prompt by prompt, as its rows do not depend on those of other prompts; ``"row"``: on none.
Pieces = bool | str | Callable[[CallShape], "bool | str"]


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
    marks: Callable[[CallShape], Mapping[str, Marks]] | None = None

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return functools.partial(self._plain, instance)

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
    def parameters(self) -> inspect.Signature:
        return _signature(self.fn)

    @property
    def inherits(self) -> bool:
        """Whether the fields of its batch are there in what it returns."""
        return self.rows not in ("apart", "regroup")

    @property
    def is_method(self) -> bool:
        return _first_parameter(self.fn)[0]

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

    def bind(self, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name, defaults filled in, without ``self``. Raises TypeError like Python."""
        first = (worker,) if self.is_method else ()
        bound = self.parameters.bind(*first, *args, **kwargs)
        bound.apply_defaults()
        found = dict(bound.arguments)
        if self.is_method:
            found.pop("self")
        return found

    def argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives for a parameter; None where it leaves that to its default."""
        if name in kwargs:
            return kwargs[name]
        names = list(self.parameters.parameters)
        place = names.index(name) - self.is_method if name in names else len(args)
        return args[place] if place < len(args) else None

    def signature(
        self,
        init: Mapping[str, Any],
        arguments: Mapping[str, Any],
        have: frozenset[str],
        *,
        rows_each: int | None = None,
        sampled_by: str = "",
    ) -> Signature:
        """What this call reads and adds. ``reads`` of argument specs (a loss) count as the op's own."""
        shape = CallShape(init, arguments, have, rows_each, sampled_by)
        reads = self.reads(shape) if callable(self.reads) else self.reads
        by_param = {self.batch_parameter: reads} if isinstance(reads, str) else dict(reads or {})
        parsed: dict[str, dict[str, FieldType | None]] = {p: parse_fields(t) for p, t in by_param.items()}
        for value in arguments.values():
            if isinstance(value, Spec):
                parsed.setdefault(self.batch_parameter, {}).update(parse_fields(value.reads))
        return Signature(parsed, self.added(shape), self.rows)

    def added(self, shape: CallShape) -> dict[str, FieldType]:
        """The fields that a call adds, with their types."""
        adds = self.adds(shape) if callable(self.adds) else self.adds
        return {n: t or FieldType("any") for n, t in parse_fields(adds if isinstance(adds, str) else "").items()}

    def wrong_values(self, arguments: Mapping[str, Any], title: str) -> list[FlowError]:
        """What is wrong with the values of a call, as far as they are known: those of specs (a loss) too."""
        found: list[FlowError] = []
        for name, value in arguments.items():
            if (error := wrong_value(self.fn, name, value, title)) is not None:
                found.append(error)
            if isinstance(value, Spec):
                found += value.wrong_values()
        return found

    def in_pieces(self, init: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
        """Whether this call may be run prompt by prompt."""
        return self.unit(init, arguments) != "call"

    def unit(self, init: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """Within what rows of this call depend on each other: ``row``, ``prompt``, or the whole ``call``."""
        said = self.pieces
        if callable(said):
            said = said(CallShape(init, arguments, frozenset()))
        return said if isinstance(said, str) else "prompt" if said else "call"

    @property
    def batch_parameter(self) -> str:
        """The parameter that holds the batch whose fields flow through: the first one."""
        return _first_parameter(self.fn)[1]

    # -- running on plain values ------------------------------------------------------------------------------

    def apply(self, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: CallInfo | None = None) -> Any:
        """Run the op on real values: hand it the fields it reads, merge what it adds.

        Raises FieldError when a read field is missing or an added one is there already or of another type.
        """
        kwargs = dict(kwargs)
        into: Mapping[str, str] = kwargs.pop("into", None) or {}
        arguments = self.bind(worker, args, kwargs)
        for error in self.wrong_values(arguments, self.title(worker)):
            raise error
        main = arguments.get(self.batch_parameter)
        have = frozenset(main.fields) if isinstance(main, Batch) else frozenset[str]()
        signature = self.signature(getattr(worker, "init_arguments", {}), arguments, have)
        if isinstance(main, Batch) and self.returns == "batch" and self.inherits:
            twice = [n for n in (into.get(n, n) for n in signature.adds) if n in have]
            if twice:
                raise written_twice(self.title(worker), twice, None)
        called = {n: self._narrow(worker, n, v, signature, call) for n, v in arguments.items()}
        if self.reads is not None:
            self._check_marks(worker, called, arguments)
        positional = (worker,) if self.is_method else ()
        bound = self.parameters.bind_partial(*positional)
        bound.arguments.update(called)
        with _watched(worker, self):
            result = self.fn(*bound.args, **bound.kwargs)
        if self.updates and hasattr(worker, "touched"):
            worker.touched()
        if self.returns != "batch" or not isinstance(main, Batch):
            return self._plain_numbers(worker, result)
        return self._merge(worker, main, result, signature, into)

    def title(self, worker: Any) -> str:
        name = getattr(worker, "name", None) or self.owner
        return f"{name}.{self.name}"

    def misread(
        self, title: str, worker: str, arguments: Mapping[str, Any], reads: Mapping[str, Mapping[str, Marks]]
    ) -> list[FlowError]:
        """What must not be done with what is read, by its marks: rows of others, log-probabilities of unlike kinds.

        ``reads``: the marks of the fields that are read, by parameter.
        """
        main = dict(reads.get(self.batch_parameter, {}))
        loss: Any = next((v for v in arguments.values() if isinstance(v, Spec)), None)
        shape = CallShape({}, arguments, frozenset(main), worker=worker, marks=main)
        own = self.marks(shape).get(OWN, UNMARKED) if self.marks is not None else UNMARKED
        reader = f"{title} with loss {loss.name}" if loss is not None else title
        found: list[FlowError | None] = [unlike(reader, {**main, OWN: own})]
        said = arguments.get("foreign")
        meant = getattr(loss, "foreign", False) or not (said is None or said is False)
        if self.cost == "train" and getattr(loss, "on", "") == "logprobs" and not meant:
            rows = main.get("tokens", UNMARKED)
            others = sorted(values(rows, "sampler") - {worker})
            found += [foreign_rows(title, loss, others, worker)] if others else []
            found += [] if others else [other_temperature(title, loss, own, rows)]
        return [error for error in found if error is not None]

    def _check_marks(self, worker: Any, called: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """Raise what :meth:`misread` finds in real rows, and ModelError for ids of another tokenizer."""
        reads = {p: {n: v[n].marks for n in v.fields} for p, v in called.items() if isinstance(v, Batch)}
        if not any(marks for fields in reads.values() for marks in fields.values()):
            return
        title = self.title(worker)
        for error in self.misread(title, worker.identity() if hasattr(worker, "identity") else "", arguments, reads):
            raise error
        own = worker.tokenizer_digest() if hasattr(worker, "tokenizer_digest") and "tokenizer" not in arguments else ""
        for name, found in (item for columns in reads.values() for item in columns.items()):
            if own and values(found, "tokenizer") - {own}:
                raise other_ids(title, name)

    def _narrow(self, worker: Any, param: str, value: Any, signature: Signature, call: CallInfo | None) -> Any:
        if not isinstance(value, Batch):
            return value
        if param in signature.reads:
            fields = signature.reads[param]
            for name in fields:
                if name not in value.fields:
                    raise missing_field(self.title(worker), name, value.fields, None, ())
            value = value.select(*fields)
        return value if call is None else value.with_call(call)

    def _plain_numbers(self, worker: Any, result: Any) -> Any:
        """Metrics and numbers as records and checkpoints hold them: those of NumPy and torch become Python's own."""
        if isinstance(result, Metrics):
            return Metrics({name: self._plain_number(worker, name, value) for name, value in result.items()})
        return self._plain_number(worker, "", result) if self.returns == "scalar" else result

    def _plain_number(self, worker: Any, name: str, value: Any) -> Any:
        if not hasattr(value, "item"):
            return value
        try:
            return value.item()
        except (RuntimeError, ValueError) as error:
            metric = f"the metric '{name}'" if name else "a number"
            raise WorkerError(
                f"{self.title(worker)} gives {metric} that is an array of shape {tuple(value.shape)}.",
                fix="Reduce it to one number first, with .mean() or .sum().",
            ) from error

    def _merge(self, worker: Any, main: Batch, result: Any, signature: Signature, into: Mapping[str, str]) -> Batch:
        columns: dict[str, Any]
        if self.rows == "regroup":
            made = _expect_batch(self.title(worker), result)
            rows, columns = made.select(), dict(made.columns)
        elif self.rows in ("same", "apart"):
            if not isinstance(result, Mapping):
                raise WorkerError(
                    f"{self.title(worker)} returned {type(result).__name__}, not a dict of the fields it adds.",
                    at=defined_at(self.fn),
                    fix=f"Return {{{', '.join(f'{n!r}: ...' for n in signature.adds)}}}; other fields flow through.",
                )
            rows = main if self.inherits else main.select()
            columns = dict(cast("Mapping[str, Any]", result))
        elif isinstance(result, Mapping):
            if self.rows != "expand":
                raise WorkerError(
                    f"{self.title(worker)} has rows='filter' and returned a dict.",
                    fix="Return batch.filter(mask), with the added fields by .with_columns(...).",
                )
            columns = dict(cast("Mapping[str, Any]", result))
            size = len(next(iter(columns.values())))
            if len(main) and size % len(main):
                raise RowsError(f"{self.title(worker)} made {size} rows from {len(main)}: not a whole number for each.")
            rows = main.expand(size // len(main) if len(main) else 0)
        else:
            made = _expect_batch(self.title(worker), result)
            rows, columns = main.take_keys(made.keys), {n: made[n] for n in made.fields if n not in main.fields}
        wrong = set(columns) ^ set(signature.adds)
        if wrong:
            raise FieldError(
                f"{self.title(worker)} declares that it adds {_names(signature.adds)}, but returned {_names(columns)}.",
                fix="Make adds= and the returned dict name the same fields.",
            )
        for name, column in columns.items():
            columns[name] = check_column(self.title(worker), name, column, signature.adds[name], len(rows))
        return rows.with_columns({into.get(n, n): c for n, c in columns.items()})


def _watched(worker: Any, op: Op) -> AbstractContextManager[None]:
    """What holds an op to its declaration while it runs; nothing where the worker has nothing to lose."""
    watch = getattr(worker, "_watched", None)
    return nullcontext() if watch is None else watch(op)


def _named(module: str, name: str) -> Any:
    """What a module has under a dotted name, where entries of a mapping count too; None where there is nothing."""
    found: Any = import_module(module)
    for part in name.split("."):
        found = cast("Any", found).get(part) if isinstance(found, Mapping) else getattr(found, part, None)
    return found


def _names(names: Any) -> str:
    return ", ".join(f"'{n}'" for n in sorted(names)) or "nothing"


def _expect_batch(title: str, result: Any) -> Batch:
    if isinstance(result, Batch):
        return result
    raise WorkerError(f"{title} changes rows and must return a Batch; it returned {type(result).__name__}.")


def check_column(title: str, name: str, data: Any, type_: FieldType, rows: int) -> Column:
    """The column that an op returned, held against its declaration."""
    ragged = type_.dims[0][1:] if type_.dims and type_.dims[0].startswith("*") else None
    column = data if isinstance(data, Column) else Column.of(data, dim=ragged, dtype=type_.dtype)
    if len(column) != rows:
        raise RowsError(f"{title} returned {len(column)} rows of '{name}' for {rows} rows.")
    if type_.dtype != "any" and (column.dtype != type_.dtype or column.dim != ragged):
        raise FieldError(f"{title} declares '{name}: {type_}' but returned {column.type}.")
    return column


@functools.lru_cache(maxsize=4096)
def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(fn)


@functools.lru_cache(maxsize=4096)
def _first_parameter(fn: Callable[..., Any]) -> tuple[bool, str]:
    """Whether a function is a method, and its first parameter besides ``self``."""
    names = list(_signature(fn).parameters)
    return names[:1] == ["self"], next((n for n in names if n != "self"), "batch")


def bad_call(parameters: Mapping[str, Any], given: Iterable[str], error: TypeError) -> tuple[list[str], str]:
    """What to say of arguments that do not fit: the names there are, and the fix."""
    known = [n for n in parameters if n != "self"]
    wrong = next((n for n in given if n not in known), None)
    meant = near(wrong, known) if wrong else None
    if wrong is not None:
        meant = meant_argument(wrong, known) or meant
        return known, f"Write {meant}= for {wrong}=." if meant else PLACE if is_place(wrong) else f"Leave out {wrong}=."
    lacking = re.search(r"missing a required (?:keyword-only )?argument: '(\w+)'", str(error))
    return known, f"Give {lacking[1]}=." if lacking else f"Its parameters are {', '.join(known)}."


def described(value: Any) -> str:
    """A value in a message: ``the function exact``, ``int 3``."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    if value is None:
        return "None"
    kinds = {BatchValue: "a batch", FieldValue: "a field", MetricsValue: "metrics", ScalarValue: "a number"}
    kind = next((k for cls, k in kinds.items() if isinstance(value, cls)), None)
    return kind or f"{type(value).__name__} {value!r}"[:60]


def missing_field(title: str, name: str, have: Any, at: Any, adders: Any, made: str | None = None) -> FieldError:
    """The error of a read of a field that nothing before it adds.

    ``adders`` are calls that would add it; ``made`` says which call added it to a batch that is not this one.
    """
    meant = near(name, have)
    fix = made or (
        f"Add {' or '.join(adders)} before this line."
        if adders
        else f"Did you mean '{meant}'?"
        if meant
        else f"Add an op that adds '{name}' before this line."
    )
    return FieldError(f"{title} reads '{name}', which no op before it adds.", at=at, have=have, fix=fix)


def written_twice(title: str, names: Sequence[str], at: Any) -> FieldError:
    """The error of an op that adds fields that the batch already has."""
    first = names[0]
    fix = (
        f"Give it another name: into={{'{first}': 'other_{first}'}}."
        if len(names) == 1
        else "Call it on the batch as it was before they were added."
    )
    return FieldError(f"{title} adds {_names(names)}, which the batch already has.", at=at, fix=fix)


class Metrics(dict[str, float]):
    """What an update reports, as numbers by name: ``Metrics(loss=0.1, grad_norm=1.2)``."""

    def __getattr__(self, name: str) -> float:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Spec:
    """A named function with parameters, handed to an op, such as a loss: what it reads counts as read by the op.

    ``remarks``: what ``check`` says of it where it is used.
    """

    name: str
    reads: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    remarks: tuple[str, ...] = ()
    allowed: Mapping[str, Allowed] = field(default_factory=dict[str, Allowed], kw_only=True)  # of the parameters

    def wrong_values(self) -> list[FlowError]:
        """What is wrong with the parameters, as far as they are known."""
        return [
            ProgramError(f"{self.name}: {problem(n, self.parameters[n], rule)}", fix=rule.mend(n, self.parameters[n]))
            for n, rule in self.allowed.items()
            if n in self.parameters and not rule.accepts(self.parameters[n])
        ]

    def with_parameters(self, parameters: Mapping[str, Any]) -> Spec:
        return replace(self, parameters=dict(parameters))

    def _no_arithmetic(self, other: Any) -> NoReturn:
        raise ProgramError(
            f"{self.name} is a loss, and losses are not added or multiplied.",
            at=sessions.caller(),
            fix="Give update one loss: weigh its parts (kl=, entropy=), train other rows along with pretraining=, or "
            "write the sum with rl.loss.",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _no_arithmetic

    def __repr__(self) -> str:
        inside = ", ".join(f"{k}={_written(v)}" for k, v in self.parameters.items())
        return f"{self.name}({inside})"


def _written(value: Any) -> str:
    """A parameter as Python writes it; a number of the program as it is computed."""
    return value.ref.text if isinstance(value, ScalarValue) and hasattr(value.ref, "text") else repr(value)


@overload
def op(fn: F, /) -> F: ...
@overload
def op(
    *,
    reads: Declared = "",
    adds: Declared = "",
    updates: str | None = None,
    rows: str = "same",
    cost: str = "none",
    external: bool = False,
    pieces: Pieces = False,
    marks: Callable[[CallShape], Mapping[str, Marks]] | None = None,
    owner: str = "",
    children: str = "",
) -> Declare: ...
def op(
    fn: Any = None,
    *,
    reads: Declared = "",
    adds: Declared = "",
    updates: str | None = None,
    rows: str = "same",
    cost: str = "none",
    external: bool = False,
    pieces: Pieces = False,
    marks: Callable[[CallShape], Mapping[str, Marks]] | None = None,
    owner: str = "",
    children: str = "",
) -> Any:
    """Declare a method of a worker, or a function, as an op.

    Args:
        reads: fields it is handed, ``"tokens, values: f32[*response]"``; a mapping by batch parameter, or a
            function of :class:`CallShape`, where that depends on the call; None hands it every field.
        adds: fields it returns, each with its type.
        updates: what it changes of its worker: ``"weights"``, or an attribute that the class ``keeps``.
        rows: what it does to the rows: ``same``, ``expand`` (each row becomes some), ``filter``, ``apart`` (the same
            rows with the added fields alone), ``regroup``.
        cost: its class for the cost model: ``none``, ``local``, ``forward``, ``generate``, ``train``, ``external``.
        external: it touches the world (a reward, an environment): its output is journalled, and never made twice.
        pieces: its rows do not depend on those of other prompts, so that a plan with ``chunks`` may run it in
            pieces; ``"row"``: nor on others of their prompt; or a function of :class:`CallShape` that says so.
        marks: a function of :class:`CallShape` that says where the fields it adds come from (:mod:`flowrl.marks`), for
            the trace; the columns that it returns have marks of their own.
        owner: name of the library it belongs to, for functions outside a worker.
        children: a parameter that takes a batch whose rows were made of those of the first one.

    The declaration is read at once: a wrong field type, row effect or cost raises WorkerError at the ``def``.
    """

    def make(declared_function: Callable[..., Any]) -> Op:
        at = sessions.caller()
        function = unchecked(declared_function)  # the op holds the rules of @takes against every call itself
        title = getattr(function, "__qualname__", str(function))
        for word, allowed, what in ((rows, ROWS, "rows"), (cost, COSTS, "cost")):
            if word not in allowed:
                meant = near(word, allowed)
                raise WorkerError(
                    f"{title}: {what}='{word}' is none of {', '.join(allowed)}.",
                    at=at,
                    fix=f"Write {what}='{meant or allowed[0]}'.",
                )
        for declared in (reads, adds):
            if declared is None or callable(declared):
                continue
            for text in [declared] if isinstance(declared, str) else declared.values():
                try:
                    parse_fields(text)
                except TypeTextError as error:
                    raise WorkerError(f"{title}: {error}.", at=at, fix=error.fix) from None
        if isinstance(adds, str):
            for name, type_ in parse_fields(adds).items():
                if type_ is None:
                    raise WorkerError(
                        f"{title} adds '{name}' without a type.", at=at, fix=f"Write {name}: f32[] or another type."
                    )
        made = Op(
            name=function.__name__,
            owner=owner or _owner(function),
            fn=function,
            reads=reads,
            adds=adds,
            updates=updates,
            rows=rows,
            cost=cost,
            external=external or cost == "external",
            returns=_returns(function, adds, rows, updates),
            pieces=pieces,
            children=children,
            marks=marks,
        )
        object.__setattr__(made, "__doc__", function.__doc__)
        object.__setattr__(made, "__wrapped__", function)
        return made

    return make(fn) if fn is not None else make


def _owner(function: Callable[..., Any]) -> str:
    """The class of a method; functions outside of a class belong to the user."""
    around = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    return "user" if around in ("", "<locals>") else around


def _returns(function: Callable[..., Any], adds: Declared, rows: str, updates: str | None) -> str:
    if adds or rows != "same":
        return "batch"
    said = function.__annotations__.get("return", "")
    text = (said if isinstance(said, str) else getattr(said, "__name__", str(said))).rpartition(".")[2]
    if text == "Metrics" or updates:
        return "metrics"
    if text in ("float", "int", "bool"):
        return "scalar"
    return "none" if text in ("None", "", "NoneType") else "batch"
