"""A run: programs one after another over the same workers, recorded in a folder, stopped and continued at will."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, RankLost
from ..graph import session as sessions
from ..graph.surroundings import Surroundings
from ..graph.terms import Reading
from ..marks import other_ids, vocabulary
from ..schedule.scheme import Scheme
from . import checkpoint
from .folder import take_folder
from .journal import Journal
from .origin import origin
from .progress import Progress
from .recorder import Recorder, versions
from .records import Cut, Hooks, Interrupted, Point, Step
from .resume import find_resume_point, parameter_changes, spelled
from .session import Running
from .stalled import STEPS, stalled
from .workplace import Workplace

if TYPE_CHECKING:
    from .ranks import RanksPlace


LOSSES = 10  # of processes without a step in between: then something is wrong that starting again does not mend


@dataclass(frozen=True)
class Stage:
    """One program of a run: ``Stage("grpo", fn, {"steps": 400}, ("actor", "reward"), graph_record, scheme)``.

    ``readings``: reads of token ids whose tokenizers are compared once the models are open.
    """

    program: str
    fn: Callable[..., Any]
    parameters: Mapping[str, Any]
    workers: tuple[str, ...]
    graph: Mapping[str, Any]
    scheme: Scheme
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True)
class Settings:
    """How to run, as opposed to what: ``Settings(out=Path("runs/a"), runtime="local", checkpoint_every=50)``."""

    out: Path
    runtime: str = "local"
    seed: int = 0
    resume: bool = False
    overwrite: bool = False
    checkpoint_every: int = 50
    save_models: bool = True
    trajectories: int = 2  # prompt groups of a step that are written down
    trajectories_every: int = 10  # steps
    quiet: bool = False
    script: str = ""
    plan: Mapping[str, Any] | None = None
    arguments: tuple[str, ...] = ()  # the words of the command line


@dataclass(frozen=True)
class Outcome:
    """What a run came to. ``status`` is ``done`` or ``interrupted``; ``last`` are the last metrics of each stage."""

    status: str
    out: Path
    weights_digest: str | None
    last: tuple[tuple[str, Mapping[str, Any]], ...]


class Runner:
    """Runs stages in a folder. One per run."""

    def __init__(self, stages: Sequence[Stage], place: Workplace | RanksPlace, settings: Settings) -> None:
        self.stages, self.place, self.settings = stages, place, settings
        self._lock = take_folder(settings.out, resume=settings.resume, overwrite=settings.overwrite)
        try:
            self.recorder = Recorder(settings.out, groups=settings.trajectories, every=settings.trajectories_every)
            self.journal = Journal(settings.out / "journal.jsonl", beside="journal.*.jsonl")
        except BaseException:  # what lies there cannot be read; a process that lives on, such as a notebook's, lets go
            self._lock.release()
            raise
        self.progress = Progress(quiet=settings.quiet)
        self.place.warn = self._warn
        self.place.watch(self._note_loss, self._note_renewal)
        self._asked_to_stop = False
        self._asked: dict[str, Any] = {}
        self._number = 0
        self._losses, self._fresh = 0, False  # of processes in a row, and whether a step was done since the last
        self._finished: list[tuple[str, dict[str, Any]]] = []
        self._around: dict[int, Surroundings] = {}  # the Python state around each stage's program as it began

    def run(self) -> Outcome:
        """Run what is left of the stages. Raises what a program raised, after a line in the events."""
        try:
            return self._run()
        finally:
            self._lock.release()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _run(self) -> Outcome:
        settings = self.settings
        manifest = find_resume_point(settings.out, self.stages, settings.seed) if settings.resume else None
        self._record_start(manifest)
        first, cut = 0, None
        if manifest is not None:
            first = manifest["stage"]
            self._finished = [(p, m) for p, m in manifest["finished"]]
        if settings.resume:
            self.recorder.cut_back(manifest["marks"] if manifest else dict.fromkeys(self.recorder.marks(), 0))
        status, digest = "done", None
        try:
            with self._stoppable(), self.progress:
                self._warn_of_plan()
                if settings.resume:
                    self.progress.note(f"resumed {self._place(manifest)}")
                if manifest is not None:
                    try:
                        cut = self._restore(manifest)
                    except RankLost as lost:
                        first, cut = self._recover(lost)
                while digest is None:
                    self._number = first
                    try:
                        if first < len(self.stages):
                            self._run_stage(self.stages[first], cut)
                            first, cut = first + 1, None
                        else:
                            digest = self._finish()
                    except RankLost as lost:
                        first, cut = self._recover(lost)
        except Interrupted:
            status = "interrupted"
        except KeyboardInterrupt:
            self.recorder.event("stopped", "at once; what came after the last checkpoint is done again")
            self.recorder.run_record(status="interrupted")
            self.recorder.curve()
            self.place.close()
            raise
        except BaseException as error:
            self.recorder.event("failed", f"{type(error).__name__}: {error}")
            self.recorder.run_record(status="failed")
            self.recorder.curve()
            self.place.close()
            raise
        return self._end(status, digest)

    def _run_stage(self, stage: Stage, cut: Cut | None) -> None:
        kinds = {w["name"]: w["kind"] for w in stage.graph["workers"]}
        opening = {name: kinds.get(name, "to be copied") for name in stage.workers}  # of=NAME opens what is not called
        self.progress.opening(stage.program, opening, str(self.settings.out))
        self._around.setdefault(self._number, Surroundings(stage.fn))
        workers = {name: self.place.open(name) for name in stage.workers}
        followers = stage.scheme.setup.followers
        servers = {name: self.place.open_server(name) for name in self._serving(stage)}
        self._compare_tokenizers(stage)
        if cut is None:
            self.place.start_program(stage.workers)
            for name in {**followers, **servers}:
                version = workers[name].read_version()  # what the program before has updated is published
                if name in servers and servers[name].version != version:
                    servers[name].install(workers[name].in_use(), version)
        self.place.make_way()
        session = Running(
            program=stage.program,
            number=self._number,
            seed=self.settings.seed,
            workers=workers,
            servers=servers,
            scheme=stage.scheme,
            runtime=self.settings.runtime,
            hands=self.place.hands(self._number, self.journal),
            journal=self.journal,
            hooks=Hooks(
                commit=lambda step: self._commit(stage, step),
                checkpoint=self._checkpoint,
                marks=self.recorder.marks,
                due=lambda step: (step + 1) % self.settings.checkpoint_every == 0,
                stop=lambda: self._asked_to_stop,
                warn=self._warn,
                tokenizer=self.place.tokenizer,
                sampled=self.recorder.sampled,
            ),
            cut=cut,
        )
        steps = stage.parameters.get("steps")
        self.progress.start(stage.program, steps if isinstance(steps, int) else None, cut.steps if cut else 0)
        self.recorder.restart_clock()
        wait, can_go_on = True, False
        try:
            with sessions.using(session):
                stage.fn(**stage.parameters)
                can_go_on = session.finish()
        except KeyboardInterrupt:
            wait = False
            raise
        finally:
            session.close(wait)
        mine = [h for h in self.recorder.history if h["program"] == stage.program]
        if (text := stalled(mine, ended=True)) is not None:
            self._warn(f"{stage.program}: {text}")
        self._finished.append((stage.program, mine[-1] if mine else {}))
        self._number += 1
        if can_go_on:
            self.journal.sync()
            checkpoint.end(self.settings.out / "checkpoints", self._done_so_far(self.recorder.marks()))
        else:
            self._checkpoint(Point(None, {}, self.recorder.marks()))

    def _compare_tokenizers(self, stage: Stage) -> None:
        """Raise ModelError, with the line, where a call would read ids that another tokenizer made."""
        for read in stage.readings:
            mine, theirs = (vocabulary(self.place.tokenizer(said)) for said in (read.reader, read.maker))
            if mine and theirs and mine != theirs:
                error = other_ids(read.title, read.column, read.other, read.own)
                error.at = read.at
                raise error

    def _serving(self, stage: Stage) -> list[str]:
        """The workers of a stage that generate with a copy of their own."""
        followers = stage.scheme.setup.followers
        return [n for n in stage.workers if self.place.serving(n, n not in followers or followers[n].shared)]

    def _commit(self, stage: Stage, step: Step) -> None:
        tokenizer = None
        if step.rows is not None:
            with suppress(ModelError):  # a flow without one: trajectories are written without texts
                tokenizer = self.place.tokenizer(None)
        line = self.recorder.commit(stage.program, step, tokenizer)
        lately = [h for h in self.recorder.history[-STEPS - 1 :] if h["program"] == stage.program]
        if (text := stalled(lately)) is not None:
            self._warn(f"{stage.program}: {text}")
        self._fresh = True
        self.place.settled(step.number)
        self.progress.step(line, step.timings)

    def _done_so_far(self, marks: Mapping[str, int]) -> dict[str, Any]:
        """How far the run is, for a manifest."""
        return {"stage": self._number, "finished": self._finished, "marks": marks}

    def _checkpoint(self, point: Point) -> None:
        """Keep all that the rest of the run depends on, in one piece."""
        self.journal.sync()
        self.place.sync()
        manifest = {
            **self._done_so_far(point.marks),
            "program": point.record,
            "parameters": [{n: spelled(v) for n, v in s.parameters.items()} for s in self.stages],
            "seed": self.settings.seed,
        }
        servers = {f"{name}.generate": worker for name, worker in self.place.servers.items()}
        workers = {**self.place.workers, **servers}
        checkpoint.save(self.settings.out / "checkpoints", manifest, workers, point.live, self.place.write_rows)
        if self._asked:  # what a resumed run was asked holds from here on, also when it is resumed again
            self.recorder.run_record(**self._asked)
            self._asked = {}

    def _recover(self, lost: RankLost) -> tuple[int, Cut | None]:
        """Start again what was lost, and go back to the last checkpoint: where to go on from. Raises what is past help.

        Steps after the checkpoint are done again with the same rows and seeds; what touched the world is answered from
        the journal.
        """
        while True:
            try:
                self._note_loss(lost)
                if not self.place.recover(lost):
                    raise lost
                return self._gone_back()
            except RankLost as again:
                if again is lost:
                    raise
                lost = again

    def _note_loss(self, lost: RankLost) -> None:
        """Write a loss down. Raises it when there were too many without a step in between."""
        self.recorder.event("lost", str(lost))
        self.progress.note(f"lost: {lost.what}")
        self._losses, self._fresh = 1 if self._fresh else self._losses + 1, False
        if self._losses > LOSSES:
            raise lost

    def _note_renewal(self, what: str) -> None:
        self.recorder.event("renewed", what)
        self.progress.note(f"started again: {what}; the step goes on")

    def _gone_back(self) -> tuple[int, Cut | None]:
        """Go back to the last checkpoint, or to the start: the stage to go on with, and where in it."""
        folder = checkpoint.latest(self.settings.out / "checkpoints")
        manifest = checkpoint.load_manifest(folder) if folder is not None else None
        self.recorder.cut_back(manifest["marks"] if manifest else dict.fromkeys(self.recorder.marks(), 0))
        self._finished = [(p, m) for p, m in manifest["finished"]] if manifest else []
        stage = manifest["stage"] if manifest else 0
        for number in [n for n in sorted(self._around, reverse=True) if n >= stage]:
            self._around.pop(number).restore()
        if manifest is None:
            self.place.begin_again()
        cut = self._restore(manifest) if manifest else None
        self.recorder.event("recovered", self._place(manifest))
        self.progress.note(f"went on {self._place(manifest)}")
        return stage, cut

    def _restore(self, manifest: Mapping[str, Any]) -> Cut | None:
        folder = checkpoint.latest(self.settings.out / "checkpoints")
        assert folder is not None, "a manifest came from a checkpoint"
        program = manifest["program"]
        stage = self.stages[manifest["stage"]] if manifest["stage"] < len(self.stages) else None
        apart = {f"{name}.generate": name for name in self._serving(stage)} if stage is not None else {}
        for name in sorted(manifest["stamps"], key=lambda n: n.endswith(".generate")):
            if name.endswith(".generate") and name not in apart:  # the plan of this run has one copy for both
                continue
            worker = self.place.open_server(apart[name]) if name in apart else self.place.open(name)
            checkpoint.load_worker(folder, name, worker)
            worker.stamp = manifest["stamps"][name]
        if program is None:
            return None
        return Cut(
            calls=program["calls"],
            reads=program["reads"],
            steps=program["steps"],
            course=program["course"],
            live=self.place.taken(checkpoint.load_live(folder, manifest)),
            cursors=program["cursors"],
            draws=program["draws"],
            held=tuple(program.get("held", ())),
        )

    def _record_start(self, manifest: Mapping[str, Any] | None) -> None:
        settings, here = self.settings, origin(self.settings.script)
        asked: dict[str, Any] = {
            "script": settings.script,
            "arguments": list(settings.arguments),
            "programs": [s.program for s in self.stages],
            "parameters": [{n: spelled(v) for n, v in s.parameters.items()} for s in self.stages],
            "seed": settings.seed,
            "runtime": settings.runtime,
            "plan": settings.plan,
            "graph": max((s.graph for s in self.stages), key=lambda graph: len(graph["nodes"])),
            "graphs": {s.program: s.graph for s in self.stages},
        }
        if settings.resume:
            before = json.loads((settings.out / "run.json").read_text())
            others = parameter_changes(before["parameters"], self.stages)
            others += [f"on {what} {here[what]}" for what in ("host", "commit") if before.get(what) != here[what]]
            self.recorder.event("resumed", "; ".join([self._place(manifest), *others]))
            self.recorder.run_record(status="running")
            self._asked = asked
        else:
            self.recorder.run_record(**asked, **here, versions=versions(), started=time.time(), status="running")

    def _place(self, manifest: Mapping[str, Any] | None) -> str:
        """Where a run goes on, in words."""
        if manifest is None:
            return "from its start: there is no checkpoint to go on from"
        if manifest["stage"] >= len(self.stages):
            return "at its end: nothing is left to do"
        steps = manifest["program"]["steps"] if manifest["program"] else 0
        return f"{self.stages[manifest['stage']].program} from step {steps}"

    def _finish(self) -> str:
        """All programs are done: save the models, and give the digest of all weights."""
        digests = {n: d for n, w in sorted(self.place.workers.items()) if (d := w.digest()) is not None}
        digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
        self.recorder.run_record(weights_digest=digest, weights_digests=digests)
        for name, worker in self.place.workers.items() if self.settings.save_models else ():
            if getattr(worker, "trains", hasattr(type(worker), "update")):
                worker.save_model(str(self.settings.out / "model" / name))
        return digest

    def _end(self, status: str, digest: str | None) -> Outcome:
        out = self.settings.out
        self.recorder.curve()
        self.recorder.run_record(status=status, ended=time.time(), **self.place.record())
        self.recorder.close()
        self.journal.close()
        self.place.close()
        return Outcome(status, out, digest, tuple(self._finished))

    def _warn(self, text: str) -> None:
        self.recorder.event("warning", text)
        self.progress.note(text)

    def _warn_of_plan(self) -> None:
        """Say which words of the plan the eager runtime has no use for."""
        pipeline: Mapping[str, int] = (self.settings.plan or {}).get("pipeline", {})
        unused = [
            f"{word}: {pipeline[word]}"
            for word, plain in (("staleness", 0), ("chunks", 1))
            if pipeline.get(word, plain) != plain
        ]
        if self.settings.runtime == "eager" and unused:
            self._warn(
                "--runtime eager does one call after another and one step after another, without "
                f"{' and '.join(unused)} of the plan. Results may differ from those of --runtime local."
            )

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Ctrl-C asks for a stop after the step that runs; a second one stops at once."""

        def asked(signum: int, frame: Any) -> None:
            if self._asked_to_stop:
                raise KeyboardInterrupt
            self._asked_to_stop = True
            self.progress.note("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

        try:
            before = signal.signal(signal.SIGINT, asked)
        except ValueError:  # not the main thread
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
