"""What an engine tells of a publish is recorded with it: what loading and the proof took, and the gap of the probe."""

from __future__ import annotations

import json

import pytest
from direct import run_direct
from flows import module_of

from flowrl.backends.hf.engine import HFEngine
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.workers.engine import Published


@pytest.fixture
def telling(monkeypatch):
    """Engines that tell something of each publish, another gap each time; the rank that proved last has the largest."""
    told = []

    def note(method):
        def written(self, *args):
            method(self, *args)
            told.append(len(told))
            self.published = Published(8, 0.25, 0.5 + 0.125 * (len(told) % 2), 1e-6 * len(told), 4)

        return written

    for name in ("take_weights", "weights_written"):
        monkeypatch.setattr(HFEngine, name, note(getattr(HFEngine, name)))
    return told


def run(out, ranks, staleness):
    module = module_of("stale_flow")
    pools = {"train": "cpu", "rollout": Pool("rollout", processes=2) if ranks else "cpu"}
    places = {"actor": {"train": Place("train"), "generate": Place("rollout")}}
    places |= {"ref": Place("train"), "reward": Place("train")}
    plan = Plan(pools, places, pipeline=Pipeline(staleness=staleness))
    how = {"parameters": {"stale": {"steps": 3}}}
    if ranks:
        run_direct(module.flow, plan, out, "stale", **how)
    else:
        module.flow.run("stale", out=out, plan=plan, runtime="local", quiet=True, save_models=False, **how)
    return [[json.loads(x) for x in (out / f"{n}.jsonl").read_text().splitlines()] for n in ("timeline", "metrics")]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("ranks", [False, True], ids=["local", "ranks"])
def test_a_publish_is_recorded_with_what_its_engine_tells(tmp_path, telling, ranks, staleness):
    timeline, metrics = run(tmp_path / "run", ranks, staleness)
    publishes = [line for line in timeline if line["node"] == "actor.publish"]
    assert len(publishes) >= 2
    for line in publishes:
        assert line["load_seconds"] == 0.25 and line["probe_rows"] == 4
        assert line["proof_seconds"] == 0.625 or (not ranks and line["proof_seconds"] == 0.5), "of the slowest rank"
    gaps = [line["probe_gap"] for line in publishes]
    assert gaps == sorted(set(gaps)) and gaps[0] > 0, "each has its own"
    assert not any("proof_seconds" in line for line in timeline if line["node"] != "actor.publish")
    shown = [line["actor.publish/probe_gap"] for line in metrics if "actor.publish/probe_gap" in line]
    assert shown and set(shown) <= set(gaps)
    with_it = [line for line in metrics if "actor.publish/proof_seconds" in line]
    assert all(line["actor.publish/load_seconds"] == 0.25 for line in with_it) and len(with_it) == len(shown)


@pytest.mark.parametrize("ranks", [False, True], ids=["local", "ranks"])
def test_of_an_engine_that_tells_nothing_nothing_is_recorded(tmp_path, ranks):
    timeline, metrics = run(tmp_path / "run", ranks, 0)
    assert [line for line in timeline if line["node"] == "actor.publish"]
    assert not any("probe" in name or "proof" in name for line in (*timeline, *metrics) for name in line)
