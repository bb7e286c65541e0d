"""A run records what updates measure, also where its program does not log it, and keeps rows that are not finite."""

from __future__ import annotations

import json
import math

import pytest
from direct import run_direct
from flows import events
from letters import SMALL

import flowrl as fl
from flowrl import rl
from flowrl.errors import NotFinite
from flowrl.graph.tracing.reported_metrics import OF_POLICY
from flowrl.placement.plan.plan import Place, Plan


def length(response: str) -> float:
    return float(len(response))


class Breaks(fl.Worker):
    """Advantages of which one is not finite in step 1."""

    @fl.op(reads="rewards, response_mask", adds="advantages: f32[*response]")
    def advantages(self, batch):
        values = batch.rewards.values.repeat_interleave(batch.response_mask.lengths).clone()
        if batch.call.step == 1:
            values[int(batch.response_mask.offsets[2])] = float("inf")
        return {"advantages": batch.response_mask.with_values(values)}


def prompts():
    easy, hard = (fl.data.rows([{"prompt": text}], batch=1) for text in ("ab", "cde"))
    return fl.data.mix({"easy": easy, "hard": hard}, batch=4)


def program(*, logs, breaks=False):
    flow = fl.Flow("measured")
    actor = flow.worker(fl.Actor, SMALL, name="actor", lr=1e-2, max_tokens=6)
    reward = flow.worker(fl.FunctionReward, length, name="reward")
    broken = flow.worker(Breaks, name="broken")

    @flow.program
    def measured(steps: int = 2) -> None:
        for step, rows in flow.steps(prompts(), steps):
            batch = reward.score(actor.generate(rows, n=3))
            batch = broken.advantages(batch) if breaks else rl.group_advantages(batch)
            metrics = actor.update(batch, loss=rl.ppo_clip())
            flow.log(step, *([metrics] if logs else []), mean=batch.rewards.mean())

    return flow


def lines(out, name="metrics"):
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def test_an_update_that_is_not_logged_has_its_measures_under_its_call(tmp_path):
    program(logs=True).run(out=tmp_path / "logged", quiet=True, save_models=False)
    program(logs=False).run(out=tmp_path / "plain", quiet=True, save_models=False)
    for logged, plain in zip(lines(tmp_path / "logged"), lines(tmp_path / "plain"), strict=True):
        assert set(OF_POLICY) <= set(logged) and not any(name.startswith("actor.update/") for name in logged)
        assert {name: plain[f"actor.update/{name}"] for name in OF_POLICY} == {name: logged[name] for name in OF_POLICY}


def test_rewards_are_told_apart_by_source(tmp_path):
    program(logs=True).run(out=tmp_path / "run", quiet=True, save_models=False, trajectories=4, trajectories_every=1)
    for number, line in enumerate(lines(tmp_path / "run")):
        rows = [row for row in lines(tmp_path / "run", "trajectories") if row["step"] == number]
        for source in {row["source"] for row in rows}:
            of_it = [row["rewards"] for row in rows if row["source"] == source]
            assert line[f"reward/{source}"] == pytest.approx(sum(of_it) / len(of_it))
        assert {n for n in line if n.startswith("reward/")} == {f"reward/{row['source']}" for row in rows}


@pytest.mark.parametrize("asked", [False, True])
def test_the_kl_to_the_reference_is_there_whatever_the_loss_reports(tmp_path, asked):
    flow = fl.Flow("referred")
    actor = flow.worker(fl.Actor, SMALL, name="actor", lr=1e-1, max_tokens=6)
    ref = flow.worker(fl.Reference, of=actor, name="ref")
    reward = flow.worker(fl.FunctionReward, length, name="reward")

    @flow.program
    def referred(steps: int = 3) -> None:
        for step, batch in flow.steps(fl.data.rows([{"prompt": "ab"}, {"prompt": "c"}], batch=2), steps):
            batch = ref.logprobs(reward.score(actor.generate(batch, n=3)))
            batch = rl.group_advantages(rl.kl_penalty(batch, coef=0.1))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=0.1 if asked else 0.0)))

    flow.run(out=tmp_path / "run", quiet=True, save_models=False, trajectories=4, trajectories_every=1, seed=1)
    found = lines(tmp_path / "run")
    assert all(("kl" in line) == asked and ("ref_kl" in line) != asked for line in found)
    for number, line in enumerate([] if asked else found):
        rows = [row for row in lines(tmp_path / "run", "trajectories") if row["step"] == number]
        pairs = [pair for row in rows for pair in zip(row["ref_logprobs"], row["rollout_logprobs"], strict=True)]
        wanted = sum(math.exp(a - b) - 1 - (a - b) for a, b in pairs) / len(pairs)
        assert len(rows) == 6 and line["ref_kl"] == pytest.approx(wanted, rel=1e-3, abs=1e-9)
    assert asked or found[2]["ref_kl"] > found[0]["ref_kl"], "the actor has gone away from it"
    if not asked:
        run_direct(flow, Plan({"here": "cpu", "there": "cpu"}, {"ref": Place("there")}), tmp_path / "ranks", seed=1)
        there = lines(tmp_path / "ranks")
        assert [line["response_truncated"] for line in there] == [line["response_truncated"] for line in found]
        assert [line["ref_kl"] for line in there] == pytest.approx([line["ref_kl"] for line in found], rel=1e-4)


def test_each_of_several_rewards_has_its_mean(tmp_path):
    flow = fl.Flow("parts")
    actor = flow.worker(fl.Actor, SMALL, name="actor", lr=1e-2, max_tokens=6)
    long, brief = (
        flow.worker(fl.FunctionReward, fn, name=name)
        for name, fn in (("long", length), ("brief", lambda response: 0.25))
    )

    @flow.program
    def parts(steps: int = 2) -> None:
        for step, batch in flow.steps(fl.data.rows([{"prompt": "ab"}, {"prompt": "c"}], batch=2), steps):
            batch = actor.generate(batch, n=3)
            batch = brief.score(long.score(batch, into={"rewards": "long"}), into={"rewards": "brief"})
            batch = batch.with_columns({"rewards": batch.long + batch.brief})
            flow.log(step, actor.update(rl.group_advantages(batch), loss=rl.ppo_clip()))

    flow.run(out=tmp_path / "run", quiet=True, save_models=False, trajectories=4, trajectories_every=1)
    for number, line in enumerate(lines(tmp_path / "run")):
        rows = [row for row in lines(tmp_path / "run", "trajectories") if row["step"] == number]
        assert line["reward/brief"] == 0.25 and len(rows) == 6
        assert line["reward/long"] == pytest.approx(sum(row["long"] for row in rows) / 6)
        assert {n for n in line if n.startswith("reward/")} == {"reward/long", "reward/brief"}


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_rows_that_are_not_finite_are_kept_as_the_run_stops(tmp_path, runtime):
    with pytest.raises(NotFinite, match="the field 'advantages' is not finite"):
        program(logs=True, breaks=True).run(out=tmp_path / "run", quiet=True, runtime=runtime)
    [file] = (tmp_path / "run" / "not_finite").iterdir()
    assert file.name == "1-actor.update.jsonl"
    [row] = [json.loads(line) for line in file.read_text().splitlines()]
    assert row["not_finite"] == {"advantages": [0]} and row["advantages"][0] is None
    assert row["tokens"] and all(row["response_mask"]) and row["rewards"] > 0
    [event] = events(tmp_path / "run", "not finite")
    assert event["text"] == f"actor.update of step 1 met numbers that are not finite: its rows are in {file}"


def seen_program(*, reads=False):
    """Two responses of each prompt, of which those with unequal lengths teach something."""
    flow = fl.Flow("seen")
    actor = flow.worker(fl.Actor, SMALL, name="actor", lr=1e-2, max_tokens=6)
    reward = flow.worker(fl.FunctionReward, length, name="reward")

    @flow.program
    def seen(steps: int = 2) -> None:
        for step, rows in flow.steps(prompts(), steps):
            batch = reward.score(actor.generate(rows, n=3))
            if reads:
                batch = actor.entropies(actor.logprobs(batch))
            batch = rl.group_advantages(batch)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), mean=batch.rewards.mean())

    return flow


SPLIT = Plan({"train": "cpu", "rollout": "cpu"}, {"actor": {"train": Place("train"), "generate": Place("rollout")}})
HOW = {"quiet": True, "save_models": False, "trajectories": 2, "trajectories_every": 1}


@pytest.mark.parametrize("how", [{"runtime": "eager"}, {"plan": SPLIT}], ids=["eager", "split"])
def test_recorded_rows_have_what_the_update_found_of_their_tokens(tmp_path, how):
    seen_program(reads=True).run(out=tmp_path / "read", **HOW, **how)
    seen_program().run(out=tmp_path / "plain", **HOW, **how)
    read, plain = lines(tmp_path / "read", "trajectories"), lines(tmp_path / "plain", "trajectories")
    assert [row["key"] for row in plain] == [row["key"] for row in read] and len(plain) == 2 * 2 * 3
    taught = 0
    for row, known in zip(plain, read, strict=True):
        assert "old_logprobs" not in row and ("trained_logprobs" in row) == any(row["advantages"])
        if "trained_logprobs" in row:
            assert row["trained_logprobs"] == pytest.approx(known["old_logprobs"], abs=1e-5)
            assert row["entropies"] == pytest.approx(known["entropies"], abs=1e-5)
            taught += 1
    assert taught


def test_a_row_that_says_its_entropies_keeps_them(tmp_path):
    seen_program(reads=True).run(out=tmp_path / "read", **HOW)
    rows = [row for row in lines(tmp_path / "read", "trajectories") if "trained_logprobs" in row]
    assert any(round(v, 6) != v for row in rows for v in row["entropies"]), "those that the program read, unrounded"


def test_what_is_trained_does_not_depend_on_what_is_recorded(tmp_path):
    digests = []
    for name, count in (("none", 0), ("all", 4)):
        seen_program().run(out=tmp_path / name, **{**HOW, "trajectories": count})
        digests.append(json.loads((tmp_path / name / "run.json").read_text())["weights_digest"])
    assert digests[0] == digests[1]
    every = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("none", "all")]
    for one, other in zip(*(map(json.loads, text) for text in every), strict=True):
        clocks = ("seconds", "tokens_per_second")
        assert {n: v for n, v in one.items() if n not in clocks} == {n: v for n, v in other.items() if n not in clocks}
