"""What a real run shows of itself: bytes of the columns that were read, weights that were published, lag, times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flowrl.analysis.measured_run import measured, measured_graph
from flowrl.analysis.moved_bytes import moved, with_moved
from flowrl.analysis.placed_graph import placed_graph
from flowrl.analysis.run_pages import write_pages
from flowrl.placement.plan.plan import Pipeline, Place, Plan

RUNTIME = Path(__file__).parents[1] / "runtime"
APART = Plan(
    {"train": "cpu", "rollout": "cpu"},
    {"actor": {"train": Place("train"), "generate": Place("rollout")}},
    pipeline=Pipeline(staleness=1),
)
STEPS = 3


@pytest.fixture
def stale(monkeypatch):
    monkeypatch.syspath_prepend(str(RUNTIME))
    flows = __import__("flows")
    yield flows.module_of("stale_flow")
    sys.modules.pop("stale_flow", None)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(module, out: Path, plan: Plan | None = None, **how):
    module.flow.run("stale", out=out, plan=plan, quiet=True, parameters={"stale": {"steps": STEPS}}, **how)
    flow, placed = module.flow, plan or Plan.one_process()
    graph = flow.graph("stale", steps=STEPS)
    if plan is not None:
        graph = placed_graph(flow.study(plan, "stale", steps=STEPS), graph)
    flown = measured(out, "stale", placed)
    assert flown is not None
    return measured_graph(graph, out, flown), flown


def edges(graph) -> dict[tuple[str, str], float | None]:
    return {(e.src, e.dst): e.bytes for e in graph.edges if e.kind in ("data", "weights")}


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_the_bytes_of_a_run_are_those_of_the_columns_that_were_read(stale, tmp_path, runtime):
    graph, _ = run(stale, tmp_path, runtime=runtime)
    rows = stale.PROMPTS * stale.GROUP
    tokens = sum(t["tokens"] for t in lines(tmp_path / "timeline.jsonl") if t["node"] == "ref.logprobs") / STEPS
    responses = sum(m["response_length"] * rows for m in lines(tmp_path / "metrics.jsonl")) / STEPS
    found = edges(graph)
    assert found["actor.generate", "ref.logprobs"] == pytest.approx(4 * tokens + responses + 4 * rows)
    assert found["actor.generate", "actor.update"] == pytest.approx(4 * tokens + 9 * responses + (4 + 1) * rows)
    assert found["ref.logprobs", "actor.update"] == found["rl.group_advantages", "actor.update"]
    assert found["ref.logprobs", "actor.update"] == pytest.approx(4 * responses)
    assert found["reward.score", "rl.group_advantages"] == found["reward.score", "batch.mean"] == 4 * rows
    assert graph.plan.startswith("Bytes are measured, of an average step. Times: measured: ")


def test_weights_that_were_published_have_their_bytes_and_rows_their_lag(stale, tmp_path):
    graph, flown = run(stale, tmp_path, plan=APART)
    saved = (tmp_path / "model" / "actor" / "model.safetensors").read_bytes()
    header = json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])
    weights = sum(t["data_offsets"][1] - t["data_offsets"][0] for n, t in header.items() if n != "__metadata__")
    published = [t for t in lines(tmp_path / "timeline.jsonl") if t["node"] == "actor.publish"]
    assert [line["step"] for line in published] == list(range(STEPS)), "also what nobody reads, after the last step"
    assert edges(graph)["actor.update", "actor.publish"] == pytest.approx(weights)
    assert flown.lags == {0: stale.PROMPTS, 1: stale.PROMPTS * (STEPS - 1)}


def test_how_alike_rows_of_a_prompt_were_is_recorded_and_read_again(stale, tmp_path):
    from statistics import fmean

    from flowrl.analysis.measured_run import tokens_of_run
    from flowrl.placement.cost.group_correlation import correlation

    run(stale, tmp_path, trajectories=stale.PROMPTS, trajectories_every=1)
    rows: dict[int, list[dict]] = {}
    for row in lines(tmp_path / "trajectories.jsonl"):
        rows.setdefault(row["step"], []).append(row)
    seen = [correlation([len(r["response_ids"]) for r in by], [r["key"][0] for r in by]) for by in rows.values()]
    said = [line["alike"] for line in lines(tmp_path / "traffic.jsonl") if line["responses"]]
    assert said == [None if each is None else pytest.approx(each, abs=1e-6) for each in seen] and len(said) == STEPS
    known = [each for each in seen if each is not None]
    assert tokens_of_run(tmp_path, "stale").alike == pytest.approx(max(0.0, fmean(known or [0.0])), abs=1e-6)


def test_weights_that_change_their_copy_inside_a_pool_have_a_time_under_their_one_name(stale, tmp_path):
    plan = Plan({"main": "cpu"}, pipeline=Pipeline(staleness=1))
    graph, flown = run(stale, tmp_path, plan=plan)
    assert graph.node("actor.publish").kind == "reshard"
    assert graph.node("actor.publish").seconds is not None
    assert {bar.node for bar in flown.bars} <= {node.id for node in graph.nodes}


def test_one_copy_that_trains_and_generates_moves_no_weights(stale, tmp_path):
    graph, flown = run(stale, tmp_path, plan=Plan({"main": "cpu"}))
    assert edges(graph)["actor.update", "actor.publish"] == 0
    assert flown.lags == {0: stale.PROMPTS * STEPS}


def test_pieces_of_a_call_are_one_call(stale, tmp_path):
    plan = Plan({"a": "cpu", "b": "cpu"}, {"reward": Place("b")}, pipeline=Pipeline(chunks=2))
    _, flown = run(stale, tmp_path, plan=plan)
    generates = [bar for bar in flown.bars if bar.node == "actor.generate"]
    assert len(generates) == 2 * STEPS and {bar.chunk for bar in generates} == {0, 1}
    assert len({bar.call for bar in generates}) == STEPS


def test_every_program_of_a_run_has_its_pages(stale, tmp_path):
    stale.flow.run(
        "stale",
        "every_other",
        out=tmp_path,
        quiet=True,
        parameters={"stale": {"steps": 2}, "every_other": {"steps": 2}},
    )
    pages = write_pages(tmp_path)
    assert {what: page.name for what, page in pages.items()} == {
        "graph": "graph.html",
        "timeline": "timeline.html",
        "graph of every_other": "graph.every_other.html",
        "timeline of every_other": "timeline.every_other.html",
    }
    assert "stale · flowrl run" in pages["timeline"].read_text()
    assert "every_other · flowrl run" in pages["timeline of every_other"].read_text()


def test_rows_of_an_earlier_step_have_their_lag(stale, tmp_path):
    @stale.flow.program
    def late(steps: int = 4):
        before = None
        for _, batch in stale.flow.steps(stale.arithmetic.prompts(stale.PROMPTS), steps):
            batch = stale.rl.group_advantages(stale.reward.score(stale.actor.generate(batch, n=stale.GROUP)))
            if before is not None:
                stale.actor.update(before, loss=stale.rl.ppo_clip())
            before = batch

    stale.flow.run("late", out=tmp_path, quiet=True)
    found = moved(tmp_path, "late")
    assert found is not None
    assert found.lags == {0: stale.PROMPTS, 1: 2 * stale.PROMPTS}, "nothing is published before the first update"


def test_of_two_edges_with_one_field_each_has_what_was_made_at_its_beginning(tmp_path):
    """A loop that refills: rows of both samples come into one concat, which was made in one step of two."""
    from flowrl.graph.record import Edge, Graph, Node

    sides = [Edge("a", "batch.concat", "data", ("tokens",)), Edge("b", "batch.concat", "data", ("tokens",))]
    after = [Edge("batch.concat", "actor.update", "data", ("tokens",)), Edge("costs", "rl.gae", "data", ("rewards",))]
    nodes = tuple(Node(id, "", id) for id in ("a", "b", "batch.concat", "costs", "rl.gae", "actor.update"))
    made = {"a": {"tokens": 100}, "costs": {"rewards": 8}}
    once = {"calls": {"a": 1, "costs": 1, "rl.gae": 1}, "makes": made, "reads": {"rl.gae": {"costs": 8}}}
    more = {"calls": {"b": 1, "batch.concat": 1}, "makes": {"b": {"tokens": 30}}, "reads": {}}
    both = {key: {**once[key], **more[key]} for key in once}
    both["reads"] = {"batch.concat": {"tokens": 130}, "actor.update": {"tokens": 130}}
    with (tmp_path / "traffic.jsonl").open("w") as file:
        for step, said in enumerate((once, both)):
            file.write(json.dumps({"program": "p", "step": step, "weights": {}, "lags": {}, **said}) + "\n")
    found = moved(tmp_path, "p")
    graph = with_moved(Graph("p", nodes, (*sides, *after)), found)
    assert [e.bytes for e in graph.edges] == [50, 15, 65, 8]


def test_a_publish_that_moves_nothing_says_so():
    """In one process the generating copy is the trained one: no byte goes anywhere, in text and picture."""
    from flowrl.analysis.placed_graph import placed_graph
    from flowrl.cli import load_script
    from flowrl.graph.draw import render
    from flowrl.placement.plan.plan import Plan

    flow = load_script(str(Path(__file__).parents[2] / "algorithms" / "grpo.py"))
    graph = placed_graph(flow.study(Plan.one_process(), "grpo"), flow.graph("grpo"))
    assert "    actor.update -> actor.publish: weights 0 B (same pool)\n" in render(graph, "text")
    assert ">0 B<" in render(graph, "svg")
