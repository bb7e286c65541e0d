"""A run that has begun with one engine goes on with another one, from a checkpoint: `--resume --plan OTHER`."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from direct import run_direct
from flows import metrics, module_of

from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]


def plan(engine: str, **pipeline) -> Plan:
    """One rank trains, another one generates with an engine."""
    options = {"kv_cache": 0.0625, "rows": 32} if engine == "vllm" else {}
    served = Place("rollout", backend=engine, options=options)
    place = {"actor": {"train": Place("train"), "generate": served}, "reward": Place("cpu")}
    return Plan({"train": "cpu", "rollout": Pool("rollout"), "cpu": "cpu"}, place, pipeline=Pipeline(**pipeline))


@pytest.fixture
def flow():
    """The overlap program, with a model for whose heads vLLM has kernels."""
    module = module_of("overlap_flow")
    module.flow.use_model("actor", replace(module.MODEL, config={**module.MODEL.config, "hidden_size": 64}))
    return module.flow


def go_on(flow, out: Path, made: Plan, steps: int, resume: bool) -> None:
    how = {"parameters": {"overlap": {"steps": steps}}, "resume": resume, "save_models": False}
    outcome, _ = run_direct(flow, made, out, trajectories=8, trajectories_every=1, **how)
    assert outcome.status == "done"


def tokens(out: Path) -> dict[tuple, list[int]]:
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    return {(line["step"], *line["key"]): line["response_ids"] for line in lines}


@pytest.mark.parametrize(
    ("engines", "pipeline"),
    [
        (("hf", "vllm"), {}),
        pytest.param(("vllm", "hf"), {}, marks=pytest.mark.nightly),
        pytest.param(("hf", "vllm"), {"staleness": 1, "publish": "interrupt"}, marks=pytest.mark.nightly),
    ],
)
def test_a_run_goes_on_with_another_engine_and_its_account_holds(flow, tmp_path, engines, pipeline):
    """Every row is admitted and trained on once. At staleness 0 the tokens are those of a run with one engine."""
    first, then = engines
    go_on(flow, tmp_path / "run", plan(first, **pipeline), 2, resume=False)
    before = tokens(tmp_path / "run")
    go_on(flow, tmp_path / "run", plan(then, **pipeline), 4, resume=True)
    after = tokens(tmp_path / "run")
    assert {key: ids for key, ids in after.items() if key in before} == before and len(after) == 2 * len(before) == 32
    account = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["overlap"]
    assert account["rows"] == {"admitted": 32, "trained": 32, "dropped": {}, "live": 0}
    assert account["prompts"] == {"admitted": 16, "trained": 16, "dropped": {}, "live": 0}
    found = metrics(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(4))
    changed = [e["text"] for e in events(tmp_path / "run") if e["kind"] == "changed"]
    assert any("vllm" in text for text in changed), "the run says that the engine is another one"
    if not pipeline:
        go_on(flow, tmp_path / "whole", plan("hf"), 4, resume=False)
        assert tokens(tmp_path / "whole") == after
        for a, b in zip(metrics(tmp_path / "whole"), found, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)


def events(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
