"""What a run says of itself: what it is asked, for its record; where it goes on; which words of a plan it ignores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import did_you_mean
from ...lowering.lower import Execution
from ..values.values_in_records import spelled
from .best_step import Metric
from .run_settings import Settings


def labels(programs: Sequence[str]) -> list[str]:
    """Return the names of programs in the records of a run, in which one that is run again has a number.

    >>> labels(["evaluate", "grpo", "evaluate"])
    ['evaluate', 'grpo', 'evaluate-2']
    """
    times = [list(programs[: place + 1]).count(name) for place, name in enumerate(programs)]
    return [name if time == 1 else f"{name}-{time}" for name, time in zip(programs, times, strict=True)]


def start_record(executions: Sequence[Execution], titles: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Return what ``run.json`` has of what a run is asked; ``titles`` are those of its programs in records."""
    return {
        "script": settings.script,
        "arguments": list(settings.arguments),
        "programs": [e.program for e in executions],
        "parameters": [_spelled(e) for e in executions],
        "evaluations": [
            {"program": each.name, "every": each.every, "parameters": _spelled(each.execution)}
            for each in settings.evaluations
        ],
        "stop_when": settings.stop_when,
        "seed": settings.seed,
        "runtime": settings.runtime,
        "plan": settings.plan,
        "inputs": settings.inputs.record,
        "graph": max(settings.graphs, key=lambda graph: len(graph["nodes"])),
        "graphs": dict(zip(titles, settings.graphs, strict=True)) | _evaluation_graphs(executions, settings),
        "forecasts": {title: said for title, said in zip(titles, settings.forecasts, strict=False) if said is not None},
    }


def _spelled(execution: Execution) -> dict[str, Any]:
    return {n: spelled(v) for n, v in execution.parameters.items()}


def evaluation_label(programs: Sequence[str], trained: Sequence[bool], stage: int, name: str) -> str:
    """Return the name in the records of a program that is run between the steps of the program number ``stage``.

    >>> evaluation_label(["warmup", "grpo"], [True, True], 1, "evaluate")
    'evaluate-2'
    """
    before = sum(trained[: stage + 1])
    return labels([*programs, *[name] * before])[-1]


def _evaluation_graphs(executions: Sequence[Execution], settings: Settings) -> dict[str, Any]:
    """Return the graphs of the programs that are run between the steps of others, by their names in the records."""
    programs, trained = [e.program for e in executions], settings.trained
    return {
        evaluation_label(programs, trained, stage, each.name): graph
        for each, graph in zip(settings.evaluations, settings.evaluation_graphs, strict=True)
        for stage, trains in enumerate(trained)
        if trains
    }


def unseen_metric(option: str, metric: Metric, lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return that no line has the metric which an option names, as a warning; None where one has it."""
    if metric.seen or not lines or any(metric.of(line) is not None for line in lines):
        return None
    names = sorted({n for line in lines for n, v in line.items() if isinstance(v, (int, float)) and n != "step"})
    return (
        f"--{option} {metric.name}: no line of metrics has such a number so far, so nothing is decided by it. "
        f"{did_you_mean(metric.name, names, 'Logged are ' + ', '.join(names) + '.')}"
    )


def describe_continuation(executions: Sequence[Execution], manifest: Mapping[str, Any] | None) -> str:
    """Return where a run goes on, in words: from a checkpoint with this manifest, or from its start."""
    if manifest is None:
        return "from its start: there is no checkpoint to go on from"
    if manifest["stage"] >= len(executions):
        return "at its end: nothing is left to do"
    steps = manifest["program"]["steps"] if manifest["program"] else 0
    return f"{executions[manifest['stage']].program} from step {steps}"


def unused_words(settings: Settings) -> str | None:
    """Return which words of the plan the eager runtime has no use for, as a warning; None where there are none."""
    pipeline: Mapping[str, int] = (settings.plan or {}).get("pipeline", {})
    unused = [
        f"{word}: {pipeline[word]}"
        for word, plain in (("staleness", 0), ("chunks", 1))
        if pipeline.get(word, plain) != plain
    ]
    if settings.runtime != "eager" or not unused:
        return None
    return (
        "--runtime eager does one call after another and one step after another, without "
        f"{' and '.join(unused)} of the plan. Results may differ from those of --runtime local."
    )
