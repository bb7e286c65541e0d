"""Which calls add a field that is missing: what the fix of an error offers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from . import rl
from .errors import FlowError
from .graph.ops.field_types import parse_fields
from .graph.ops.op import Op
from .graph.ops.signature import CallShape
from .graph.tracing.trace_records import Adder
from .handle import Handle
from .workers.actor import Actor
from .workers.critic import Critic, RewardModel
from .workers.reference import Reference
from .workers.reward import FunctionReward

#: Calls of workers that a script may not have yet.
_OFFERS: tuple[tuple[type, str, str], ...] = (
    (Reference, "logprobs", "ref = flow.worker(fl.Reference, of=actor) and batch = ref.logprobs(batch)"),
    (Critic, "values", "critic = flow.worker(fl.Critic, ...) and batch = critic.values(batch)"),
    (Actor, "generate", "batch = actor.generate(batch)"),
    (FunctionReward, "score", "reward = flow.worker(fl.FunctionReward, fn) and batch = reward.score(batch)"),
    (RewardModel, "score", "reward = flow.worker(fl.RewardModel, ...) and batch = reward.score(batch)"),
)


def offers(handles: Sequence[Handle]) -> list[Adder]:
    """Calls that add fields: those of the workers that are there, then of rl, then of other workers."""
    adders: list[Adder] = []
    for handle in handles:
        for name in dir(handle.cls):
            op = inspect.getattr_static(handle.cls, name)
            if name in getattr(handle.cls, "reads_text", {}).values():
                continue  # the like of an op that is offered
            if isinstance(op, Op) and (adds := _added(op, handle.arguments)):
                adders.append(_adder(f"batch = {handle.name}.{name}({_wanted(op)})", op, adds))
    for name, op in vars(rl).items():
        if isinstance(op, Op) and isinstance(op.adds, str) and _wanted(op) == "batch":
            adders.append(_adder(f"batch = rl.{name}(batch)", op, op.adds))
    there = frozenset[str]().union(*(a.adds for a in adders))
    for cls, name, text in _OFFERS:
        op = inspect.getattr_static(cls, name)
        adds = _added(op, {})
        if adds and not frozenset(parse_fields(adds)) <= there:
            adders.append(_adder(text, op, adds, new=True))
    return adders


def _wanted(op: Op) -> str:
    """The arguments of a call: the batch, and what has no default."""
    lacking = [n for n, p in op.parameters.named.items() if p.default is p.empty and n not in ("self", "batch")]
    return ", ".join(["batch", *(f"{name}=..." for name in lacking)])


def _added(op: Op, init: Mapping[str, Any]) -> str:
    """Return what an op of a worker adds; empty where that depends on more than the worker."""
    if not callable(op.adds):
        return op.adds if isinstance(op.adds, str) else ""
    try:
        adds = op.adds(CallShape(init, {}, frozenset()))
    except (FlowError, KeyError):
        return ""
    return adds if isinstance(adds, str) else ""


def _adder(text: str, op: Op, adds: str, *, new: bool = False) -> Adder:
    """Return what an op adds to a batch that lacks it, and reads where that does not depend on the worker."""
    reads = op.reads
    if callable(reads) and not op.parameters.is_method:
        defaults = {n: p.default for n, p in op.parameters.named.items()}
        reads = reads(CallShape({}, defaults, frozenset()))
    wanted = parse_fields(reads) if isinstance(reads, str) else {}
    return Adder(text, frozenset(parse_fields(adds)) - frozenset(wanted), frozenset(wanted), new)
