"""An agent of another package that a limit cuts off has the time that it takes to give what it has."""

from __future__ import annotations

import asyncio
import threading

import pytest
from letters import build_tokenizer, model_of

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.environments import reward
from flowrl.environments.adapters.package_rollouts import PackageRollouts
from flowrl.environments.gateway.requests import Refused, Request

pytest.importorskip("h11", reason="the gateway needs the package h11")


ASKED = Request([{"role": "user", "content": "ab"}])


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_what_is_given_after_time_is_up_is_what_is_graded():
    """Row 0 is cut off by its turns and row 1 by time, which is up while row 0 has not given what it has."""
    clock, time_is_up, another_is_late = Clock(), threading.Event(), threading.Event()

    class Cut(PackageRollouts):
        turns = 1

        def agent(self, task):
            closed = threading.Event()
            task.session.at_end(closed.set)
            if task.row["number"] == 0:
                asyncio.run(task.session.ask(ASKED))
                with pytest.raises(Refused, match="is over"):
                    asyncio.run(task.session.ask(ASKED))
                clock.now += 100
                time_is_up.set()
                another_is_late.wait(60)
            elif task.row["number"] == 1:
                closed.wait(60)
                another_is_late.set()
            else:
                time_is_up.wait(60)
                with pytest.raises(Refused, match="is over"):
                    asyncio.run(task.session.ask(ASKED))
            return "what it has"

        def _failure(self, result, *, cut):
            return None if result == "what it has" else ValueError(f"it gave {result}")

        def _stopped_by(self, result):
            return None

        @reward()
        def given(self, state):
            return len(state.result)

    source = fl.data.rows([{"prompt": "ab", "number": i} for i in range(3)], batch=3, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, build_tokenizer()).with_call(CallInfo(seed=3, op="cut.rollout"))
    engine = fl.testing.FakeEngine(vocab=8, stop=(1,), tokenizer=build_tokenizer())
    actor = fl.open(fl.Actor(model_of(), max_tokens=4), name="actor", engine=engine)
    env = fl.open(Cut(), name="cut")
    env._now = clock
    try:
        found = env.rollout(batch, policy=actor, seconds=50, on_error="mark")
    finally:
        env.close()
    assert found.failed_why.to_list() == [""] * 3 and found.rewards.to_list() == [11.0] * 3
    assert found.outcome.to_list() == ["truncated_turns", "truncated_wall", "truncated_wall"]
