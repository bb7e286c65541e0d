"""Simulations to show: runs of the schedule's tests, and made ones at the edges of what there can be."""

from __future__ import annotations

import random
from dataclasses import replace

from programs import SHARED, SPLIT, Driver, Times, pools_of, setup

from flowrl.placement.cost.continuous_batch import Engine
from flowrl.schedule.engine_slots import Rows
from flowrl.schedule.events import Memory
from flowrl.schedule.simulation import Bar, Simulation, bars_of, pool_times, steady

SECONDS = {
    "actor.generate": 6,
    "reward.score": 1,
    "ref.logprobs": 1.2,
    "critic.values": 0.8,
    "critic.update": 1.1,
    "actor.update": 2.2,
    "actor.publish": 0.5,
    "actor.train.swap": 0.3,
    "actor.generate.swap": 0.2,
}
HAS = {"train": "devices 0-7 (h100-80)", "rollout": "devices 8-15 (h100-80)", "cpu": "4 processes"}
EVIL = "</script><img src=x onerror=\"document.title='pwned'\">'&`${1}`\x1b[2J\n" + "long " * 30


def told(driver: Driver, has: dict[str, str], program: str, **more) -> Simulation:
    """What a driver's run was, as the simulator tells it."""
    flown, staleness = driver.clock.flown, driver.machine.setup.staleness
    bars = bars_of(flown.spans, {})
    pools = tuple(
        replace(p, memory=tuple(flown.memory.get(p.name, ())), capacity=80e9 if p.name in flown.memory else 0.0)
        for p in pool_times(has, bars, driver.clock.time)
    )
    return Simulation(
        program,
        len(flown.commits),
        driver.clock.time,
        steady(flown.commits, driver.clock.time, staleness),
        bars,
        pools,
        driver.clock.lags(),
        "given: costs.yaml",
        staleness,
        flown.events,
        workers=("actor", "ref", "critic", "reward"),
        **more,
    )


def ppo(steps: int, engine=lambda call: None, **more) -> Simulation:
    """PPO with training and rollout on different devices."""
    driver = Driver(setup(SPLIT, tuple(HAS), **more), Times(SECONDS, engine=engine), pools_of(SPLIT))
    for _ in driver.steps(steps):
        rows = driver.generate(groups=8)
        scored, reference = driver.score(rows), driver.logprobs(rows)
        values = driver.call("critic.values", rows, reads=("critic",), rowwise=True)
        driver.call("critic.update", scored, values, reference, reads=("critic",), updates="critic")
        driver.update(scored, values, reference)
    driver.clock.end()
    return told(
        driver,
        HAS,
        "ppo",
        edges=(
            {"src": "actor.update", "dst": "actor.generate", "bytes": 141.2e9, "transport": "nccl"},
            {"src": "actor.generate", "dst": "reward.score", "bytes": 33.1e6, "transport": "memory"},
        ),
        assumed=("not (float(kl) > 0.2)   algorithms/ppo.py:31",),
        notes=("tokens of a prompt: 512 (assumed); of a response: 800",),
    )


def overlapping(steps: int) -> Simulation:
    """Rollouts of several steps side by side in one engine."""
    chance = random.Random(3)

    def engine(call) -> Rows:
        return Rows(
            [[chance.lognormvariate(1.2, 0.5) for _ in range(4)] for _ in range(8)], Engine(40, lambda rows: 1.0)
        )

    return ppo(steps, engine, staleness=4, order="window", publish="interrupt")


def turns(steps: int) -> Simulation:
    """Residents of one pool that take turns in its memory."""
    memory = {"gpu": Memory(80e9, {"actor.train": 60e9, "actor.generate": 50e9})}
    driver = Driver(setup(SHARED, ("gpu", "cpu"), memory=memory), Times(SECONDS), pools_of(SHARED))
    for _ in driver.steps(steps):
        rows = driver.generate(residents=("actor.generate",))
        scored = driver.score(rows)
        driver.call("actor.update", scored, reads=("actor",), updates="actor", residents=("actor.train",))
    driver.clock.end()
    return told(driver, {"gpu": "devices 0-7 (h100-80)", "cpu": "4 processes"}, "grpo")


def many(count: int) -> Simulation:
    """So many bars on four pools, of 100 steps."""
    chance = random.Random(1)
    at, bars = [0.0] * 4, []
    names = [name for name in SECONDS if "swap" not in name]
    for number in range(count):
        pool, seconds = number % 4, chance.expovariate(1)
        bars.append(
            Bar(names[number % 7], number * 100 // count, f"pool{pool}", at[pool], at[pool] + seconds, names[0])
        )
        at[pool] += 1.2 * seconds
    bars = tuple(sorted(bars, key=lambda bar: bar.start))
    pools = pool_times({f"pool{n}": "" for n in range(4)}, bars, max(at))
    return Simulation("many", 100, max(at), max(at) / 100, bars, pools, {0: 5, 1: 100, 2: 30}, "roofline")


def hostile() -> Simulation:
    """Names that want to be markup, scales from 1e-6 to 1e6 seconds, bars without length, outside of steps."""
    bars = (
        Bar(EVIL, -1, EVIL, 0.0, 0.0, EVIL),
        Bar("a.b", 0, EVIL, 0.0, 1e-6, "x"),
        Bar("日本.語", 0, "p\n\x1b[1mq", 0.0, 1e6, EVIL),
        Bar("a.c", 3, "p2", 5e5, 5e5),
        Bar("a.c", 3, "in no list", 6e5, 6.1e5),
    )
    pools = pool_times({EVIL: EVIL, "p\n\x1b[1mq": "", "p2": "x" * 300}, bars, 1e6)
    edge = {"src": EVIL, "dst": EVIL, "bytes": 3, "transport": EVIL}
    return Simulation(
        EVIL, 2, 1e6, 5e5, bars, pools, {0: 1}, EVIL, edges=(edge,), assumed=(EVIL,), notes=("n\n" + EVIL,)
    )


def tiny() -> Simulation:
    """One step that takes microseconds."""
    bars = (Bar("a.go", 0, "here", 0.0, 1e-6, "the start"), Bar("b.go", 0, "here", 1.5e-6, 2e-6, "a.go"))
    return Simulation("tiny", 1, 2e-6, 2e-6, bars, pool_times({"here": ""}, bars, 2e-6), {0: 1}, "given: c.yaml")


def nothing() -> Simulation:
    """A program that calls nothing."""
    return Simulation("nothing", 0, 0.0, 0.0, (), pool_times({"here": "auto"}, (), 0.0), {}, "")
