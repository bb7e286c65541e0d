"""A run beside its prediction: what the costs of another run have for it, node by node, and how far off that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..schedule.report.figures import totals
from ..schedule.simulation import Simulation, steady

STEP = "a steady step"


@dataclass(frozen=True)
class Predicted:
    """Seconds of a node, of a call on average: ``Predicted("actor.generate", predicted=1.2, measured=1.25)``.

    None where one of the two has no such node.
    """

    node: str
    predicted: float | None
    measured: float | None

    @property
    def off(self) -> float | None:
        """How far off the prediction is, as a part of what was measured."""
        if self.predicted is None or not self.measured:
            return None
        return abs(self.predicted - self.measured) / self.measured


def beside(flown: Simulation, real: Simulation) -> tuple[Predicted, ...]:
    """Return the nodes of a simulation and of the run that it forecasts side by side; the last one is a steady step."""
    ours, theirs = _means(flown), _means(real)
    nodes = dict.fromkeys((*theirs, *ours))
    step = Predicted(STEP, steady_seconds(flown), steady_seconds(real))
    return (*(Predicted(node, ours.get(node), theirs.get(node)) for node in nodes), step)


def in_words(rows: Sequence[Predicted]) -> str:
    """Return a table of them."""
    cells = [("node", "predicted s", "measured s", "off")]
    for row in rows:
        off = "-" if row.off is None else f"{100 * row.off:.1f} %"
        cells.append((row.node, _seconds(row.predicted), _seconds(row.measured), off))
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    padded = ([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, 4))] for line in cells)
    return "\n".join("  ".join(line) for line in padded)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _means(simulation: Simulation) -> Mapping[str, float]:
    """Seconds of a call of each node, on average."""
    found: dict[str, float] = {}
    for total in totals(simulation):
        found.setdefault(total.node, total.mean)
    return found


def steady_seconds(simulation: Simulation) -> float:
    """Return seconds from the last call of a step to that of the next, by the bars alone: runs are counted alike."""
    ends: dict[int, float] = {}
    for bar in simulation.bars:
        if bar.step >= 0 and not bar.node.endswith(".publish"):
            ends[bar.step] = max(ends.get(bar.step, 0.0), bar.end)
    return steady(ends, simulation.makespan, simulation.staleness)
