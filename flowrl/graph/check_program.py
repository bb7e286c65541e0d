"""What is wrong with a program, found from its trace alone: no engine, no torch, no model is touched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import At, FlowError, ProgramError, WorkerError
from .may_see_older_weights import stale_rows, trained_on
from .ops.batch_ops import ELEMENTWISE, REDUCTIONS
from .ops.function_spec import Spec
from .record import WorkerInfo
from .tracing.trace_records import Lint, Reading, TCall, Traced, Trail, each_once


@dataclass(frozen=True)
class Report:
    """All findings on one program: ``errors`` stop a run, ``lints`` are remarks, ``proved`` is what cannot happen."""

    program: str
    errors: tuple[FlowError, ...]
    lints: tuple[Lint, ...]
    proved: tuple[str, ...] = ()

    def text(self) -> str:
        """The findings as they are printed."""
        blocks = [e.report() for e in self.errors] + [lint.report() for lint in self.lints]
        count = f"{_counted(len(self.errors), 'error')}, {_counted(len(self.lints), 'lint')}"
        blocks.append("\n  ".join((f"{self.program}: {'fine' if not blocks else count}", *self.proved)))
        return "\n\n".join(blocks)

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "errors": [e.to_json() for e in self.errors],
            "lints": [lint.to_json() for lint in self.lints],
            **({"proved": list(self.proved)} if self.proved else {}),
        }


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def check(traced: Traced) -> Report:
    """The findings of the trace, and what only the whole of it shows."""
    lints = [*traced.lints, *remarks(traced)]
    lints += [] if traced.errors else unread(traced)  # an error often leaves something unread
    errors = [*traced.errors, *([] if traced.errors else [*stale(traced), *endless(traced), *unread_failures(traced)])]
    return Report(traced.program, tuple(errors), tuple(lints))


def unlike_names(traced: Traced, *, sizes: Collection[str] = ()) -> list[Lint]:
    """Reads of token ids by a model of another name, where the tokenizers of the two are not both on this machine.

    ``sizes`` are names of models that only a plan is made for, which have no tokenizer.
    """
    told: dict[tuple[str, str], Reading] = {}  # one of each pair
    for read in (read for trail in traced.trails for read in trail.readings):
        if read.named and read.own not in sizes and read.other not in sizes:
            told.setdefault((read.own, read.other), read)
    return [
        Lint(
            "tokenizer",
            f"{read.title} reads '{read.column}' that {read.other} made, and has the model {read.own}. Their "
            "tokenizers are not both on this machine; the run compares them when the models open, and refuses ids of "
            "another one." + (f" If they differ, write {read.instead}." if read.instead else ""),
            read.at,
        )
        for read in told.values()
    ]


def stale(traced: Traced, staleness: int = 0) -> list[FlowError]:
    """Updates whose loss does not correct for rows that can be older than the weights, unless they allow it.

    Rows are older when they were kept from an earlier step, or may be when steps overlap.
    """
    errors: list[FlowError] = []
    for pair in trained_on(traced):
        loss = pair.update.arguments.get("loss")
        if loss is None or getattr(loss, "corrects_stale", True) or pair.update.arguments.get("allow_stale"):
            continue
        if pair.carried or staleness:
            why = "they are kept from an earlier step" if pair.carried else f"staleness is {staleness}"
            errors.append(stale_rows(pair.update.title, loss, why, pair.update.at))
    return each_once(errors)


def endless(traced: Traced) -> list[FlowError]:
    """Loops over a source that never ends, without a number of steps, which the program leaves on no path."""
    left: dict[At, bool] = {}
    for trail in traced.trails:
        for at, leaves in trail.endless.items():
            left[at] = left.get(at, False) or leaves
    return [
        ProgramError(
            "this loop has no end: the source begins again when it has ended, and no number of steps is given.",
            at=at,
            fix="Give flow.steps(source, steps) a number, or the source repeat=False.",
        )
        for at, leaves in left.items()
        if not (leaves or traced.capped)
    ]


def unread_failures(traced: Traced) -> list[FlowError]:
    """Calls that mark rows that failed, where nothing leaves them out: their values are nan."""
    read: set[tuple[Any, ...]] = set()
    marking: dict[tuple[Any, ...], tuple[TCall, str]] = {}
    for trail in traced.trails:
        for call in trail.calls:
            if "failed" in call.signature.adds and call.op.owner != "batch" and call.iteration in (0, 1):
                name = call.arguments.get("into", {}).get("failed", "failed")
                marking.setdefault(call.place, (call, name))
                if _is_heeded(trail, call.index, name):
                    read.add(call.place)
    return [
        ProgramError(
            f"{call.title} marks rows that failed in '{name}', and nothing leaves them out: "
            "their other fields are nan.",
            at=call.at,
            fix=f"Leave them out after this line: batch = batch.filter(~batch.{name}).",
        )
        for place, (call, name) in marking.items()
        if place not in read
    ]


def _is_heeded(trail: Trail, marking: int, name: str) -> bool:
    """Whether what a call adds under a name reaches more than numbers that are logged: a filter, an op, a condition."""
    computed = {marking}
    for call in trail.calls[marking + 1 :]:
        if any(use.call in computed and (use.call != marking or use.made == name) for use in call.uses):
            if call.op.owner != "batch" or call.op.name not in (*ELEMENTWISE, *REDUCTIONS):
                return True
            computed.add(call.index)
    return any(decision.calls & (computed - {marking}) for decision in trail.path.taken)


def unused(
    workers: Sequence[WorkerInfo], used: Iterable[str], at: Mapping[str, At], named: Callable[[str], bool]
) -> tuple[list[FlowError], list[Lint]]:
    """Return the workers that no program of a flow calls: errors, or remarks where the code of one has ``named`` it."""
    known = set(used)
    lost = [w for w in workers if w.name not in known]
    errors: list[FlowError] = [
        WorkerError(
            f"worker '{w.name}' ({w.kind}) is never used by a program of this flow.",
            at=at.get(w.name),
            fix="Call one of its ops, or take the worker out.",
        )
        for w in lost
        if not named(w.name)
    ]
    what = (
        "worker '{}' ({}) is called on no path that was followed, with these parameters; it is not opened, and a call "
        "of it ends the run."
    )
    return errors, [Lint("unused", what.format(w.name, w.kind), at[w.name]) for w in lost if named(w.name)]


def remarks(traced: Traced) -> list[Lint]:
    """Return the remarks of the losses of a program, at the calls that they are given to."""
    calls = [call for trail in traced.trails for call in trail.calls]
    specs = [(spec, call.at) for call in calls for spec in call.arguments.values() if isinstance(spec, Spec)]
    return each_once(Lint("loss", remark, at) for spec, at in specs for remark in spec.remarks)


def unread(traced: Traced) -> list[Lint]:
    """Calls of workers whose every result goes unread on every path: work for nothing."""
    read: set[tuple[Any, ...]] = set()
    adding: dict[tuple[Any, ...], TCall] = {}
    for trail in traced.trails:
        wanted = {c for call in trail.calls for c in call.makers} | {use.call for use in trail.logged}
        for call in trail.calls:
            worker_op = call.op.owner != "batch"
            if worker_op and call.op.returns == "batch" and not call.updates and call.iteration in (0, 1):
                adding.setdefault(call.place, call)
                if call.index in wanted:
                    read.add(call.place)
    return [
        Lint("unread", f"{call.title} adds {', '.join(call.signature.adds) or 'rows'}, which nothing reads.", call.at)
        for place, call in adding.items()
        if place not in read
    ]
