"""The flow: workers and programs of one script, and what can be done with them: trace, check, draw, run."""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

from .analysis.chat_templates import template_findings
from .errors import CheckError, ProgramError, UsageError, WorkerError, did_you_mean, shown
from .evaluation_options import check_evaluation, check_stop, read_evaluations
from .graph.check_program import Report, check, unlike_names, unused
from .graph.compile_paths import compile_graph
from .graph.ops.allowed import check_values, whole
from .graph.ops.check_arguments import described
from .graph.record import Graph
from .graph.script.named_in_code import mentions
from .graph.script.site import cell, defined_at, user_frame
from .graph.stand_ins import current_session as sessions
from .graph.stand_ins.scalars import ScalarValue
from .graph.tracing.log_names import logged
from .graph.tracing.trace_program import trace
from .graph.tracing.trace_records import Traced
from .handle import Handle, first_model, misnamed, worker_names_for_tokenizers
from .html_tables import table
from .lowering.lower import used_workers
from .offers import offers
from .placement.model.zoo import SHIPPED
from .placement.plan.plan import Plan
from .program import Program
from .run_options import RUN_OPTIONS, parameters_of_run
from .worker_arguments import find_worker, use_arguments
from .workers.base import Worker
from .workers.model_options import Model
from .workers.undeclared_state import state_findings

if TYPE_CHECKING:
    from .analysis.row_lengths import Tokens
    from .analysis.study import Study
    from .batch import Batch
    from .placement.cost.cost_model import Costs
    from .prepare_run import CheckedProgram
    from .runtime.driver.run_settings import Outcome

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")


class Flow:
    """Hold workers and programs that belong together: trace, check, draw and run them.

    ``name`` is that of the default program. docs/language.md has the whole language.

    >>> flow = fl.Flow("example")
    >>> actor = flow.worker(fl.Actor, "a/model", lr=1e-6)
    >>> reward = flow.worker(fl.FunctionReward, lambda prompt, response: float(len(response)))
    >>> @flow.program
    ... def example(steps: int = 10, n: int = 4) -> None:
    ...     for step, batch in flow.steps(fl.data.rows([{"prompt": "1+2="}], batch=1), steps):
    ...         batch = reward.score(actor.generate(batch, n=n))
    ...         metrics = actor.update(rl.advantages(batch), loss=rl.ppo_clip())
    ...         flow.log(step, metrics, reward=batch.rewards.mean())
    >>> flow.check().text()
    'example: fine'
    >>> [node.id for node in flow.graph().nodes]
    ['actor.generate', 'reward.score', 'rl.advantages', 'actor.update', 'batch.mean']
    """

    def __init__(self, name: str) -> None:
        frame = user_frame()
        self.name = name
        self.script = frame.f_code.co_filename if frame else ""
        self.handles: list[Handle] = []
        self.programs: dict[str, Program] = {}
        self._traces: dict[Any, Traced] = {}
        self._cell: CodeType | None = None

    def _repr_html_(self) -> str:
        """Its workers and programs, for a notebook."""
        workers = [
            (h.name, h.cls.__name__, ", ".join(f"{n}={value!r}" for n, value in h.arguments.items()))
            for h in self.handles
        ]
        programs = [
            (p.name, str(inspect.signature(p.fn)), f"{shown(p.at.file)}:{p.at.line}") for p in self.programs.values()
        ]
        return table(["worker", "class", "arguments"], workers, title=f"flow '{self.name}'") + table(
            ["program", "parameters", "at"], programs
        )

    # -- the language -------------------------------------------------------------------------------------------

    @overload
    def worker(self, cls: Callable[P, W], /, *args: P.args, **kwargs: P.kwargs) -> W: ...
    @overload
    def worker(self, cls: Callable[..., W], /, *args: Any, name: str, **kwargs: Any) -> W: ...
    def worker(self, cls: Callable[..., W], /, *args: Any, **kwargs: Any) -> W:
        """Declare a worker: its class and constructor arguments. Nothing is loaded.

        The handle is typed as the worker, so editors complete and check its ops. ``name=`` overrides its name, which
        is that of the module-level variable.
        """
        given: Any = cls
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            what = f"flow.worker takes a worker class, and was given {described(given)}."
            wrapped = f"Wrap a reward function: flow.worker(fl.FunctionReward, {getattr(given, '__name__', 'fn')})."
            fix = wrapped if inspect.isfunction(given) else "Subclass fl.Worker."
            raise WorkerError(what, at=sessions.caller(), fix=fix)
        if sessions.current() is not None:
            what = f"a worker ({given.__name__}) is declared inside a program, which is run several times."
            raise WorkerError(what, at=sessions.caller(), fix="Move the line to the module, above the program.")
        name = kwargs.pop("name", None) if "name" not in inspect.signature(cls).parameters else None
        self._new_cell()
        handle = Handle(cls, args, kwargs, cast("str | None", name))
        self.handles.append(handle)
        return cast("W", handle)

    @overload
    def program(self, fn: Callable[P, R]) -> Callable[P, R]: ...
    @overload
    def program(self, *, presets: Mapping[str, Mapping[str, Any]]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
    def program(self, fn: Any = None, *, presets: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
        """Declare a program: a function over the workers of this flow, named like it.

        ``presets`` are values of its parameters under a name: ``--preset NAME`` on the command line.
        """

        if isinstance(fn, str):
            raise ProgramError(
                f'@flow.program("{fn}"): a program is named like its function.',
                at=sessions.caller(),
                fix="Write @flow.program without a name, and name the function so.",
            )
        declare = partial(self._declare, presets=presets or {})
        return declare if fn is None else declare(fn)

    def _declare(self, fn: Callable[P, R], presets: Mapping[str, Mapping[str, Any]]) -> Callable[P, R]:
        self._new_cell()
        at, first = defined_at(fn), self.programs.get(fn.__name__)
        if first is not None and not _replaced(first.cell, self._cell):
            what = f"this flow has a program '{fn.__name__}' already, at line {first.at.line}."
            raise ProgramError(what, at=at, fix="Give one of them another name.")
        self.programs[fn.__name__] = program = Program(fn, fn.__name__, at, presets, self._cell)
        return cast("Callable[P, R]", program)

    def steps(self, source: Any, steps: int | None = None) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch) ``steps`` times, or until the source ends. Each round is one step of the program."""
        session = self._session("steps")
        if hasattr(source, "schema"):  # what is no source is said by the session
            check_values("flow.steps", {"steps": steps}, {"steps": whole(least=0) | None})
        return session.steps(source, steps)

    def more(self, count: int) -> Batch:
        """Return ``count`` further prompts of this step's source, as a batch: for loops that refill."""
        session = self._session("more")
        check_values("flow.more", {"count": count}, {"count": whole(least=1)})
        return session.more(count)

    def take(self, source: Any, count: int | None = None) -> Batch:
        """Return the next ``count`` rows of another source (by default its batch), such as an evaluation set."""
        session = self._session("take")
        if hasattr(source, "schema"):
            check_values("flow.take", {"count": count}, {"count": whole(least=1) | None})
        return session.take(source, count)

    def log(self, step: Any, /, *metrics: Any, **values: Any) -> None:
        """Record metrics and numbers with this step. Never waits: they are written when the step commits.

        Metrics of one update keep their names; those of several are told apart as ``actor/loss`` and ``critic/loss``,
        or ``actor/loss`` and ``actor_2/loss``. A name means one thing in a step, and the same in all steps.
        """
        session = self._session("log")
        if not isinstance(step, (int, float, ScalarValue)):
            what = f"flow.log takes the step first, and was given {described(step)}."
            raise ProgramError(what, at=sessions.caller(), fix="Write flow.log(step, ...).")
        session.log(step, logged(metrics, values, sessions.caller()))

    # -- what can be done with it -------------------------------------------------------------------------------

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Run this script's command line: ``python SCRIPT`` is ``flowrl run SCRIPT``. Ends the process.

        ``python -m package.driver`` does the same, and the driver may import from its package.
        """
        frame = user_frame()
        if frame is not None and frame.f_globals.get("__name__") != "__main__":
            return
        if not Path(self.script).is_file():
            what = "flow.main() is the command line of a script, and this flow is in none."
            raise UsageError(what, at=sessions.caller(), fix="Write flow.run().")
        command_line = import_module("flowrl.cli")  # by name: the command line lies above the flow
        spec = frame.f_globals.get("__spec__") if frame is not None else None  # there with python -m
        module = spec.name if spec is not None and spec.parent else None
        sys.exit(command_line.main(["run", self.script, *(sys.argv[1:] if argv is None else argv)], module))

    def default_program(self) -> str:
        """Return the name of the program named like the flow, or of the only one."""
        if self.name in self.programs or not self.programs:
            return self.name
        return next(iter(self.programs))

    def find_program(self, name: str | None) -> Program:
        """Return the program of that name. Raises UsageError with the near miss."""
        wanted = name or self.default_program()
        if wanted not in self.programs:
            fix = did_you_mean(wanted, self.programs, "Write a function under @flow.program.")
            raise UsageError(f"flow '{self.name}' has no program '{wanted}'.", have=self.programs, fix=fix)
        return self.programs[wanted]

    def trace(self, program: str | None = None, **parameters: Any) -> Traced:
        """Run a program abstractly and return what it did. Nothing is loaded."""
        self._drop_replaced()
        declared = self.find_program(program)
        arguments = declared.arguments(parameters)
        key = (declared.name, repr(sorted(arguments.items())))
        if key not in self._traces:
            adders, owner = offers(self.handles), first_model(self.handles)
            self._traces[key] = trace(declared.fn, arguments, name=declared.name, adders=adders, owner=owner)
        return self._traces[key]

    def graph(self, program: str | None = None, **parameters: Any) -> Graph:
        """Return the dataflow graph of a program's steady step. Raises UsageError for an unknown name."""
        return compile_graph(self.trace(program, **parameters), [h.info() for h in self.handles])

    def check(self, program: str | None = None, **parameters: Any) -> Report:
        """Return all findings on a program: errors and lints, among them workers that no program of this flow uses."""
        report = check(traced := self.trace(program, **parameters))
        used, whole = set(self.workers_of(traced)), traced.whole
        for name, found in self.programs.items():
            for values in (dict[str, Any](), *found.presets.values()):
                if used.issuperset(self._names()) or (name == traced.program and values == parameters):
                    continue
                try:
                    other = self.trace(name, **values)
                except UsageError:  # a program that needs parameters of its own
                    whole = False
                    continue
                used |= set(self.workers_of(other))
                whole &= other.whole
        handles = {h.name: h for h in self.handles}
        lost, idle = unused(
            [h.info() for h in self.handles] if whole else [],
            used,
            {name: handle.at for name, handle in handles.items()},
            lambda name: any(mentions(p.fn, handles[name]) for p in self.programs.values()),
        )
        found = [state_findings(cls) for cls in dict.fromkeys(h.cls for h in self.handles)]
        found.append(template_findings(traced, self.handles))
        named = (*misnamed(self.handles), *worker_names_for_tokenizers(traced, self.handles))
        errors = (*report.errors, *lost, *named, *(error for some, _ in found for error in some))
        lints = (*report.lints, *idle, *(lint for _, some in found for lint in some))
        return Report(report.program, errors, (*lints, *(() if errors else unlike_names(traced, sizes=SHIPPED))))

    def study(
        self,
        plan: str | Path | Plan | None = None,
        program: str | None = None,
        *,
        costs: Costs | None = None,
        tokens: Tokens | None = None,
        seed: int = 0,
        runtime: str = "",
        **parameters: Any,
    ) -> Study:
        """Return a program under a plan: work, memory, costs, and its schedule on a virtual clock. Nothing is loaded.

        ``costs``: None takes a roofline of the plan's cluster. ``tokens``: what is known of lengths. ``runtime`` is
        to run it: the one that the plan needs unless it is said.
        """
        return self.study_with(parameters, plan, program, costs=costs, tokens=tokens, seed=seed, runtime=runtime)

    def study_with(
        self,
        parameters: Mapping[str, Any],
        plan: str | Path | Plan | None = None,
        program: str | None = None,
        *,
        costs: Costs | None = None,
        tokens: Tokens | None = None,
        seed: int = 0,
        runtime: str = "",
    ) -> Study:
        """Return :meth:`study` of a program whose parameters may have any names, ``tokens`` and ``seed`` too."""
        from .analysis.row_lengths import Tokens
        from .analysis.study import Study

        declared, traced = self.find_program(program), self.trace(program, **parameters)
        arguments, tokens = declared.arguments(parameters), tokens or Tokens()
        return Study(declared.fn, arguments, traced, self.handles, _plan(plan), costs, tokens, seed, runtime)

    def workers_of(self, traced: Traced) -> tuple[str, ...]:
        """Return names of the workers that a program calls, hands on, or copies, as they were declared."""
        return used_workers(traced, self.handles)

    def run(
        self,
        *programs: str,
        out: str | Path | None = None,
        plan: str | Path | Plan | None = None,
        runtime: str = "local",
        seed: int = 0,
        resume: bool = False,
        allow_changed: bool = False,
        unlock: bool = False,
        overwrite: bool = False,
        checkpoint_every: int = 50,
        keep_last: int = 2,
        keep_best: str = "",
        evaluate: str | Sequence[str] = (),
        stop_when: str = "",
        checkpoint: str | Path | None = None,
        save_models: bool = True,
        trajectories: int = 2,
        trajectories_every: int = 10,
        keep_sampled: bool = False,
        quiet: bool = False,
        track: str | Sequence[str] = (),
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
        arguments: Sequence[str] = (),
        address: str | None = None,
        **values: Any,
    ) -> Outcome:
        """Check programs, then run them one after another over the same workers, recorded in ``out``.

        ``flow.run(steps=3)``: other keywords are parameters of the program. Of several programs the one that has it is
        meant; ``parameters={"warmup": {"steps": 3}}`` says of which, and gives those that have the name of an option
        here. ``out`` is ``runs/NAME-TIME`` unless it is said. All rows of the first ``trajectories`` prompts of every
        ``trajectories_every``-th step are written down; with ``keep_sampled`` all sampled rows are kept, so that
        ``flowrl replay --forced`` can give them again. ``address`` is that of a running Ray cluster, for
        ``runtime="ray"``. ``resume`` goes on with the run in ``out``; what has changed since its start is told, and
        refused where it makes another run, unless ``allow_changed``. ``unlock`` says that the process on another host
        which has the folder is gone. The newest ``keep_last`` checkpoints are kept, and with ``keep_best="accuracy"``
        that with the largest such metric (``"loss:min"``: the smallest), whose models are saved in ``best/``.
        ``evaluate="test:20"`` runs the program ``test`` after every 20 steps and at the end of each one that trains, on
        the weights as they are there; nothing else changes by it. ``stop_when="accuracy:3"`` ends a loop over steps
        when three such numbers in a row were not above the best one before (``"loss:min:3"``: below). ``checkpoint`` is
        the folder of a checkpoint of another run of this flow, with whose weights the workers begin.
        ``track`` names trackers that show the run too: ``"tensorboard"``, ``["wandb", "module:Class"]``. Raises
        UsageError for an unknown keyword or value, CheckError with every finding before anything is loaded,
        ResumeError for a run that cannot go on so.
        """
        options = {name: value for name, value in locals().items() if name in RUN_OPTIONS}
        from .backends import names as engines
        from .prepare_run import prepare_run
        from .trackers.open_tracker import find_trackers

        check_values("flow.run", options, RUN_OPTIONS, UsageError)
        trackers = find_trackers(track)
        self._drop_replaced()
        names = [self.find_program(name).name for name in programs or (None,)]
        asked = read_evaluations(evaluate, self.find_program)
        check_stop(stop_when)
        keywords = [n for n, p in inspect.signature(Flow.run).parameters.items() if p.kind is p.KEYWORD_ONLY]
        given = parameters_of_run(self.programs, names, parameters or {}, values, keywords, beside=asked)
        options |= {
            "out": self.new_folder() if out is None else Path(out),
            "track": trackers,
            "script": self.script,
            "arguments": tuple(arguments),
            "programs": tuple(program.fn for program in self.programs.values()),
        }
        placed = _plan(plan)
        placed.check_workers(self._names(), engines())
        checked = partial(self._checked, plan=placed, planned=bool(plan), runtime=runtime)
        run = [checked(name, given[name]) for name in names]
        between = [_evaluating(checked(name, given[name]), run) for name in asked]
        return prepare_run(
            run,
            list(zip(between, asked.values(), strict=True)),
            self.handles,
            options,
            plan=placed,
            planned=bool(plan),
            checkpoint=checkpoint,
            address=address,
        ).run()

    def _checked(
        self, name: str, parameters: Mapping[str, Any], *, plan: Plan, planned: bool, runtime: str
    ) -> CheckedProgram:
        """Return a program of a run under its plan. Raises CheckError with all that is wrong with it or the plan."""
        from .analysis.check_plan import refuse
        from .prepare_run import CheckedProgram

        if errors := self.check(name, **parameters).errors:
            raise CheckError(errors)
        study = self.study_with(parameters, plan, name, runtime=runtime)
        refuse(study, planned=planned)
        return CheckedProgram(study, self.graph(name, **parameters))

    def new_folder(self) -> Path:
        """Return the folder of a run that starts now and names none: ``runs/grpo-20260131-120000``."""
        name = re.sub(r"[^\w.-]+", "-", self.name)  # a folder below runs/, whatever the flow is called
        return Path(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")

    def use_model(self, worker: str, model: str) -> None:
        """Put another model in the place of a worker's own, as ``--model actor=NAME`` does. Raises UsageError."""
        handle = find_worker(self.handles, worker, f"--model {worker}=...: flow '{self.name}'")
        if "model" not in handle.arguments:
            raise UsageError(f"--model {worker}=...: worker '{worker}' ({handle.cls.__name__}) has no model.")
        handle.use_model(Model.of(model))
        self._traces.clear()

    def use_arguments(self, worker: str, /, **arguments: Any) -> None:
        """Put other arguments in the place of a worker's own, as ``--arg actor.lr=2e-6`` does, for runs that follow.

        They are held against the rules of their class together. A mapping stands for a record: ``lora={"r": 16}``.
        Raises UsageError for what is not there or has to be changed in the driver, else the error of the class; then
        nothing is changed.

        >>> flow = fl.Flow("example")
        >>> actor = flow.worker(fl.Actor, "a/model", lr=1e-6, name="actor")
        >>> flow.use_arguments("actor", lr=2e-6, schedule="linear", total=100)
        """
        handle = find_worker(self.handles, worker, f"--arg {worker}...: flow '{self.name}'")
        use_arguments(handle, self.handles, arguments)
        self._traces.clear()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _new_cell(self) -> None:
        """Notice that another cell of a notebook is running: nothing that was traced before it is kept."""
        now = cell()
        if now is not None and now is not self._cell:
            self._cell = now
            self._traces.clear()
            for handle in self.handles:
                _ = handle.name  # asked for before its variable takes the next worker

    def _drop_replaced(self) -> None:
        """Leave out workers that a later cell of a notebook has declared again."""
        self._new_cell()
        last = {handle.name: handle.cell for handle in self.handles}
        self.handles = [h for h in self.handles if not _replaced(h.cell, last[h.name])]

    def _names(self) -> tuple[str, ...]:
        return tuple(h.name for h in self.handles)

    def _session(self, what: str) -> Any:
        session = sessions.current()
        if session is None:
            fix = "Call it inside a function under @flow.program."
            raise ProgramError(f"flow.{what} was called outside of a program.", at=sessions.caller(), fix=fix)
        return session


def _plan(plan: str | Path | Plan | None) -> Plan:
    """Return a plan, that of a file, or one process where there is none."""
    return plan if isinstance(plan, Plan) else Plan.one_process() if plan is None else Plan.load(plan)


def _evaluating(evaluation: CheckedProgram, run: Sequence[CheckedProgram]) -> CheckedProgram:
    """Return a program as one that is run between the steps of others. Raises what is wrong with that."""
    studies = [program.study for program in run]
    used = {worker for study in studies for worker in study.execution.workers}
    check_evaluation(evaluation.study.traced, {study.traced.program: study.traced for study in studies}, used)
    return evaluation


def _replaced(first: CodeType | None, second: CodeType | None) -> bool:
    """Whether what was declared in the first cell is replaced by what is declared under its name in the second."""
    return first is not None and second is not None and first is not second
