"""Which calls may see older weights: those that sample rows which an update of the same worker is trained on."""

from __future__ import annotations

from .arithmetic import REDUCTIONS
from .op import Op
from .terms import TCall, Traced

Site = tuple[str, str, int]  # title, file, line: by it a running program knows a call of the trace


def site(call: TCall) -> Site:
    """By what a call of the program is known outside of its trace."""
    return (call.title, call.at.file, call.at.line)


def samples(op: Op, serves: tuple[str, ...] | list[str]) -> bool:
    """Whether an op looks at a copy that generates: it generates itself, or holds the handle of a worker."""
    return op.cost == "generate" or bool(serves)


def relaxed_calls(traced: Traced) -> frozenset[Site]:
    """Calls that sample rows for an update of the worker that they sample from (docs/schedule.md, rule 1).

    A call that samples for nothing but a number, such as an evaluation, is not among them: it sees precisely the
    updates before it.
    """
    found: set[Site] = set()
    for trail in traced.trails:
        rows: dict[int, frozenset[int]] = {}  # the samplers whose rows are in the result of a call
        for call in trail.calls:
            mine = frozenset[int]().union(*(rows.get(maker, frozenset()) for maker, _ in call.uses))
            if call.op.cost == "train" or call.updates == "weights":
                for sampler in (trail.calls[i] for i in mine):
                    if call.worker == sampler.worker or call.worker in sampler.serves:
                        found.add(site(sampler))
            if samples(call.op, call.serves):
                mine |= {call.index}
            rows[call.index] = mine if _gives_rows(call) else frozenset()
    return frozenset(found)


def _gives_rows(call: TCall) -> bool:
    if call.op.returns == "raw":  # a filter, a join of rows, or arithmetic: on fields it reads some, on numbers none
        fields = bool(call.signature.reads) or call.signature.rows != "same"
        return fields and call.op.name not in (*REDUCTIONS, "count")
    return call.op.returns == "batch"
