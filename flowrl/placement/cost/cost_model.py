"""How long a call takes: from a roofline, from a file of given seconds, or from a run that was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from .calibrate_run import calibrate
from .calibrated_costs import Calibrated
from .efficiency import Efficiency
from .given_costs import GivenCosts, is_calibrated
from .roofline import Roofline
from .work import Work


class Costs(Protocol):
    """Predicts seconds; ``source`` says from what: ``roofline``, ``given: FILE``, ``calibrated: RUN (error 4.1 %)``."""

    @property
    def source(self) -> str: ...

    def seconds(self, work: Work) -> float:
        """Return seconds that the call keeps its pool busy."""
        ...


def load_costs(path: str | Path) -> GivenCosts | Calibrated:
    """Read a file of ``--costs``: seconds by title, or what ``flowrl calibrate`` saved. Of a folder of a run it is what
    ``flowrl calibrate`` would save.

    Raises PlanError with file, line and the nearest right word, UsageError where nothing is there.
    """
    if (Path(path) / "timeline.jsonl").is_file():
        return calibrate(path)
    return Calibrated.load(path) if is_calibrated(path) else GivenCosts.load(path)


__all__ = ["Calibrated", "Costs", "Efficiency", "GivenCosts", "Roofline", "calibrate", "load_costs"]
