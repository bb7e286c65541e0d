"""How much of each peak a run has reached: the figures of a roofline, fitted to its calls, so that they carry over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median
from typing import Any

from ..errors import PlanError
from ..placement.cost.calibrated_costs import SWAPS, Calibrated
from ..placement.cost.efficiency import Efficiency
from ..placement.cost.engine_curve import EngineCurve
from ..placement.cost.per_device_counts import rows_of_replica
from ..placement.cost.roofline import Roofline
from ..placement.cost.work import Work
from .fit_passes import calls_of, fit_passes
from .part_of_peak import LEAST, fit_part, solve
from .study import Study


@dataclass(frozen=True)
class FittedCall:
    """An op as the fitted roofline has it, and as it was: ``FittedCall("actor.update", 1.2, measured=1.25)``."""

    title: str
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """How far off, as a part of what was measured."""
        return abs(self.predicted - self.measured) / self.measured if self.measured else 0.0


@dataclass(frozen=True)
class FittedEfficiency:
    """Figures of a roofline with the calls that they were fitted to."""

    efficiency: Efficiency
    calls: tuple[FittedCall, ...]

    def report(self) -> str:
        """Return the figures, then each op as they have it and as it was."""
        figures = ", ".join(f"{name} {getattr(self.efficiency, name):.3g}" for name in _changed(self.efficiency))
        rows = [("op", "by the roofline s", "measured s", "off")]
        rows += [(c.title, f"{c.predicted:.4g}", f"{c.measured:.4g}", f"{100 * c.off:.1f} %") for c in self.calls]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
        return f"fitted: {figures}\n" + "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """As plain data: ``{"efficiency": {figure: value}, "fitted": [{"title", "predicted", "measured"}]}``."""
        figures = {name: getattr(self.efficiency, name) for name in (*_changed(self.efficiency), "error")}
        return {"efficiency": figures, "fitted": [vars(call) for call in self.calls]}


def fit_efficiency(study: Study, costs: Calibrated) -> FittedEfficiency:
    """Return the figures with which a roofline of the study's plan takes what the ops of the run took.

    ``study``: the program of the run under its plan, with its lengths. Of each kind of call one figure is fitted:
    ``train``, ``forward``, ``link`` and ``network`` for publishes, ``host`` for workers that leave the memory of a pool
    and come back, ``row_s`` for user code, and of an engine ``step_s``, with its curve also ``slot_s`` and ``prefill``.
    Where passes took a part of their time whatever their tokens were, that is ``call_s``; where they send weights
    between CPUs it tells ``link`` and ``network``, and what publishes take besides is ``publish_s``. A figure that
    would have to be above the peak is 1, and the call is off. Raises PlanError for a run none of whose calls are the
    program's.
    """
    fits = ((work, costs.fits.get(work.node) or costs.fits.get(work.title)) for work in _works(study))
    measured = [(work, fit) for work, fit in fits if fit is not None]
    if not measured:
        what = f"no call of {costs.run} is one of this program on devices."
        raise PlanError(what, have=costs.fits, fix="Name a run of this program.")
    took = [
        (work, costs.seconds(work) if work.kind == "generate" else fit.seconds(work.load.tokens))
        for work, fit in measured
    ]
    found = Efficiency(name=costs.run)
    if any(work.kind == "train" and work.role.assumes_recomputation(work.backend) for work, _ in measured):
        found = replace(found, recomputation=0.0)  # what the driver did not say was not done
    roofline = Roofline(study.plan.cluster)
    publishes = [(w, s) for w, s in took if w.kind == "publish"]
    found = fit_part(found, ("link", "network"), publishes, roofline)
    link = found.link
    for kind in ("train", "forward"):
        calls = [call for work, fit in measured if work.kind == kind for call in calls_of(work, fit, costs)]
        found = fit_passes(found, kind, calls, roofline, tells_link=found.link == link)
    if found.link != link:
        found = _beside_bytes(found, publishes, roofline)
    found = fit_part(found, ("host",), [(w, s) for w, s in took if w.kind in SWAPS], roofline)
    found = _external(found, [(w, s) for w, s in took if w.kind == "external"])
    for work, seconds in took:
        if work.kind == "generate":
            found = _engine(found, work, seconds, costs.curves.get(work.title), roofline)
    found = replace(found, sources={**found.sources, **dict.fromkeys(_changed(found), f"fitted to {costs.run}")})
    there = replace(roofline, efficiency=found)
    calls = tuple(FittedCall(work.title, there.seconds(work), seconds) for work, seconds in took)
    off = median(call.off for call in calls)
    return FittedEfficiency(replace(found, error=max(off, costs.error or 0.0)), calls)


def _works(study: Study) -> Iterable[Work]:
    """The calls of a step that take devices or processes, publishes, and workers that make room for others."""
    yield from (work for work in study.works.values() if work.kind != "none")
    for worker, role in study.roles.items():
        if role.trains and role.generates and role.model is not None:
            yield study.publish(worker)
    for pool, memory in study.memory.items():
        yield from (study.swap(pool, resident, what) for resident in memory.sizes for what in SWAPS)


def _beside_bytes(found: Efficiency, took: Sequence[tuple[Work, float]], roofline: Roofline) -> Efficiency:
    """The seconds of a publish that its bytes do not take, where other calls have told how fast links are."""
    there = replace(roofline, efficiency=found)
    left = [seconds - there.seconds(work) for work, seconds in took if there.seconds(work)]
    return replace(found, publish_s=max(0.0, sum(left) / len(left))) if left else found


def _external(found: Efficiency, took: Sequence[tuple[Work, float]]) -> Efficiency:
    turns = sum(ceil(w.load.rows / max(1, w.processes, w.mesh.data)) for w, _ in took)
    return replace(found, row_s=sum(seconds for _, seconds in took) / turns) if turns else found


def _engine(found: Efficiency, work: Work, took: float, curve: EngineCurve | None, roofline: Roofline) -> Efficiency:
    """Seconds of a decoded token that reading and computing do not account for."""
    bare = replace(roofline, efficiency=replace(found, step_s=0.0, slot_s=0.0))
    if curve is not None and work.role.model is not None and work.load.lengths is not None:
        rows = max(2, ceil(rows_of_replica(work.load, work.mesh, work.processes)))
        lengths = work.load.lengths
        each = curve.row + curve.context * (lengths.prompt + lengths.running)
        one, many = (bare.token_seconds(work, n) for n in (1, rows))
        if many - one > each * (rows - 1):  # computing is faster than was taken
            faster = min(1.0, found.decode * (many - one) / max(each * (rows - 1), 1e-12))
            found = replace(found, decode=faster)
            bare = replace(bare, efficiency=replace(bare.efficiency, decode=faster))
            one, many = (bare.token_seconds(work, n) for n in (1, rows))
        slot = max(0.0, (each * (rows - 1) - (many - one)) / (rows - 1))
        step = max(0.0, curve.step + each - one - slot)
        found = replace(found, slot_s=slot, step_s=step / work.mesh["pp"])
        return _prefill(found, work, curve, roofline)

    def seconds(step: float) -> float:
        return replace(roofline, efficiency=replace(found, step_s=step, slot_s=0.0)).seconds(work)

    return replace(found, step_s=solve(seconds, took, least=0.0, most=60.0, falls=False), slot_s=0.0)


def _prefill(found: Efficiency, work: Work, curve: EngineCurve, roofline: Roofline) -> Efficiency:
    target = curve.prompt * work.load.prompt * work.load.rows / max(1, curve.replicas)

    def seconds(part: float) -> float:
        return replace(roofline, efficiency=replace(found, prefill=part)).terms(work)["prefill"]

    return replace(found, prefill=solve(seconds, target, least=LEAST, most=1.0, falls=True))


def _changed(found: Efficiency) -> list[str]:
    assumed = Efficiency()
    return [name for name in assumed.sources if getattr(found, name) != getattr(assumed, name)]
