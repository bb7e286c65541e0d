"""How long episodes are away between two turns: by a clock that environments set, whoever they are and however they end."""

from __future__ import annotations

import asyncio
import time

import pytest
from echo_env import LETTERS, Echo, prompts
from letters import build_tokenizer, model_of

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.errors import RewardError
from flowrl.runtime.storage.answers import external_answers
from flowrl.runtime.storage.journal import Journal
from flowrl.workers.environment_waits import EnvironmentWaits, count_waits, waits_counted_in

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


class Timed(fl.Env):
    """Its calls take seconds of a clock of its own, one after another in the thread of the op."""

    turns, timeout = 3, None
    resets, steps, anchors = 100.0, 1.5, 0.25

    def __init__(self):
        self.clock = self._now = Clock()

    def reset(self, row, seed):
        self.clock.now += self.resets
        return (row["number"], 0), "a"

    def step(self, state, action):
        number, turn = state
        self.clock.now += self.steps
        return self.at(number, turn)

    def at(self, number, turn):
        return (number, turn + 1), "b", 1.0, False

    def anchor(self, state, observation):
        self.clock.now += self.anchors
        return state[1]


def rows(count):
    ids = fl.Column.of([[2 + i % 6, 3] for i in range(count)], dim="prompt", dtype="i32")
    number = fl.Column.of(list(range(count)), dtype="any")
    return fl.Batch.of(count, prompt_ids=ids, number=number).with_call(CallInfo(seed=3, op="game.rollout"))


def player(cls=fl.Actor):
    engine = fl.testing.FakeEngine(vocab=8, stop=(), tokenizer=build_tokenizer())
    return fl.open(cls(model_of(), max_tokens=2), name="actor", engine=engine)


def played(env, count=1, policy=None, **how):
    with waits_counted_in(EnvironmentWaits()) as waits:
        found = fl.open(env, name="game").rollout(rows(count), policy=policy or player(), **how)
    return waits, found


def test_it_is_what_step_and_anchor_take_between_two_turns():
    """What came before the first turn and what comes behind the last one is no time between two."""
    waits, _ = played(Timed())
    assert waits == EnvironmentWaits(count=2, seconds=2 * 1.75) and waits.mean == 1.75
    longer, _ = played(Timed(), turns=5)
    assert longer == EnvironmentWaits(count=4, seconds=4 * 1.75)


def test_it_is_there_where_a_policy_is_asked_for_whole_calls_and_has_no_slots():
    class Whole(fl.Actor):
        def respond(self, prompts, seeds, starts, said):
            return super().respond(prompts, seeds, starts, said)

    waits, _ = played(Timed(), policy=player(Whole))
    assert waits == EnvironmentWaits(count=2, seconds=2 * 1.75)


def test_those_that_take_turns_in_one_thread_wait_for_each_other():
    waits, _ = played(Timed(), count=4)
    assert waits == EnvironmentWaits(count=2 * 4, seconds=2 * 4 * 4 * 1.75)


def test_an_episode_of_one_turn_has_no_wait():
    waits, found = played(Timed(), count=3, turns=1)
    assert waits.mean is None and waits == EnvironmentWaits() and found.turns.to_list() == [1, 1, 1]


def test_nobody_has_to_count():
    fl.open(Timed(), name="game").rollout(rows(2), policy=player())
    count_waits(EnvironmentWaits(3, 1.0))
    with waits_counted_in(EnvironmentWaits()) as outer:
        with waits_counted_in(EnvironmentWaits()) as inner:
            played(Timed())
            count_waits(EnvironmentWaits(3, 1.0))
        count_waits(EnvironmentWaits(1, 2.0))
    assert inner == EnvironmentWaits(3, 1.0) and outer == EnvironmentWaits(1, 2.0)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_real_seconds_of_calls_that_wait_beside_each_other(kind):
    """Each for itself: one after another 80 of them would have all episodes wait eight seconds."""

    class Sleeps(Timed):
        timeout, resets = 600.0, 0.0

        def __init__(self):
            pass

        anchor = fl.Env.anchor

        def reset(self, row, seed):
            return (row["number"], 0), "a"

        def step(self, state, action):
            time.sleep(0.1)
            return self.at(*state)

    class Async(Sleeps):
        async def step(self, state, action):
            await asyncio.sleep(0.1)
            return self.at(*state)

    waits, _ = played((Sleeps if kind == "plain" else Async)(), count=40, n=2)
    assert waits.count == 2 * 80 and waits.mean is not None and 0.09 < waits.mean < 6


class Fails(Timed):
    """The third step that there is takes an hour and fails."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def step(self, state, action):
        self.calls += 1
        if self.calls == 3:
            self.clock.now += 3600
            raise OSError("down")
        return super().step(state, action)


@pytest.mark.filterwarnings("ignore:game.rollout")
@pytest.mark.parametrize(("how", "count"), [
    ({"retries": 1, "backoff": 0}, 2 + 2),
    ({"spare": 1}, 2 + 2),
    ({"on_error": "mark"}, 2),
])  # fmt: skip
def test_a_turn_that_fails_and_what_is_played_for_it_is_no_wait(how, count):
    """Of the episode that failed the turns before it count, and those of the one that is played for it."""
    waits, found = played(Fails(), **how)
    assert waits == EnvironmentWaits(count, count * 1.75) and len(found) == 1


def test_time_that_is_up_ends_no_wait():
    class Late(Timed):
        def at(self, number, turn):
            self.clock.now += 1000 * turn
            return super().at(number, turn)

    waits, found = played(Late(), seconds=500)
    assert waits == EnvironmentWaits(1, 1.75) and found.outcome.to_list() == ["truncated_wall"]


def test_two_policies_count_for_themselves():
    quick, slow = Timed(), Timed()
    slow.steps = 6.0
    found = [played(env, policy=player())[0].mean for env in (quick, slow, quick)]
    assert found == [1.75, 6.25, 1.75]


OP = fl.Env.__dict__["rollout"]


class Twice(Echo):
    """Its steps take two seconds of a clock; the one of a number fails."""

    timeout = None

    def __init__(self, fails_at=-1):
        super().__init__()
        self.clock = self._now = Clock()
        self.fails_at, self.steps = fails_at, 0

    def step(self, state, action):
        self.steps += 1
        if self.steps - 1 == self.fails_at:
            raise OSError("down")
        self.clock.now += 2
        state, observation, reward, _ = super().step(state, action)
        return state, observation, reward, len(state) - 2 > state[1] % 5  # one to five turns


def test_episodes_that_a_resumed_call_has_already_are_not_away(tmp_path):
    """Only those count that are played again: for others the policy is asked turn by turn, and no environment."""
    actor = fl.open(fl.Actor(LETTERS, max_tokens=4))

    def play(folder, env):
        folder.mkdir(exist_ok=True)
        journal, info = Journal(folder / "journal.jsonl", beside="journal*.jsonl"), CallInfo(seed=4, op="echo.rollout")
        arguments = OP.bind((prompts(4),), {"policy": actor, "n": 3})
        try:
            with waits_counted_in(EnvironmentWaits()) as waits:
                opened = fl.open(env, name="echo")
                made = external_answers.once(journal, (0, 0), OP, opened, arguments, {}, info, lambda text: None)
        finally:
            journal.close()
        return waits, made

    whole, made = play(tmp_path / "whole", Twice())
    assert whole.count == sum(made.turns.to_list()) - 12
    with pytest.raises(RewardError, match="down"):
        play(tmp_path / "run", Twice(20))
    waits, again = play(tmp_path / "run", rest := Twice())
    assert again.digest() == made.digest() and 0 < rest.steps < sum(made.turns.to_list())
    assert 0 < waits.count < whole.count and waits.mean is not None and waits.mean >= 2
    assert play(tmp_path / "run", Twice())[0] == EnvironmentWaits()
