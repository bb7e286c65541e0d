"""``flowrl check``: find a script's mistakes; nothing is loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from ..analysis.certificate import certificate
from ..analysis.check_plan import plan_findings
from ..analysis.study import Study
from ..errors import At, FlowError, UsageError, WorkerError
from ..flow import Flow
from ..graph.check_program import Report
from ..graph.tracing.trace_records import Lint
from ..workers.model_folder import missing_folders
from .arguments.options import parse
from .arguments.plan_option import asks_auto
from .arguments.study_options import add_study_options, load_plan, study_of


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_study_options(parser)
    parser.add_argument("--format", default="text", choices=("text", "json"), help="text or json")


def check_command(flow: Flow, words: Sequence[str]) -> int:
    """Print the findings on a script's programs. Returns the exit status."""
    given = parse(flow, "check", words, add_options)
    reports = [flow.check(name, **given.parameters[name]) for name in dict.fromkeys(given.programs)]
    plan = None
    if given.options.plan or given.options.set:
        sound = next((r.program for r in reports if not r.errors), None)
        first = sound or given.programs[0]
        searched = asks_auto(given.options) and sound is None  # there is nothing to search for
        plan = None if searched else load_plan(flow, given.options, first, given.parameters[first])
        reports = [
            _with_plan(report, study_of(flow, r, given.parameters[r], given.options, plan))
            if plan is not None and not report.errors
            else report
            for report in reports
            for r in [report.program]
        ]
    if not given.options.program:  # the others too
        reports += [_checked(flow, name) for name in flow.programs if name not in given.programs]
    if missing := missing_folders(flow.handles):
        reports[0] = _with_folders(reports[0], missing, elsewhere=plan is not None and plan.cluster is not None)
    reports = _each_once(reports)
    if given.options.format == "json":
        print(json.dumps([r.to_json() for r in reports], indent=1))
    else:
        print("\n\n".join(r.text() for r in reports))
    return 1 if any(r.errors for r in reports) else 0


def _with_folders(report: Report, missing: Sequence[FlowError], *, elsewhere: bool) -> Report:
    """Return the folders of models that are not here: wrong, but for a plan of a cluster, which may have them."""
    if not elsewhere:
        return replace(report, errors=(*missing, *report.errors))
    lints = [Lint("folder", f"{e.what} It has to be on the cluster.", e.at or At("--model", 0)) for e in missing]
    return replace(report, lints=(*lints, *report.lints))


def _with_plan(report: Report, study: Study) -> Report:
    """Return what is wrong with a program, and with its plan."""
    errors, lints = plan_findings(study)
    known = {lint.report() for lint in report.lints}
    lints = (*report.lints, *(n for n in lints if n.report() not in known))
    if errors:
        return Report(report.program, tuple(errors), lints)
    proved, refuted = certificate(study)
    return Report(report.program, refuted, lints, proved)


def _each_once(reports: Sequence[Report]) -> list[Report]:
    """Return the reports with each error of a worker in the first of them alone."""
    told: set[str] = set()
    kept: list[Report] = []
    for report in reports:
        errors = tuple(e for e in report.errors if not (isinstance(e, WorkerError) and e.report() in told))
        told |= {e.report() for e in errors}
        kept.append(replace(report, errors=errors))
    return kept


def _checked(flow: Flow, name: str) -> Report:
    """The report on a program that nobody asked for: one that needs parameters of its own is left out."""
    try:
        return flow.check(name)
    except UsageError as error:
        at = flow.find_program(name).at
        return Report(name, (), (Lint("unchecked", f"{error.what} To check it, add --program {name}.", at),))
