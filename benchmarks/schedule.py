"""How long the schedule takes: microseconds per event, and PPO on 1024 devices from the script to a flown schedule.

    python benchmarks/schedule.py [--steps 500]

Targets: below 20 microseconds per event; tracing, checking and scheduling PPO on 1024 devices below 2 s. Times are of a
fresh process for the second, the median of several rounds for the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PLAN = """
cluster: {device: h100-80, nodes: 128, devices_per_node: 8}
pools:
  train:   {devices: "0-511"}
  rollout: {devices: "512-1023"}
  cpu:     {processes: 256}
place:
  actor:
    train:    {pool: train, mesh: {fsdp: 512}, backend: fsdp2}
    generate: {pool: rollout, mesh: {dp: 64, tp: 8}, engine: vllm}
  critic: {pool: train, mesh: {fsdp: 512}, backend: fsdp2}
  ref:    {pool: train, mesh: {fsdp: 512}, backend: fsdp2}
  reward: {pool: cpu}
pipeline: {staleness: 1, chunks: 4}
"""


def fly(steps: int, plan: Path) -> dict[str, float]:
    """One process: load, trace, check, price and fly. Seconds by what they were spent on."""
    begun = time.perf_counter()
    sys.path.insert(0, str(HERE.parent / "algorithms"))
    from flowrl.cli.arguments.script import load_script
    from flowrl.placement.plan.plan import Plan

    flow = load_script(str(HERE.parent / "algorithms" / "ppo.py"))
    for worker in ("actor", "critic"):
        flow.use_model(worker, "llama-70b")
    asked = {"prompts_per_step": 4096}
    report = flow.check("ppo", **asked)
    assert not report.errors, report.text()
    checked = time.perf_counter()
    study = flow.study(Plan.load(plan), "ppo", **asked)
    study.memory  # noqa: B018  computed here, so that the next line is the schedule alone
    priced = time.perf_counter()
    study.execution  # noqa: B018  the lowering is part of it
    simulation = study.simulate(steps)
    flown = time.perf_counter()
    return {
        "load, trace and check": checked - begun,
        "plan and memory": priced - checked,
        f"{steps} steps": flown - priced,
        "events": simulation.events,
        "all": flown - begun,
    }


def events(rounds: int) -> float:
    """Microseconds per event of the machine alone, on the calls of a flown program: the median of several rounds."""
    sys.path.insert(0, str(HERE.parent / "tests" / "schedule"))
    from programs import SPLIT, Driver, Times, pools_of, setup

    spent: list[float] = []
    for _ in range(rounds):
        driver = Driver(
            setup(staleness=1, chunks=4), Times({"actor.generate": 6.0, "actor.update": 3.0}), pools_of(SPLIT)
        )
        inside = 0.0
        handle = driver.machine.handle

        def timed(event, handle=handle):
            nonlocal inside
            start = time.perf_counter()
            commands = handle(event)
            inside += time.perf_counter() - start
            return commands

        driver.machine.handle = timed
        for _ in driver.steps(500):
            rows = driver.generate(rowwise=True)
            driver.update(driver.score(rows), driver.logprobs(rows))
        driver.clock.end()
        spent.append(inside / driver.clock.flown.events * 1e6)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fly", metavar="PLAN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fly:
        print(json.dumps(fly(options.steps, Path(options.fly))))
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "ppo_1024.yaml"
        plan.write_text(PLAN)
        found = []
        for _ in range(options.rounds):
            command = [sys.executable, __file__, "--steps", str(options.steps), "--fly", str(plan)]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found.append(json.loads(said))
    print(f"the machine: {events(options.rounds):.1f} microseconds per event (target 20)")
    print("PPO with Llama 70B on 1024 devices, a fresh process each, medians:")
    for key in found[0]:
        value = statistics.median(f[key] for f in found)
        print(f"  {key:24} {value:.0f}" if key == "events" else f"  {key:24} {value:.3f} s")
    per = statistics.median(f[f"{options.steps} steps"] / f["events"] for f in found) * 1e6
    print(f"  per event of the simulation, costs included: {per:.1f} microseconds")


if __name__ == "__main__":
    main()
