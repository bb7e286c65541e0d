"""How far a run is: the programs that have ended, what they left, and the checkpoint that it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...graph.script.surroundings import Surroundings
from ...lowering.lower import Execution
from ..executor import Executor
from ..storage.checkpoints import checkpoint_folder as checkpoint
from ..storage.checkpoints.choose_checkpoint import Chosen
from ..storage.checkpoints.left_behind import LeftBehind
from ..storage.journal import Journal
from ..storage.recorder import Recorder
from ..values.step_records import ResumePoint


class RunPosition:
    """Where a run is in its programs. ``warn`` is told of what a resume would not have, ``note`` of what is damaged.

    ``seen`` says what was seen in the lines of metrics; ``on_cut_back`` is given what it said for a checkpoint to which
    records were cut back, or None where they begin anew, and where an older flowrl wrote it.
    """

    def __init__(
        self,
        executions: Sequence[Execution],
        executor: Executor,
        recorder: Recorder,
        behind: LeftBehind,
        *,
        journal: Journal,
        warn: Callable[[str], None],
        note: Callable[[str], None],
        seen: Callable[[], Mapping[str, Any]],
        on_cut_back: Callable[[Mapping[str, Any] | None], None],
    ) -> None:
        self.executions, self.executor, self.recorder = executions, executor, recorder
        self.number = 0  # of the program that runs
        self.finished: list[tuple[str, dict[str, Any]]] = []
        self.chosen: Chosen | None = None  # what the run goes on from, while nothing was written after it
        self._behind, self._journal, self._warn, self._note = behind, journal, warn, note
        self._seen, self._on_cut_back = seen, on_cut_back
        self._around: dict[int, Surroundings] = {}  # the Python state around each program as it began
        self._left: dict[str, Any] = {}  # what programs that have ended left at module level, as of LeftBehind.record

    def enter(self, execution: Execution) -> None:
        """Note the Python state around the program that begins."""
        self._around.setdefault(self.number, Surroundings(execution.fn))

    def leave(self, execution: Execution, last: dict[str, Any]) -> None:
        """The program has ended with these metrics: note what it left, and go on to the next one."""
        self.finished.append((execution.program, last))
        self._note_left(execution)
        self.number += 1

    def _note_left(self, execution: Execution) -> None:
        """Write down what programs have changed at module level so far; say what of it a resume would not have."""
        record, lost = self._behind.record(execution.fn)
        said = {loss["name"] for loss in self._left.get("lost", ())}
        for loss in lost:
            if loss.name not in said:
                self._warn(
                    f"'{execution.program}' leaves what no checkpoint can hold: {loss}; a resume does not have it"
                )
        before = [loss for loss in self._left.get("lost", ()) if loss["name"] not in {new.name for new in lost}]
        self._left = {**record, "lost": [*before, *map(asdict, lost)]}

    def record(self, marks: Mapping[str, Any], calls: int = 0, reads: int = 0) -> dict[str, Any]:
        """Return how far the run is, for a manifest; ``calls`` and ``reads`` are those of the program that runs."""
        return {
            "stage": self.number,
            "finished": list(self.finished),
            "marks": marks,
            "left": self._left,
            "seen": self._seen(),
            "journal": self._journal.parts(self.number, calls, reads),
        }

    def marks(self) -> dict[str, Any]:
        """Return how long the files of the run are."""
        self.settle_in()
        return self.recorder.marks()

    def settle_in(self) -> None:
        """Do in the folder what waited until it was sure that the run goes on: leave out what is done again."""
        chosen, self.chosen = self.chosen, None
        if chosen is None:
            return
        self.recorder.settle()
        if chosen.undone and chosen.folder is None:
            self.recorder.run_record(checkpoints=False)
        chosen.settle()

    def restore_surroundings(self, first: int) -> None:
        """Bring back the Python state as it was before a program and all after it."""
        for number in [n for n in sorted(self._around, reverse=True) if n >= first]:
            self._around.pop(number).restore()

    def go_on(self, chosen: Chosen, *said: str) -> tuple[int, ResumePoint | None]:
        """Go on from a checkpoint: the program, and where in it. ``said``: of what else is damaged."""
        manifest = chosen.manifest
        marks = manifest["marks"] if manifest else dict.fromkeys(self.recorder.marks(), 0)
        for text in filter(None, (*chosen.said, *said, *self.recorder.cut_back(marks))):
            self.recorder.event("damaged", text)
            self._note(text)
        self._on_cut_back(manifest.get("seen") if manifest else None)
        self.chosen = chosen
        self.finished = [(p, m) for p, m in manifest["finished"]] if manifest else []
        self._left = manifest.get("left", {}) if manifest else {}
        self.executor.restore(manifest or {})
        resume = self._restore(chosen.folder, manifest) if chosen.folder is not None and manifest is not None else None
        return manifest["stage"] if manifest else 0, resume

    def _restore(self, folder: Path, manifest: Mapping[str, Any]) -> ResumePoint | None:
        program = manifest["program"]
        left = self.executions[manifest["stage"] :]  # the program that goes on, and those after it
        apart = {f"{name}.generate": name for name in (left[0].servers if left else ())}
        for name in sorted(manifest["stamps"], key=lambda n: n.endswith(".generate")):
            if name.endswith(".generate") and name not in apart:  # the plan of this run has one copy for both
                continue
            worker = self.executor.open_server(apart[name]) if name in apart else self.executor.open(name)
            checkpoint.load_worker(folder, name, worker)
            worker.stamp = manifest["stamps"][name]
        if program is None:
            return None
        return ResumePoint(
            calls=program["calls"],
            reads=program["reads"],
            steps=program["steps"],
            call_digest=program["course"],
            live={i: self.executor.put(v) for i, v in checkpoint.load_live(folder, manifest).items()},
            cursors=program["cursors"],
            draws=program["draws"],
            held=tuple(program.get("held", ())),
            variables=program.get("variables"),
            ledger=program.get("ledger"),
            evaluated=program.get("evaluated", {}),
            stopped=program.get("stopped", {}),
        )
