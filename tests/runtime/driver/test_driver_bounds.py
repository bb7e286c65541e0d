"""The bound of age, the ledger and the lengths of random programs under random plans, on a fake engine whose rows have
log-normal lengths; and what dropping rows for their age would do to the lengths."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import table_engine
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[3] / "algorithms"))

import flowrl as fl
from flowrl import rl
from flowrl.placement.backends import BACKENDS
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.driver.monitoring.length_bias import GroupLengths, length_bias
from flowrl.schedule.group_window import width
from flowrl.workers.model_options import Sampling
from tasks import arithmetic


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], Pipeline]:
    """A program, as its parameters, and the pipeline of its plan."""
    order = draw(st.sampled_from(["fifo", "window"]))
    program = {
        "steps": draw(st.integers(4, 9)),
        "prompts": draw(st.integers(1, 6)),
        "group": draw(st.integers(2, 4)),
        "every": draw(st.integers(1, 2)),
        "look": order == "fifo" and draw(st.booleans()),  # of several generates in a step none are exchanged
        "more": order == "fifo" and draw(st.booleans()),
    }
    window: dict[str, Any] = {"window": draw(st.sampled_from([0.1, 0.3, 0.6, 1.0]))} if order == "window" else {}
    pipeline = Pipeline(
        staleness=draw(st.integers(0, 4)),
        order=order,
        publish=draw(st.sampled_from(["drain", "interrupt", "continue"])),
        chunks=draw(st.integers(1, 3)),
        **window,
    )
    return program, pipeline


def flow_of() -> fl.Flow:
    flow = fl.Flow("bounds")
    actor = flow.worker(fl.Actor, arithmetic.MODEL, lr=1e-3, max_tokens=400, name="actor")
    reward = flow.worker(fl.FunctionReward, lambda prompt, response: float(len(response) % 7), name="reward")

    @flow.program
    def bounds(
        steps: int = 6, prompts: int = 4, group: int = 2, every: int = 1, look: bool = False, more: bool = False
    ):
        for step, batch in flow.steps(arithmetic.prompts(prompts), steps):
            rows = actor.generate(batch, n=group)
            if more:
                rows = rows.concat(actor.generate(flow.more(2), n=group))
            rows = rl.advantages(reward.score(rows))
            if step % every == 0:
                flow.log(step, actor.update(rows, loss=rl.ppo_clip()))
            if look:
                held = actor.generate(flow.take(arithmetic.heldout(2, repeat=True)), greedy=True)
                flow.log(step, at=held.versions.row_mean().min(), most=held.versions.row_mean().max())

    return flow


def hold(program: dict[str, Any], pipeline: Pipeline) -> None:
    """Run a program; hold its lag to the bound, and its ledger and lengths to each other."""
    pools = {"train": "cpu", "rollout": "cpu", "cpu": "cpu"}
    place = {"train": Place("train", backend="table"), "generate": Place("rollout", backend="table")}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setitem(BACKENDS, "table", table_engine.ROW)
        plan = Plan(pools, {"actor": place, "reward": Place("cpu")}, pipeline=pipeline)
        out = Path(folder) / "run"
        flow_of().run(
            "bounds", out=out, plan=plan, quiet=True, save_models=False, runtime="local", parameters={"bounds": program}
        )
        traffic = [json.loads(line) for line in (out / "traffic.jsonl").read_text().splitlines()]
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        told = json.loads((out / "run.json").read_text())["ledger"]["bounds"]
    prompts, window = program["prompts"], 0
    if pipeline.order == "window":
        window = math.ceil((width(prompts, pipeline.staleness, pipeline.window) - 1) / prompts)
    found = [int(lag) for line in traffic for lag in line.get("lags", {})]
    assert found and min(found) >= 0 and max(found) <= pipeline.staleness + window
    rows = told["rows"]
    assert rows["admitted"] == rows["trained"] + sum(rows["dropped"].values()) and not rows["live"]
    assert rows["admitted"] == program["steps"] * program["group"] * (prompts + 2 * program["more"])
    if program["every"] == 1:
        assert rows["trained"] == rows["admitted"], "nothing is dropped for its age"
    if "lengths" in told:
        assert told["lengths"]["distance"] <= told["lengths"]["bound"], "long rows are trained on as often as others"
    if program["look"]:  # an evaluation sees every update before it
        wanted = [step // program["every"] + 1 for step in range(program["steps"])]
        assert [line["at"] for line in metrics] == [line["most"] for line in metrics] == wanted


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cases())
def test_programs_hold_their_bounds_under_any_plan(case):
    hold(*case)


@pytest.mark.nightly
@settings(max_examples=500, deadline=None, phases=[Phase.generate])
@given(cases())
def test_five_hundred_programs_hold_their_bounds(case):
    hold(*case)


def groups_by_age(most: int | None, *, steps: int = 40, prompts: int = 8, rows: int = 4) -> list[GroupLengths]:
    """Prompt groups of an engine that is a step ahead: a version is published whenever so many groups have ended.

    Those that are more than ``most`` versions old by then are dropped; None: none are.
    """
    engine = table_engine.Table.__new__(table_engine.Table)
    fl.testing.FakeEngine.__init__(engine, vocab=32, lengths=table_engine.lognormal)
    begun: dict[int, tuple[int, list[int]]] = {}  # by call: the version that it began with, and its seeds
    found: list[GroupLengths] = []
    version = ended = 0

    def begin() -> None:
        while len(begun) < 2 * prompts:  # this step's, and the next one's
            seeds = [1 + rows * (len(begun) + len(found)) * 7919 + row for row in range(rows)]
            prompt = fl.Column.of([[3]], dim="prompt", dtype="i32")
            begun[engine.submit(prompt, rows, torch.tensor(seeds), Sampling(max_tokens=400))] = version, seeds

    def end(call: int, *, trained: bool) -> None:
        _, seeds = begun.pop(call)
        found.append(GroupLengths([min(400, table_engine.lognormal(seed)) for seed in seeds], [trained] * rows))

    begin()
    while version < steps:
        engine.step()
        running = {call for call, _ in engine.running()}
        for call in [call for call in begun if call not in running]:
            end(call, trained=True)
            ended += 1
        if ended >= prompts:
            ended, version = ended - prompts, version + 1
            for call in [c for c, (since, _) in begun.items() if most is not None and version - since > most]:
                engine.abort(call)
                end(call, trained=False)
            begin()
    while engine.running():
        engine.step()
    for call in list(begun):
        end(call, trained=True)
    return found


def test_dropping_for_age_would_be_seen_in_the_lengths():
    """The control: the same engine with a bound that is kept by dropping trains on short rows."""
    kept, dropped = length_bias(groups_by_age(None)), length_bias(groups_by_age(1))
    assert kept is not None and kept.trained == kept.rows and not kept.is_biased
    assert dropped is not None and dropped.trained < dropped.rows
    assert dropped.is_biased and dropped.distance > 2 * dropped.bound
