"""``flowrl simulate``: fly a program with the real schedule on a virtual clock."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..analysis.check_plan import memory_errors
from ..analysis.placed_graph import edge_records, placed_graph
from ..analysis.what_helps import explained
from ..errors import CheckError, UsageError
from ..flow import Flow
from ..schedule.report import FORMATS, render
from .arguments.auto_plan import STEPS
from .arguments.options import chosen, parse, put, whole_number
from .arguments.study_options import (
    add_hours_options,
    add_study_options,
    hours_of,
    load_plan,
    study_of,
)


def add_options(parser: argparse.ArgumentParser, *, steps: bool = True) -> None:
    """Add the options of this command; ``steps`` unless the program has a parameter of that name."""
    add_study_options(parser)
    add_hours_options(parser)
    if steps:
        parser.add_argument("--steps", type=whole_number, default=STEPS, help=f"of each loop, at most ({STEPS})")
    parser.add_argument("--explain", action="store_true", help="the critical path of a step, and what would help")
    parser.add_argument("--format", default="table", help=", ".join(FORMATS))
    parser.add_argument("--out", "-o", metavar="FILE", help="write to a file instead of the screen")


def simulate_command(flow: Flow, words: Sequence[str]) -> int:
    """Print or write what a simulated run did. Returns the exit status."""
    asks = "steps" in flow.find_program(chosen(flow, words)[0]).parameters  # then it is the program's own
    given = parse(flow, "simulate", words, partial(add_options, steps=not asks))
    name, options = given.programs[0], given.options
    if len(given.programs) > 1:
        raise UsageError("flowrl simulate flies one program.", fix=f"Write --program {name}.")
    parameters = given.parameters[name]
    report = flow.check(name, **parameters)
    if report.errors:
        raise CheckError(report.errors)
    study = study_of(flow, name, parameters, options, load_plan(flow, options, name, parameters))
    if errors := memory_errors(study):
        raise CheckError(errors)
    edges = edge_records(placed_graph(study, flow.graph(name, **parameters)))
    steps = None if asks else options.steps
    flown = replace(study.simulate(steps), edges=tuple(edges))
    if (hours := hours_of(options, study.plan.cluster, flown.step_seconds)) is not None:
        flown = replace(flown, machines=hours.to_json())
    if options.explain:
        flown = replace(flown, explained=explained(study, flown, steps).to_json())
    put(render(flown, options.format), options.out)
    return 0
