"""The bound of age, the ledger, and which rows of random programs are trained on under random plans, on a fake engine
whose rows have log-normal lengths; and what dropping rows for their age would do to the lengths.

Where the program says which rows are trained on, they have to be these. Where a window exchanges groups and every other
step trains, it is up to timing: there the statistic of lengths may be above its bound as often as chance explains.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
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
from flowrl.workers.streaming import SampleRequest
from tasks import arithmetic

#: Pools of the trained copy, the one that generates, and the rewards.
PLACEMENTS = {
    "split": ("train", "rollout", "cpu"),
    "rewards beside the trainer": ("train", "rollout", "train"),
    "rewards beside the engine": ("train", "rollout", "rollout"),
    "colocated": ("train", "train", "cpu"),
    "all in one pool": ("train", "train", "train"),
}
ABOVE = 0.02  # of cases in which lengths have no part: the distance lies above the largest but one of 100 shuffles
CHANCE = 1e-6  # with which a count of those is taken for a bias that is none


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], Pipeline, tuple[str, str, str]]:
    """A program, as its parameters, the pipeline of its plan, and its pools."""
    order = draw(st.sampled_from(["fifo", "window"]))
    pools = PLACEMENTS[draw(st.sampled_from(sorted(PLACEMENTS)))]
    keeps = ["continue"] if pools[0] != pools[1] else []  # a turn of generating ends before a publish
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
        publish=draw(st.sampled_from(["drain", "interrupt", *keeps])),
        chunks=draw(st.integers(1, 3)),
        **window,
    )
    return program, pipeline, pools


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


@dataclass
class Seen:
    """What an engine was asked for and trained on, by its own account: lengths of rows, and keys of updates."""

    admitted: Counter[int] = field(default_factory=Counter[int])
    trained: Counter[int] = field(default_factory=Counter[int])
    keys: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def watch(self, patched: pytest.MonkeyPatch) -> None:
        submit, update = table_engine.Table.submit, table_engine.Table.update

        def submitted(engine: Any, request: SampleRequest) -> int:
            if request.n > 1:  # an evaluation has a row for each prompt
                self.admitted.update(min(400, table_engine.lognormal(seed)) for seed in request.seeds.tolist())
            return submit(engine, request)

        def updated(engine: Any, batch: fl.Batch, loss: Any, **how: Any) -> Any:
            self.trained.update(batch["rollout_logprobs"].lengths.tolist())
            self.keys += batch.keys
            return update(engine, batch, loss, **how)

        patched.setattr(table_engine.Table, "submit", submitted)
        patched.setattr(table_engine.Table, "update", updated)


@dataclass
class Biased:
    """How many statistics of lengths there were that only chance decides, and how many were above their bounds."""

    cases: int = 0
    above: int = 0

    def add(self, distance: float, bound: float) -> None:
        self.cases += 1
        self.above += distance > bound

    @property
    def is_chance(self) -> bool:
        """Whether chance alone may have put as many above."""
        n, p = self.cases, ABOVE
        tail = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(self.above, n + 1))
        return tail > CHANCE


def own_rows(program: dict[str, Any]) -> set[tuple[int, int]]:
    """The rows of the steps that train: prompts have numbers in the order in which the program draws them."""
    mine = program["prompts"] + 2 * program["more"]
    drawn = mine + 2 * program["look"]
    steps = range(0, program["steps"], program["every"])
    return {(step * drawn + i, row) for step in steps for i in range(mine) for row in range(program["group"])}


def hold(program: dict[str, Any], pipeline: Pipeline, pools: tuple[str, str, str], biased: Biased) -> None:
    """Run a program; hold its lag to the bound, its ledger to what was asked for, and its rows to those of the program."""
    train, rollout, rewards = pools
    place = {"train": Place(train, backend="table"), "generate": Place(rollout, backend="table")}
    seen = Seen()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setitem(BACKENDS, "table", table_engine.ROW)
        seen.watch(patched)
        plan = Plan(dict.fromkeys(pools, "cpu"), {"actor": place, "reward": Place(rewards)}, pipeline=pipeline)
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
    assert rows["admitted"] == seen.admitted.total() and rows["trained"] == len(seen.keys) == len(set(seen.keys))
    assert seen.trained <= seen.admitted, "rows are trained on with all their tokens"
    if program["every"] == 1:
        assert seen.trained == seen.admitted, "nothing is dropped for its age, or for its length"
    if program["every"] == 1 or pipeline.order == "fifo":
        assert set(seen.keys) == own_rows(program), "each step trains on its own rows, however long they take"
    else:
        assert len(seen.keys) == len(own_rows(program)), "each step trains on as many groups as it has prompts"
        biased.add(told["lengths"]["distance"], told["lengths"]["bound"])
    if program["look"]:  # an evaluation sees every update before it
        wanted = [step // program["every"] + 1 for step in range(program["steps"])]
        assert [line["at"] for line in metrics] == [line["most"] for line in metrics] == wanted


def hold_many(count: int, *, derandomize: bool) -> Biased:
    """Draw so many programs and plans, and hold each. Returns what is left to chance."""
    biased = Biased()

    @settings(max_examples=count, deadline=None, derandomize=derandomize, phases=[Phase.generate], database=None)
    @given(cases())
    def each(case: tuple[dict[str, Any], Pipeline, tuple[str, str, str]]) -> None:
        hold(*case, biased)

    each()
    return biased


def test_programs_hold_their_bounds_under_any_plan():
    assert hold_many(8, derandomize=True).is_chance


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_five_hundred_programs_hold_their_bounds():
    biased = hold_many(500, derandomize=False)
    print(f"{biased.above} of {biased.cases} statistics of lengths were above their bounds")
    assert biased.is_chance and biased.cases > 50


def groups_by_age(
    most: int | None, *, steps: int = 40, prompts: int = 8, rows: int = 4, first: int = 0
) -> list[GroupLengths]:
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
            seeds = [1 + first + rows * (len(begun) + len(found)) * 7919 + row for row in range(rows)]
            prompt = fl.Column.of([[3]], dim="prompt", dtype="i32")
            request = SampleRequest(prompt, rows, torch.tensor(seeds), Sampling(max_tokens=400))
            begun[engine.submit(request)] = version, seeds

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


def test_chance_does_not_explain_the_lengths_of_dropped_rows():
    """Five engines that drop, of which each has fewer rows than the one above; and ten statistics by chance."""
    dropped, kept = Biased(), Biased()
    for number in range(5):
        found = length_bias(groups_by_age(1, first=1000 * number))
        assert found is not None
        dropped.add(found.distance, found.bound)
    drawn = random.Random(3)
    for _ in range(10):
        groups = [[table_engine.lognormal(drawn.getrandbits(40)) for _ in range(3)] for _ in range(24)]
        other = length_bias([GroupLengths(lengths, [i % 2 == 0] * 3) for i, lengths in enumerate(groups)])
        assert other is not None
        kept.add(other.distance, other.bound)
    assert not dropped.is_chance and kept.is_chance


@pytest.mark.parametrize(("cases_", "above", "chance"), [(0, 0, True), (100, 8, True), (100, 14, False), (8, 5, False)])
def test_a_count_above_the_bound_is_held_to_what_chance_explains(cases_, above, chance):
    assert Biased(cases_, above).is_chance is chance


def test_rows_of_a_program_are_told_from_those_drawn_aside():
    """Two prompts of the loop, two more and two held-out ones in each step, of which every other trains."""
    program = {"steps": 3, "prompts": 2, "group": 1, "every": 2, "look": True, "more": True}
    assert own_rows(program) == {(i, 0) for i in (0, 1, 2, 3, 12, 13, 14, 15)}
