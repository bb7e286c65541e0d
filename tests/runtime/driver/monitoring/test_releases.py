"""What let each call begin is in the timeline of a run, with what each rank did of it; the memory is beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from direct import run_direct
from flows import module_of

from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

POOLS: Any = {"train": "cpu", "rollout": "cpu", "cpu": Pool("cpu", processes=2)}
PLACES: Any = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
STEPS = {"stale": {"steps": 4}}


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=["local", "ranks"])
def recorded(request, tmp_path_factory) -> tuple[str, Path]:
    """A run at staleness 1, in this process or on ranks."""
    out = tmp_path_factory.mktemp("releases") / request.param
    flow = module_of("stale_flow").flow
    if request.param == "ranks":
        run_direct(flow, Plan(POOLS, PLACES, pipeline=Pipeline(staleness=1)), out, "stale", parameters=STEPS)
    else:
        plan = Plan({**POOLS, "cpu": "cpu"}, PLACES, pipeline=Pipeline(staleness=1))
        flow.run("stale", out=out, plan=plan, quiet=True, save_models=False, parameters=STEPS)
    return request.param, out


def test_every_call_says_what_let_it_begin(recorded: tuple[str, Path]) -> None:
    timeline = lines(recorded[1], "timeline")
    over = {line["call"]: line for line in timeline}
    for line in timeline:
        kind, call = line["after"]
        assert line.get("issued", line["due"]) <= line["due"] <= line["start"], line
        assert kind in ("rows", "weights", "pool", "order", "program")
        if call is not None:
            assert over[call]["end"] <= line["due"] + 1e-3, "it was over by then"
    scores = [line for line in timeline if line["node"] == "reward.score"]
    assert all(over[line["after"][1]]["node"] == "actor.generate" for line in scores if line["after"][0] == "rows")
    assert any(line["after"][0] == "rows" for line in scores)
    publishes = [line for line in timeline if line["node"] == "actor.publish"]
    assert len({line["call"] for line in publishes}) == len(publishes) and all(line["call"] < 0 for line in publishes)
    waited = [line for line in timeline if line["node"] == "actor.generate" and line["after"][0] == "weights"]
    assert all(over[line["after"][1]]["node"] in ("actor.publish", "actor.update") for line in waited)


def test_ranks_are_within_their_call(recorded: tuple[str, Path]) -> None:
    kind, out = recorded
    timeline = lines(out, "timeline")
    for line in timeline:
        for _, start, ready, end in line.get("ranks", ()):
            assert line["start"] <= start <= ready <= end <= line["end"]
    ranks = {rank for line in timeline if line["node"] == "reward.score" for rank, *_ in line.get("ranks", ())}
    assert ranks == ({2, 3} if kind == "ranks" else set()), "the reward is on two ranks"


def test_calls_that_sample_tell_the_passes_of_their_engine(recorded: tuple[str, Path]) -> None:
    """Each token but the first of a row is of a pass, and those of passes in which other rows begin are not told."""
    timeline = lines(recorded[1], "timeline")
    generated = [line for line in timeline if line["node"] == "actor.generate"]
    assert not any("passes" in line for line in timeline if line["node"] != "actor.generate")
    told = [each for line in generated for each in line.get("passes", ())]
    sampled = sum(line["tokens"] - line["prompt"] - line["rows"] for line in generated)
    assert 0 < sum(rows for _, rows, _, _ in told) <= sampled
    for count, rows, context, seconds in told:
        assert count <= rows < context and seconds > 0


def test_memory_is_recorded_at_the_end_of_each_step(recorded: tuple[str, Path]) -> None:
    kind, out = recorded
    memory = lines(out, "memory")
    assert [line["step"] for line in memory] == [0, 1, 2, 3]
    wanted = {"driver", *(f"rank {rank}" for rank in range(4))} if kind == "ranks" else {"driver"}
    assert set(memory[-1]["processes"]) == wanted
    assert all(1e7 < found["resident"] <= 1.1 * found["peak"] for found in memory[-1]["processes"].values())
