"""The critical path of a step and what would help, held against schedules that can be followed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.analysis.call_seconds import Faster
from flowrl.analysis.row_lengths import Tokens
from flowrl.analysis.what_helps import critical_path, explained
from flowrl.cli import main
from flowrl.cli.arguments.script import load_script
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cost.given_costs import GivenCosts
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.plan.plan import Pipeline, Plan

ROOT = Path(__file__).parents[2]
GIVEN = {"actor.generate": 6.0, "ref.logprobs": 2.0, "reward.score": 1.0, "actor.update": 3.0, "actor.publish": 0.5}


def study(plan: str, *, costs=None, tokens: Tokens | None = None, model: str = "", steps: int = 12, **pipeline):
    flow = load_script(str(ROOT / "algorithms" / "grpo.py"))
    for handle in flow.handles:
        if model and handle.arguments.get("model") is not None:
            flow.use_model(handle.name, model)
    loaded = Plan.load(ROOT / "algorithms" / "plans" / f"{plan}.yaml")
    if pipeline:
        loaded = Plan(loaded.pools, loaded.place, loaded.cluster, Pipeline(**pipeline))
    return flow.study(loaded, costs=costs or GivenCosts(GIVEN), tokens=tokens or Tokens(), steps=steps)


def path_of(found) -> dict[str, float]:
    return {at.node: round(at.seconds, 6) for at in found}


def test_one_pool_waits_for_all_that_it_does():
    flown = study("colocated_8").simulate()
    found = critical_path(flown)
    assert path_of(found) == {"actor.generate": 6.0, "actor.update": 3.0, "ref.logprobs": 2.0}
    assert sum(at.share for at in found) == pytest.approx(1.0)


def test_one_step_off_waits_for_the_pool_that_samples():
    found = critical_path(study("disaggregated_16").simulate())
    assert found[0].node == "actor.generate" and found[0].share > 0.8
    assert {at.node for at in found} >= {"actor.generate", "actor.publish"}


def test_one_after_another_goes_through_every_stage():
    found = path_of(critical_path(study("disaggregated_16", staleness=0).simulate()))
    assert set(found) == {"actor.generate", "ref.logprobs", "actor.update", "actor.publish"}
    assert found["actor.generate"] == pytest.approx(6.0, rel=0.15) and found["actor.update"] == pytest.approx(
        3.0, rel=0.15
    )


def test_more_devices_help_where_a_step_waits_and_only_there():
    hand = study("disaggregated_16")
    told = explained(hand, hand.simulate())
    by_name = {change.what: change for change in told.changes}
    rollout = by_name["one more device in pool 'rollout', if its calls scale with it"]
    assert rollout.step_seconds == pytest.approx(6.0 * 8 / 9 + 0.5, rel=1e-6), "a ninth of the generate is saved"
    assert not any("pool 'train'" in what or "process" in what for what in by_name)


def test_overlap_helps_what_runs_one_after_another():
    hand = study("disaggregated_16", staleness=0)
    told = explained(hand, hand.simulate())
    assert told.changes[0].what == "one more step in flight: staleness 1"
    assert told.changes[0].step_seconds == pytest.approx(6.5, rel=1e-6)
    assert told.step_seconds == pytest.approx(6 + 2 + 3 + 0.5, rel=1e-6)


def test_fewer_steps_in_flight_are_looked_at_too():
    """Where calls of a later step take the turn of an earlier one, more staleness may be slower: then this is told."""
    hand = study("disaggregated_16", staleness=2)
    told = explained(hand, hand.simulate())
    assert not any("one step less" in change.what for change in told.changes), "here it is not"


def test_a_roofline_is_asked_again_with_faster_links_and_says_what_is_uncertain():
    tokens = Tokens(512.0, "fixed", (1024.0,))

    hand = study("disaggregated_16", costs=Roofline(Cluster.of("h100-80:2x8")), tokens=tokens, model="qwen3-8b")
    told = explained(hand, hand.simulate())
    assert all(0 < change.saved < 1 and change.step_seconds < told.step_seconds for change in told.changes)
    assert [c.saved for c in told.changes] == sorted((c.saved for c in told.changes), reverse=True)
    assert any("roofline" in what for what in told.uncertain) and any("long tail" in what for what in told.uncertain)
    assert json.loads(json.dumps(told.to_json()))["words"] == list(told.lines())


def test_rows_of_their_own_lengths_are_faster_too():

    tokens = Tokens(512.0, "lognormal", (400.0, 1.0, 4096.0))
    hand = study("colocated_8", costs=Roofline(Cluster.of("h100-80:1x8")), tokens=tokens, model="qwen3-0.6b")
    work = hand.works["actor.generate"]
    assert isinstance(hand.cost_model, Roofline)
    faster, plain = Faster(hand.cost_model, 0.5, pool=work.pool).engine(work), hand.cost_model.engine(work)
    assert faster is not None and faster.step(8) == plain.step(8) / 2 and faster.slots == plain.slots
    assert Faster(hand.cost_model, 0.5, pool="other").seconds(work) == hand.cost_model.seconds(work)


@pytest.mark.parametrize("form", ["table", "json", "html"])
def test_the_command_tells_it_in_every_form(capsys, monkeypatch, tmp_path, form):
    monkeypatch.chdir(ROOT)
    costs = tmp_path / "costs.yaml"
    costs.write_text("".join(f"{name}: {seconds}\n" for name, seconds in GIVEN.items()))
    words = [
        "simulate",
        "algorithms/grpo.py",
        "--plan",
        "algorithms/plans/disaggregated_16.yaml",
        "--costs",
        str(costs),
    ]
    assert main([*words, "--steps", "10", "--explain", "--format", form]) == 0
    out = capsys.readouterr().out
    assert "critical path: actor.generate" in out
    assert "one more device in pool" in out
    assert main([*words, "--steps", "10", "--format", form]) == 0
    assert "critical path" not in capsys.readouterr().out


def test_the_heavier_the_tail_the_more_is_gained_by_four_steps_in_flight_over_one():
    """As AReaL (arXiv:2505.24298, section 7) and others report: rows of later steps fill what the longest leave idle."""
    gains: list[float] = []
    for sigma in (0.1, 0.5, 1.0):
        tokens = Tokens(512.0, "lognormal", (2000.0, sigma, 16384.0))
        costs = Roofline(Cluster.of("h100-80:2x8"))
        how = {"costs": costs, "tokens": tokens, "model": "qwen3-8b", "steps": 60}
        one, four = (study("disaggregated_16", **how, staleness=s).simulate().step_seconds for s in (1, 4))
        assert four < one * 1.02, "with hardly a tail one step off is enough: the pool that trains is always busy"
        gains.append(one / four)
    assert gains == sorted(gains) and gains[0] < 1.25 and gains[-1] > 1.4


def test_a_search_is_explained_with_where_its_runner_up_loses(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["plan", "algorithms/grpo.py", "--cluster", "h100-80:1x4", "--model", "actor=qwen3-0.6b", "--steps", "8"]
    words += ["--lengths", "fixed:1024", "--prompt-tokens", "512", "--prompts-per-step", "64"]
    assert main([*words, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "Critical path: actor.generate" in text and "Uncertain: " in text
    assert main([*words, "--explain", "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    told = record["explained"]
    assert record["runner_up"] is not None and told["lost_on"]
    assert sum(at["seconds"] for at in told["path"]) == pytest.approx(record["step_s"], rel=1e-6)
    lost = [term["other"] - term["seconds"] for term in told["lost_on"]]
    assert lost == sorted(lost, reverse=True) and min(lost) > 0
    assert f"The runner-up loses on {told['lost_on'][0]['node']}: " in text
    assert main([*words, "--format", "json"]) == 0
    assert "explained" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("form", ["table", "json", "html"])
def test_what_lies_on_hosts_is_told_in_every_form_and_too_much_is_refused(capsys, monkeypatch, tmp_path, form):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "algorithms" / "plans" / "colocated_8.yaml").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("cluster:"))
    words = ["simulate", "algorithms/grpo.py", "--steps", "4", "--model", "actor=qwen3-30b-a3b", "--format", form]
    words += ["--lengths", "fixed:1024", "--prompt-tokens", "1024"]
    for memory, fits in (("1TiB", True), ("60GB", False)):
        cluster = f"cluster: {{device: h100-80, nodes: 1, devices_per_node: 8, host_memory: {memory}}}"
        (tmp_path / "plan.yaml").write_text(text.replace(line, cluster))
        status = main([*words, "--plan", str(tmp_path / "plan.yaml")])
        out, err = capsys.readouterr()
        assert (status == 0) == fits
        if fits:
            assert {"table": "host memory of", "json": '"hosts": [{', "html": "<h2>Host memory</h2>"}[form] in out
        else:
            assert "of host memory beside the 10% that stay free, and has 60 GB" in out + err
