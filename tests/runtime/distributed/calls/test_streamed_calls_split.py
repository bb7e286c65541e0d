"""Runs on Ray whose engine two ranks split: steps share its batch, publishes come into rows, and a rank may be lost.

They need vLLM: `make vllm-test`.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from flows import events, module_of

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]


@pytest.fixture(scope="module")
def cluster():
    """One Ray for all tests of this file."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def load():
    """The flow, whose updates leave the weights as they are; vLLM has no kernel for heads of 8."""
    module_of("long_rows_flow")
    found = module_of("split_rows_flow")
    found.flow.use_model("actor", replace(found.MODEL, config={**found.MODEL.config, "hidden_size": 64}))
    return found


@pytest.fixture
def module():
    return load()


def plan(engine: str, mesh: str, **pipeline) -> Plan:
    """One rank trains, others sample."""
    size = Mesh.of(mesh).size
    pools = {
        "train": Pool("train", devices=(0,)),
        "rollout": Pool("rollout", devices=tuple(range(1, 1 + size))),
        "cpu": Pool("cpu", processes=1),
    }
    options = {"kv_cache": 0.0625, "rows": 32} if engine == "vllm" else {}
    served = Place("rollout", Mesh.of(mesh), engine, options=options)
    place = {"actor": {"train": Place("train"), "generate": served}, "ref": Place("train"), "reward": Place("cpu")}
    return Plan(pools, place, cluster=Cluster.of(f"cpu:1x{1 + size}"), pipeline=Pipeline(**pipeline))


def rows_of(out: Path) -> dict[tuple, dict]:
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    return {(line["step"], *line["key"]): line for line in lines}


def run(module, out: Path, made: Plan, **settings):
    """The rows of a run, each of which is trained on once."""
    how = {"quiet": True, "save_models": False, "trajectories": 64, "trajectories_every": 1}
    found = module.flow.run("split_rows", out=out, plan=made, runtime="ray", **how, **settings)
    rows = rows_of(out)
    account = json.loads((out / "run.json").read_text())["ledger"]["split_rows"]["rows"]
    assert found.status == "done" and account["live"] == 0
    assert account["admitted"] == account["trained"] == len(rows) == 4 * module.PROMPTS * module.GROUP
    return rows


@pytest.fixture(scope="module")
def wanted(cluster, tmp_path_factory):
    """The rows of a run with `engine: hf`."""
    out = tmp_path_factory.mktemp("hf") / "run"
    return run(load(), out, plan("hf", "dp=1", staleness=1, publish="interrupt"))


def check_equal(found: dict[tuple, dict], wanted: dict[tuple, dict]) -> None:
    """The same tokens and ends, log-probabilities but for rounding; versions that rise."""
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        now = found[key]
        assert (now["response_ids"], now["finish_reason"]) == (row["response_ids"], row["finish_reason"])
        assert now["rollout_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)
        assert now["versions"] == sorted(now["versions"])


def lags(out: Path) -> set[int]:
    lines = [json.loads(line) for line in (out / "traffic.jsonl").read_text().splitlines()]
    return {int(lag) for line in lines for lag in line.get("lags", {})}


def timeline(out: Path, node: str) -> list[dict]:
    lines = [json.loads(line) for line in (out / "timeline.jsonl").read_text().splitlines()]
    return sorted((line for line in lines if line["node"] == node), key=lambda line: line["start"])


@pytest.mark.parametrize(("mesh", "order"), [("tp=2", "fifo"), ("dp=2,tp=2", "window")])
def test_steps_share_a_split_engine_and_publishes_come_into_rows(module, wanted, tmp_path, mesh, order):
    module.PACE = 0.1
    out, staleness = tmp_path / "run", 1 if order == "fifo" else 2
    rows = run(module, out, plan("vllm", mesh, staleness=staleness, publish="interrupt", order=order))
    if order == "fifo":
        check_equal(rows, wanted)
    assert {len(line["ranks"]) for line in timeline(out, "actor.generate")} <= {2, 4}
    calls = timeline(out, "actor.generate")
    assert any(a["end"] > b["start"] for a, b in pairwise(calls)), "two steps at a time"
    assert any(len(set(row["versions"])) > 1 for row in rows.values()), "rows have tokens of two versions"
    assert max(lags(out)) <= (1 if order == "fifo" else 3)
    said = json.loads((out / "run.json").read_text())
    assert said["traffic"]["payload"] == 0 and len(said["publishes"]) >= 4
    assert not events(out, "lost")


LOST = {
    "rank": r"rank {} of pool 'rollout' died during \w+\.\w+ of step",
    "engine": r"rank {} of pool 'rollout' has lost its engine during actor.generate .*exit status -9",
}


@pytest.mark.parametrize(("who", "place"), [("rank", 1), ("engine", 1), ("rank", 0), ("engine", 0)])
def test_who_is_lost_is_named_and_rows_go_on_from_what_was_told(module, wanted, tmp_path, who, place):
    """Both ranks of the team are started again, with the weights of the version that was kept for them."""
    module.PACE, module.NOTE = 0.05, str(tmp_path / "struck")
    module.FAULT = (who, place, int(signal.SIGKILL), 30)
    out = tmp_path / "run"
    rows = run(module, out, plan("vllm", "tp=2", staleness=1, publish="interrupt", copies=2))
    check_equal(rows, wanted)
    (lost,) = events(out, "lost")
    assert re.search(LOST[who].format(1 + place), lost["text"], re.DOTALL), lost["text"]
    assert [event["text"] for event in events(out, "renewed")] == ["ranks 1, 2"] and not events(out, "recovered")
    kept = [event["text"] for event in events(out, "kept")]
    assert kept and all("kept tokens: actor.generate of step" in text and "on rank 1" in text for text in kept)


@pytest.mark.parametrize(("who", "place"), [("rank", 1), ("engine", 0)])
def test_a_team_that_is_lost_leaves_the_other_one_alone(module, wanted, tmp_path, who, place):
    """Two ranks are started again of four, with the weights of the other two."""
    module.PACE, module.NOTE = 0.05, str(tmp_path / "struck")
    module.FAULT = (who, place, int(signal.SIGKILL), 30)
    out = tmp_path / "run"
    rows = run(module, out, plan("vllm", "dp=2,tp=2", staleness=1, publish="interrupt"))
    check_equal(rows, wanted)
    (lost,) = events(out, "lost")
    found = next(n for n in (1 + place, 3 + place) if re.search(LOST[who].format(n), lost["text"], re.DOTALL))
    team = "ranks 3, 4" if found > 2 else "ranks 1, 2"
    assert [event["text"] for event in events(out, "renewed")] == [team] and not events(out, "recovered")


def test_a_run_goes_on_without_a_team_and_takes_one_up(module, wanted, tmp_path):
    """There is room for it, and it is not waited for."""
    module.PACE, module.NOTE = 0.05, str(tmp_path / "struck")
    module.FAULT = ("rank", 1, int(signal.SIGKILL), 30)
    out = tmp_path / "run"
    rows = run(module, out, plan("vllm", "dp=2,tp=2", staleness=1, publish="interrupt", restart=0))
    check_equal(rows, wanted)
    said = [event["text"] for event in events(out, "resized")]
    less = "pool 'rollout' goes on with 2 ranks: ranks {}, {} could not be started again within 0 s"
    assert said[0] in (less.format(1, 2), less.format(3, 4))
    assert said[1:] in ([], ["pool 'rollout' has all its ranks: ranks 6, 7 have come"])
    assert not events(out, "recovered")


def test_a_rank_that_hangs_is_named_by_the_deadline(module, wanted, tmp_path):
    module.PACE, module.NOTE, module.FAULT = 0.05, str(tmp_path / "struck"), ("rank", 1, int(signal.SIGSTOP), 30)
    out = tmp_path / "run"
    check_equal(
        run(module, out, plan("vllm", "tp=2", staleness=1, publish="interrupt", copies=2, deadline=100)), wanted
    )
    (lost,) = events(out, "lost")
    assert re.search(r"rank 2 of pool 'rollout' has not answered actor.generate .* in time", lost["text"])
