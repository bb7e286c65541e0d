"""Make a run of programs that are checked: what opens their workers, its settings, and the runner that holds both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .analysis.forecast import forecast_of
from .analysis.placed_graph import recorded_graph
from .analysis.study import Study
from .graph.record import Graph
from .handle import Handle
from .launch import launch
from .lowering.scheme_of_program import trained_workers
from .placement.plan.plan import Plan
from .runtime.driver.run_settings import Evaluation, Settings
from .runtime.driver.runner import Runner
from .runtime.storage.checkpoints.other_run import begun_with
from .runtime.storage.run_inputs import inputs_of


@dataclass(frozen=True)
class CheckedProgram:
    """A program of a run that its plan suits, and its graph: ``CheckedProgram(study, graph)``."""

    study: Study
    graph: Graph

    def graph_for_records(self, *, planned: bool) -> Mapping[str, Any]:
        """Return its graph as a run's records have it."""
        return recorded_graph(self.study, self.graph, planned=planned).to_json()


def prepare_run(
    programs: Sequence[CheckedProgram],
    evaluations: Sequence[tuple[CheckedProgram, int]],
    handles: Sequence[Handle],
    options: Mapping[str, Any],
    *,
    plan: Plan,
    planned: bool,
    checkpoint: str | Path | None,
    address: str | None,
) -> Runner:
    """Return the runner of these programs, one after another. Nothing is started yet.

    ``evaluations``: programs that are run between their steps, and after how many. ``handles``: the flow's workers.
    ``options``: fields of :class:`Settings` as they were asked for. ``planned``: the plan was given, and is not the one
    process that a run has without. ``checkpoint``, ``address``: as in :meth:`flowrl.Flow.run`.
    """
    studies = [program.study for program in programs]
    executions, traces = [study.execution for study in studies], [study.traced for study in studies]
    between = tuple(Evaluation(each.study.execution.without_memory(), every) for each, every in evaluations)
    every = [*executions, *(evaluation.execution for evaluation in between)]
    executor = launch(every, handles, out=options["out"], seed=options["seed"], address=address)
    used = {name for execution in executions for name in execution.workers}
    inputs = inputs_of(
        executions,
        traces,
        [handle for handle in handles if handle.name in used],
        seed=options["seed"],
        plan=plan.to_json(),
        runtime=options["runtime"],
        checkpoint=begun_with(checkpoint),
    )
    trained = tuple(bool(trained_workers(traced)) for traced in traces)
    if checkpoint is not None and not any(trained):
        options = {**options, "save_models": False}  # they are there already
    settings = Settings(
        **options,
        plan=plan.to_json(),
        graphs=tuple(program.graph_for_records(planned=planned) for program in programs),
        forecasts=tuple(forecast_of(study) if planned else None for study in studies),
        inputs=inputs,
        evaluations=between,
        evaluation_graphs=tuple(each.graph_for_records(planned=planned) for each, _ in evaluations),
        trained=trained,
        checkpoint=None if checkpoint is None else Path(checkpoint),
    )
    return Runner(executions, executor, settings)
