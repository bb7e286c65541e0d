"""What the commands that look at a plan have in common: their options, and the program under its plan."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from ...analysis.measured_run import tokens_of_run, with_turns_of
from ...analysis.row_lengths import Tokens
from ...analysis.study import Study
from ...errors import PlanError, UsageError, near
from ...flow import Flow
from ...graph.ops.op import Op
from ...placement.cluster.cluster import Cluster
from ...placement.cost.calibrated_costs import SWAPS, Calibrated, placed
from ...placement.cost.continuous_batch import Turns
from ...placement.cost.cost_model import load_costs
from ...placement.cost.efficiency import Efficiency
from ...placement.cost.given_costs import GivenCosts
from ...placement.cost.length_distribution import read_lengths
from ...placement.cost.machine_hours import Failures, MachineHours, Prices, machine_hours
from ...placement.cost.roofline import Roofline
from ...placement.plan.plan import Plan
from ...run_options import RUN_OPTIONS
from .auto_plan import auto_plan
from .options import name_of, whole_number
from .plan_option import asks_auto, said_plan


def add_study_options(parser: argparse.ArgumentParser) -> None:
    """Options of costs and lengths."""
    parser.add_argument(
        "--costs",
        metavar="FILE",
        type=name_of,
        help="seconds per call (YAML), what flowrl calibrate has saved, or a run to calibrate",
    )
    parser.add_argument(
        "--efficiency",
        metavar="FILE",
        type=name_of,
        help="parts of a peak that the roofline takes (YAML), or published: fitted to published steps",
    )
    parser.add_argument(
        "--calibrated-by",
        metavar="RUN",
        type=name_of,
        help="parts of a peak fitted to the calls of this run: they carry over to other plans on machines of its kind",
    )
    parser.add_argument(
        "--run",
        metavar="DIR",
        type=name_of,
        help="take lengths of prompts and responses, and turns of episodes, from this run",
    )
    parser.add_argument(
        "--lengths",
        metavar="KIND:NUMBERS",
        help="of responses: fixed:1024, lognormal:MEAN,SIGMA, uniform:LEAST,MOST; alike=0.6 behind: within a prompt",
    )
    parser.add_argument(
        "--episode-turns",
        metavar="COUNT:SECONDS",
        help="how many an episode has, and seconds of its environment between two: 4:1.5",
    )
    parser.add_argument("--prompt-tokens", type=whole_number, metavar="N", help="of a prompt, on average")
    parser.add_argument(
        "--runtime", choices=RUN_OPTIONS["runtime"].words, default="", help="that is to run it (the one the plan needs)"
    )


def words_of(add: Callable[[argparse.ArgumentParser], None]) -> tuple[str, ...]:
    """Return the options that a function adds to a parser: ``--costs``, ``--efficiency``."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    return tuple(name for action in parser._actions for name in action.option_strings)  # pyright: ignore[reportPrivateUsage]


def add_hours_options(parser: argparse.ArgumentParser) -> None:
    """Options of what devices cost, and how often they fail."""
    parser.add_argument("--prices", metavar="FILE", help="what an hour of a device costs, by kind (YAML: h100-80: 2.5)")
    parser.add_argument(
        "--failures",
        metavar="H,S,S",
        help="hours between failures of a device, seconds of a checkpoint, of a restart: 40000,60,300",
    )


def hours_of(options: argparse.Namespace, cluster: Cluster | None, seconds: float) -> MachineHours | None:
    """Return what the options ask of a step on a cluster; None where they ask nothing. Raises UsageError, PlanError."""
    if not options.prices and not options.failures:
        return None
    if cluster is None:
        word = "--prices" if options.prices else "--failures"
        raise UsageError(f"{word} is for the devices of a cluster, and the plan has none.", fix="Name one in the plan.")
    prices = Prices.load(options.prices) if options.prices else None
    failures = Failures.read(options.failures) if options.failures else None
    return machine_hours(cluster, seconds, prices, failures)


def load_plan(flow: Flow, options: argparse.Namespace, program: str, parameters: Mapping[str, Any]) -> Plan:
    """The plan that the options name, checked against the workers of the flow. Raises PlanError.

    ``auto`` is the one that is found for the program on this machine, with the costs and lengths of the options.
    """
    if asks_auto(options):
        whole = Plan(cluster=Cluster.auto())
        return auto_plan(flow, program, parameters, study_of(flow, program, parameters, options, whole))
    plan = said_plan(options) or Plan.one_process()
    plan.check_workers([h.name for h in flow.handles])
    return plan


def study_of(flow: Flow, program: str, parameters: Mapping[str, Any], options: argparse.Namespace, plan: Plan) -> Study:
    """A program under a plan, with the costs and lengths of the options. Raises PlanError, UsageError."""
    costs = load_costs(options.costs) if options.costs else None
    roofline = None
    said = [word for word in ("costs", "efficiency", "calibrated_by") if getattr(options, word)]
    if len(said) > 1:
        both = " and ".join(f"--{word.replace('_', '-')}" for word in said[:2])
        raise UsageError(f"{both} both say how long calls take.", fix="Leave one out.")
    if options.efficiency:
        roofline = Roofline(plan.cluster, Efficiency.load(options.efficiency))
    if options.calibrated_by:
        from .calibrated_by import efficiency_of

        roofline = Roofline(plan.cluster, efficiency_of(Path(options.calibrated_by), program).efficiency)
    tokens = _tokens(program, options, whole=isinstance(costs, Calibrated) and not costs.curves)
    if options.episode_turns:
        if costs is not None:
            what = "--episode-turns and --costs both say what environments take: it is in the seconds of a rollout."
            raise UsageError(what, fix="Leave one out.")
        tokens = replace(tokens, turns=_read_turns(options.episode_turns))
    elif costs is None:
        tokens = _with_turns(tokens, program, options)
    how = {"seed": options.seed or 0, "runtime": options.runtime}
    study = flow.study_with(parameters, plan, program, costs=costs or roofline, tokens=tokens, **how)
    if costs is not None:
        listed = costs.given if isinstance(costs, GivenCosts) else costs.fits
        costs.check_names([*study.names(), *(name for name in listed if _elsewhere(name, flow))])
        if isinstance(costs, Calibrated) and plan.place:  # of a search nothing is placed yet
            _refuse_elsewhere(study, costs)
    return study


def _refuse_elsewhere(study: Study, costs: Calibrated) -> None:
    """Raise PlanError for the first call whose seconds are those of another backend or mesh than it has in the plan."""
    for work in study.works.values():
        was, now = costs.places.get(work.title), placed(work.backend, work.mesh)
        replicas = work.kind == "generate" and costs.curves.get(work.title) and _replicated(was) and _replicated(now)
        if work.role.model is None or was in (None, now) or replicas:
            continue
        what = f"{work.node}: its seconds were measured on {was}, and the plan has it on {now}: they do not carry over."
        fix = f"Write --calibrated-by {costs.run}, which fits parts of a peak, or give it the mesh of the run."
        raise PlanError(what, at=study.plan.place_of(work.role.name, work.use).at, fix=fix)


def _replicated(text: str | None) -> bool:
    """Whether replicas alone are what a place has."""
    return text is not None and re.fullmatch(r"\w+, (one device|mesh dp=\d+)", text) is not None


def _tokens(program: str, options: argparse.Namespace, *, whole: bool) -> Tokens:
    """Return the lengths of the options; with costs of ``whole`` calls each row has the average one of a run.

    The time of the longest is in the seconds that were measured.
    """
    if options.prompt_tokens is not None and options.prompt_tokens < 1:
        raise UsageError(f"--prompt-tokens {options.prompt_tokens}: give 1 or more.")
    if options.run:
        if options.lengths or options.prompt_tokens is not None:
            other = "--lengths" if options.lengths else "--prompt-tokens"
            raise UsageError(f"--run and {other} both say how long rows are.", fix="Leave one out.")
        return tokens_of_run(Path(options.run), program, varies=not whole)
    if options.lengths:
        kind, numbers, alike = read_lengths(options.lengths)
        return Tokens(options.prompt_tokens, kind, numbers, alike=alike)
    return Tokens(options.prompt_tokens)


def _with_turns(tokens: Tokens, program: str, options: argparse.Namespace) -> Tokens:
    """Add the turns of the run that lengths are from, else of the one whose calls tell how fast devices are."""
    if options.run and (found := with_turns_of(Path(options.run), program, tokens)).measured_turns:
        return found
    if not options.calibrated_by:
        return tokens
    from .calibrated_by import program_of

    run = Path(options.calibrated_by)
    return with_turns_of(run, program_of(run, program), tokens)


def _read_turns(text: str) -> Turns:
    """Read ``4:1.5``: turns of an episode, and seconds between two. Raises UsageError."""
    count, _, seconds = text.partition(":")
    with suppress(ValueError):
        turns = Turns(int(count), float(seconds))
        if turns.count > 0 and 0 <= turns.seconds < inf:
            return turns
    raise UsageError(f"--episode-turns {text}: these are no turns.", fix="Write COUNT:SECONDS, such as 4:1.5.")


def _elsewhere(name: str, flow: Flow) -> bool:
    """Whether costs are those of a call that another program makes, or another driver: one file may serve several."""
    worker, _, op = name.partition("#")[0].partition(".")
    handle = next((h for h in flow.handles if h.name == worker), None)
    if handle is not None:
        moves = op == "publish" or op.rpartition(".")[2] in SWAPS
        return moves or isinstance(inspect.getattr_static(handle.cls, op, None), Op)
    return bool(op) and near(worker, [h.name for h in flow.handles]) is None
