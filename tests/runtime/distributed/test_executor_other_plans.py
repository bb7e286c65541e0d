"""A run that is stopped again and again and goes on under another plan each time: `--resume --plan OTHER`."""

from __future__ import annotations

import json

import pytest
from direct import run_direct
from flows import module_of
from safetensors.torch import load_file

from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

SHOWN = {"trajectories": 8, "trajectories_every": 1}


def ranks(generate: int, **pipeline) -> Plan:
    """One rank trains, and so many others generate; with none it does both."""
    pools = {"a": Pool("a", processes=1)} | ({"b": Pool("b", processes=generate)} if generate else {})
    place = {"learner": {"train": Place("a"), "generate": Place("b" if generate else "a")}}
    return Plan(pools, place, pipeline=Pipeline(**pipeline))


def go_on(out, plans, *, every=2):
    """Run so many steps under each plan, one after another; None is one process without a plan."""
    flow = module_of("replicas_flow").trained
    for number, plan in enumerate(plans):
        steps = {"learn": {"steps": every * (number + 1)}}
        how = {"parameters": steps, "resume": number > 0, **SHOWN}
        if plan is None:
            flow.run("learn", out=out, quiet=True, **how)
        else:
            run_direct(flow, plan, out, "learn", **how)


def tokens(out):
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    return {(line["step"], tuple(line["key"])): line["response_ids"] for line in lines}


def check_ledger(out, prompts):
    """Each prompt is admitted once and trained on once; nothing is left."""
    found = json.loads((out / "run.json").read_text())["ledger"]["learn"]
    assert found["prompts"] == {"admitted": prompts, "trained": prompts, "dropped": {}, "live": 0}
    assert found["rows"] == {"admitted": 3 * prompts, "trained": 3 * prompts, "dropped": {}, "live": 0}


@pytest.mark.parametrize(
    "plans",
    [
        [None, ranks(3), ranks(0), ranks(1)],
        [ranks(2), None, ranks(4), ranks(1)],
    ],
    ids=["from one process", "from two replicas"],
)
def test_more_and_fewer_ranks_give_what_one_process_gives(tmp_path, plans):
    """The same tokens; weights up to the last bits of log-probabilities, which the shape of a batch decides."""
    go_on(tmp_path / "whole", [None], every=2 * len(plans))
    go_on(tmp_path / "hops", plans)
    assert tokens(tmp_path / "hops") == tokens(tmp_path / "whole")
    check_ledger(tmp_path / "hops", 16 * len(plans))
    whole, found = (
        load_file(tmp_path / name / "model" / "learner" / "model.safetensors") for name in ("whole", "hops")
    )
    assert whole.keys() == found.keys()
    assert max(float((whole[name] - found[name]).abs().max()) for name in whole) < 1e-4


def test_staleness_order_and_publish_change_on_the_way(tmp_path):
    """With ranks that come and go with the plans: every row is admitted and trained on once."""
    ahead = ranks(2, staleness=2, order="window", window=1.0, publish="interrupt")
    go_on(tmp_path, [ranks(2), ahead, ranks(3, staleness=1), ranks(1, staleness=1, publish="continue"), None])
    check_ledger(tmp_path, 80)
    made = tokens(tmp_path)
    assert len(made) == 240 and {step for step, _ in made} == set(range(10))
