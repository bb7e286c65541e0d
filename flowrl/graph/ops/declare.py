"""How an op is declared: ``@op`` above a method of a worker or a function, whose declaration is read at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ...errors import At, WorkerError, near
from ...marks import Marks
from ..script.site import caller
from .check_arguments import unchecked
from .field_types import TypeTextError, parse_fields
from .op import Op
from .signature import CallShape, Declared, Pieces

if TYPE_CHECKING:
    from .op_for_type_checkers import Declare

ROWS = ("same", "expand", "filter", "apart", "regroup")
COSTS = ("none", "local", "forward", "generate", "train", "external")
F = TypeVar("F", bound=Callable[..., Any])


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
    joins: bool = False,
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
    joins: bool = False,
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
            One of ``generate`` may be a generator: it yields what it asks of its engine, and is sent the answer.
        external: it touches the world (a reward, an environment): its output is journalled, and never made twice.
            A generator that yields pairs (row of its batch, its fields) has each of them journalled as it comes.
        pieces: its rows do not depend on those of other prompts, so that a plan with ``chunks`` may run it in
            pieces; ``"row"``: nor on others of their prompt; or a function of :class:`CallShape` that says so.
        marks: a function of :class:`CallShape` that says where the fields it adds come from (:mod:`flowrl.marks`), for
            the trace; the columns that it returns have marks of their own.
        owner: name of the library it belongs to, for functions outside a worker.
        children: a parameter that takes a batch whose rows were made of those of the first one.
        joins: what it asks of a worker whose handle it takes joins that worker's engine row by row, each token with its
            version: a publish may come in between, and other calls of the kind are beside it.

    The declaration is read at once: a wrong field type, row effect or cost raises WorkerError at the ``def``.

    >>> class Scale(fl.Worker):
    ...     @fl.op(reads="rewards", adds="scaled: f32[]")
    ...     def scale(self, batch, *, by: float = 2.0):
    ...         return {"scaled": batch.rewards * by}
    >>> fl.open(Scale()).scale(fl.Batch.of(2, rewards=[1.0, 0.5])).scaled.to_list()
    [2.0, 1.0]
    """

    def make(declared_function: Callable[..., Any]) -> Op:
        at = caller()
        function = unchecked(declared_function)  # the op holds the rules of @takes against every call itself
        title = getattr(function, "__qualname__", str(function))
        _check_declaration(title, reads=reads, adds=adds, rows=rows, cost=cost, at=at)
        if inspect.isgeneratorfunction(function) and (external or cost != "generate"):
            _check_generator(title, external=external or cost == "external", rows=rows, pieces=pieces, at=at)
        declared = Op(
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
            joins=joins,
            marks=marks,
        )
        object.__setattr__(declared, "__doc__", function.__doc__)
        object.__setattr__(declared, "__wrapped__", function)
        return declared

    return make(fn) if fn is not None else make


def _check_declaration(title: str, *, reads: Declared, adds: Declared, rows: str, cost: str, at: At) -> None:
    """Raise WorkerError for a row effect or a cost that is not there, and for fields that cannot be read."""
    for word, allowed, what in ((rows, ROWS, "rows"), (cost, COSTS, "cost")):
        if word not in allowed:
            fix = f"Write {what}='{near(word, allowed) or allowed[0]}'."
            raise WorkerError(f"{title}: {what}='{word}' is none of {', '.join(allowed)}.", at=at, fix=fix)
    for declared in (reads, adds):
        if declared is None or callable(declared):
            continue
        for text in [declared] if isinstance(declared, str) else declared.values():
            try:
                parse_fields(text)
            except TypeTextError as error:
                raise WorkerError(f"{title}: {error}.", at=at, fix=error.fix) from None
    for name, type_ in parse_fields(adds).items() if isinstance(adds, str) else ():
        if type_ is None:
            fix = f"Write {name}: f32[] or another type."
            raise WorkerError(f"{title} adds '{name}' without a type.", at=at, fix=fix)


def _check_generator(title: str, *, external: bool, rows: str, pieces: Pieces, at: At) -> None:
    """Raise WorkerError for an op that yields its rows where these are not answers of the world, each on its own."""
    if external and rows in ("same", "apart") and (pieces == "row" or callable(pieces)):
        return
    raise WorkerError(
        f"{title} yields, which is for rows that the world answers one by one.",
        at=at,
        fix='Declare it with cost="external" and pieces="row", and let its rows as they are; or return its fields.',
    )


def _owner(function: Callable[..., Any]) -> str:
    """The class of a method; functions outside of a class belong to the user."""
    around = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    return "user" if around in ("", "<locals>") else around


def _returns(function: Callable[..., Any], adds: Declared, rows: str, updates: str | None) -> str:
    if adds or rows != "same":
        return "batch"
    annotation = function.__annotations__.get("return", "")
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = name.rpartition(".")[2]
    if text == "Metrics" or updates:
        return "metrics"
    if text in ("float", "int", "bool"):
        return "scalar"
    return "none" if text in ("None", "", "NoneType") else "batch"
