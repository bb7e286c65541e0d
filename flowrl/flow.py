"""The flow: workers and programs of one script, and what can be done with them: trace, check, draw, run."""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

from .errors import CheckError, FlowError, ModelError, ProgramError, UsageError, WorkerError, near, shown
from .graph import session as sessions
from .graph.allowed import check_values, flag, one_of, whole
from .graph.arguments import described
from .graph.check import Report, check, unused
from .graph.compile import compile_graph
from .graph.logged import logged
from .graph.mentions import mentions
from .graph.record import Graph, WorkerInfo
from .graph.scalars import ScalarValue
from .graph.settings import settings_of_worker
from .graph.site import cell, defined_at, user_frame
from .graph.terms import Traced
from .graph.trace import trace
from .handle import Handle
from .lowering.execution import used_workers
from .names import name_problem
from .offers import offers
from .placement.plan.plan import Plan
from .program import Program
from .workers.base import Worker
from .workers.records import Model
from .workers.state import state_findings
from .workers.tokenizer import actor_of

if TYPE_CHECKING:
    from .analysis.row_lengths import Tokens
    from .analysis.study import Study
    from .batch import Batch
    from .placement.cost.model import Costs
    from .runtime.driver.settings import Outcome

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")

#: What the options of a run may be.
RUN_OPTIONS = {
    "runtime": one_of("local", "eager", "ray"),
    "seed": whole(),
    "resume": flag(),
    "allow_changed": flag(),
    "unlock": flag(),
    "overwrite": flag(),
    "checkpoint_every": whole(least=1),
    "save_models": flag(),
    "trajectories": whole(least=0),
    "trajectories_every": whole(least=1),
    "quiet": flag(),
}
#: Names that nodes of a graph have without a worker.
_LIBRARIES = ("rl", "batch", "data", "user")
_FILES = frozenset(("live", "manifest"))


def _plain(text: str) -> str:
    """A docstring's line without its markup."""
    return re.sub(r":\w+:`([^`]*)`", r"\1", text).replace("``", "")


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
            wrapped = f"Wrap a reward function: flow.worker(fl.FunctionReward, {getattr(given, '__name__', 'fn')})."
            raise WorkerError(
                f"flow.worker takes a worker class, and was given {described(given)}.",
                at=sessions.caller(),
                fix=wrapped if inspect.isfunction(given) else "Subclass fl.Worker.",
            )
        if sessions.current() is not None:
            raise WorkerError(
                f"a worker ({given.__name__}) is declared inside a program, which is run several times.",
                at=sessions.caller(),
                fix="Move the line to the module, above the program.",
            )
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

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            return self._declare(function, presets or {})

        return declare if fn is None else declare(fn)

    def _declare(self, fn: Callable[P, R], presets: Mapping[str, Mapping[str, Any]]) -> Callable[P, R]:
        self._new_cell()
        at, first = defined_at(fn), self.programs.get(fn.__name__)
        if first is not None and not _replaced(first.cell, self._cell):
            raise ProgramError(
                f"this flow has a program '{fn.__name__}' already, at line {first.at.line}.",
                at=at,
                fix="Give one of them another name.",
            )
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            waits = inspect.iscoroutinefunction(fn)
            raise ProgramError(
                f"program '{fn.__name__}' is {'async' if waits else 'a generator: it yields'}.",
                at=at,
                fix="Write def and call ops without await: they return at once, and steps overlap by the plan."
                if waits
                else "Record what it yields with flow.log(step, ...).",
            )
        made = Program(fn, fn.__name__, at, presets, self._cell)
        self.programs[fn.__name__] = made
        return cast("Callable[P, R]", made)

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
            raise ProgramError(
                f"flow.log takes the step first, and was given {described(step)}.",
                at=sessions.caller(),
                fix="Write flow.log(step, ...).",
            )
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
            raise UsageError(
                "flow.main() is the command line of a script, and this flow is in none.",
                at=sessions.caller(),
                fix="Write flow.run().",
            )
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
            meant = near(wanted, self.programs)
            raise UsageError(
                f"flow '{self.name}' has no program '{wanted}'.",
                have=self.programs,
                fix=f"Did you mean '{meant}'?" if meant else "Write a function under @flow.program.",
            )
        return self.programs[wanted]

    def trace(self, program: str | None = None, **parameters: Any) -> Traced:
        """Run a program abstractly and return what it did. Nothing is loaded."""
        self._drop_replaced()
        found = self.find_program(program)
        arguments = found.arguments(parameters)
        key = (found.name, repr(sorted(arguments.items())))
        if key not in self._traces:
            self._traces[key] = trace(
                found.fn, arguments, name=found.name, adders=offers(self.handles), owner=self._first_model()
            )
        return self._traces[key]

    def graph(self, program: str | None = None, **parameters: Any) -> Graph:
        """Return the dataflow graph of a program's steady step. Raises UsageError for an unknown name."""
        return compile_graph(self.trace(program, **parameters), self._infos())

    def check(self, program: str | None = None, **parameters: Any) -> Report:
        """Return all findings on a program: errors and lints, among them workers that no program of this flow uses."""
        report = check(traced := self.trace(program, **parameters))
        used, whole = set(self.workers_of(traced)), traced.whole
        everyone = {h.name for h in self.handles}
        for name, found in self.programs.items():
            for values in (dict[str, Any](), *found.presets.values()):
                if used >= everyone or (name == traced.program and values == parameters):
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
            self._infos() if whole else [],
            used,
            {name: handle.at for name, handle in handles.items()},
            lambda name: any(mentions(p.fn, handles[name]) for p in self.programs.values()),
        )
        found = [state_findings(cls) for cls in dict.fromkeys(h.cls for h in self.handles)]
        errors = (*report.errors, *lost, *self._misnamed(), *(error for some, _ in found for error in some))
        return Report(report.program, errors, (*report.lints, *idle, *(lint for _, some in found for lint in some)))

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
        from .analysis.row_lengths import Tokens
        from .analysis.study import Study

        found = self.find_program(program)
        placed = plan if isinstance(plan, Plan) else Plan.load(plan) if plan else Plan.one_process()
        return Study(
            found.fn,
            found.arguments(parameters),
            self.trace(program, **parameters),
            self.handles,
            placed,
            costs,
            tokens or Tokens(),
            seed,
            runtime,
        )

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
        save_models: bool = True,
        trajectories: int = 2,
        trajectories_every: int = 10,
        quiet: bool = False,
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
        arguments: Sequence[str] = (),
        address: str | None = None,
        **values: Any,
    ) -> Outcome:
        """Check programs, then run them one after another over the same workers, recorded in ``out``.

        ``flow.run(steps=3)``: other keywords are parameters of the program. Of several programs the one that has it is
        meant; ``parameters={"warmup": {"steps": 3}}`` says of which, and gives those that have the name of an option
        here. ``out`` is ``runs/NAME-TIME`` unless it is said. All rows of the first ``trajectories`` prompts of every
        ``trajectories_every``-th step are written down. ``address`` is that of a running Ray cluster, for
        ``runtime="ray"``. ``resume`` goes on with the run in ``out``; what has changed since its start is told, and
        refused where it makes another run, unless ``allow_changed``. ``unlock`` says that the process on another host
        which has the folder is gone. Raises UsageError for an unknown keyword or value,
        CheckError with every finding before anything is loaded, ResumeError for a run that cannot go on so.
        """
        from .launch import launch
        from .runtime.driver.run import Runner
        from .runtime.driver.settings import Settings
        from .runtime.storage.inputs import inputs_of

        options: dict[str, Any] = {
            "runtime": runtime,
            "seed": seed,
            "resume": resume,
            "allow_changed": allow_changed,
            "unlock": unlock,
            "overwrite": overwrite,
            "checkpoint_every": checkpoint_every,
            "save_models": save_models,
            "trajectories": trajectories,
            "trajectories_every": trajectories_every,
            "quiet": quiet,
        }
        check_values("flow.run", options, RUN_OPTIONS, UsageError)
        self._drop_replaced()
        names = programs or (self.default_program(),)
        given = self._parameters(names, parameters or {}, values)
        folder = self.new_folder() if out is None else Path(out)
        placed = self._plan_of_run(plan)
        studies = [self._checked(name, placed, given[name], planned=bool(plan), runtime=runtime) for name in names]
        executions = [study.execution for study in studies]
        executor = launch(executions, self.handles, out=folder, seed=seed, address=address)
        used = {name for execution in executions for name in execution.workers}
        handles = [h for h in self.handles if h.name in used]
        traces = [study.traced for study in studies]
        graphs = [self._recorded(name, study, planned=bool(plan)) for name, study in zip(names, studies, strict=True)]
        settings = Settings(
            **options,
            out=folder,
            script=self.script,
            plan=placed.to_json(),
            arguments=tuple(arguments),
            programs=tuple(program.fn for program in self.programs.values()),
            graphs=tuple(graph.to_json() for graph in graphs),
            inputs=inputs_of(executions, traces, handles, seed=seed, plan=placed.to_json(), runtime=runtime),
        )
        return Runner(executions, executor, settings).run()

    def _plan_of_run(self, plan: str | Path | Plan | None) -> Plan:
        """The plan that a run is given, or one process. Raises PlanError where it does not fit the workers."""
        from .backends import names as engines

        placed = plan if isinstance(plan, Plan) else Plan.load(plan) if plan else Plan.one_process()
        placed.check_workers(tuple(h.name for h in self.handles), engines())
        return placed

    def _checked(self, name: str, plan: Plan, parameters: Mapping[str, Any], *, planned: bool, runtime: str) -> Study:
        """A program of a run under its plan. Raises CheckError with all that is wrong with it, or with the plan."""
        from .analysis.check import plan_findings

        if errors := self.check(name, **parameters).errors:
            raise CheckError(errors)
        study = self.study(plan, name, runtime=runtime, **parameters)
        if refused := study.unsupported():
            raise refused[0] if len(refused) == 1 else CheckError(refused)
        if planned and (errors := plan_findings(study)[0]):
            raise CheckError(errors)
        return study

    def _recorded(self, name: str, study: Study, *, planned: bool) -> Graph:
        """The graph of a program of a run; with places, where it has a plan and the sizes of models are known."""
        from .analysis.placed_graph import placed_graph

        graph = self.graph(name, **study.parameters)
        if planned:
            with suppress(ModelError):
                graph = placed_graph(study, graph)
        return graph

    def new_folder(self) -> Path:
        """Return the folder of a run that starts now and names none: ``runs/grpo-20260131-120000``."""
        name = re.sub(r"[^\w.-]+", "-", self.name)  # a folder below runs/, whatever the flow is called
        return Path(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")

    def _parameters(
        self, names: Sequence[str], by_program: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """The parameters of each program: those given by its name, and the keywords that it alone has."""
        programs = {name: self.find_program(name) for name in names}
        found = {name: dict(by_program.get(name, {})) for name in programs}
        stray = next((name for name in by_program if name not in programs), None)
        if stray is not None:
            raise UsageError(
                f"parameters= names '{stray}', which is none of the programs that are run.",
                at=sessions.caller(),
                have=programs,
                fix=f"Run it too: flow.run({', '.join(repr(n) for n in (*programs, stray))}, ...)."
                if stray in self.programs
                else None,
            )
        for key, value in values.items():
            owners = [name for name, program in programs.items() if key in program.parameters]
            if len(owners) != 1 or key in found[owners[0]]:
                raise _no_keyword(key, programs, owners)
            found[owners[0]][key] = value
        return found

    def use_model(self, worker: str, model: str) -> None:
        """Put another model in the place of a worker's own, as ``--model actor=NAME`` does. Raises UsageError."""
        handle = next((h for h in self.handles if h.name == worker), None)
        if handle is None:
            names = [h.name for h in self.handles]
            meant = near(worker, names)
            raise UsageError(
                f"--model {worker}=...: flow '{self.name}' has no worker '{worker}'.",
                have=names,
                fix=f"Did you mean '{meant}'?" if meant else None,
            )
        if "model" not in handle.arguments:
            raise UsageError(f"--model {worker}=...: worker '{worker}' ({handle.cls.__name__}) has no model.")
        handle.use_model(Model.of(model))
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

    def _session(self, what: str) -> Any:
        session = sessions.current()
        if session is None:
            raise ProgramError(
                f"flow.{what} was called outside of a program.",
                at=sessions.caller(),
                fix="Call it inside a function under @flow.program.",
            )
        return session

    def _first_model(self) -> Handle | None:
        """The worker whose tokenizer reads data that says no other, as a run finds it; None where none has one."""
        try:
            name = actor_of({h.name: (h.cls, h.arguments) for h in self.handles})
        except ModelError:
            return None
        return next(h for h in self.handles if h.name == name)

    def _infos(self) -> list[WorkerInfo]:
        return [
            WorkerInfo(
                h.name,
                h.cls.__name__,
                shown(h.at.file),
                h.at.line,
                _plain((inspect.getdoc(h.cls) or "").split("\n")[0]),
                settings_of_worker(h.cls, h.arguments),
            )
            for h in self.handles
        ]

    def _misnamed(self) -> list[FlowError]:
        """Workers that plans, graphs and records could not tell apart from others, or from a library."""
        found: list[FlowError] = []
        first: dict[str, Handle] = {}
        for handle in self.handles:
            other = first.setdefault(handle.name.casefold(), handle)
            if other is not handle:
                same = other.name == handle.name
                taken = f"as is the one at line {other.at.line}{'' if same else f', {other.name!r}, but for its case'}"
            elif (wrong := name_problem(handle.name)) is not None:
                taken = f"which {wrong}"
            elif handle.name in _LIBRARIES:
                taken = "which is the name of a library"
            elif handle.name in _FILES:
                taken = "which is the name of a file in every checkpoint"
            else:
                continue
            found.append(
                WorkerError(
                    f"a worker is called '{handle.name}', {taken}.",
                    at=handle.at,
                    fix=f'Give it a variable of its own, or a name: flow.worker(..., name="{handle.name}_2").',
                )
            )
        return found


def _no_keyword(key: str, programs: Mapping[str, Program], owners: Sequence[str]) -> UsageError:
    """What is said of a keyword of ``Flow.run`` that is no parameter, that of several programs, or given twice."""
    what = f"flow.run({key}=...): "
    if len(owners) > 1:
        which = ", ".join(f"'{owner}'" for owner in owners)
        what, fix = what + f"programs {which} have it.", f'Write parameters={{"{owners[0]}": {{"{key}": ...}}}}.'
    elif owners:
        what, fix = what + f"parameters= gives it to '{owners[0]}' too.", "Give it once."
    else:
        whose = " or ".join(f"'{name}'" for name in programs)
        options = [n for n, p in inspect.signature(Flow.run).parameters.items() if p.kind is p.KEYWORD_ONLY]
        meant = near(key, [*(n for program in programs.values() for n in program.parameters), *options])
        what += f"neither flow.run nor program {whose} has it."
        fix = f"Did you mean '{meant}'?" if meant else None
    have = dict.fromkeys(name for program in programs.values() for name in program.parameters)
    return UsageError(what, at=sessions.caller(), have=None if owners else have, fix=fix)


def _replaced(first: CodeType | None, second: CodeType | None) -> bool:
    """Whether what was declared in the first cell is replaced by what is declared under its name in the second."""
    return first is not None and second is not None and first is not second
