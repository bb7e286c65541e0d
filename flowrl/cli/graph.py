"""``flowrl graph``: show a script's dataflow graph."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..analysis.placed_graph import placed_graph
from ..analysis.run_pages import look_at
from ..errors import UsageError
from ..flow import Flow
from ..graph.draw import FORMATS, render
from .arguments.options import check_format, parse, put, read_run_words, refuse_unused, whole_number
from .arguments.study_options import add_study_options, load_plan, study_of, words_of
from .timeline import add_run


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_study_options(parser)
    parser.add_argument(
        "--simulate",
        metavar="STEPS",
        type=whole_number,
        help="with --plan: times and utilisation of so many steps",
    )
    parser.add_argument("--format", default="text", help=", ".join(FORMATS))
    parser.add_argument("--narrow", action="store_true", help="with --format svg: one column, for a narrow screen")
    parser.add_argument("--out", "-o", metavar="FILE", help="write to a file instead of the screen")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--narrow", action="store_true", help="with --format svg: one column, for a narrow screen")


def graph_of_run(words: Sequence[str]) -> int:
    """Print or write the graph of a run, with what was measured so far. Returns the exit status."""
    options = read_run_words("graph", words, _add_run, formats=FORMATS)
    graph, _ = look_at(options.run, options.program)
    put(render(graph, options.format, narrow=options.narrow), options.out)
    return 0


def graph_command(flow: Flow, words: Sequence[str]) -> int:
    """Print or write the graph of a program. Returns the exit status."""
    given = parse(flow, "graph", words, add_options)
    check_format(given.options.format, FORMATS)
    name = given.programs[0]
    if len(given.programs) > 1:
        raise UsageError("flowrl graph draws one program.", fix=f"Write --program {name}.")
    if not given.options.plan and not given.options.set:
        refuse_unused(words, words_of(add_study_options), "is for the times of a plan.", "Add --plan FILE.")
    graph = flow.graph(name, **given.parameters[name])
    report = flow.check(name, **given.parameters[name])
    if (given.options.plan or given.options.set) and not report.errors:
        plan = load_plan(flow, given.options, name, given.parameters[name])
        study = study_of(flow, name, given.parameters[name], given.options, plan)
        flown = study.simulate(given.options.simulate) if given.options.simulate else None
        graph = placed_graph(study, graph, flown)
    elif given.options.simulate:
        raise UsageError("--simulate needs a plan.", fix="Write --plan FILE.")
    put(render(graph, given.options.format, narrow=given.options.narrow), given.options.out)
    for error in report.errors:
        print(error.report(), file=sys.stderr)
    return 1 if report.errors else 0
