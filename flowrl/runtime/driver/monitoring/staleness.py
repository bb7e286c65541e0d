"""How old the rows of an update are, in versions of its weights, and whether its loss corrects for that."""

from __future__ import annotations

from ....batch import Batch
from ....graph.may_see_older_weights import samples, stale_rows
from ....graph.script.site import caller
from ....graph.stand_ins.values import BatchValue, FieldValue
from ....schedule.scheme import Scheme
from ...values.call import Call, maker
from ...values.remote_batch import RemoteBatch, oldest_of


def note_origins(call: Call, scheme: Scheme) -> None:
    """Note which workers the rows of a call were sampled from, and in which step."""
    rows = [v for v in call.values if isinstance(v, (BatchValue, FieldValue))]
    found = frozenset[tuple[str, int, bool]]().union(*(maker(v.ref).origins for v in rows))
    if samples(call.op, call.handles) and call.worker is not None:
        relaxed = scheme.setup.staleness > 0 and call.site in scheme.relaxed and not call.outside
        found |= {(worker, call.step, relaxed) for worker in call.handles or (call.worker,)}
    call.origins = found


def refuse_stale(call: Call, scheme: Scheme) -> None:
    """Raise ProgramError where an update is given rows that can be stale, and its loss does not correct for them.

    Rows are stale that were sampled in an earlier step, and may be stale when the plan relaxes the call that sampled
    them. ``allow_stale=True`` on the update overrides it.
    """
    said = call.arguments
    loss = said.get("loss")
    if call.op.cost != "train" or loss is None or getattr(loss, "corrects_stale", True) or said.get("allow_stale"):
        return
    for worker, step, relaxed in sorted(call.origins):
        if worker == call.worker and (relaxed or step < call.step) and worker in scheme.setup.followers:
            why = f"staleness is {scheme.setup.staleness}" if relaxed else f"some were sampled in step {step}"
            raise stale_rows(call.title, loss, why, caller())


def lags(call: Call, version: int, rows: Batch | RemoteBatch | None) -> dict[int, int]:
    """Prompt groups by lag: the publishes between the oldest token of a group and ``version``, that of the weights.

    Only of rows that the updated worker has sampled itself; empty where rows do not say their versions.
    """
    own = call.op.updates == "weights" and {origin[0] for origin in call.origins} == {call.worker}
    oldest = _oldest_versions(rows) if own and rows is not None else None
    if oldest is None or rows is None:
        return {}
    found: dict[int, int] = {}
    for group in rows.groups():
        seen = [v for v in (oldest[i] for i in group) if v is not None]
        if seen:
            lag = version - min(seen)
            found[lag] = found.get(lag, 0) + 1
    return found


def _oldest_versions(rows: Batch | RemoteBatch) -> list[int | None] | None:
    """The version that the oldest token of each row was sampled with; None for a row without tokens."""
    if "versions" not in rows:
        return None
    return rows.columns["versions"].oldest(rows.keys) if isinstance(rows, RemoteBatch) else oldest_of(rows)
