"""``flowrl calibrate``: costs of a run's ops from its timeline, with the error of their predictions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from ..analysis.measured_run import tokens_of_run
from ..analysis.prediction import Predicted, beside, in_words
from ..analysis.row_lengths import Tokens
from ..analysis.run_pages import look_at, programs_of
from ..errors import UsageError
from ..placement.cost.calibrate_run import calibrate
from ..placement.cost.calibrated_costs import Calibrated
from ..placement.plan.plan import Plan
from ..placement.plan.plan_file import read
from .arguments.calibrated_by import efficiency_of
from .arguments.recorded_run import recorded_parameters, recorded_run, reopen


def calibrate_command(words: Sequence[str]) -> int:
    """Fit the costs of a run, print how well they predict, and save them. Returns the exit status.

    ``--against``: also what they predict of another run, whose script is loaded and not run, beside what it took.
    """
    parser = argparse.ArgumentParser(prog="flowrl calibrate", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--program", help="which of its programs; default: the one with the most ops")
    parser.add_argument("--out", "-o", metavar="FILE", help="where to save the costs (RUN/costs.yaml)")
    parser.add_argument(
        "--against", type=Path, metavar="RUN", help="another run of the program, beside what these costs predict of it"
    )
    parser.add_argument(
        "--efficiency",
        metavar="FILE",
        help="also fit the parts of a peak that calls reached, which carry over to other plans",
    )
    parser.add_argument("--format", default="text", choices=("text", "json"))
    try:
        options = parser.parse_args(list(words))
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}.", fix="Write flowrl calibrate RUN.") from None
    costs = calibrate(options.run, program=options.program)
    out = Path(options.out) if options.out else Path(options.run) / "costs.yaml"
    costs.save(out)
    fitted = efficiency_of(Path(options.run), options.program) if options.efficiency else None
    if fitted is not None:
        fitted.efficiency.save(options.efficiency)
    rows = _predicted(Path(options.run), options.against, options.program, costs) if options.against else ()
    if options.format == "json":
        against = {"against": [vars(row) for row in rows]} if rows else {}
        print(json.dumps(costs.to_json() | against | (fitted.to_json() if fitted else {}), indent=1))
        return 0
    print(f"{costs.report()}\n\ncosts: {out}   use them with: flowrl simulate SCRIPT --costs {quote(str(out))}")
    if fitted is not None:
        out = options.efficiency
        with_them = f"flowrl simulate SCRIPT --efficiency {quote(out)}"
        print(f"\n{fitted.report()}\n\nefficiencies: {out}   use them with: {with_them}")
    if rows:
        print(f"\n{options.against}\n{in_words(rows)}")
    return 0


def _predicted(run: Path, other: Path, program: str | None, costs: Calibrated) -> tuple[Predicted, ...]:
    """Simulate the other run with costs, and lengths, of the first one. Raises UsageError, PlanError."""
    record = recorded_run(other)
    name = program or programs_of(other)[0]
    _, real = look_at(other, name)
    if real is None:
        raise UsageError(f"the run in {other} has no step that is done.", fix="Look again when one is.")
    flow, said = reopen(record)
    plan = read(json.dumps(record["plan"]), "the plan of the run") if record.get("plan") else Plan.one_process()
    parameters = recorded_parameters(flow, record, said)[name]
    tokens = tokens_of_run(run, name) if costs.curves else Tokens()
    study = flow.study_with(parameters, plan, name, costs=costs, tokens=tokens, runtime=record["runtime"])
    return beside(study.simulate(None if "steps" in parameters else real.steps), real)
