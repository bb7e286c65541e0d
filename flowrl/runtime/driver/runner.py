"""A run: programs one after another over the same workers, recorded in a folder, stopped and continued at will."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...errors import DiskError, ModelError, RankLost
from ...graph.script.surroundings import Surroundings
from ...graph.stand_ins import current_session as sessions
from ...lowering.lower import Execution
from ...marks import other_ids, vocabulary
from ...workers.user_code.rows_in_progress import Notes
from ..executor import Executor, RunServices
from ..local.python_warnings import Raised, show_again
from ..local.user_code_watch import Watch, died_before, name_rows, same_folder
from ..storage.changes_since_start import Continuation, find_continuation
from ..storage.checkpoints import checkpoint_folder as checkpoint
from ..storage.checkpoints.background_writer import CheckpointWriter
from ..storage.checkpoints.choose_checkpoint import Chosen, newest_whole
from ..storage.checkpoints.left_behind import LeftBehind
from ..storage.disk import size, writing
from ..storage.failed_rows import FailedRows
from ..storage.journal import Journal
from ..storage.recorder import Recorder, versions
from ..storage.run_folder import take_folder
from ..storage.run_origin import origin
from ..storage.run_record import read_record
from ..values.step_records import Hooks, Interrupted, Point, ResumePoint, Step
from .gap_alarm import GapAlarm
from .learning_stalled import STEPS, stalled
from .progress import Progress
from .run_settings import Outcome, Settings
from .run_texts import describe_continuation, labels, start_record, unused_words
from .run_trackers import close_tracking, open_tracking
from .running_program import Running
from .stop_signals import Stop

WARNINGS = 1000  # of Python's that a run tells, each of another place or text
LOSSES = 10  # of processes without a step in between: then something is wrong that starting again does not mend


class Runner:
    """Runs programs in a folder, one after another. One per run."""

    def __init__(self, executions: Sequence[Execution], executor: Executor, settings: Settings) -> None:
        self._lock = take_folder(
            settings.out, resume=settings.resume, overwrite=settings.overwrite, unlock=settings.unlock
        )
        self._out = settings.out  # as it was said; user code may change the working directory
        settings = replace(settings, out=settings.out.absolute())
        self.executions, self.executor, self.settings = executions, executor, settings
        try:
            self._died = died_before(settings.out) if settings.resume else ""
            record, self._damage = read_record(settings.out) if settings.resume else ({}, "")
            self.recorder = Recorder(
                settings.out, groups=settings.trajectories, every=settings.trajectories_every, record=record
            )
            self.journal = Journal(settings.out / "journal.jsonl", beside="journal*.jsonl")
        except BaseException:  # what lies there cannot be read; a process that lives on, such as a notebook's, lets go
            self._lock.release()
            raise
        self._labels = labels([execution.program for execution in executions])  # by which records tell them apart
        self.progress = Progress(quiet=settings.quiet)
        self._services = RunServices(
            self.journal,
            Notes(settings.out),
            self._warn,
            self._note_loss,
            self._note_renewal,
            failed=FailedRows(self.journal, self._warn),
        )
        self.executor.attach(self._services)
        self._raised: dict[str, Raised] = {}  # the warnings of Python's that were told, by place and text
        show_again()
        self._gap_alarm = GapAlarm()
        self._stop = Stop(self.progress.note)
        self._writer = CheckpointWriter(settings.out / "checkpoints", self._lock.check)
        self._overdue = False  # a checkpoint was lost with a rank that was writing it
        self._waits = False  # whether it was told that there is no memory to write them in the background
        self._chosen: Chosen | None = None  # what the run goes on from, while nothing was written after it
        self._asked: dict[str, Any] = {}
        self._number = 0
        self._losses, self._fresh = 0, False  # of processes in a row, and whether a step was done since the last
        self._finished: list[tuple[str, dict[str, Any]]] = []
        self._around: dict[int, Surroundings] = {}  # the Python state around each program as it began
        self._left: dict[str, Any] = {}  # what programs that have ended left at module level, as of LeftBehind.record
        self._behind = LeftBehind(*(settings.programs or [e.fn for e in executions]))

    def run(self) -> Outcome:
        """Run what is left of the programs. Raises what a program raised, after a line in the events."""
        try:
            with same_folder():
                return self._run()
        finally:
            self._services.notes.close()
            self._lock.release()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _run(self) -> Outcome:
        settings = self.settings
        point = None
        if settings.resume:
            point = find_continuation(
                settings.out,
                self.executions,
                settings.inputs,
                self.recorder.record,
                self.journal,
                self._behind,
                allow_changed=settings.allow_changed,
            )
        self._record_start(point)
        self._tracking = open_tracking(settings, self.recorder, resumed=point is not None, warn=self._warn)
        first, resume = 0, None
        status, digest = "done", None
        try:
            with self._stop.listening(), self.progress, Watch(self.settings.out, self._warn).watching():
                if (text := unused_words(self.settings)) is not None:
                    self._warn(text)
                if self._died:
                    self._warn(self._died)
                if point is not None:
                    self._say_what_changed(point)
                    try:
                        first, resume = self._go_on(point.chosen, self._damage, *self.journal.damage)
                    except RankLost as lost:
                        first, resume = self._recover(lost)
                while digest is None:
                    self._number = first
                    try:
                        if first < len(self.executions):
                            self._run_program(self.executions[first], resume)
                            first, resume = first + 1, None
                        else:
                            digest = self._finish()
                    except RankLost as lost:
                        first, resume = self._recover(lost)
        except Interrupted:
            status = "interrupted"
        except KeyboardInterrupt:
            self._last_words("stopped", "at once; what came after the last checkpoint is done again", "interrupted")
            raise
        except BaseException as error:
            self._last_words("failed", f"{type(error).__name__}: {error}", "failed")
            raise
        return self._end(status, digest)

    def _last_words(self, kind: str, text: str, status: str) -> None:
        """Note why a run ends, as far as the disk takes it, and end the ranks."""
        with suppress(DiskError):
            if not self._lock.lost:  # else the folder is another run's
                if status == "failed":
                    self._end_writing()
                close_tracking(self._tracking, status, self.recorder, self.progress.note, patience=5.0)
                self.recorder.event(kind, text)
                self.recorder.run_record(status=status)
                self.recorder.curve()
        self._writer.give_up()
        self.recorder.close()
        self.journal.close()
        self.executor.close()

    def _end_writing(self) -> None:
        """Have a checkpoint that is being written come to its end; the run fails for another reason."""
        try:
            self._writer.wait()
        except Exception as error:
            self.recorder.event("checkpoint", f"the last one could not be written: {error}")

    def _run_program(self, execution: Execution, resume: ResumePoint | None) -> None:
        kinds = {w["name"]: w["kind"] for w in self.settings.graphs[self._number]["workers"]}
        opening = {n: kinds.get(n, "to be copied") for n in execution.workers}  # of=NAME opens what is not called
        self.progress.opening(execution.program, opening, str(self._out))
        self._around.setdefault(self._number, Surroundings(execution.fn))
        workers = {name: self.executor.open(name) for name in execution.workers}
        followers = execution.scheme.setup.followers
        servers = {name: self.executor.open_server(name) for name in execution.servers}
        self._compare_tokenizers(execution)
        self.executor.start_program(execution.workers, resumed=resume is not None)
        for name in () if resume is not None else {**followers, **servers}:
            version = workers[name].read_version()  # what the program before has updated is published
            if name in servers and servers[name].version != version:
                self.executor.install(name, version)
        self._services.failed.reset()
        session = Running(
            execution,
            self._number,
            self.settings.seed,
            executor=self.executor,
            journal=self.journal,
            hooks=Hooks(
                commit=lambda step: self._commit(execution, step),
                note=lambda step: self.recorder.note(self._labels[self._number], step),
                checkpoint=self._checkpoint,
                marks=self._marks,
                due=lambda step: self._overdue or (step + 1) % self.settings.checkpoint_every == 0,
                stop=lambda: self._stop.asked,
                sampled=self.recorder.sampled,
                settle=self._services.failed.settle,
            ),
            resume=resume,
        )
        steps = execution.parameters.get("steps")
        self.progress.start(execution.program, steps if isinstance(steps, int) else None, resume.steps if resume else 0)
        self.recorder.restart_clock()
        wait, can_go_on = True, False
        try:
            with sessions.using(session):
                execution.fn(**execution.parameters)
                can_go_on = session.finish()
        except Interrupted:
            self._writer.wait()
            raise
        except KeyboardInterrupt:
            wait = False
            raise
        finally:
            session.close(wait)
        label = self._labels[self._number]
        mine = [h for h in self.recorder.history if h["program"] == label]
        if (text := stalled(mine, ended=True)) is not None:
            self._warn(f"{label}: {text}")
        self._finished.append((execution.program, mine[-1] if mine else {}))
        self._note_left(execution)
        self._number += 1
        if can_go_on:
            self.executor.sync()
            self._writer.wait()
            checkpoint.end(self.settings.out / "checkpoints", self._done_so_far(self._marks()))
        else:
            self._checkpoint(Point(None, {}, self._marks()))

    def _compare_tokenizers(self, execution: Execution) -> None:
        """Raise ModelError, with the line, where a call would read ids that another tokenizer made."""
        for read in execution.readings:
            mine, theirs = (vocabulary(self.executor.tokenizer(said)) for said in (read.reader, read.maker))
            if mine and theirs and mine != theirs:
                error = other_ids(read.title, read.column, read.other, read.own)
                error.at = read.at
                raise error

    def _marks(self) -> dict[str, Any]:
        """How long the files of the run are."""
        self._settle_in()
        return self.recorder.marks()

    def _settle_in(self) -> None:
        """Do in the folder what waited until it was sure that the run goes on: leave out what is done again."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            return
        self.recorder.settle()
        if chosen.undone and chosen.folder is None:
            self.recorder.run_record(checkpoints=False)
        chosen.settle()

    def _commit(self, execution: Execution, step: Step) -> None:
        self._lock.check()
        self._look_after(self._writer.check)
        self._settle_in()
        tokenizer = None
        if step.rows is not None:
            with suppress(ModelError):  # a flow without one: trajectories are written without texts
                tokenizer = self.executor.tokenizer(None)
        label = self._labels[self._number]
        line = self.recorder.commit(label, step, tokenizer)
        lately = [h for h in self.recorder.history[-STEPS - 1 :] if h["program"] == label]
        if (text := stalled(lately)) is not None:
            self._warn(f"{label}: {text}")
        rang = self._gap_alarm.rang
        for text in self._gap_alarm.look(label, line["step"], step.gaps):
            self.recorder.event("gap", text)
            self.progress.note(text)
        if self._gap_alarm.rang and not rang:  # with the weights that the next rows are sampled with, for flowrl gap
            self._overdue = True
            self.progress.note(f"look for the cause when the next step is done: flowrl gap {self._out}")
        self._fresh = True
        for settle in self._services.on_commit:
            settle(step.number)
        self.progress.step(line, step.timings)

    def _done_so_far(self, marks: Mapping[str, Any]) -> dict[str, Any]:
        """How far the run is, for a manifest."""
        return {"stage": self._number, "finished": list(self._finished), "marks": marks, "left": self._left}

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

    def _checkpoint(self, point: Point) -> None:
        """Keep all that the rest of the run depends on, in one piece: copied here, and written meanwhile."""
        self._lock.check()
        self._look_after(self._writer.wait)
        self.executor.sync()
        manifest = {
            **self._done_so_far(point.marks),
            "program": point.record,
            "inputs": self.settings.inputs.record,
            "seed": self.settings.seed,
            "run": self.recorder.record.get("id"),
            "record": {**self.recorder.record, **self._asked, "checkpoints": True},
        }

        def capture(after: int) -> checkpoint.Begun:
            return self.executor.capture(self.settings.out / "checkpoints", manifest, point.live, after=after)

        if self._gap_alarm.rang and point.record is not None:
            self.recorder.keep_rows(point.record["steps"])
        lacking = self._writer.begin(capture, self._note_written)
        self._overdue = False
        if lacking and not self._waits:
            self._waits = True
            self._warn(
                f"steps wait until checkpoints are written: a copy of the state lacks {size(lacking)} of host memory"
            )

    def _note_written(self) -> None:
        """A checkpoint is there. What a resumed run was asked holds from here on, also when it is resumed again."""
        if self._asked or not self.recorder.record.get("checkpoints"):
            self.recorder.run_record(**self._asked, checkpoints=True)
            self._asked = {}

    def _look_after(self, ask: Callable[[], None]) -> None:
        """Raise what has kept a checkpoint from being written. One that a rank was lost in is taken again."""
        try:
            ask()
        except RankLost as lost:
            self._overdue = True
            self.recorder.event("checkpoint", f"one was not finished, and is taken again after this step: {lost.what}")

    def _recover(self, lost: RankLost) -> tuple[int, ResumePoint | None]:
        """Start again what was lost, and go back to the last checkpoint: where to go on from. Raises what is past help.

        Steps after the checkpoint are done again with the same rows and seeds; what touched the world is answered from
        the journal.
        """
        self._look_after(self._writer.wait)  # it may be the one to go back to
        while True:
            try:
                self._note_loss(lost)
                self.executor.recover(lost)
                return self._gone_back()
            except RankLost as again:
                if again is lost:
                    raise
                lost = again

    def _note_loss(self, lost: RankLost) -> None:
        """Write a loss down. Raises it when there were too many without a step in between."""
        name_rows(lost, self.settings.out)
        self.recorder.event("lost", str(lost))
        self.progress.note(f"lost: {lost.what}")
        self._losses, self._fresh = 1 if self._fresh else self._losses + 1, False
        if self._losses > LOSSES:
            raise lost

    def _note_renewal(self, what: str) -> None:
        self.recorder.event("renewed", what)
        self.progress.note(f"started again: {what}; the step goes on")

    def _gone_back(self) -> tuple[int, ResumePoint | None]:
        """Go back to the last checkpoint, or to the start: the program to go on with, and where in it."""
        if self._chosen is not None:  # nothing was done since the run was resumed
            chosen = replace(self._chosen, said=())
        else:
            chosen = newest_whole(self.settings.out, self.recorder.record, self.journal)
        first = chosen.manifest["stage"] if chosen.manifest else 0
        for number in [n for n in sorted(self._around, reverse=True) if n >= first]:
            self._around.pop(number).restore()
        if chosen.manifest is None:
            self.executor.reset()
        first, resume = self._go_on(chosen)
        self.recorder.event("recovered", self._describe(chosen.manifest))
        self.progress.note(f"went on {self._describe(chosen.manifest)}")
        return first, resume

    def _go_on(self, chosen: Chosen, *said: str) -> tuple[int, ResumePoint | None]:
        """Go on from a checkpoint: the program, and where in it. ``said``: of what else is damaged."""
        manifest = chosen.manifest
        marks = manifest["marks"] if manifest else dict.fromkeys(self.recorder.marks(), 0)
        for text in filter(None, (*chosen.said, *said, *self.recorder.cut_back(marks))):
            self.recorder.event("damaged", text)
            self.progress.note(text)
        self._tracking.rewind(self.recorder.history)
        self._chosen = chosen
        self._finished = [(p, m) for p, m in manifest["finished"]] if manifest else []
        self._left = manifest.get("left", {}) if manifest else {}
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
        )

    def _say_what_changed(self, point: Continuation) -> None:
        self.progress.note(f"resumed {self._describe(point.chosen.manifest)}")
        for text in (*map(str, point.changes), *point.notes):
            self.recorder.event("changed", text)
            self.progress.note(f"changed since the start: {text}" if text not in point.notes else text)

    def _record_start(self, point: Continuation | None) -> None:
        """Write down what this run is asked, or that it is resumed."""
        settings, here = self.settings, origin(self.settings.script)
        asked = start_record(self.executions, self._labels, settings)
        if self._lock.taken_from:
            self.recorder.event("unlocked", f"{self._lock.taken_from} was said to be gone")
        if point is not None:
            before = self.recorder.record.get("commit")
            commit = [f"on commit {here['commit']}"] if before != here["commit"] else []
            self.recorder.event("resumed", "; ".join([self._describe(point.chosen.manifest), *commit]))
            self.recorder.run_record(status="running")
            self._asked = asked
        else:
            now = {"started": time.time(), "id": uuid.uuid4().hex, "status": "running"}
            self.recorder.run_record(**asked, **here, versions=versions(), **now)
            self.recorder.begin()
            self.journal.begin()

    def _describe(self, manifest: Mapping[str, Any] | None) -> str:
        return describe_continuation(self.executions, manifest)

    def _finish(self) -> str:
        """All programs are done: save the models, and give the digest of all weights."""
        self._writer.wait()
        self._settle_in()
        workers = {name: self.executor.open(name) for name in self.executor.workers}
        digests = {n: d for n, w in sorted(workers.items()) if (d := w.digest()) is not None}
        digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
        self.recorder.run_record(weights_digest=digest, weights_digests=digests)
        for name, worker in workers.items() if self.settings.save_models else ():
            if getattr(worker, "trains", hasattr(type(worker), "update")):
                with writing(self.settings.out / "model" / name):
                    worker.save_model(str(self.settings.out / "model" / name))
        return digest

    def _end(self, status: str, digest: str | None) -> Outcome:
        out = self._out
        close_tracking(self._tracking, status, self.recorder, self.progress.note)
        self.recorder.curve()
        self.recorder.run_record(status=status, ended=time.time(), **self.executor.record())
        self.recorder.close()
        self.journal.close()
        self.executor.close()
        stopped = self._stop.status if status == "interrupted" else 0
        return Outcome(status, out, digest, tuple(self._finished), stopped)

    def _is_new(self, raised: Raised) -> bool:
        """Whether no other rank and no other step has told of a warning of Python's, and there were not too many."""
        return len(self._raised) < WARNINGS and self._raised.setdefault(raised.key, raised) is raised

    def _warn(self, text: str) -> None:
        if isinstance(text, Raised) and not self._is_new(text):
            return
        self.recorder.event("warning", text)
        self.progress.note(text)
