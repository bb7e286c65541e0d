"""What calls were given, took and made, noted in the record of their step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ....batch import Batch, Column
from ....graph.ops.batch_ops import STRUCTURAL
from ....graph.ops.op import Op
from ....graph.tracing.reported_metrics import OF_POLICY
from ....schedule.events import Publish
from ....schedule.scheme import Scheme
from ....workers.decode_slots import DecodeSlots
from ....workers.engine import Published
from ....workers.environment_waits import EnvironmentWaits
from ...executor import PendingCall
from ...storage.traffic import bytes_made, bytes_read, prompt_tokens, row_tokens, rows_cut_off
from ...values.call import Call
from ...values.episode_counts import EpisodeCounts, count_episodes, failed_episodes
from ...values.remote_batch import RemoteBatch, RemoteColumn
from ...values.row_digests import RowDigests
from ...values.step_records import Made, RankTime, Release, Step, StepLog, Timing
from .gap_alarm import gap_in
from .row_ledger import RowLedger
from .staleness import lags

#: Metrics of all updates that are recorded beside those of a policy.
_OF_UPDATES = ("loss", "grad_norm", "clip_fraction", "truncated")


class StepNotes:
    """Writes into the records of ``steps``, from several threads at a time: each note is made under ``lock``."""

    def __init__(self, scheme: Scheme, steps: StepLog, lock: AbstractContextManager[Any], ledger: RowLedger) -> None:
        self.scheme, self.steps, self.lock, self.ledger = scheme, steps, lock, ledger

    def note_start(
        self,
        call: Call,
        chunk: int,
        worker: Any,
        arguments: Mapping[str, Any],
        rows: Batch | RemoteBatch | None,
        versions: Mapping[str, int],
    ) -> None:
        """Note what a call is given: bytes by field, versions of weights, and of an update how old its rows are."""
        read = bytes_read(call, worker, arguments) if arguments else {}
        old = lags(call, worker.version, rows) if call.op.updates == "weights" else {}
        with self.lock:
            traffic, node = self.steps.of(call).traffic, self._node(call)
            _add(traffic.calls, {node: int(chunk == 0)})
            _add(traffic.reads.setdefault(node, {}), read)
            _add(traffic.lags, old)
            seen = self._made(call).versions
            for name, version in versions.items():
                if version not in seen.setdefault(name, []):
                    seen[name].append(version)

    def note_end(
        self,
        call: Call,
        chunk: int,
        result: Any,
        given: Batch | RemoteBatch | None,
        start: float,
        end: float,
        *,
        due: float | None = None,
        after: Release | None = None,
        pending: PendingCall | None = None,
    ) -> None:
        """Note what a call took and made, what let it begin, and what ranks and engines did of it, as ``pending`` says.

        Arithmetic on fields takes no pool and no time worth a line.
        """
        rows = result if isinstance(result, (Batch, RemoteBatch)) else given
        length = count_tokens(rows, "tokens")
        pools = self.scheme.pools(call.op, call.worker)
        made, digests = bytes_made(result, given, call.op), digests_of(call.op, result, given)
        ranks = () if pending is None else pending.rank_times
        passes = () if pending is None else tuple(pending.take_passes())
        with self.lock:
            step, node = self.steps.of(call), self._node(call)
            record = self._made(call)
            if digests is not None:
                record.parts.append(digests)
            record.values.update(numbers_in(result))
            self._enter(call, result, given, digests)
            _add(step.traffic.makes.setdefault(node, {}), made)
            if call.worker is None and call.op.owner == "batch":
                return
            pool = pools[0] if pools else ""
            size = 0 if rows is None else len(rows)
            waited = {"issued": call.issued, "due": due, "after": after, "ranks": within(ranks, start, end)}
            how: dict[str, Any] = waited | _sampled(call.op, result) | {"passes": passes}
            step.timings.append(Timing(node, call.step, pool, start, end, size, length, call.index, chunk, **how))
            if call.op.updates == "weights" and (gap := gap_in(result)):
                step.gaps[node] = gap
            if call.op.updates == "weights" and (measured := _measured(result)):
                step.updates[node] = measured
            if call.op.cost in ("generate", "external") and call.op.rows == "expand":
                name = "" if call.site in self.scheme.main else node
                tokens, responses = step.sampled.get(name, (0, 0))
                step.sampled[name] = tokens + count_tokens(result, "response_ids"), responses + len(result)
                if (cut_off := rows_cut_off(result)) is not None:
                    _add(step.cut_off, {name: cut_off})
                if (episodes := count_episodes(result)) is not None:
                    step.episodes.setdefault(node, EpisodeCounts()).add(episodes)
                lengths = row_tokens(result, "response_ids")
                step.lengths.setdefault(name, []).extend(lengths)
                step.traffic.prompts += prompt_tokens(result)
                step.traffic.responses += lengths
                step.traffic.sources += [(node, key[0]) for key in result.keys] if lengths else []

    def note_rollout(self, call: Call, slots: DecodeSlots, waits: EnvironmentWaits) -> None:
        """Note which decode slots of an engine a call has used, and how long its environments took."""
        if not slots.there and not waits.count:
            return
        with self.lock:
            step, node = self.steps.of(call), self._node(call)
            if slots.there:
                before = step.slots.get(node, DecodeSlots())
                step.slots[node] = DecodeSlots(before.used + slots.used, before.there + slots.there)
            if waits.count:
                step.waits.setdefault(node, EnvironmentWaits()).add(waits)

    def note_draw(self, call: Call, rows: Batch, *, admit: bool) -> None:
        """Note the rows that a step has drawn; with ``admit`` they are those of its loop."""
        digests = RowDigests.of(rows, rows.fields)
        with self.lock:
            self.ledger.draw(rows.keys, admit=admit)
            self._made(call).parts.append(digests)

    def note_publish(
        self,
        command: Publish,
        moved: int,
        told: Published | None,
        start: float,
        end: float,
        *,
        due: float,
        after: Release | None,
    ) -> None:
        """Note how long a publish took, what let it begin, the bytes that it has moved, and what the engine has told of
        it; its step may be recorded already.
        """
        title = f"{command.worker}.publish"
        with self.lock:
            step = self.steps.step(command.step) if command.step >= 0 else self.steps.outside
            waited = {"call": command.id, "due": due, "after": after, "published": told}
            step.timings.append(Timing(title, command.step, command.pools[0], start, end, **waited))
            _add(step.traffic.weights, {title: moved})
            if told is not None:
                step.published[title] = told

    def note_swap(self, call: Call, title: str, pool: str, start: float, end: float) -> None:
        """Note how long a worker took to leave the memory of a pool before a call, or to come back."""
        with self.lock:
            self.steps.of(call).timings.append(Timing(title, call.step, pool, start, end))

    def take_late(self, recorded: int) -> list[Step]:
        """Return what was noted of steps since they were recorded, which are those below ``recorded``; once."""
        with self.lock:
            return [self.steps.steps.pop(number) for number in sorted(self.steps.steps) if number < recorded]

    def _enter(self, call: Call, result: Any, given: Batch | RemoteBatch | None, digests: RowDigests | None) -> None:
        """Enter into the ledger what became of the rows that a call was given."""
        op = call.op
        if given is None:
            return
        if op.updates is not None:
            self.ledger.train(given.keys)
        elif isinstance(result, (Batch, RemoteBatch)):
            if op.rows == "expand" and call.site in self.scheme.main:
                self.ledger.sample(result.keys, row_tokens(result, "response_ids"), failed_episodes(result))
            if op.rows == "same" and digests is not None and op.owner != "batch":
                self.ledger.compare(f"{call.title} of step {call.step}", given.keys, digests.keys)
            else:
                self.ledger.leave_out(given.keys, result.keys, self._reason(call))

    def _reason(self, call: Call) -> str:
        """Return by whom rows were left out, with the line of the script."""
        at = call.at
        return f"{call.title}, {Path(at.file).name}:{at.line}" if at is not None else call.title

    def _made(self, call: Call) -> Made:
        """Return the record of what a call made."""
        found = self.steps.of(call).made
        if call.index not in found:
            found[call.index] = Made(self._node(call), call.outside)
        return found[call.index]

    def _node(self, call: Call) -> str:
        """Return the id of a call in the graph."""
        return self.scheme.nodes.get(call.site, call.title)


def _sampled(op: Op, result: Any) -> dict[str, int]:
    """Return of a call that samples the tokens of its prompts, of the longest response, and those that each sampled
    token came after; nothing of another call."""
    if not op.asks:
        return {}
    prompts, responses = prompt_tokens(result), row_tokens(result, "response_ids")
    if not responses or len(prompts) != len(responses):
        return {}
    context = sum(n * p + n * (n - 1) // 2 for p, n in zip(prompts, responses, strict=True))
    return {"prompt": sum(prompts), "longest": max(responses), "context": context}


def _measured(metrics: Any) -> dict[str, float]:
    """Return what an update of a policy measures without being asked; nothing of another."""
    if not isinstance(metrics, Mapping) or "repetition" not in metrics:
        return {}
    ratios = [name for name in metrics if str(name).startswith("correction")]
    return {name: metrics[name] for name in (*_OF_UPDATES, *OF_POLICY, *ratios) if name in metrics}


def tells_no_reference(call: Call, metrics: Any) -> bool:
    """Return whether a call is an update of a policy whose loss does not report how far it is from the reference."""
    if call.op.updates != "weights" or not isinstance(metrics, Mapping) or "kl" in metrics:
        return False
    return "repetition" in metrics or bool(getattr(call.arguments.get("loss"), "of_policy", False))


def count_tokens(rows: Any, name: str) -> int:
    """Return how many tokens a field has in all rows; 0 where there is none."""
    if isinstance(rows, RemoteBatch):
        return rows.count(name)
    return int(rows[name].values.shape[0]) if isinstance(rows, Batch) and name in rows.fields else 0


def within(ranks: Sequence[RankTime], start: float, end: float) -> tuple[RankTime, ...]:
    """Return times of ranks as they can be in a call that took from ``start`` to ``end``: clocks of machines differ.

    >>> within([RankTime(0, 0.9, 1.5, 2.25)], 1.0, 2.0)
    (RankTime(rank=0, start=1.0, ready=1.5, end=2.0),)
    """
    return tuple(
        RankTime(time.rank, *(min(max(at, start), end) for at in (time.start, time.ready, time.end))) for time in ranks
    )


def digests_of(op: Op, result: Any, given: Batch | RemoteBatch | None) -> RowDigests | None:
    """Return digests of the fields that a call made; None for a number, and for arithmetic on fields.

    ``given`` is the first batch among its arguments. Of operations on batches they name the rows alone.
    """
    if op.owner == "batch":
        chosen = isinstance(result, (Batch, RemoteBatch)) and op.name not in STRUCTURAL
        return RowDigests(result.keys) if chosen else None
    if isinstance(result, (RemoteBatch, RemoteColumn)):
        before = {s for source in given.sources for s in source.stored} if isinstance(given, RemoteBatch) else set()
        stored = dict.fromkeys(s for source in result.sources for s in source.stored if s not in before)
        parts = [s.digests for s in stored if s.digests is not None]
        return RowDigests.merged(parts) if parts else RowDigests(result.keys)
    if isinstance(result, Column):
        alike = given is not None and len(given) == len(result)
        keys = given.keys if given is not None and alike else [(i,) for i in range(len(result))]
        return RowDigests.of(Batch(keys, {"value": result}), ["value"])
    if isinstance(result, Batch):
        handed_on = given.fields if given is not None and op.inherits else ()
        return RowDigests.of(result, [name for name in result.fields if name not in handed_on])
    return None


def numbers_in(result: Any) -> dict[str, Any]:
    """Return the numbers that a call gave, by name: its metrics, or ``value``."""
    if isinstance(result, Mapping):
        metrics: Mapping[str, Any] = result
        return {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    return {"value": result} if isinstance(result, (int, float)) else {}


def _add(total: dict[Any, int], counts: Mapping[Any, int]) -> None:
    for name, count in counts.items():
        total[name] = total.get(name, 0) + count
