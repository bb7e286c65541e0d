"""Runs whose steps share an engine: within the bound, every prompt once, and each token with its own version."""

from __future__ import annotations

import json
import math
import random
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from flows import module_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from publish_gate import PublishGate

from flowrl.backends.continuous import ContinuousBatch
from flowrl.errors import RunError
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.driver.pool_threads import Pools
from flowrl.runtime.local.shared_engine import SharedEngine
from flowrl.runtime.storage.recorder import Recorder
from flowrl.schedule.events import Start
from flowrl.schedule.group_window import width

BOUND = 120.0  # seconds that a test waits for another thread at most


@pytest.fixture(scope="module")
def module():
    return module_of("overlap_flow")


def plan(**pipeline) -> Plan:
    pools = {"train": "cpu", "rollout": "cpu", "cpu": "cpu"}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
    return Plan(pools, place, pipeline=Pipeline(**pipeline))


def run(module, out: Path, made: Plan, runtime: str = "local", **parameters):
    module.Witness.rows.clear()
    asked = {"overlap": parameters}
    how: dict[str, Any] = {n: parameters.pop(n) for n in ("resume", "checkpoint_every") if n in parameters}
    return module.flow.run(out=out, plan=made, runtime=runtime, quiet=True, save_models=False, parameters=asked, **how)


def lines(out: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def of_rows(column) -> list[list]:
    return column.to_list()


def check_rows(module, steps: int, more: bool, *, exchanged: bool = False) -> None:
    """Every prompt is trained on once, unless ``exchanged`` in the step that drew it; versions rise within a row."""
    uids: list[int] = []
    for _, batch in sorted(module.Witness.rows, key=lambda item: item[0]):
        keys = [key[0] for key in batch.keys]
        assert all(keys.count(uid) == module.GROUP for uid in set(keys))
        uids += sorted(set(keys))
        for versions in of_rows(batch["versions"]):
            assert versions == sorted(versions)
    assert len(uids) == len(set(uids)) == steps * (module.PROMPTS + 2 * more)
    assert exchanged or uids == sorted(uids)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    staleness=st.integers(0, 3),
    publish=st.sampled_from(["drain", "interrupt", "continue"]),
    chunks=st.sampled_from([1, 2, 3]),
    more=st.booleans(),
    every=st.sampled_from([1, 2]),
    look=st.booleans(),
)
def test_the_bound_holds_and_every_prompt_is_trained_on_once(module, staleness, publish, chunks, more, every, look):
    said = {"steps": 6, "more": more, "every": every, "look": look}
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run(module, out, plan(staleness=staleness, publish=publish, chunks=chunks), **said)
        check_rows(module, 6, more)
        lags = [int(lag) for line in lines(out, "traffic") for lag in line.get("lags", {})]
        assert lags and max(lags) <= staleness and min(lags) >= 0
        trained = sum(len(batch) for step, batch in module.Witness.rows if step % every == 0)
        assert json.loads((out / "run.json").read_text())["ledger"]["overlap"]["rows"]["trained"] == trained
        for line in lines(out):
            if "at" in line:  # an evaluation sees precisely the updates before it
                assert line["at"] == line["at_most"] == len(range(0, line["step"] + 1, every))


def test_the_timeline_tells_what_was_sampled(module, tmp_path):
    """Tokens of prompts, of the longest response, and those that each sampled token came after."""
    run(module, tmp_path / "run", plan(), steps=2)
    told = [line for line in lines(tmp_path / "run", "timeline") if "longest" in line]
    assert [line["node"] for line in told] == ["actor.generate"] * 2
    for line, (_, batch) in zip(told, sorted(module.Witness.rows, key=lambda item: item[0]), strict=True):
        prompts, rows = of_rows(batch["prompt_ids"]), of_rows(batch["tokens"])
        assert line["prompt"] == sum(map(len, prompts)) and line["tokens"] == sum(map(len, rows))
        sampled = [range(len(p), len(r)) for p, r in zip(prompts, rows, strict=True)]
        assert (line["longest"], line["context"]) == (max(map(len, sampled)), sum(map(sum, sampled)))


@pytest.mark.parametrize("publish", ["drain", "interrupt", "continue"])
def test_without_staleness_every_mode_gives_what_eager_gives(module, tmp_path, publish):
    eager = run(module, tmp_path / "eager", plan(), "eager", steps=3, more=True)
    local = run(module, tmp_path / "local", plan(publish=publish), steps=3, more=True)
    assert local.weights_digest == eager.weights_digest


class Gate(PublishGate):
    """Keeps the weights that were published, and how many rows ran then."""

    def __init__(self, monkeypatch) -> None:
        super().__init__(monkeypatch)
        self.published: dict[int, dict[str, torch.Tensor]] = {}
        self.inside: list[int] = []  # rows that run as a version is published
        step, publish = SharedEngine.step, SharedEngine.publish

        def gated(shared):
            if not self.held(sorted({call for call, _ in shared.engine.running()}), first=1):
                step(shared)

        def kept(shared, install, version, *, keep_cache):
            self.inside.append(len(shared.engine.running()))
            moved = publish(shared, install, version, keep_cache=keep_cache)
            self.published[version] = {n: w.clone() for n, w in shared.engine.plain_weights().items()}
            return moved

        monkeypatch.setattr(SharedEngine, "step", gated)
        monkeypatch.setattr(SharedEngine, "publish", kept)


@pytest.mark.parametrize("publish", ["interrupt", "continue"])
def test_tokens_after_a_publish_are_those_of_the_new_weights(module, tmp_path, monkeypatch, publish):
    """With ``interrupt`` the log-probability of every token is that of a whole pass under the weights of its version."""
    from flowrl.backends import open_engine
    from flowrl.workers.model_options import Build

    gate = Gate(monkeypatch)
    run(module, tmp_path / "run", plan(staleness=1, publish=publish), steps=4)
    check_rows(module, 4, False)
    assert any(gate.inside), "rows ran as weights were published"
    assert gate.together == 2, "calls of two open steps were in one batch"

    fresh = open_engine("hf", Build(module.MODEL, device="cpu"))
    mixed, worst = 0, 0.0
    for _, batch in module.Witness.rows:
        versions, sampled = batch["versions"].values, batch["rollout_logprobs"].values
        mixed += sum(len(set(row)) > 1 for row in of_rows(batch["versions"]))
        for version in set(versions.tolist()) - {0}:
            fresh.take_weights(gate.published[version])
            apart = (fresh.logprobs(batch).values - sampled)[versions == version].abs()
            worst = max(worst, float(apart.max()))
    assert mixed > 0, "rows have tokens of two versions"
    warned = [e for e in lines(tmp_path / "run", "events") if "disagree" in e.get("text", "")]
    assert not warned, "the gap is measured where the two should agree"
    if publish == "interrupt":
        assert worst < 1e-4
    else:
        assert worst > 1e-4, "keys and values are those of the version before"


@pytest.mark.parametrize("order", ["fifo", "window"])
def test_a_run_that_stopped_goes_on_and_loses_no_prompt(module, tmp_path, order):
    made = plan(staleness=2, publish="interrupt", chunks=2, order=order)
    run(module, tmp_path / "run", made, steps=4, checkpoint_every=2)
    check_rows(module, 4, False, exchanged=order == "window")
    before = list(module.Witness.rows)
    outcome = run(module, tmp_path / "run", made, steps=8, resume=True, checkpoint_every=2)
    assert outcome.status == "done" and [line["step"] for line in lines(tmp_path / "run")] == list(range(8))
    module.Witness.rows[:0] = before
    check_rows(module, 8, False, exchanged=order == "window")
    lags = [int(lag) for line in lines(tmp_path / "run", "traffic") for lag in line.get("lags", {})]
    assert max(lags) <= bound(made, module.PROMPTS)


IN_STEP, AHEAD = {"staleness": 0}, {"staleness": 1}
SHARED = {"staleness": 1, "publish": "interrupt", "chunks": 2}
EXCHANGED = {"staleness": 2, "publish": "continue", "order": "window", "window": 1.0}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(SHARED, IN_STEP, id="interrupt-to-S0", marks=pytest.mark.nightly),
        pytest.param(IN_STEP, EXCHANGED, id="S0-to-window", marks=pytest.mark.nightly),
        pytest.param(EXCHANGED, AHEAD, id="window-to-drain"),
        pytest.param(AHEAD, SHARED, id="drain-to-interrupt", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_died_goes_on_under_another_pipeline(module, tmp_path, before, after):
    """Staleness, order, publish and chunks may all be others: no prompt is lost or trained on twice."""
    commit = Recorder.commit

    def dies(self, program, step, tokenizer):
        if step.number == 5:
            raise OSError("stopped on purpose")
        return commit(self, program, step, tokenizer)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(OSError, match="stopped on purpose"):
        patched.setattr(Recorder, "commit", dies)
        run(module, tmp_path / "run", plan(**before), steps=8, checkpoint_every=2)
    seen = dict(module.Witness.rows)
    run(module, tmp_path / "run", plan(**after), steps=8, resume=True, checkpoint_every=2)
    module.Witness.rows[:] = (seen | dict(module.Witness.rows)).items()
    check_rows(module, 8, False, exchanged=True)
    told = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["overlap"]["prompts"]
    assert told["admitted"] == told["trained"] == 8 * module.PROMPTS and not told["live"] and not told["dropped"]
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(8))
    lags = [int(lag) for line in lines(tmp_path / "run", "traffic") for lag in line.get("lags", {})]
    assert max(lags) <= max(bound(plan(**each), module.PROMPTS) for each in (before, after))


def bound(made: Plan, prompts: int) -> int:
    """The most publishes between sampling and training (docs/schedule.md)."""
    steps = made.pipeline
    return steps.staleness + (
        math.ceil((width(prompts, steps.staleness, steps.window) - 1) / prompts) if steps.order == "window" else 0
    )


def check_exchanged(module, out: Path, made: Plan, steps: int) -> None:
    """Every prompt is trained on once within the bound, and the run's own account of it closes."""
    check_rows(module, steps, False, exchanged=True)
    lags = [int(lag) for line in lines(out, "traffic") for lag in line.get("lags", {})]
    assert min(lags) >= 0 and max(lags) <= bound(made, module.PROMPTS)
    told = json.loads((out / "run.json").read_text())["ledger"]["overlap"]
    for count, each in (("prompts", 1), ("rows", module.GROUP)):
        of = told[count]
        assert of["admitted"] == of["trained"] == steps * module.PROMPTS * each and not of["dropped"] and not of["live"]
    assert told["lengths"]["distance"] <= told["lengths"]["bound"], "long rows are trained on as often as short ones"


def long_tails(monkeypatch) -> None:
    """Have rows end after log-normal numbers of tokens."""

    def end_of(batch, row):
        most = int(random.Random(row.seed).lognormvariate(1.2, 0.9)) + 1
        return "length" if len(row.ids) >= min(most, row.limit) else None

    monkeypatch.setattr(ContinuousBatch, "end_of", end_of)


def try_windows(module, staleness, window, publish, chunks, steps) -> None:
    made = plan(staleness=staleness, order="window", window=window, publish=publish, chunks=chunks)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        long_tails(patched)
        run(module, Path(folder) / "run", made, steps=steps)
        check_exchanged(module, Path(folder) / "run", made, steps)


PLANS: dict[str, Any] = {
    "window": st.sampled_from([0.1, 0.3, 0.6, 1.0]),
    "publish": st.sampled_from(["drain", "interrupt", "continue"]),
    "chunks": st.sampled_from([1, 2, 3]),
}


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(staleness=st.integers(1, 3), **PLANS)
def test_a_window_holds_its_bound_and_loses_no_prompt(module, staleness, window, publish, chunks):
    try_windows(module, staleness, window, publish, chunks, steps=5)


@pytest.mark.nightly
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
@given(staleness=st.integers(0, 4), **PLANS)
def test_many_windows_hold_their_bounds(module, staleness, window, publish, chunks):
    try_windows(module, staleness, window, publish, chunks, steps=8)


def test_a_long_row_does_not_hold_up_its_step(module, tmp_path, monkeypatch):
    """The first prompt is still sampled as all others have ended: its step is trained on one of the next step's."""
    starts: list[int] = []
    joined = threading.Event()
    put, step, steps = Pools.put, SharedEngine.step, [0]

    def noted(pools, pool, job):
        put(pools, pool, job)
        if pool == "rollout" and isinstance(job.command, Start):
            starts.append(job.command.id)
            if len(starts) == 2:
                joined.set()

    def gated(shared):
        steps[0] += 1
        if steps[0] == 4:
            assert joined.wait(BOUND), "the next step has not come"
        step(shared)

    monkeypatch.setattr(Pools, "put", noted)
    monkeypatch.setattr(SharedEngine, "step", gated)
    monkeypatch.setattr(ContinuousBatch, "end_of", lambda batch, row: (
        "length" if len(row.ids) >= (row.limit if row.call == 1 else 2) else None
    ))  # fmt: skip
    made = plan(staleness=1, order="window", window=1.0, publish="interrupt")
    run(module, tmp_path / "run", made, steps=4)
    check_exchanged(module, tmp_path / "run", made, 4)
    trained = {step: {key[0] for key in batch.keys} for step, batch in module.Witness.rows}
    assert 0 not in trained[0] and trained[0] > {1, 2, 3} and 0 in trained[1]


def test_a_group_that_fails_ends_the_run(module, tmp_path, monkeypatch):
    """Steps that wait for its groups wait no longer."""
    take = SharedEngine.take

    def broken(shared, rows):
        made = take(shared, rows)
        if rows.number == 6:  # of the second step
            raise RunError("broken on purpose")
        return made

    monkeypatch.setattr(SharedEngine, "take", broken)
    with pytest.raises(RunError, match="broken on purpose") as e:
        run(module, tmp_path / "run", plan(staleness=2, order="window", window=0.5), steps=6)
    assert e.value.at is not None and "return actor.generate(batch, **how)" in e.value.at.text
