"""An op as a process runs it: its warnings and faults are told, and what touches the world is asked once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from ...batch import CallInfo
from ...graph.ops.op import Op
from ...workers.decode_passes import DecodePasses
from ...workers.model_worker import ModelWorker
from ...workers.user_code.rows_in_progress import Notes
from ..storage.answers.external_answers import once
from ..storage.journal import Journal
from .python_warnings import hear_warnings
from .user_code_watch import user_call


def run_op(
    op: Op,
    worker: Any,
    arguments: Mapping[str, Any],
    into: Mapping[str, str],
    info: CallInfo,
    *,
    place: tuple[int, float] | None,
    journal: Callable[[], Journal],
    notes: Notes,
    warn: Callable[[str], None],
) -> Any:
    """Return what an op gives, run with a worker of this process; raises what it raises.

    ``place``: the numbers of its program and of the call, for one that touches the world; it is answered from the
    ``journal`` where it was made before. ``notes`` are of the rows that user code is at.
    """
    with heard(op, worker, arguments.values(), info, notes=notes, warn=warn):
        if place is None:
            return op.run(worker, arguments, into, info)
        return once(journal(), place, op, worker, arguments, into, info, warn)


def take_passes(op: Op, worker: Any) -> tuple[DecodePasses, ...]:
    """Return how long passes of the engine took that an op samples with: those since it was asked last."""
    return worker.take_passes() if op.asks and isinstance(worker, ModelWorker) else ()


@contextmanager
def heard(
    op: Op, worker: Any, arguments: Iterable[Any], info: CallInfo, *, notes: Notes, warn: Callable[[str], None]
) -> Generator[None]:
    """Run a call of an op inside, or a part of one: its warnings and faults are told."""
    with user_call(op, worker, arguments, info, notes, warn), hear_warnings(warn, info):
        yield
