"""How long responses are, and how many tokens a second: of the rows that are trained on, and of other calls apart."""

from __future__ import annotations

import json

import pytest
from letters import model_of

import flowrl as fl
from flowrl import rl
from flowrl.graph.may_see_older_weights import main_samplers

MODEL = model_of(
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_hidden_layers=1,
)
PROMPTS = [{"prompt": "ab"}, {"prompt": "cde"}, {"prompt": "f"}]


def length(response: str) -> float:
    return float(len(response))


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def judged():
    """The evaluation stands first and is there in every second step; the judge samples one token."""
    flow = fl.Flow("judged")
    actor = flow.worker(fl.Actor, MODEL, name="actor", max_tokens=9)
    judge = flow.worker(fl.Actor, MODEL, name="judge", lr=None, max_tokens=1)
    reward = flow.worker(fl.FunctionReward, length, name="reward")

    @flow.program
    def train(steps: int = 3) -> None:
        heldout = fl.data.rows(PROMPTS, batch=2)
        for step, rows in flow.steps(fl.data.rows(PROMPTS, batch=2), steps):
            if step % 2 == 0:
                tested = actor.generate(flow.take(heldout), greedy=True)
                flow.log(step, tested=tested.response_ids.lengths_column().mean())
            batch = actor.generate(rows, n=3)
            said = judge.generate(judge.ask(batch, "a{response}"))
            batch = rl.group_advantages(reward.score(batch))
            asked = said.response_ids.lengths_column().mean()
            flow.log(step, ended=batch.finished.mean())
            mine = batch.response_ids.lengths_column().mean()
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), mine=mine, asked=asked)

    return flow


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_every_call_that_samples_has_numbers_of_its_own(tmp_path, runtime):
    out = judged().run(out=tmp_path / "run", runtime=runtime, quiet=True).out
    found = lines(out)
    assert len(found) == 3
    for line in found:
        own = {key for key in line if key.rpartition("/")[2] == "response_length"}
        tested = {"actor.generate/response_length"} if line["step"] % 2 == 0 else set()
        assert own == {"response_length", "judge.generate/response_length"} | tested
        assert {key.replace("response_length", "tokens_per_second") for key in own} <= set(line)
        assert line["response_length"] == pytest.approx(line["mine"])
        for key in own:
            middle, most, longest = (line[f"{key}_{part}"] for part in ("p50", "p95", "max"))
            assert 0 <= middle <= most <= longest and line[key] <= longest
        assert line["response_truncated"] == pytest.approx(1 - line["ended"])
        assert {key.replace("response_length", "response_truncated") for key in own} <= set(line)
        assert line["judge.generate/response_length"] == pytest.approx(line["asked"])
        if tested:
            assert line["actor.generate/response_length"] == pytest.approx(line["tested"])
        speed = {key: value for key, value in line.items() if "tokens_per_second" in key}
        rows = {"tokens_per_second": 6, "judge.generate/tokens_per_second": 6, "actor.generate/tokens_per_second": 2}
        for key, value in speed.items():
            tokens = rows[key] * line[key.replace("tokens_per_second", "response_length")]
            assert value == pytest.approx(tokens / line["seconds"], rel=1e-2, abs=0.06), "it is rounded to a tenth"


def test_one_call_keeps_its_plain_name(tmp_path):
    flow = fl.Flow("evaluate")
    actor = flow.worker(fl.Actor, MODEL, name="actor", max_tokens=5)

    @flow.program
    def evaluate() -> None:
        for step, batch in flow.steps(fl.data.rows(PROMPTS, batch=3), 1):
            made = actor.generate(batch)
            flow.log(step, mine=made.response_ids.lengths_column().mean())

    [line] = lines(flow.run(out=tmp_path / "run", quiet=True, trajectories=3).out)
    assert line["response_length"] == pytest.approx(line["mine"])
    rows = [json.loads(text) for text in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    lengths = sorted(len(row["response_ids"]) for row in rows)
    assert [line["response_length_p50"], line["response_length_max"]] == [lengths[1], lengths[2]]
    assert not any("/" in key for key in line)


def test_rows_of_several_calls_that_are_trained_on_are_one_number():
    flow = fl.Flow("twice")
    actor = flow.worker(fl.Actor, MODEL, name="actor")
    other = flow.worker(fl.Actor, MODEL, name="other")

    @flow.program
    def train(steps: int = 2) -> None:
        for step, rows in flow.steps(fl.data.rows(PROMPTS, batch=2), steps):
            batch = actor.generate(rows).concat(actor.generate(rows, temperature=0.5))
            batch = batch.with_columns({"advantages": batch.rollout_logprobs})
            first = actor.update(batch, loss=rl.ppo_clip())
            mine = other.generate(rows)
            mine = mine.with_columns({"advantages": mine.rollout_logprobs})
            flow.log(step, first, other.update(mine, loss=rl.ppo_clip()))

    assert {title for title, _ in main_samplers(flow.trace())} == {"actor.generate"}
    assert len(main_samplers(flow.trace())) == 1, "of one line"
