"""Calls that a program issues: of workers that the run has opened alone."""

from __future__ import annotations

import pytest
from letters import build_tokenizer

import flowrl as fl
from flowrl.errors import ProgramError


class Score(fl.Worker):
    @fl.op(reads="prompt", adds="rewards: f32[]", cost="local")
    def score(self, batch: fl.Batch) -> dict[str, list[float]]:
        return {"rewards": [1.0] * len(batch)}


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_a_worker_that_the_trace_did_not_see_called_is_named_with_the_line(tmp_path, runtime):
    flow = fl.Flow("late")
    often = flow.worker(Score, name="often")
    rare = flow.worker(Score, name="rare")
    prompts = fl.data.rows([{"prompt": "a"}, {"prompt": "b"}], batch=2, tokenizer=build_tokenizer)

    @flow.program
    def late(steps: int = 5) -> None:
        done: list[int] = []
        for step, batch in flow.steps(prompts, steps):
            flow.log(step, reward=often.score(batch).rewards.mean())
            done.append(1)
            if len(done) % 4 == 0:  # a counter of its own, which the trace follows for two rounds
                flow.log(step, again=rare.score(batch).rewards.mean())

    assert "a call of it ends the run" in flow.check().text()
    with pytest.raises(ProgramError, match="the run has not opened worker 'rare'") as e:
        flow.run(out=tmp_path / "run", runtime=runtime, quiet=True)
    assert e.value.at is not None and "again=rare.score(batch)" in e.value.at.text
