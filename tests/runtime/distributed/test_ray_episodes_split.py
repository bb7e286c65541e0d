"""Episodes on Ray whose policy is vLLM, split over two ranks: rows of `hf`, whoever of them is lost meanwhile.

They need vLLM: `make vllm-nightly`.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from flows import events, metrics, module_of

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


def run(out: Path, engine: str, mesh: str, fault: tuple[str, int, int, int] | None = None, **pipeline):
    """The rows that were played, and the numbers of the steps."""
    module_of("long_rows_flow")
    struck = module_of("split_rows_flow")
    struck.FAULT, struck.NOTE = fault, str(out.parent / "struck")
    found = module_of("split_episodes_flow")
    model = replace(struck.MODEL, config={**struck.MODEL.config, "hidden_size": 64})  # for whose heads vLLM has kernels
    found.flow.use_model("actor", model)
    size = Mesh.of(mesh).size
    pools = {
        "train": Pool("train", devices=(0,)),
        "rollout": Pool("rollout", devices=tuple(range(1, 1 + size))),
        "games": Pool("games", processes=1),
    }
    options = {"kv_cache": 0.0625, "rows": 32} if engine == "vllm" else {}
    served = Place("rollout", Mesh.of(mesh), engine, options=options)
    place = {"actor": {"train": Place("train"), "generate": served}, "game": Place("games")}
    cluster = Cluster.of(f"cpu:1x{1 + size}")
    plan = Plan(pools, place, cluster=cluster, pipeline=Pipeline(deadline=200, **pipeline))
    how = {"quiet": True, "save_models": False, "trajectories": 64, "trajectories_every": 1}
    assert found.flow.run("split_episodes", out=out, plan=plan, runtime="ray", **how).status == "done"
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    rows = {(line["step"], *line["key"]): line for line in lines}
    assert len(rows) == found.STEPS * 8
    return rows, [(line["reward"], line["length"]) for line in metrics(out)]


@pytest.fixture(scope="module")
def wanted(cluster, tmp_path_factory):
    """What `hf` plays."""
    return run(tmp_path_factory.mktemp("hf") / "run", "hf", "dp=1")


def check_equal(found, wanted, *what: str) -> None:
    """The same tokens, rewards and ends, log-probabilities but for rounding; and ``what`` else is said."""
    assert found[1] == wanted[1] and found[0].keys() == wanted[0].keys()
    for key, row in wanted[0].items():
        now = found[0][key]
        for name in ("response_ids", "finish_reason", "rewards", *what):
            assert now[name] == row[name]
        assert now["rollout_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_episodes_are_those_of_hf(wanted, tmp_path, mesh):
    check_equal(run(tmp_path / "run", "vllm", mesh), wanted, "versions")
    assert not events(tmp_path / "run", "lost")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["traffic"]["payload"] == 0


def test_episodes_go_on_over_publishes(wanted, tmp_path):
    """Of weights that each update leaves as they are: the tokens are those of `hf`, whatever version has drawn them."""
    found = run(tmp_path / "run", "vllm", "tp=2", staleness=1, publish="interrupt")
    check_equal(found, wanted)
    versions = {number for row in found[0].values() for number in row["versions"]}
    assert max(versions) > 0 and not events(tmp_path / "run", "lost")


LOST = {
    "rank": r"rank {} of pool 'rollout' died during game\.rollout of step",
    "engine": r"rank {} of pool 'rollout' has lost its engine during game\.rollout of step .*exit status -9",
}


@pytest.mark.parametrize(("who", "place"), [("engine", 1), ("rank", 1), ("engine", 0), ("rank", 0)])
def test_who_is_lost_is_named_and_the_episodes_are_played(wanted, tmp_path, who, place):
    """In the midst of a rollout: both ranks are started again."""
    check_equal(run(tmp_path / "run", "vllm", "tp=2", (who, place, int(signal.SIGKILL), 20)), wanted, "versions")
    (lost,) = events(tmp_path / "run", "lost")
    assert re.search(LOST[who].format(1 + place), lost["text"], re.DOTALL), lost["text"]
    assert [event["text"] for event in events(tmp_path / "run", "renewed")] == ["ranks 1, 2"]
