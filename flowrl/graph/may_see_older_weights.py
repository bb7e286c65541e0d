"""Which calls may see older weights: those that sample rows which an update of the same worker is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import At, ProgramError
from .ops.batch_ops import REDUCTIONS
from .ops.op import Op
from .tracing.trace_records import TCall, Traced

Site = tuple[str, tuple[tuple[str, int], ...]]  # title, and the lines that lead to the call from the program's own


def site(call: TCall) -> Site:
    """By what a running program knows a call of the trace: in a function that it calls twice there are two of them."""
    return (call.title, call.lines)


def samples(op: Op, serves: tuple[str, ...] | list[str]) -> bool:
    """Whether an op looks at a copy that generates: it generates itself, or holds the handle of a worker."""
    return op.cost == "generate" or bool(serves)


@dataclass(frozen=True)
class Trained:
    """An update, and a call whose rows it is trained on. ``carried``: they were sampled in an earlier step."""

    update: TCall
    sampler: TCall
    carried: bool


def trained_on(traced: Traced) -> list[Trained]:
    """Every pair of an update and a call that samples rows for it from the same worker, on every path."""
    pairs: list[Trained] = []
    for trail in traced.trails:
        rows: dict[int, frozenset[int]] = {}  # the samplers whose rows are in the result of a call
        for call in trail.calls:
            mine = frozenset[int]().union(*(rows.get(maker, frozenset()) for maker in call.makers))
            if call.op.cost == "train" or call.updates == "weights":
                for sampler in (trail.calls[i] for i in sorted(mine)):
                    if call.worker == sampler.worker or call.worker in sampler.serves:
                        carried = (sampler.loop, sampler.iteration) != (call.loop, call.iteration)
                        pairs.append(Trained(call, sampler, carried))
            if samples(call.op, call.serves):
                mine |= {call.index}
            rows[call.index] = mine if _gives_rows(call) else frozenset()
    return pairs


def relaxed_calls(traced: Traced) -> frozenset[Site]:
    """Calls that sample rows for an update of the worker that they sample from (docs/schedule.md, rule 2).

    A call that samples for nothing but a number, such as an evaluation, is not among them: it sees precisely the
    updates before it.
    """
    return frozenset(site(pair.sampler) for pair in trained_on(traced))


def main_samplers(traced: Traced) -> frozenset[Site]:
    """Calls that sample the rows which the first trained worker is trained on; without such, the first that samples.

    They are what the length of responses of a step is of; others are recorded under their own names.
    """
    pairs = sorted(trained_on(traced), key=lambda pair: pair.sampler.index)
    if pairs:
        return frozenset(site(pair.sampler) for pair in pairs if pair.update.worker == pairs[0].update.worker)
    first = next((c for t in traced.trails for c in t.calls if samples(c.op, c.serves)), None)
    return frozenset() if first is None else frozenset({site(first)})


def gives_rows(op: Op) -> bool:
    """Whether the result of an op holds rows, and not a number made of them."""
    if op.returns == "raw":  # a filter, a join of rows, or arithmetic
        return op.name not in (*REDUCTIONS, "count")
    return op.returns == "batch"


def _gives_rows(call: TCall) -> bool:
    if call.op.returns == "raw" and call.signature.rows == "same" and not call.signature.reads:
        return False  # arithmetic on numbers
    return gives_rows(call.op)


def stale_rows(title: str, loss: Any, why: str, at: At | None) -> ProgramError:
    """The error of an update whose loss does not correct for rows that may be older than the weights."""
    return ProgramError(
        f"{title}: loss {getattr(loss, 'name', loss)} does not correct for rows that are older than the weights, "
        f"and these may be: {why}.",
        at=at,
        fix="Take a loss with a ratio to rollout_logprobs, such as rl.ppo_clip(); "
        f"or write {title}(..., allow_stale=True).",
    )
