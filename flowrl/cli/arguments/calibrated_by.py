"""How much of each peak the run of a folder has reached: its script is loaded, its program is not run."""

from __future__ import annotations

import json
from pathlib import Path

from ...analysis.fitted_efficiency import FittedEfficiency, fit_efficiency
from ...analysis.measured_run import tokens_of_run, with_turns_of
from ...analysis.run_pages import programs_of
from ...placement.cost.calibrate_run import calibrate
from ...placement.plan.plan import Plan
from ...placement.plan.plan_file import read
from .recorded_run import recorded_parameters, recorded_run, reopen


def efficiency_of(run: Path, program: str | None = None) -> FittedEfficiency:
    """Return the figures of a roofline that are fitted to a run. Raises UsageError, PlanError."""
    record, name = recorded_run(run), program_of(run, program)
    flow, said = reopen(record)
    plan = read(json.dumps(record["plan"]), "the plan of the run") if record.get("plan") else Plan.one_process()
    parameters = recorded_parameters(flow, record, said)[name]
    costs = calibrate(run, program=name)
    tokens = with_turns_of(run, name, tokens_of_run(run, name))  # what environments took is no part of a peak
    study = flow.study_with(parameters, plan, name, tokens=tokens, runtime=record["runtime"])
    return fit_efficiency(study, costs)


def program_of(run: Path, program: str | None) -> str:
    """Return the program of a run that figures are fitted to: the one of that name, else the one with most nodes."""
    return program if program is not None and program in recorded_run(run)["programs"] else programs_of(run)[0]
