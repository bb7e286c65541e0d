"""What a run writes down and says of its ranks: some were started again, a pool has fewer, rows go on elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..storage.recorder import Recorder
from .progress import Progress


@dataclass(frozen=True)
class RankEvents:
    """``RankEvents(recorder, progress)``: each goes to events.jsonl, and to who looks at the run."""

    recorder: Recorder
    progress: Progress

    def note_restart(self, what: str) -> None:
        """Note that ranks were started again within a program."""
        self.recorder.event("renewed", what)
        self.progress.note(f"started again: {what}; the step goes on")

    def note_size(self, what: str, replicas: Mapping[str, Mapping[str, int]]) -> None:
        """Note that a pool has another number of ranks, and how many each has that is not whole."""
        self.recorder.event("resized", what)
        self.recorder.run_record(replicas=dict(replicas))
        self.progress.note(what)

    def note_kept(self, what: str) -> None:
        """Note that rows go on from tokens that a lost rank had told."""
        self.recorder.event("kept", what)
        self.progress.note(what)
