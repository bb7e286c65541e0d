"""The programs of a run as its runtime takes them: the schedule and the graph of each, and where workers are opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..analysis.placed_graph import placed_graph
from ..analysis.study import Study
from ..errors import ModelError
from ..graph.record import Graph
from ..runtime.driver.run import Stage
from ..runtime.local.executor import LocalExecutor
from ..schedule.events import Memory
from .here import scheme_here
from .places import on_ranks, workplace
from .scheme import scheme_of


def stage_of(name: str, study: Study, graph: Graph, workers: tuple[str, ...], *, runtime: str, planned: bool) -> Stage:
    """A program of a run, of which ``workers`` are used. Its graph says where calls are if the run is ``planned``."""
    scheme = scheme_of(
        study.traced, study.plan, study.workers, in_one=runtime == "eager", memory=_memory(study, runtime)
    )
    if planned:
        with suppress(ModelError):  # of a model whose size is not known here: the graph without its places
            graph = placed_graph(study, graph)
    readings = tuple(dict.fromkeys(r for trail in study.traced.trails for r in trail.readings))
    here = scheme_here(scheme, ranks=runtime == "ray")
    return Stage(name, study.fn, study.parameters, workers, graph.to_json(), here, readings)


def place_of(studies: Sequence[Study], *, runtime: str, out: Path, seed: int, address: str | None) -> Any:
    """What opens the workers of a run: this process, or ranks on Ray."""
    handles, plan = studies[0].handles, studies[0].plan
    if runtime != "ray":
        place: LocalExecutor = workplace(handles, plan, seed=seed)
        return place
    swapped = {name for study in studies for held in _memory(study, runtime).values() for name in held.sizes}
    traces = [study.traced for study in studies]
    return on_ranks(handles, plan, traces, out=out, seed=seed, address=address, swapped=swapped)


def _memory(study: Study, runtime: str) -> Mapping[str, Memory]:
    """The memory of pools whose residents may have to take turns: of devices that the plan names, on ranks."""
    return study.memory if runtime == "ray" and study.plan.cluster else {}
