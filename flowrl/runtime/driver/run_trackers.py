"""The trackers of a run: opened with what its record says, and closed with a word on what they have lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...trackers.tracker import TrackedRun
from ...trackers.tracking import PATIENCE, Tracking
from ..storage.recorder import Recorder
from ..storage.run_record import configuration_of
from .run_settings import Settings


def open_tracking(settings: Settings, recorder: Recorder, *, resumed: bool, warn: Callable[[str], None]) -> Tracking:
    """Return the trackers that a run is asked for, told of every line that the recorder writes from now on."""
    record = recorder.record
    configuration = configuration_of({**record, "inputs": settings.inputs.record})
    graphs = record.get("graphs", {})
    run = TrackedRun(
        settings.out.name,
        Path(settings.script).stem or next(iter(graphs), "flowrl"),
        str(record.get("id", "")),
        settings.out,
        resumed,
        configuration,
        settings.plan or {},
        graphs,
    )
    tracking = Tracking(run, settings.track, warn)
    recorder.tell = tracking.tell
    return tracking


def close_tracking(
    tracking: Tracking, status: str, recorder: Recorder, note: Callable[[str], None], *, patience: float = PATIENCE
) -> None:
    """End the trackers of a run, and tell what did not arrive."""
    for name, count in tracking.close(status, patience).items():
        if count.lost:
            text = f"tracker {name}: {count.lost} of {count.given} lines did not arrive"
            recorder.event("tracker", text)
            note(text)
