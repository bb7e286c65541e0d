"""The plan of a command: the file of ``--plan`` with the changes of ``--set``."""

from __future__ import annotations

import argparse

from ...errors import UsageError
from ...placement.plan.plan import Plan
from ...placement.plan.plan_file import read
from .auto_plan import is_auto


def asks_auto(options: argparse.Namespace) -> bool:
    """Whether a plan is searched for. Raises UsageError where it is to be changed too."""
    if is_auto(options.plan) and options.set:
        what = f"--set {options.set[0]} changes a plan that is known, and --plan auto searches for one."
        fix = "Write the found one to a file with flowrl plan SCRIPT --cluster auto --out plan.yaml, and name that."
        raise UsageError(what, fix=fix)
    return is_auto(options.plan)


def said_plan(options: argparse.Namespace) -> Plan | None:
    """The plan that the options say; None where they say nothing. Raises PlanError, UsageError.

    Changes without a file are those of the plan of one process.
    """
    if options.plan:
        return Plan.load(options.plan, options.set)
    return read("", "", options.set) if options.set else None
