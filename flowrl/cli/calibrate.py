"""``flowrl calibrate``: costs of a run's ops from its timeline, with the error of their prediction."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..placement.cost.calibrated_costs import calibrate


def calibrate_command(words: Sequence[str]) -> int:
    """Fit the costs of a run, print how well they predict, and save them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="flowrl calibrate", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--program", help="which of its programs; default: the one with the most ops")
    parser.add_argument("--out", "-o", metavar="FILE", help="where to save the costs (RUN/costs.yaml)")
    parser.add_argument("--format", default="text", choices=("text", "json"))
    try:
        options = parser.parse_args(list(words))
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}.", fix="Write flowrl calibrate RUN.") from None
    costs = calibrate(options.run, program=options.program)
    out = Path(options.out) if options.out else Path(options.run) / "costs.yaml"
    costs.save(out)
    if options.format == "json":
        print(json.dumps(costs.to_json(), indent=1))
    else:
        print(f"{costs.report()}\n\ncosts: {out}   use them with: flowrl simulate SCRIPT --costs {out}")
    return 0
