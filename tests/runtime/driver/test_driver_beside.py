"""Episodes of several steps are played beside each other, and go on under the weights that are published meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import table_engine
from flows import module_of

from flowrl.placement.backends import BACKENDS
from flowrl.runtime.local.executor import LocalExecutor

STEPS = 4


def lines(out: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def straddle(monkeypatch):
    """The flow, with its gate told of each publish."""
    monkeypatch.setitem(BACKENDS, "table", table_engine.ROW)
    module = module_of("straddle_flow")
    module.GATE.append(module.Gate(STEPS))
    install = LocalExecutor.install

    def installed(executor, name, version, *weights, **how):
        engine = executor.open_server(name).engine
        module.GATE[-1].before(version, engine)
        moved = install(executor, name, version, *weights, **how)
        module.GATE[-1].after(version, engine)
        return moved

    monkeypatch.setattr(LocalExecutor, "install", installed)
    return module


@pytest.mark.parametrize("publish", ["interrupt", "continue"])
@pytest.mark.parametrize("engine", ["hf", "table"])
def test_later_turns_are_those_of_the_next_weights_and_earlier_ones_stay(straddle, tmp_path, engine, publish):
    out = tmp_path / "run"
    plan = straddle.plan(engine, publish)
    straddle.make_flow().run(out=out, plan=plan, quiet=True, runtime="local", save_models=False, steps=STEPS)
    straddle.hold(straddle.GATE[-1], engine)
    assert [line["lags"] for line in lines(out, "traffic") if "lags" in line] == [{"0": 2}, *[{"1": 2}] * (STEPS - 1)]
    rows = json.loads((out / "run.json").read_text())["ledger"]["straddle"]["rows"]
    assert rows["admitted"] == rows["trained"] == STEPS * straddle.PROMPTS * straddle.GROUP
    assert not rows["live"] and not rows["dropped"]
