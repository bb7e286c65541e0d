"""Digests of what calls made are those of one process, wherever the rows lie."""

from __future__ import annotations

import pytest
from direct import run_direct
from flows import module_of

from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.storage.digest_lines import read_digests

PLANS = {
    "one": Plan({"a": "cpu"}),
    "split": Plan({"a": "cpu", "b": "cpu", "c": "cpu"}, {"world": Place("b"), "fails": Place("c")}),
    "many": Plan({"a": "cpu", "b": Pool("b", processes=3)}, {"world": Place("b")}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_digests_do_not_depend_on_where_the_rows_lie(small, tmp_path, plan):
    small.flow.run("train", out=tmp_path / "local", quiet=True)
    run_direct(small.flow, PLANS[plan], tmp_path / "ranks")
    local, ranks = (list(read_digests(tmp_path / out)) for out in ("local", "ranks"))
    assert ranks == local
    assert {"counter.values", "world.judge", "batch.filter"} <= {made.node for made in ranks if made.keys}


def test_those_of_a_model_have_the_rows_fields_and_versions_of_one_process(tmp_path):
    plan = Plan(
        {"train": "cpu", "rollout": "cpu", "cpu": Pool("cpu", processes=2)},
        {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")},
        pipeline=Pipeline(staleness=1),
    )
    flow = module_of("stale_flow").flow
    flow.run("stale", out=tmp_path / "local", plan=plan, quiet=True, parameters={"stale": {"steps": 3}})
    run_direct(flow, plan, tmp_path / "ranks", "stale", parameters={"stale": {"steps": 3}})
    local, ranks = (list(read_digests(tmp_path / out)) for out in ("local", "ranks"))
    assert [(m.node, m.keys, m.versions, set(m.fields)) for m in ranks] == [
        (m.node, m.keys, m.versions, set(m.fields)) for m in local
    ]
    assert [m.versions for m in local if m.node == "actor.generate"] == [{"actor": (v,)} for v in (0, 0, 1)]
