"""A run: programs one after another over the same workers, recorded in a folder, stopped and continued at will."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...batch import Batch
from ...errors import DiskError, FlowError, ModelError, RankLost, Stalled
from ...graph.stand_ins import current_session as sessions
from ...lowering.lower import Execution
from ...marks import other_ids, vocabulary
from ...workers.user_code.rows_in_progress import Notes
from ..executor import Executor, RunServices
from ..local.python_warnings import Raised, show_again
from ..local.user_code_watch import Watch, died_before, same_folder
from ..storage.changes_since_start import Continuation, find_continuation
from ..storage.checkpoints import checkpoint_folder as checkpoint
from ..storage.checkpoints.left_behind import LeftBehind
from ..storage.failed_rows import FailedRows
from ..storage.journal import Journal
from ..storage.not_finite_rows import save_rows
from ..storage.recorder import Recorder, versions
from ..storage.replay_record import read_replay
from ..storage.run_folder import take_folder
from ..storage.run_origin import origin
from ..storage.run_record import read_record
from ..storage.sampled_rows import RecordedRows, SampledRows
from ..values.call import Call
from ..values.step_records import Hooks, Interrupted, Point, ResumePoint, Step
from .early_stop import EarlyStop
from .evaluations import Evaluations
from .go_back import Losses
from .monitoring.hang_watch import HangWatch, Signs
from .monitoring.health import Health
from .monitoring.learning_stalled import stalled
from .monitoring.wait_notes import WaitNotes
from .monitoring.wait_story import WaitStory, wait_story
from .progress import Progress
from .rank_events import RankEvents
from .run_position import RunPosition
from .run_settings import Outcome, Settings
from .run_texts import describe_continuation, evaluation_label, labels, start_record, unseen_metric, unused_words
from .run_trackers import close_tracking, open_tracking
from .running_program import Running
from .save_models import save_best, save_models
from .stop_signals import Stop
from .take_checkpoint import Checkpoints

WARNINGS = 1000  # of Python's that a run tells, each of another place or text


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
            self.recorder = Recorder(
                settings.out, groups=settings.trajectories, every=settings.trajectories_every, record=record
            )
            self.journal = Journal(settings.out / "journal.jsonl", beside="journal*.jsonl", since=None)
        except BaseException:  # what lies there cannot be read; a process that lives on, such as a notebook's, lets go
            self._lock.release()
            raise
        self._labels = labels([execution.program for execution in executions])  # by which records tell them apart
        self.progress = Progress(quiet=settings.quiet)
        self._raised: dict[str, Raised] = {}  # the warnings of Python's that were told, by place and text
        self._session: Running | None = None  # while a program runs
        self._since = time.monotonic()  # when the last program ended, or the run began
        self._opening = ""  # the worker that is being opened
        self._replayed = False  # all that a replay was to do is done
        self._health = Health()
        self._stop = Stop(self.progress.note)
        self._early = EarlyStop(settings.stop_when, executions[0].scheme.setup.staleness)
        self._not_kept: set[str] = set()  # why checkpoints have no variables
        self._unseen: set[str] = set()  # options whose metric is told to be in no line
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
            warn=self._warn,
            note=self.progress.note,
            seen=lambda: {
                "health": self._health.state(),
                "tracking": self._tracking.state(),
                "stop": self._early.state(),
            },
            on_cut_back=self._rewind,
        )
        self._checkpoints = Checkpoints(
            settings,
            executor,
            self.recorder,
            self._position,
            self._health.gap_alarm,
            check=self._lock.check,
            warn=self._warn,
        )
        self._trained = settings.trained or (True,) * len(executions)
        only_read = settings.checkpoint is not None and not any(self._trained)  # the state is there already
        self._checkpoints.none = self._replay is not None or only_read
        self._losses = Losses(self._position, self._checkpoints, self.progress, self.journal, settings.out)
        told = RankEvents(self.recorder, self.progress)
        self._services = RunServices(
            self.journal,
            Notes(settings.out),
            self._warn,
            self._losses.note,
            on_restart=told.note_restart,
            on_resize=told.note_size,
            on_kept=told.note_kept,
            failed=FailedRows(self.journal, self._warn),
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
        self._tracking = open_tracking(settings, self.recorder, resumed=point is not None, warn=self._warn)
        self._tell_start(point)
        first, resume = 0, None
        status, digest = "done", None
        try:
            watch = Watch(self.settings.out, self._warn).watching()
            waits = WaitNotes(self.settings.out, self.settings.script, self._waits)
            hang = self._hang_watch(waits).watching()
            with self._stop.listening(), self.progress, watch, waits.watching(), hang:
                if (text := unused_words(self.settings)) is not None:
                    self._warn(text)
                if self._died:
                    self._warn(self._died)
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
            self._last_words("failed", text, "failed", still=isinstance(error, Stalled))
            raise
        return self._end(status, digest)

    def _last_words(self, kind: str, text: str, status: str, *, still: bool = False) -> None:
        """Note why a run ends, as far as the disk takes it, and end the ranks. ``still``: nothing goes on there."""
        with suppress(DiskError):
            if not self._lock.lost:  # else the folder is another run's
                if status == "failed" and not still:
                    self._end_writing()
                try:
                    self.recorder.event(kind, text)
                finally:
                    close_tracking(self._tracking, status, self.recorder, self.progress.note, patience=5.0)
                self.recorder.run_record(status=status, ledger=self.recorder.ledgers)
                self.recorder.curve()
        self._checkpoints.give_up()
        self.recorder.close()
        self.journal.close()
        self.executor.close()

    def _end_writing(self) -> None:
        """Have a checkpoint that is being written come to its end; the run fails for another reason."""
        try:
            self._checkpoints.wait()
        except Exception as error:
            self.recorder.event("checkpoint", f"the last one could not be written: {error}")

    def _run_program(self, execution: Execution, resume: ResumePoint | None) -> None:
        kinds = {w["name"]: w["kind"] for w in self.settings.graphs[self._position.number]["workers"]}
        opening = {n: kinds.get(n, "to be copied") for n in execution.workers}  # of=NAME opens what is not called
        self.progress.opening(execution.program, opening, str(self._out))
        self._position.enter(execution)
        new = [name for name in execution.workers if name not in self.executor.workers]
        workers = {name: self._open(name, self.executor.open) for name in execution.workers}
        if resume is None:
            self._begin_with_checkpoint(new)
        followers = execution.scheme.setup.followers
        server = ", the copy that generates,"
        servers = {name: self._open(name, self.executor.open_server, server) for name in execution.servers}
        self._compare_tokenizers(execution)
        for other in self._evaluated_in(self._position.number):
            for name in other.workers:
                self._open(name, self.executor.open)
            for name in other.servers:
                self._open(name, self.executor.open_server, server)
            self._compare_tokenizers(other)
        self.executor.start_program(execution.workers, resumed=resume is not None)
        for name in () if resume is not None else {**followers, **servers}:
            version = workers[name].read_version()  # what the program before has updated is published
            if name in servers and servers[name].version != version:
                self.executor.install(name, version)
        self._services.failed.reset()
        if self._replay is not None and self._replay.program == self._position.number:
            after = resume.calls if resume is not None else 0
            execution = execution.in_order(self._replay.begun, self._replay.taken, after=after)
        session = Running(
            execution,
            self._position.number,
            self.settings.seed,
            executor=self.executor,
            journal=self.journal,
            hooks=Hooks(
                commit=lambda step: self._commit(execution, step),
                note=lambda step: self.recorder.note(self._labels[self._position.number], step),
                checkpoint=self._checkpoints.take,
                marks=self._position.marks,
                due=self._checkpoints.is_due,
                stop=lambda: self._stop.asked or self._replayed,
                sampled=self.recorder.sampled,
                settle=self._services.failed.settle,
                not_finite=self._keep_not_finite,
                take_sampled=self._find_take_sampled(),
                not_kept=self._tell_not_kept,
                evaluations=self._evaluations.due if self._trained[self._position.number] else lambda *_: (),
                evaluate=self._evaluate,
                looks=self._early.begin,
                enough=self._is_enough,
                replayed=lambda: self._replayed,
            ),
            resume=resume,
            same=self.settings.inputs.same(self._position.number),
            lengths=self.settings.inputs.free_lengths(self._position.number),
        )
        steps = execution.parameters.get("steps")
        self.progress.start(execution.program, steps if isinstance(steps, int) else None, resume.steps if resume else 0)
        self.recorder.restart_clock()
        wait, can_go_on = True, False
        self._session = session
        try:
            with sessions.using(session):
                execution.fn(**execution.parameters)
                can_go_on = session.finish()
        except Interrupted:
            self._checkpoints.wait()
            raise
        except (KeyboardInterrupt, Stalled):
            wait = False
            raise
        finally:
            self._session, self._since = None, time.monotonic()
            session.close(wait)
        label = self._labels[self._position.number]
        self.recorder.ledgers[label] = session.end_ledger()
        mine = self.recorder.latest[label]
        if (text := stalled(mine, ended=True)) is not None:
            self._warn(f"{label}: {text}")
        self._tell_unseen_metrics()
        self._position.leave(execution, mine[-1] if mine else {})
        if can_go_on:
            self._checkpoints.end_program()
        else:
            self._checkpoints.take(Point(None, {}, self._position.marks()))

    def _open(self, name: str, do: Callable[[str], Any], what: str = "") -> Any:
        """Open a worker; who looks at the run meanwhile is told that it waits for that."""
        self._opening, self._since = f"worker '{name}'{what}", time.monotonic()
        try:
            return do(name)
        finally:
            self._opening, self._since = "", time.monotonic()

    def _compare_tokenizers(self, execution: Execution) -> None:
        """Raise ModelError, with the line, where a call would read ids that another tokenizer made."""
        for read in execution.readings:
            mine, theirs = (vocabulary(self.executor.tokenizer(said)) for said in (read.reader, read.maker))
            if mine and theirs and mine != theirs:
                error = other_ids(read.title, read.column, read.other, read.own)
                error.at = read.at
                raise error

    def _commit(self, execution: Execution, step: Step) -> None:
        self._lock.check()
        self._checkpoints.look()
        self._position.settle_in()
        tokenizer = None
        if step.rows is not None:
            with suppress(ModelError):  # a flow without one: trajectories are written without texts
                tokenizer = self.executor.tokenizer(None)
        label = self._labels[self._position.number]
        lines = self.recorder.commit(label, step, tokenizer)
        for line in lines:
            self._checkpoints.score.note(line)
            self._early.note(line, step.number + 1)
        self.recorder.note_memory(label, step.number, self.executor.memory())
        rang = self._health.gap_alarm.rang
        for kind, text in self._health.look(label, lines[-1], step, self.recorder.latest[label]):
            self.recorder.event(kind, text)
            self.progress.note(text)
        if self._health.gap_alarm.rang and not rang:
            self._checkpoints.overdue = True  # with the weights that the next rows are sampled with, for flowrl gap
            self.progress.note(f"look for the cause when the next step is done: flowrl gap {self._out}")
        self._losses.note_step()
        if self._replay is not None and self._replay.ends_after(self._position.number, step.number):
            self._replayed = True
        for settle in self._services.on_commit:
            settle(step.number)
        self.progress.step(lines[-1], step.timings)

    def _evaluated_in(self, stage: int) -> list[Execution]:
        """Return the programs that are run between the steps of one of the run."""
        return [each.execution for each in self.settings.evaluations] if self._trained[stage] else []

    def _evaluate(self, name: str, done: int, calls: int) -> None:
        """Run a program between two steps, of which so many are done, and record what it came to."""
        outer = self._session
        assert outer is not None, "an evaluation is between the steps of a program"

        def during(session: Running | None) -> None:
            self._session = session or outer

        hooks = Hooks(
            commit=lambda step: None,
            note=lambda step: None,
            checkpoint=lambda point: None,
            marks=dict,
            due=lambda step: False,
            stop=lambda: False,
            sampled=lambda step: 0,
            settle=self._services.failed.settle,
            not_finite=self._keep_not_finite,
        )
        self.recorder.restart_clock()
        found = self._evaluations.run(name, outer, calls, hooks, during)
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
        self._checkpoints.score.note(line)
        self._early.note_settled(line, done)
        self.progress.evaluated(line)
        self._tell_unseen_metrics()
        self.recorder.restart_clock()

    def _is_enough(self, opened: int) -> bool:
        """Whether a loop ends after so many steps, as it does not get better."""
        enough = self._early.is_enough(opened)
        if enough:
            text = f"{self._labels[self._position.number]} after {opened} steps: {self._early.in_words()}"
            self.recorder.event("stopped early", text)
            self.progress.note(f"stopped early: {text}")
        return enough

    def _tell_unseen_metrics(self) -> None:
        """Warn of a metric that a run is to go by, and that no line has."""
        lines = [line for some in self.recorder.latest.values() for line in some]
        for option, metric in (("keep-best", self._checkpoints.score.metric), ("stop-when", self._early.metric)):
            text = unseen_metric(option, metric, lines)
            if text is not None and option not in self._unseen:
                self._unseen.add(option)
                self._warn(text)

    def _tell_not_kept(self, text: str) -> None:
        """Say once why checkpoints have no variables of a program, which makes a resume slower."""
        if text not in self._not_kept:
            self._not_kept.add(text)
            self.recorder.event("not kept", text)
            self.progress.note(text)

    def _begin_with_checkpoint(self, names: Sequence[str]) -> None:
        """Give workers that were just opened their state in the checkpoint of another run."""
        folder = self.settings.checkpoint
        if folder is not None:
            saved = checkpoint.load_manifest(folder, reopened=True)["stamps"]
            for name in names:
                if name in saved:
                    checkpoint.load_worker(folder, name, self.executor.open(name))

    def _rewind(self, seen: Mapping[str, Any] | None) -> None:
        """Have what looks at the lines of metrics go back to where those end that are left."""
        if seen is not None:
            self._tracking.restore(seen["tracking"])
            self._health.restore(seen["health"])
            self._early.restore(seen.get("stop", {}))
        else:
            self._early.begin()
            self._tracking.rewind(self.recorder.metrics())
            self._health.rewind(self.recorder.metrics())
        self._checkpoints.score.rewind()

    def _keep_not_finite(self, call: Call, rows: Any) -> None:
        """Write down the rows of a call whose numbers are not finite, as far as they can be had."""
        with suppress(FlowError):
            rows = None if rows is None else self.executor.get(rows)
            if isinstance(rows, Batch):
                path = save_rows(self.settings.out, step=call.step, op=call.title, rows=rows)
                text = f"{call.title} of step {call.step} met numbers that are not finite: its rows are in {path}"
                self.recorder.event("not finite", text)
                self.progress.note(text)

    def _find_take_sampled(self) -> Callable[[Call, int, str, Any], Any] | None:
        """Return what is done with sampled rows: a replay may be given those of its run, and a run may keep them."""
        out, replay, program = self.settings.out, self._replay, self._position.number
        if replay is not None and replay.forced:
            recorded = RecordedRows(Path(replay.run), out)

            def take(call: Call, part: int, node: str, rows: Any) -> Any:
                sampled = self.executor.get(rows)
                return self.executor.put(recorded.take(program, node, call.step, call.index, part, sampled))

            return take
        if replay is not None or not self.settings.keep_sampled:
            return None
        kept = SampledRows(out)

        def keep(call: Call, part: int, node: str, rows: Any) -> Any:
            kept.write(program, call.index, part, self.executor.get(rows))
            return rows

        return keep

    def _waits(self) -> tuple[Mapping[str, Any], float]:
        """What the run waits for now, and for how long nothing has happened: asked by a thread of its own."""
        session = self._session
        if session is not None:
            return session.waits()
        waits = {"opening": self._opening, "ranks": self.executor.unanswered()}
        return waits, time.monotonic() - self._since

    def _hang_watch(self, waits: WaitNotes) -> HangWatch:
        """What ends the run once nothing goes on any more; where a debugger works, nothing does."""
        first, out = self.executions[0], self.settings.out

        def story() -> WaitStory:
            waits.write()
            return wait_story(out)

        def end(error: Stalled) -> None:
            if (session := self._session) is not None:
                session.break_off(error)
            self._stop.end_with(error)

        return HangWatch(
            0.0 if first.runtime == "eager" else first.plan.pipeline.hang,
            events=self._events,
            signs=self._signs,
            story=story,
            end=end,
        )

    def _events(self) -> tuple[float, ...]:
        """What changes with each event that the driver knows of; asked by a thread of its own."""
        session = self._session
        return (self._since, self._position.number, -1 if session is None else session.events)

    def _signs(self) -> Signs:
        """What shows that the run goes on; asked by a thread of its own."""
        session = self._session
        own = session is not None and session.dispatcher.runs_own_ops_alone()
        return Signs(self._events(), self.executor.headway(), own)

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
        out = self._out
        close_tracking(self._tracking, status, self.recorder, self.progress.note)
        self.recorder.curve()
        ledgers = self.recorder.ledgers
        self.recorder.run_record(status=status, ended=time.time(), ledger=ledgers, **self.executor.record())
        self.recorder.close()
        self.journal.close()
        self.executor.close()
        stopped = self._stop.status if status == "interrupted" else 0
        return Outcome(status, out, digest, tuple(self._position.finished), stopped)

    def _is_new(self, raised: Raised) -> bool:
        """Whether no other rank and no other step has told of a warning of Python's, and there were not too many."""
        return len(self._raised) < WARNINGS and self._raised.setdefault(raised.key, raised) is raised

    def _warn(self, text: str) -> None:
        if isinstance(text, Raised) and not self._is_new(text):
            return
        self.recorder.event("warning", text)
        self.progress.note(text)
