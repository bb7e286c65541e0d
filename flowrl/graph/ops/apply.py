"""How an op is run on plain values: it is handed the fields it reads, and what it adds is merged into its batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ...batch import Batch, Column, MissingField
from ...errors import FieldError, RowsError, WorkerError
from ...marks import other_ids, text_call, values
from ..script.site import defined_at, raised_at
from ..tracing.call_errors import misread, missing_field, quoted, undeclared, written_twice
from .check_arguments import wrong_values
from .field_types import FieldType
from .partial_answers import gathered
from .signature import Signature
from .update_metrics import Metrics

if TYPE_CHECKING:
    from ...batch import CallInfo
    from .op import Op

#: What ends a child that the code of an op has forked off, and that comes back from it; None leaves it alone.
IN_A_CHILD: ContextVar[Callable[[], None] | None] = ContextVar("flowrl_in_a_child", default=None)
_forks: list[None] = []  # one for each process between the first one and this one
os.register_at_fork(after_in_child=lambda: _forks.append(None))


def run(op: Op, worker: Any, arguments: Mapping[str, Any], into: Mapping[str, str], call: CallInfo | None) -> Any:
    """Run an op on real values by parameter. ``into`` renames the fields that it adds."""
    ready = _prepare(op, worker, arguments, into, call)
    forks = len(_forks)
    with _watch_state(worker, op), _named_reads(ready, arguments):
        try:
            result = _collected(ready, ready.begin())
        finally:
            _end_child(forks)
    return ready.finish(result)


def run_asking(
    op: Op, worker: Any, arguments: Mapping[str, Any], into: Mapping[str, str], call: CallInfo | None
) -> Generator[Any, Any, Any]:
    """Run an op that yields what it asks of its engine: yield that, and be sent the answer. Returns what :func:`run`
    does."""
    ready = _prepare(op, worker, arguments, into, call)
    with _watch_state(worker, op), _named_reads(ready, arguments):
        asking: Generator[Any, Any, Any] = ready.begin()
        result = yield from asking
    return ready.finish(result)


def _collected(ready: _Ready, given: Any) -> Any:
    """Return what the function of an op gives: of a generator what it comes to."""
    if isinstance(given, Generator) and ready.op.cost == "generate" and not ready.op.external:
        return _answered(cast("Any", given))
    if isinstance(given, Generator) and ready.main is not None and ready.op.external:
        own = _in_this_process(cast("Any", given))
        return gathered(ready.title, ready.called[ready.op.batch_parameter], own, ready.signature.adds)
    return cast("Any", given)


def _answered(asking: Generator[Any, Any, Any]) -> Any:
    """Have everything that an op asks answered at once; return what it returns."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(asked.answer())
    except StopIteration as end:
        return end.value


@dataclass(frozen=True)
class _Ready:
    """A call whose arguments were looked at. ``main`` is the batch to which it adds; None where it adds nothing."""

    op: Op
    worker: Any
    title: str
    called: Mapping[str, Any]
    signature: Signature
    into: Mapping[str, str]
    main: Batch | None

    def begin(self) -> Any:
        """Call the function of the op."""
        args, kwargs = self.op.parameters.passed(self.called)
        return self.op.fn(self.worker, *args, **kwargs) if self.op.parameters.is_method else self.op.fn(*args, **kwargs)

    def finish(self, result: Any) -> Any:
        """Return what the op gives, made of what its function has returned."""
        if self.op.updates and hasattr(self.worker, "mark_changed"):
            self.worker.mark_changed()
        if self.main is None:
            return _plain_numbers(self.op, self.title, result)
        return merge(self.op, self.title, self.main, result, self.signature, self.into)


def _prepare(
    op: Op, worker: Any, arguments: Mapping[str, Any], into: Mapping[str, str], call: CallInfo | None
) -> _Ready:
    """Return a call with the fields that it reads. Raises what is wrong with its arguments."""
    title = op.title(worker)
    for error in wrong_values(op.fn, arguments, title):
        raise error
    main = arguments.get(op.batch_parameter)
    batch = main if isinstance(main, Batch) else None
    have = frozenset(batch.fields) if batch is not None else frozenset[str]()
    signature = op.signature(getattr(worker, "init_arguments", {}), arguments, have)
    adds_to = batch if op.returns == "batch" else None
    if adds_to is not None and op.inherits:
        twice = [n for n in (into.get(n, n) for n in signature.adds) if n in have]
        if twice:
            raise written_twice(title, twice, None)
    called = {n: _narrow(title, n, v, signature, call) if isinstance(v, Batch) else v for n, v in arguments.items()}
    if op.reads is not None:
        _check_marks(op, worker, called, arguments)
    return _Ready(op, worker, title, called, signature, into, adds_to)


def _end_child(forks: int) -> None:
    """End this process where it is a child of the one that the op was called in, which was after so many forks."""
    if len(_forks) != forks and (end := IN_A_CHILD.get()) is not None:
        end()


def _in_this_process(given: Iterator[Any]) -> Iterator[Any]:
    """Yield what is given; a forked child that goes on with it ends."""
    forks = len(_forks)
    for one in given:
        _end_child(forks)
        yield one


def _check_marks(op: Op, worker: Any, called: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise what :func:`misread` finds in real rows, and ModelError for ids of another tokenizer."""
    reads = {p: {n: v[n].marks for n in v.fields} for p, v in called.items() if isinstance(v, Batch)}
    if not any(marks for fields in reads.values() for marks in fields.values()):
        return
    title = op.title(worker)
    for error in misread(op, title, worker.identity() if hasattr(worker, "identity") else "", arguments, reads):
        raise error
    own = worker.tokenizer_digest() if hasattr(worker, "tokenizer_digest") and "tokenizer" not in arguments else ""
    for name, own_marks in (item for columns in reads.values() for item in columns.items()):
        if own and values(own_marks, "tokenizer") - {own}:
            raise other_ids(title, name, instead=text_call(worker, op.name, title))


def _narrow(title: str, param: str, value: Batch, signature: Signature, call: CallInfo | None) -> Batch:
    """A batch with the fields that are read of it alone."""
    if param in signature.reads:
        fields = signature.reads[param]
        for name in fields:
            if name not in value.fields:
                raise missing_field(title, name, value.fields, None, ())
        value = value.select(*fields)
    return value if call is None else value.with_call(call)


@contextmanager
def _named_reads(ready: _Ready, arguments: Mapping[str, Any]) -> Generator[None]:
    """Have the error of a field that the op was not handed say that its ``reads=`` does not name it."""
    try:
        yield
    except MissingField as error:
        name = str(error.name)
        for param, declared in ready.signature.reads.items():
            whole = arguments.get(param)
            if name in declared or not isinstance(whole, Batch):
                continue
            if name in whole.fields or error.have == ", ".join(sorted(declared)):
                at = raised_at(error)
                raise undeclared(ready.op, ready.title, param, name, declared, whole.fields, at) from error
        raise


def _plain_numbers(op: Op, title: str, result: Any) -> Any:
    """Metrics and numbers as records and checkpoints hold them: those of NumPy and torch become Python's own."""
    if isinstance(result, Metrics):
        plain = Metrics({name: _plain_number(title, name, value) for name, value in result.items()})
        plain.rows_seen = result.rows_seen
        return plain
    return _plain_number(title, "", result) if op.returns == "scalar" else result


def _plain_number(title: str, name: str, value: Any) -> Any:
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError) as error:
        metric = f"the metric '{name}'" if name else "a number"
        raise WorkerError(
            f"{title} gives {metric} that is an array of shape {tuple(value.shape)}.",
            fix="Reduce it to one number first, with .mean() or .sum().",
        ) from error


def merge(op: Op, title: str, main: Batch, result: Any, signature: Signature, into: Mapping[str, str]) -> Batch:
    """The batch of a call with the fields that the op has returned, which are those that it declares."""
    rows, columns = _rows_made(op, title, main, result, signature)
    if columns.keys() != signature.adds.keys():
        raise FieldError(
            f"{title} declares that it adds {quoted(signature.adds)}, but returned {quoted(columns)}.",
            fix="Make adds= and the returned dict name the same fields.",
        )
    size = len(rows)
    return rows.with_columns(
        {into.get(n, n): check_column(title, n, c, signature.adds[n], size) for n, c in columns.items()}
    )


def _rows_made(op: Op, title: str, main: Batch, result: Any, signature: Signature) -> tuple[Batch, Mapping[str, Any]]:
    """The rows after a call, and the columns that it adds to them, as it returned them."""
    if op.rows == "regroup":
        batch = _expect_batch(title, result)
        return batch.select(), batch.columns
    if op.rows in ("same", "apart"):
        if not isinstance(result, Mapping):
            raise WorkerError(
                f"{title} returned {type(result).__name__}, not a dict of the fields it adds.",
                at=defined_at(op.fn),
                fix=f"Return {{{', '.join(f'{n!r}: ...' for n in signature.adds)}}}; other fields flow through.",
            )
        return main if op.inherits else main.select(), cast("Mapping[str, Any]", result)
    if not isinstance(result, Mapping):
        batch = _expect_batch(title, result)
        return main.take_keys(batch.keys), {n: batch[n] for n in batch.fields if n not in main.fields}
    if op.rows != "expand":
        raise WorkerError(
            f"{title} has rows='filter' and returned a dict.",
            fix="Return batch.filter(mask), with the added fields by .with_columns(...).",
        )
    columns = cast("Mapping[str, Any]", result)
    size = len(next(iter(columns.values())))
    if len(main) and size % len(main):
        raise RowsError(f"{title} made {size} rows from {len(main)}: not a whole number for each.")
    return main.expand(size // len(main) if len(main) else 0), columns


def _watch_state(worker: Any, op: Op) -> AbstractContextManager[None]:
    """Return a block that holds an op to its declaration; an empty one where the worker has nothing to lose."""
    if op.updates or not getattr(worker, "keeps", ()) or not hasattr(worker, "_watch_state"):
        return nullcontext()
    return worker._watch_state(op)


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
