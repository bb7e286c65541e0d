"""Trackio: a run in its local database, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from .tracker import Level, TrackedRun, table


class Trackio:
    """Logs with ``trackio``, which prints where to; ``trackio show`` shows it."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio
        from PIL import Image

        self._trackio = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or run.project,
            name=f"{run.name}-{run.id[:8]}",  # a run in the same folder as an older one is another run
            config={**run.flat_configuration(), "plan": run.plan_text()},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if not run.resumed:
            for program, picture in run.pictures().items():
                self._run.log({f"graph/{program}": trackio.Image(Image.open(BytesIO(picture)))}, step=0)

    def log(self, program: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a program under its name."""
        self._run.log({f"{program}/{name}": value for name, value in numbers.items()}, step=step)

    def samples(self, program: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        names, entries = table(rows)
        self._run.log({f"{program}/samples": self._trackio.Table(columns=names, data=entries)}, step=step)

    def event(self, kind: str, text: str, level: Level) -> None:
        """Send an alert, which trackio prints, keeps, and sends on where TRACKIO_WEBHOOK_URL says."""
        if not hasattr(self._run, "alert"):  # an older trackio
            return
        levels = {"alarm": self._trackio.AlertLevel.ERROR, "warning": self._trackio.AlertLevel.WARN}
        self._run.alert(kind, text, levels.get(level, self._trackio.AlertLevel.INFO))

    def close(self, status: str) -> None:
        self._run.finish()
