"""A run: programs one after another over the same workers, recorded in a folder, stopped and continued at will."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import DiskError, ModelError, RankLost, ResumeError, Stalled
from ...graph.stand_ins import current_session as sessions
from ...lowering.lower import Execution
from ...workers.user_code.rows_in_progress import Notes
from ..executor import Executor, RunServices
from ..local.python_warnings import show_again
from ..local.user_code_watch import Watch, died_before, same_folder
from ..storage.changes_since_start import Continuation, find_continuation
from ..storage.checkpoints.left_behind import LeftBehind
from ..storage.failed_rows import FailedRows
from ..storage.journal import Journal
from ..storage.package_versions import versions
from ..storage.recorder import Recorder
from ..storage.replay_record import read_replay
from ..storage.run_folder import take_folder
from ..storage.run_origin import origin
from ..storage.run_record import read_record
from ..values.call import Call
from ..values.step_records import Hooks, Interrupted, Point, ResumePoint, Step
from .evaluations import Evaluations
from .go_back import Losses
from .keep_rows import Take, keep_not_finite, keep_sampled, take_recorded
from .metric_watches import MetricWatches
from .notices import Notices
from .open_workers import open_workers
from .progress import Progress
from .rank_events import RankEvents
from .run_activity import RunActivity
from .run_position import RunPosition
from .run_settings import Outcome, Settings
from .run_texts import describe_continuation, evaluation_label, labels, start_record, unused_words
from .run_trackers import close_tracking, open_tracking
from .running_program import Running
from .save_models import save_best, save_models
from .stop_signals import Stop
from .take_checkpoint import Checkpoints


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
            self._replay = read_replay(settings.out) if settings.resume else None
            record, self._damage = read_record(settings.out) if settings.resume else ({}, "")
            staleness = executions[0].scheme.setup.staleness
            groups, every = settings.trajectories, settings.trajectories_every
            self.recorder = Recorder(settings.out, groups=groups, every=every, record=record, at_once=staleness + 1)
            self.journal = Journal(settings.out / "journal.jsonl", beside="journal*.jsonl", since=None)
        except BaseException:  # what lies there cannot be read; a process that lives on, such as a notebook's, lets go
            self._lock.release()
            raise
        self._labels = labels([execution.program for execution in executions])  # by which records tell them apart
        self.progress = Progress(quiet=settings.quiet)
        self._notices = Notices(self.recorder, self.progress)
        self._status = ""  # that a run which is resumed had before
        self._replayed = False  # all that a replay was to do is done
        self._stop = Stop(self.progress.note)
        self._watches = MetricWatches(settings, self.recorder, self._notices, staleness)
        self._evaluations = Evaluations(
            settings.evaluations,
            executor,
            self.journal,
            settings.seed,
            after=len(executions),
            groups=settings.trajectories,
        )
        self._behind = LeftBehind(*(settings.programs or [e.fn for e in executions]))
        self._position = RunPosition(
            executions,
            executor,
            self.recorder,
            self._behind,
            journal=self.journal,
            warn=self._notices.warn,
            note=self.progress.note,
            seen=self._watches.state,
            on_cut_back=self._watches.rewind,
        )
        self._activity = RunActivity(executor, self._position)
        self._checkpoints = Checkpoints(
            settings,
            executor,
            self.recorder,
            self._position,
            self._watches,
            check=self._lock.check,
            warn=self._notices.warn,
        )
        self._trained = settings.trained or (True,) * len(executions)
        only_read = settings.checkpoint is not None and not any(self._trained)  # the state is there already
        self._checkpoints.none = self._replay is not None or only_read
        self._losses = Losses(self._position, self._checkpoints, self.progress, self.journal, settings.out)
        told = RankEvents(self.recorder, self.progress)
        self._services = RunServices(
            self.journal,
            Notes(settings.out),
            self._notices.warn,
            self._losses.note,
            on_restart=told.note_restart,
            on_resize=told.note_size,
            on_kept=told.note_kept,
            failed=FailedRows(self.journal, self._notices.warn),
        )
        self.executor.attach(self._services)
        show_again()

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
        resumed, warn = point is not None, self._notices.warn
        self._watches.tracking = open_tracking(settings, self.recorder, resumed=resumed, warn=warn)
        self._tell_start(point)
        first, resume = 0, None
        status, digest = "done", None
        try:
            watch = Watch(self.settings.out, self._notices.warn)
            waits, hang = self._activity.watches(self.settings, self._stop.end_with)
            with self._stop.listening(), self.progress, watch.watching(), waits.watching(), hang.watching():
                if (text := unused_words(self.settings)) is not None:
                    self._notices.warn(text)
                if self._died:
                    self._notices.warn(self._died)
                if point is not None:
                    self._say_what_changed(point)
                    try:
                        first, resume = self._position.go_on(point.chosen, self._damage, *self.journal.damage)
                    except RankLost as lost:
                        first, resume = self._losses.recover(lost)
                while digest is None:
                    self._position.number = first
                    try:
                        if first < len(self.executions):
                            self._run_program(self.executions[first], resume)
                            first, resume = first + 1, None
                        else:
                            digest = self._finish()
                    except RankLost as lost:
                        first, resume = self._losses.recover(lost)
        except Interrupted:
            status = "interrupted"
        except KeyboardInterrupt:
            self._last_words("stopped", "at once; what came after the last checkpoint is done again", "interrupted")
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, ResumeError) and self._position.chosen is not None:  # nothing was done: it is refused
                self._last_words("refused", text, self._status)
            else:
                self._last_words("failed", text, "failed", still=isinstance(error, Stalled))
            raise
        return self._end(status, digest)

    def _last_words(self, kind: str, text: str, status: str, *, still: bool = False) -> None:
        """Note why a run ends, as far as the disk takes it, and end the ranks. ``still``: nothing goes on there."""
        with ExitStack() as ends:
            self._close_after(ends)
            ends.callback(self._checkpoints.give_up)
            with suppress(DiskError):
                if not self._lock.lost:  # else the folder is another run's
                    if status == "failed" and not still:
                        self._end_writing()
                    try:
                        self.recorder.event(kind, text)
                    finally:
                        close_tracking(self._watches.tracking, status, self.recorder, self.progress.note, patience=5.0)
                    if kind == "refused":
                        self.recorder.run_record(status=status)
                    else:
                        self.recorder.run_record(status=status, ledger=self.recorder.ledgers)
                        self.recorder.curve()

    def _close_after(self, ends: ExitStack) -> None:
        """Have the ranks end and the files be let go at the end, whatever is raised until then."""
        for part in (self.executor, self.journal, self.recorder):
            ends.callback(part.close)

    def _end_writing(self) -> None:
        """Have a checkpoint that is being written come to its end; the run fails for another reason."""
        try:
            self._checkpoints.wait()
        except Exception as error:
            self.recorder.event("checkpoint", f"the last one could not be written: {error}")

    def _run_program(self, execution: Execution, resume: ResumePoint | None) -> None:
        self._open(execution, resumed=resume is not None)
        self._services.failed.reset()
        if self._replay is not None and self._replay.program == self._position.number:
            after = resume.calls if resume is not None else 0
            execution = execution.in_order(self._replay.begun, self._replay.taken, after=after)
        session = self._begin_session(execution, resume)
        steps = execution.parameters.get("steps")
        self.progress.start(execution.program, steps if isinstance(steps, int) else None, resume.steps if resume else 0)
        self.recorder.restart_clock()
        can_go_on = self._execute(session, execution)
        self._leave(session, execution, can_go_on=can_go_on)

    def _open(self, execution: Execution, *, resumed: bool) -> None:
        """Open what a program needs, in view of who looks at the run."""
        kinds = {w["name"]: w["kind"] for w in self.settings.graphs[self._position.number]["workers"]}
        opening = {n: kinds.get(n, "to be copied") for n in execution.workers}  # of=NAME opens what is not called
        self.progress.opening(execution.program, opening, str(self._out))
        self._position.enter(execution)
        trains = self._trained[self._position.number]
        open_workers(
            execution,
            [each.execution for each in self.settings.evaluations] if trains else [],
            self.executor,
            self._activity.opening,
            resumed=resumed,
            begun_with=self.settings.checkpoint,
        )

    def _begin_session(self, execution: Execution, resume: ResumePoint | None) -> Running:
        """Return the session of a program, which tells this run what becomes of it."""
        number = self._position.number
        hooks = Hooks(
            commit=self._commit,
            note=lambda step: self.recorder.note(self._labels[number], step),
            checkpoint=self._checkpoints.take,
            marks=self._position.marks,
            due=self._checkpoints.is_due,
            stop=lambda: self._stop.asked or self._replayed,
            sampled=self.recorder.sampled,
            settle=self._services.failed.settle,
            not_finite=self._keep_not_finite,
            take_sampled=self._take_sampled(number),
            not_kept=partial(self._notices.tell_once, "not kept"),
            evaluations=self._evaluations.due if self._trained[number] else lambda *_: (),
            evaluate=self._evaluate,
            looks=self._watches.early.begin,
            enough=partial(self._watches.is_enough, self._labels[number]),
            replayed=lambda: self._replayed,
        )
        return Running(
            execution,
            number,
            self.settings.seed,
            executor=self.executor,
            journal=self.journal,
            hooks=hooks,
            resume=resume,
            same=self.settings.inputs.same(number),
            lengths=self.settings.inputs.free_lengths(number),
        )

    def _execute(self, session: Running, execution: Execution) -> bool:
        """Run a program to its end. Returns whether a checkpoint is there from which it could be made longer."""
        wait = True
        self._activity.session = session
        try:
            with sessions.using(session):
                execution.fn(**execution.parameters)
                return session.finish()
        except Interrupted:
            self._checkpoints.wait()
            raise
        except (KeyboardInterrupt, Stalled):
            wait = False
            raise
        finally:
            self._activity.end_program()
            session.close(wait)

    def _leave(self, session: Running, execution: Execution, *, can_go_on: bool) -> None:
        """Record what a program came to, and take the checkpoint of its end."""
        label = self._labels[self._position.number]
        self.recorder.ledgers[label] = session.end_ledger()
        self._watches.end_program(label)
        mine = self.recorder.latest[label]
        self._position.leave(execution, mine[-1] if mine else {})
        if can_go_on:
            self._checkpoints.end_program()
        else:
            self._checkpoints.take(Point(None, {}, self._position.marks()))

    def _commit(self, step: Step) -> None:
        self._lock.check()
        self._checkpoints.look()
        self._position.settle_in()
        tokenizer = None
        if step.rows is not None:
            with suppress(ModelError):  # a flow without one: trajectories are written without texts
                tokenizer = self.executor.tokenizer(None)
        label = self._labels[self._position.number]
        lines = self.recorder.commit(label, step, tokenizer)
        self.recorder.note_memory(label, step.number, self.executor.memory())
        if self._watches.look(label, lines, step):
            self._checkpoints.overdue = True  # with the weights that the next rows are sampled with, for flowrl gap
            command = shlex.join(["flowrl", "gap", str(self._out)])
            self.progress.note(f"look for the cause when the next step is done: {command}")
        self._losses.note_step()
        if self._replay is not None and self._replay.ends_after(self._position.number, step.number):
            self._replayed = True
        for settle in self._services.on_commit:
            settle(step.number)
        self.progress.step(lines[-1], step.timings, named=step.named())

    def _evaluate(self, name: str, done: int, calls: int) -> None:
        """Run a program between two steps, of which so many are done, and record what it came to."""
        outer = self._activity.session
        assert outer is not None, "an evaluation is between the steps of a program"

        def during(session: Running | None) -> None:
            self._activity.session = session or outer

        self.recorder.restart_clock()
        found = self._evaluations.run(
            name, outer, calls, during, settle=self._services.failed.settle, not_finite=self._keep_not_finite
        )
        self._lock.check()
        self._position.settle_in()
        tokenizer = None
        with suppress(ModelError):
            tokenizer = self.executor.tokenizer(None)
        stage, step = self._position.number, found.step
        label = evaluation_label([e.program for e in self.executions], self._trained, stage, name)
        step.number, step.logs = done, [(done, numbers) for _, numbers in step.logs]
        (line,) = self.recorder.commit(label, step, tokenizer, groups=self.settings.trajectories)
        self.recorder.ledgers[label] = dict(found.ledger)
        self.recorder.note_memory(label, done, self.executor.memory())
        self.progress.evaluated(line)
        self._watches.look_at_evaluation(line, done)
        self.recorder.restart_clock()

    def _keep_not_finite(self, call: Call, rows: Any) -> None:
        keep_not_finite(self.settings.out, self.executor, self._notices.tell, call, rows)

    def _take_sampled(self, program: int) -> Take | None:
        """Return what is done with sampled rows: a replay may be given those of its run, and a run may keep them."""
        out, replay = self.settings.out, self._replay
        if replay is not None:
            return take_recorded(out, self.executor, program, Path(replay.run)) if replay.forced else None
        return keep_sampled(out, self.executor, program) if self.settings.keep_sampled else None

    def _say_what_changed(self, point: Continuation) -> None:
        if self._replay is None:  # which has a report of its own
            self.progress.note(f"resumed {self._describe(point.chosen.manifest)}")
        for text in (*map(str, point.changes), *point.notes):
            self.recorder.event("changed", text)
            if self._replay is None:
                self.progress.note(f"changed since the start: {text}" if text not in point.notes else text)

    def _record_start(self, point: Continuation | None) -> None:
        """Write down what this run is asked, or that it is resumed."""
        settings, here = self.settings, origin(self.settings.script)
        asked = start_record(self.executions, self._labels, settings)
        if point is not None:
            self._status = self.recorder.record.get("status", "")
            self.recorder.run_record(status="running")
            self._checkpoints.asked = asked
        else:
            now = {"started": time.time(), "id": uuid.uuid4().hex, "status": "running"}
            self.recorder.run_record(**asked, **here, versions=versions(), **now)
            self.recorder.begin()
            self.journal.begin()

    def _tell_start(self, point: Continuation | None) -> None:
        """Have readers and trackers know of a run that is resumed, or whose folder was another process's."""
        if self._lock.taken_from:
            self.recorder.event("unlocked", f"{self._lock.taken_from} was said to be gone")
        if point is not None:
            here = origin(self.settings.script)["commit"]
            commit = [f"on commit {here}"] if self.recorder.record.get("commit") != here else []
            self.recorder.event("resumed", "; ".join([self._describe(point.chosen.manifest), *commit]))

    def _describe(self, manifest: Mapping[str, Any] | None) -> str:
        return describe_continuation(self.executions, manifest)

    def _finish(self) -> str:
        """All programs are done: save the models, and give the digest of all weights."""
        self._checkpoints.wait()
        self._position.settle_in()
        out, save = self.settings.out, self.settings.save_models
        digest = save_models(self.executor, self.recorder, out / "model", save=save)
        if save and self.settings.keep_best:
            save_best(self.executor, self.recorder, out / "checkpoints", out / "best")
        return digest

    def _end(self, status: str, digest: str | None) -> Outcome:
        with ExitStack() as ends:
            self._close_after(ends)
            close_tracking(self._watches.tracking, status, self.recorder, self.progress.note)
            ledgers = self.recorder.ledgers
            self.recorder.run_record(status=status, ended=time.time(), ledger=ledgers, **self.executor.record())
            if (text := self.recorder.curve()) and not self.settings.quiet:
                self.progress.note(text)
        stopped = self._stop.status if status == "interrupted" else 0
        return Outcome(status, self._out, digest, tuple(self._position.finished), stopped)
