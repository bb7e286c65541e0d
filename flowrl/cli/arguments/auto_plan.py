"""``--plan auto``: the plan that the search finds for this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...analysis.search_problem import find_plan
from ...analysis.study import Study
from ...flow import Flow
from ...placement.cluster.cluster import Cluster
from ...placement.plan.plan import Plan

STEPS = 20  # of each loop of a program that does not say how many it makes


def is_auto(plan: str | None) -> bool:
    """Whether ``--plan`` asks for a search; a file of that name is a plan."""
    return plan == "auto" and not Path(plan).exists()


def steps_flown(flow: Flow, program: str) -> int | None:
    """Return how many steps of each loop are simulated; None for a program that has a parameter of its own for them."""
    return None if "steps" in flow.find_program(program).parameters else STEPS


def auto_plan(flow: Flow, program: str, parameters: Mapping[str, Any], study: Study | None = None) -> Plan:
    """Return the plan with the shortest step of a program on the devices of this machine. Raises PlanError.

    Steps do not overlap in it, as that changes results: ``flowrl plan --cluster auto`` chooses among both.
    ``study``: the program with the costs and lengths to search with, on that cluster.
    """
    asked = study or flow.study_with(parameters, Plan(cluster=Cluster.auto()), program)
    cluster = asked.plan.cluster
    assert cluster is not None, "the search has this machine"
    graph = flow.graph(program, **parameters)
    return find_plan(asked, graph, cluster, staleness=(0,), steps=steps_flown(flow, program)).plan
