"""Forward passes and updates of a run: the part of the peak that they reach, and what does not follow their size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..placement.cost.calibrated_costs import Calibrated, Call, Fit
from ..placement.cost.efficiency import Efficiency
from ..placement.cost.roofline import Roofline
from ..placement.cost.work import Work, Workload
from .part_of_peak import LEAST, fit_part, solve, with_part


def fit_passes(
    found: Efficiency, kind: str, calls: Sequence[tuple[Work, float]], roofline: Roofline, *, tells_link: bool
) -> Efficiency:
    """The part of the peak that forward passes or updates reach, and seconds of each that do not follow its size.

    Both are fitted to relative errors of all calls. The seconds of one are those that are known already, or none,
    unless the calls tell more (Schwarz 1978). On CPUs, which compute nothing while they send, they are the traffic of
    sharded weights, as far as there is any: that fits ``link`` and ``network`` anew, with ``tells_link``.
    """
    found = fit_part(found, (kind,), calls, roofline)
    there = replace(roofline, efficiency=replace(found, call_s=0.0))
    looked = [(work, seconds, there.terms(work)) for work, seconds in calls if seconds > 0]
    sends = tells_link and any(_sends(work, roofline) for work, _, _ in looked)
    rows: list[tuple[float, float, float]] = []
    for work, seconds, terms in looked:
        computed = terms["compute"] + terms.get("bubble", 0.0)
        sent = terms["weights"] if sends else 0.0
        beside = sum(terms.values()) - computed - sent
        rows.append(((sent if sends else _times_called(work)) / seconds, computed / seconds, 1 - beside / seconds))
    if not any(computed for _, computed, _ in rows):
        return found
    known = 1.0 if sends else found.call_s  # of traffic so many times as much as at the link that is known
    call, slower = _fit_call(rows, known)
    if slower:
        found = with_part(found, (kind,), min(1.0, getattr(found, kind) / slower))
    if not sends:
        return replace(found, call_s=call)
    if call == known:
        return found
    sent = call * sum(terms["weights"] for _, _, terms in looked)
    return _fit_link(found, [work for work, _, _ in looked], sent, roofline)


def calls_of(work: Work, fit: Fit, costs: Calibrated) -> list[tuple[Work, float]]:
    """The calls of an op as works with their own rows and tokens; where costs have none, some that the fit says."""
    calls = [call for call in costs.calls.get(work.node) or costs.calls.get(work.title, ()) if call.rows]
    if calls:
        return [(_of_size(work, call), call.seconds) for call in calls]
    rows = {work.load.rows, *((work.load.rows // 2, work.load.rows // 4) if fit.per_token else ())}
    works = [replace(work, load=replace(work.load, rows=count)) for count in sorted(rows) if count]
    return [(each, fit.seconds(each.load.tokens)) for each in works]


def _of_size(work: Work, call: Call) -> Work:
    """The work of a call: its prompts are as long as those of others, and as many rows are to one."""
    load, rows = work.load, int(call.rows)
    prompt = min(load.prompt, call.tokens / rows)
    prompts = max(1, load.rows // load.group)
    response = call.tokens / rows - prompt
    return replace(work, load=Workload(rows, prompt, response, group=max(1, rows // prompts)))


def _sends(work: Work, roofline: Roofline) -> bool:
    """Whether a call's seconds tell how fast weights are sent: they are sharded over CPUs."""
    kinds = {roofline.cluster.kind(device).name for device in work.devices} if roofline.cluster is not None else set()
    return kinds == {"cpu"} and roofline.terms(work).get("weights", 0.0) > 0


def _times_called(work: Work) -> int:
    """How many optimizer steps an update makes; a forward pass is one."""
    return work.minibatches * work.epochs if work.kind == "train" else 1


def _fit_link(found: Efficiency, works: Sequence[Work], sent: float, roofline: Roofline) -> Efficiency:
    """The figures with the part of ``link`` and ``network`` at which the traffic of these works takes so long."""

    def seconds(part: float) -> float:
        there = replace(roofline, efficiency=with_part(found, ("link", "network"), part))
        return sum(there.terms(work)["weights"] for work in works)

    return with_part(found, ("link", "network"), solve(seconds, sent, least=LEAST, most=1.0, falls=True))


def _fit_call(rows: Sequence[tuple[float, float, float]], known: float) -> tuple[float, float]:
    """The seconds of a call besides computing, and how many times as long that takes.

    Of each call a row has the times that these seconds are in it, what computing takes, and what both take together, as
    parts of what was measured.
    """
    fitted = {call: _slower(rows, call) for call in (known, *_call_seconds(rows))}
    left = {call: sum((y - call * c - slower * x) ** 2 for c, x, y in rows) for call, slower in fitted.items()}
    call = min(left, key=left.__getitem__)
    if left[call] >= left[known] * len(rows) ** (-1 / len(rows)):
        call = known
    return call, fitted[call]


def _slower(rows: Sequence[tuple[float, float, float]], call: float) -> float:
    """How many times as long computing takes, by least squares, where a call has so many seconds besides."""
    return max(0.0, sum((y - call * c) * x for c, x, y in rows) / sum(x * x for _, x, _ in rows))


def _call_seconds(rows: Sequence[tuple[float, float, float]]) -> list[float]:
    """The seconds of a call that calls tell, by least squares; none where they are all of one size, or below 0."""
    cc, cx, xx = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    cy, xy = (sum(r[i] * r[2] for r in rows) for i in (0, 1))
    settled = cc * xx - cx * cx
    if len(rows) < 3 or settled < 1e-6 * cc * xx:
        return []
    call = (cy * xx - xy * cx) / settled
    return [call] if call > 0 else []
