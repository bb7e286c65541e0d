"""More steps in flight are never slower in the schedule, over programs, plans and seconds by chance."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from flowrl.analysis.row_lengths import Tokens
from flowrl.analysis.study import Study
from flowrl.cli.arguments.script import load_script
from flowrl.placement.cost.given_costs import GivenCosts
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

ALGORITHMS = Path(__file__).parents[2] / "algorithms"
DRIVERS = ("grpo", "ppo", "safe_rlhf", "online_dpo", "remax")
BOUNDS = (0, 1, 2, 3, 4)


@lru_cache(maxsize=8)
def flow_of(driver: str):
    return load_script(str(ALGORITHMS / f"{driver}.py"))


def any_study(seed: int) -> Study:
    """A driver whose trained workers sample in a pool of their own, with seconds of its calls by chance."""
    chance = random.Random(seed)
    driver = chance.choice(DRIVERS)
    flow = flow_of(driver)
    parameters: dict[str, Any] = {"steps": 30, "prompts_per_step": chance.choice((4, 8))}
    parameters = {k: v for k, v in parameters.items() if k in flow.find_program(driver).parameters}
    bare = flow.study(Plan(), driver, **parameters)
    pools = {f"p{i}": Pool(f"p{i}") for i in range(chance.randint(2, 5))}
    place: dict[str, dict[str, Place]] = {}
    for handle in flow.handles:
        role = bare.roles.get(handle.name)
        if role is not None and role.trains and role.generates:
            train, generate = chance.sample(list(pools), 2)
            place[handle.name] = {"train": Place(train), "generate": Place(generate)}
        else:
            place[handle.name] = {"train": Place(chance.choice(list(pools)))}
    names = [name for name in bare.names() if "#" not in name]
    costs = {name: chance.choice((0.0, 0.5, 1.0, 2.0, 3.0, 6.0)) * chance.choice((1.0, 1.37)) for name in names}
    plan = Plan(pools, place, pipeline=Pipeline(chunks=chance.choice((1, 1, 1, 2, 4))))
    return flow.study(plan, driver, costs=GivenCosts(costs), tokens=Tokens(), **parameters)


def steps_of(study: Study) -> list[float]:
    plans = (study.plan.but(pipeline=Pipeline(staleness=s, chunks=study.plan.pipeline.chunks)) for s in BOUNDS)
    return [study.under(plan).simulate(30).step_seconds for plan in plans]


def never_slower(seed: int) -> None:
    steps = steps_of(any_study(seed))
    for bound, (fewer, more) in enumerate(itertools.pairwise(steps)):
        assert more <= fewer * 1.001 + 1e-9, (seed, bound, steps)


@pytest.mark.parametrize("seed", range(5))
def test_more_staleness_is_never_slower(seed):
    never_slower(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("tens", range(1, 20))
def test_more_staleness_is_never_slower_of_many(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        never_slower(seed)
