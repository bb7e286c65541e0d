"""What a trace knows of where fields come from: the marks that data and ops add, and the reads that marks forbid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import At
from ...marks import UNMARKED, Marks, marks, other_ids, saved_vocabulary, text_call, values
from ..ops.function_spec import Spec
from ..ops.op import Op
from ..ops.signature import CallShape, Signature
from ..stand_ins.values import BatchValue, is_handle
from .call_errors import misread
from .trace_records import Reading, TBatch

if TYPE_CHECKING:
    from .tracer import Tracer

FIRST = "the flow's first model"


class Provenance:
    """The marks of one path. ``owner`` is the flow's first model, whose tokenizer reads what says no other.

    A tokenizer is known by what was said of it, such as the name of its model. Where two are told differently nobody
    knows before they are loaded whether they are the same: such reads are noted, to be looked at when models open.
    """

    def __init__(self, tracer: Tracer, owner: Any) -> None:
        self.tracer, self.owner = tracer, owner
        self.said: dict[str, Any] = {}  # of each tokenizer: what loads it
        self.names: set[str] = set()  # of those that are a name or a folder

    def of_data(self, source: Any) -> Marks:
        """The marks of token ids that reading a source makes."""
        return marks(tokenizer=self._known(getattr(source, "tokenizer", None) or FIRST))

    def added(self, op: Op, worker: Any, arguments: Mapping[str, Any], batch: TBatch | None) -> Mapping[str, Marks]:
        """The marks of the fields that a call adds."""
        if op.marks is None:
            return {}
        reader = self._reader(worker, arguments)
        fields = dict(batch.fields) if batch is not None else {}
        return op.marks(
            CallShape(
                worker.arguments if worker else {},
                arguments,
                frozenset(fields),
                worker=reader.name if reader is not None and _has_model(reader) else "",
                tokenizer=self._known(reader),
                marks={name: field.marks for name, field in fields.items()},
            )
        )

    def check(
        self, op: Op, worker: Any, title: str, arguments: Mapping[str, Any], signature: Signature, at: At
    ) -> tuple[str, ...]:
        """Report what a call must not do with what it reads. Gives the other workers that sampled what it trains on."""
        if op.reads is None:
            return ()
        reads = {
            param: {n: value.ref.fields[n].marks for n in signature.reads.get(param, ()) if n in value.ref.fields}
            for param, value in arguments.items()
            if isinstance(value, BatchValue)
        }
        name = worker.name if worker else ""
        for error in misread(op, title, name, arguments, reads):
            error.at = at
            self.tracer.wrong(error)
        own = self._known(self._reader(worker, arguments))
        if "tokenizer" in arguments:  # an op that reads text that another worker wrote
            own = self._known(arguments["tokenizer"] or FIRST)
        for field, known in (item for fields in reads.values() for item in fields.items()):
            for maker in sorted(values(known, "tokenizer") - {own}) if own else ():
                self._other(title, field, maker, own, text_call(worker and worker.cls, op.name, title), at)
        losses = [value for value in arguments.values() if isinstance(value, Spec)]
        trains = op.cost == "train" and any(getattr(loss, "on", "") == "logprobs" for loss in losses)
        rows = reads.get(op.batch_parameter, {}).get("tokens", UNMARKED)
        return tuple(sorted(values(rows, "sampler") - {name})) if trains else ()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _other(self, title: str, field: str, maker: str, own: str, instead: str, at: At) -> None:
        """Ids of a tokenizer that was told differently: an error where it is another one, else noted."""
        theirs, mine = map(saved_vocabulary, (maker, own))
        if theirs and mine and theirs != mine:
            error = other_ids(title, field, maker, own, instead)
            error.at = at
            self.tracer.wrong(error)
        elif not (theirs and mine):
            named, (reader, writer) = {own, maker} <= self.names, (self.said[own], self.said[maker])
            self.tracer.trail.readings.append(Reading(title, field, reader, writer, own, maker, at, instead, named))

    def _reader(self, worker: Any, arguments: Mapping[str, Any]) -> Any:
        """Return whose tokenizer reads the ids of a call: the worker, or the policy that it is handed."""
        if worker is None or _has_model(worker) or _declared(worker) is not None:
            return worker
        return next((v for v in arguments.values() if is_handle(v) and _has_model(v)), worker)

    def _known(self, said: Any) -> str:
        """Return what a tokenizer is called; empty for a worker that reads no ids, or a model without a tokenizer."""
        thing, seen = said, 0
        while said is not None and (said is FIRST or is_handle(said)) and seen < 8:
            seen += 1
            if said is FIRST:
                said = thing = self.owner
            else:
                said = _declared(said)
                thing = thing if is_handle(thing) and _has_model(thing) else said
        if said is None:
            return ""
        if isinstance(said, (str, Path)):
            self.names.add(name := str(said))
        else:
            name = _written(said)
        self.said.setdefault(name, thing)
        return name


def _has_model(handle: Any) -> bool:
    return hasattr(handle.cls, "build")


def _declared(handle: Any) -> Any:
    """Return what a worker's declaration says of the tokenizer whose ids it reads."""
    return handle.cls.declared_tokenizer(handle.arguments) if hasattr(handle.cls, "declared_tokenizer") else None


def _written(said: Any) -> str:
    """A tokenizer, or a function that builds one, in a message; one text for each."""
    name = getattr(said, "__qualname__", "")
    if not name or "<" in name:  # what stands inside of a function may be made anew with other values
        return f"{name or type(said).__name__} at {id(said):x}"
    return f"{said.__module__}.{name}"
