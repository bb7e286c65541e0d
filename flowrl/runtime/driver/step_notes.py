"""What calls were given, took and made, noted in the record of their step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from ...batch import Batch
from ...graph.may_see_older_weights import Site
from ...schedule.events import Publish
from ...schedule.scheme import Scheme
from ..storage.traffic import bytes_made, bytes_read, row_tokens
from ..values.call import Call
from ..values.remote_batch import RemoteBatch
from ..values.step_records import Step, StepLog, Timing
from .gap_alarm import gap_in
from .staleness import lags


class StepNotes:
    """Writes into the records of ``steps``, from several threads at a time: each note is made under ``lock``."""

    def __init__(self, scheme: Scheme, steps: StepLog, lock: AbstractContextManager[Any]) -> None:
        self.scheme, self.steps, self._lock = scheme, steps, lock

    def note_start(
        self, call: Call, chunk: int, worker: Any, arguments: Mapping[str, Any], rows: Batch | RemoteBatch | None
    ) -> None:
        """Note what a call is given: bytes by field, and of an update how old its rows are."""
        read = bytes_read(call, worker, arguments) if arguments else {}
        old = lags(call, worker.version, rows) if call.op.updates == "weights" else {}
        with self._lock:
            traffic, node = self.steps.of(call).traffic, self._node(call)
            _add(traffic.calls, {node: int(chunk == 0)})
            _add(traffic.reads.setdefault(node, {}), read)
            _add(traffic.lags, old)

    def note_end(
        self, call: Call, chunk: int, result: Any, given: Batch | RemoteBatch | None, start: float, end: float
    ) -> None:
        """Note what a call took and made. Arithmetic on fields takes no pool and no time worth a line."""
        rows = result if isinstance(result, (Batch, RemoteBatch)) else given
        length = count_tokens(rows, "tokens")
        pools = self.scheme.pools(call.op, call.worker)
        made = bytes_made(result, given, call.op)
        with self._lock:
            step, node = self.steps.of(call), self._node(call)
            _add(step.traffic.makes.setdefault(node, {}), made)
            if call.worker is None and call.op.owner == "batch":
                return
            pool = pools[0] if pools else ""
            size = 0 if rows is None else len(rows)
            step.timings.append(Timing(node, call.step, pool, start, end, size, length, call.index, chunk))
            if call.op.updates == "weights" and (gap := gap_in(result)):
                step.gaps[node] = gap
            if call.op.cost in ("generate", "external") and call.op.rows == "expand":
                name = "" if site_of(call) in self.scheme.main else node
                tokens, responses = step.sampled.get(name, (0, 0))
                step.sampled[name] = tokens + count_tokens(result, "response_ids"), responses + len(result)
                step.traffic.prompts += row_tokens(result, "prompt_ids")
                step.traffic.responses += row_tokens(result, "response_ids")

    def note_publish(self, command: Publish, moved: int, start: float, end: float) -> None:
        """Note how long a publish took, and the bytes that it has moved; its step may be recorded already."""
        title = f"{command.worker}.publish"
        with self._lock:
            step = self.steps.step(command.step) if command.step >= 0 else self.steps.outside
            step.timings.append(Timing(title, command.step, command.pools[0], start, end))
            _add(step.traffic.weights, {title: moved})

    def take_late(self, recorded: int) -> list[Step]:
        """Return what was noted of steps since they were recorded, which are those below ``recorded``; once."""
        with self._lock:
            return [self.steps.steps.pop(number) for number in sorted(self.steps.steps) if number < recorded]

    def _node(self, call: Call) -> str:
        """Return the id of a call in the graph."""
        return self.scheme.nodes.get(site_of(call), call.title)


def site_of(call: Call) -> Site:
    """Return by what a call is known to the trace."""
    return (call.title, call.at.file, call.at.line) if call.at is not None else (call.title, "", 0)


def count_tokens(rows: Any, name: str) -> int:
    """Return how many tokens a field has in all rows; 0 where there is none."""
    if isinstance(rows, RemoteBatch):
        return rows.count(name)
    return int(rows[name].values.shape[0]) if isinstance(rows, Batch) and name in rows.fields else 0


def _add(total: dict[Any, int], counts: Mapping[Any, int]) -> None:
    for name, count in counts.items():
        total[name] = total.get(name, 0) + count
