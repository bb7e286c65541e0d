"""``flowrl plan``: who sits where in a plan, or a search for the best placement of a program on a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .. import shipped
from ..analysis.search_problem import corrects, find_plan
from ..analysis.study import Study
from ..analysis.what_helps import explained_search
from ..errors import CheckError, UsageError
from ..flow import Flow
from ..graph.check_program import stale
from ..placement.cluster.cluster import Cluster
from ..placement.plan.plan import Plan
from ..placement.plan.show import render
from ..placement.search.explanation import explain, to_json
from ..placement.search.find_placement import Found
from .arguments.auto_plan import steps_flown
from .arguments.options import parse, put, refuse_unused, save, whole_number
from .arguments.plan_option import asks_auto
from .arguments.study_options import (
    add_hours_options,
    add_study_options,
    hours_of,
    load_plan,
    study_of,
    words_of,
)

FORMATS = ("text", "json", "svg")
_DRAW = "Write --out plan.yaml, then draw it: flowrl plan --show plan.yaml --format svg."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_study_options(parser)
    add_hours_options(parser)
    parser.add_argument("--show", action="store_true", help="who sits where in the plan of --plan")
    parser.add_argument(
        "--cluster", metavar="KIND:NxM", help="search on this cluster: h100-80:4x8, auto, or that of a plan file"
    )
    parser.add_argument(
        "--staleness", metavar="S,...", help="bounds to choose from (0, and 1 if every loss corrects for it)"
    )
    parser.add_argument("--explain", action="store_true", help="the critical path, what would help, why the next loses")
    parser.add_argument("--format", default="text", help=", ".join(FORMATS))
    parser.add_argument("--out", "-o", metavar="FILE", help="write the plan (YAML), or with --show the picture")


def plan_command(flow: Flow, words: Sequence[str]) -> int:
    """Show a plan, or search for one and explain it. Returns the exit status."""
    given = parse(flow, "plan", words, add_options)
    options, name = given.options, given.programs[0]
    if len(given.programs) > 1:
        raise UsageError("flowrl plan is for one program.", fix=f"Write --program {name}.")
    if options.format not in FORMATS:
        raise UsageError(f"--format {options.format}: the formats are {', '.join(FORMATS)}.")
    if options.show or not options.cluster:
        if not options.plan and not options.set:
            raise UsageError(
                "flowrl plan needs a plan to show, or a cluster to search on.",
                fix="Write --show --plan FILE, or --cluster h100-80:4x8.",
            )
        _refuse_of_a_search(words, searches=asks_auto(options))
        plan = load_plan(flow, options, name, given.parameters[name])
        kinds = {h.name: h.cls.__name__ for h in flow.handles}
        put(render(plan, options.format, kinds), options.out)
        return 0
    if options.set:
        what = f"--set {options.set[0]} changes a plan, and --cluster searches for one."
        raise UsageError(what, fix="Change the plan that is found: --plan FILE --set ... of the other commands.")
    refuse_unused(words, ("--plan",), "names a plan, and --cluster searches for one.", "Leave one of them out.")
    if options.format == "svg":
        refuse_unused(words, ("--format",), "svg draws a plan, and --cluster searches for one.", _DRAW)
    report = flow.check(name, **given.parameters[name])
    if report.errors:
        raise CheckError(report.errors)
    study, result = _search(flow, name, given.parameters[name], options)
    told = explained_search(study, result, steps_flown(flow, name)) if options.explain else None
    hours = hours_of(options, result.plan.cluster, result.step_seconds)
    if options.format == "json":
        more = {"explained": told.to_json()} if told else {}
        print(json.dumps(_record(result) | more | ({"machines": hours.to_json()} if hours else {}), indent=1))
    else:
        words = (*(told.lines() if told else ()), *(hours.words if hours else ()))
        print("\n".join((explain(result), *(f"{word[0].upper()}{word[1:]}." for word in words))))
    if options.out:
        _write(result, options.out)
    elif options.format == "text":
        print("\n" + result.plan.to_yaml(), end="")
    return 0


def _refuse_of_a_search(words: Sequence[str], *, searches: bool) -> None:
    """Raise UsageError for an option of a search where a plan is shown; ``--plan auto`` has costs and lengths."""
    search = ("--cluster", "--staleness", "--explain", *words_of(add_hours_options))
    why, fix = "is for the search with --cluster, and does nothing to a plan that is shown.", "Leave it out."
    refuse_unused(words, search if searches else (*search, *words_of(add_study_options)), why, fix)


def show_command(words: Sequence[str]) -> int:
    """``flowrl plan --show FILE``: a plan alone, without a script."""
    parser = argparse.ArgumentParser(prog="flowrl plan --show", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("plan", help="a plan file, or the name of a shipped plan")
    parser.add_argument("--format", default="text", choices=FORMATS)
    parser.add_argument("--out", "-o", metavar="FILE")
    try:
        options = parser.parse_args(list(words))
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}.", fix="Write flowrl plan --show FILE.") from None
    put(render(Plan.load(options.plan), options.format), options.out)
    return 0


def _search(flow: Flow, name: str, parameters: Mapping[str, Any], options: argparse.Namespace) -> tuple[Study, Found]:
    cluster = _cluster(options.cluster)
    plan = Plan(cluster=cluster)
    study = study_of(flow, name, parameters, options, plan)
    bounds = _bounds(options.staleness) if options.staleness else (0, 1) if corrects(study) else (0,)
    if refused := stale(study.traced, max(bounds)):
        raise CheckError(refused)
    graph, steps = flow.graph(name, **parameters), steps_flown(flow, name)
    return study, find_plan(study, graph, cluster, bounds, steps=steps)


def _cluster(text: str) -> Cluster:
    """The cluster of ``--cluster``: in short, or that of a plan file, which may say more of its network."""
    if not text.endswith((".yaml", ".yml")) and shipped.find_plan(text) is None:
        return Cluster.of(text)
    found = Plan.load(text).cluster
    if found is None:
        raise UsageError(f"--cluster {text}: this plan has no cluster.", fix="Add one, or write h100-80:4x8.")
    return found


def _bounds(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({whole_number(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"--staleness {text}: give bounds, such as 0,1,4.") from None


def _record(found: Found) -> dict[str, object]:
    return {**to_json(found), "explanation": explain(found)}


def _write(found: Found, out: str) -> None:
    comment = "".join(f"# {line}\n".replace("# \n", "#\n") for line in explain(found).splitlines())
    save(comment + found.plan.to_yaml(), out)
    print(f"\n{out}")
