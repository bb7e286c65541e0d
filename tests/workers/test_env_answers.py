"""Episodes that have ended are kept as they end: what was not over is played again, and comes out to the same bits."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter

import pytest
import torch
from answers_run import journalled
from echo_env import LETTERS, Echo, prompts

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.errors import RewardError, WorkerError
from flowrl.marks import values
from flowrl.runtime.storage.answers import external_answers
from flowrl.runtime.storage.journal import Journal

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*have others in their place")]

INFO = CallInfo(seed=4, op="echo.rollout")
OP = fl.Env.__dict__["rollout"]


class Listening(fl.Actor):
    """Notes what it is asked to go on from."""

    def respond(self, prompts, seeds, starts, said):
        self.asked.append((prompts.to_list(), seeds.tolist(), starts.tolist()))
        return super().respond(prompts, seeds, starts, said)


@pytest.fixture(scope="module")
def actor():
    made = fl.open(Listening(LETTERS, max_tokens=4))
    made.asked = []
    return made


class Counted(Echo):
    """Notes each call of it, and fails at the call of a number."""

    def __init__(self, fails_at=-1, **how):
        super().__init__(**how)
        self.fails_at, self.resets, self.steps = fails_at, [], []

    def reset(self, row, seed):
        self.resets.append((row["name"], seed))
        return super().reset(row, seed)

    def step(self, state, action):
        if len(self.steps) == self.fails_at:
            raise OSError("down")
        self.steps.append(state[:2])
        state, observation, reward, _ = super().step(state, action)
        return state, observation, reward, len(state) - 2 > state[1] % 5  # one to five turns


def play(folder, env, actor, rows=None, warnings=None, into=None, **how):
    """A call as a process of its own would make it: with what the journal's files hold."""
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "journal.jsonl", beside="journal*.jsonl")
    arguments = OP.bind((rows if rows is not None else prompts(4),), {"policy": actor, "n": 3, **how})
    said = warnings if warnings is not None else []
    try:
        return external_answers.once(
            journal, (0, 0), OP, fl.open(env, name="echo"), arguments, into or {}, INFO, said.append
        )
    finally:
        journal.close()


@pytest.mark.parametrize("fails_at", [0, 5, 13, 20, 27])
def test_a_call_that_ends_early_plays_only_the_rest_again_to_the_same_bits(actor, tmp_path, fails_at):
    whole = Counted()
    actor.asked = every = []
    undisturbed = play(tmp_path / "whole", whole, actor)
    actor.asked = []
    assert len(set(undisturbed.turns.to_list())) > 2 and len(whole.steps) > 27, "they end at different times"
    first, again, said = Counted(fails_at), Counted(), []
    with pytest.raises(RewardError, match="down"):
        play(tmp_path / "run", first, actor)
    kept = journalled(tmp_path / "run")
    actor.asked = []
    made = play(tmp_path / "run", again, actor, warnings=said)
    assert made.digest() == undisturbed.digest() and made.fields == undisturbed.fields and said == []
    assert actor.asked == every[: len(actor.asked)] and actor.asked, (
        "all rows are sampled together, as bits may depend on how many there are"
    )
    for name in made.fields:
        assert made[name].marks == undisturbed[name].marks
    seats = dict(zip(undisturbed.keys, whole.resets, strict=True))  # name and seed of the episode of each row
    turns = dict(zip(undisturbed.keys, undisturbed.turns.to_list(), strict=True))
    ended = {key for key in undisturbed.keys if first.steps.count(seats[key]) == turns[key]}
    assert set(kept) == ended and len(kept) == len(ended)
    assert len(again.resets) == 12 - len(ended)
    assert set(again.steps).isdisjoint(seats[key] for key in ended)
    assert bool(ended) == (fails_at > 0)
    third = Counted()
    assert play(tmp_path / "run", third, actor).digest() == undisturbed.digest()
    assert third.resets == third.steps == []


def test_an_episode_is_in_the_journal_while_the_others_are_played(actor, tmp_path):
    go = threading.Event()

    class Slow(Echo):
        def step(self, state, action):
            if state[0] == "row 3":
                assert go.wait(60)
            return super().step(state, action)

    made = []
    thread = threading.Thread(target=lambda: made.append(play(tmp_path, Slow(ends=1), actor)), daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while set(journalled(tmp_path)) != {(i, k) for i in range(3) for k in range(3)}:
        assert time.monotonic() < end
        time.sleep(0.02)
    go.set()
    thread.join()
    assert {key[0] for key in journalled(tmp_path)} == {0, 1, 2, 3} and made[0].keys[-1] == (3, 2)


def test_a_call_in_other_pieces_asks_nothing_again(actor, tmp_path):
    """Those that ended in a call of all rows, in calls of some; and the other way round."""
    whole = play(tmp_path / "whole", Counted(), actor)
    with pytest.raises(RewardError, match="down"):
        play(tmp_path / "run", Counted(27), actor)
    ended = set(journalled(tmp_path / "run"))
    parts = [prompts(4).take([0, 2]), prompts(4).take([1, 3])]
    envs = [Counted(), Counted()]
    made = [play(tmp_path / "run", env, actor, rows=rows) for env, rows in zip(envs, parts, strict=True)]
    assert sum(len(env.resets) for env in envs) == 12 - len(ended)
    last = Counted()
    together = play(tmp_path / "run", last, actor)
    assert last.resets == [] and together.keys == whole.keys
    assert together.digest() == fl.Batch.concat(*made).take_keys(whole.keys).digest()
    assert together.response_ids.equal(whole.response_ids) and together.rewards.equal(whole.rewards)


def test_other_names_of_fields_and_other_arguments(actor, tmp_path):
    with pytest.raises(RewardError, match="down"):
        play(tmp_path, Counted(27), actor, into={"rewards": "gains"})
    again, said = Counted(), []
    made = play(tmp_path, again, actor, into={"rewards": "gains"}, warnings=said)
    assert "gains" in made and "rewards" not in made and 0 < len(again.resets) < 12 and said == []
    other = Counted()
    play(tmp_path, other, actor, into={"rewards": "gains"}, turns=2, warnings=said)
    assert len(other.resets) == 12 and "other rows beside them, or other arguments," in said[0]


class Breaks(Counted):
    """Fails in the second turn of some seeds; the process ends at the call of a number."""

    def step(self, state, action):
        if len(self.steps) == self.fails_at:
            raise WorkerError("its process ends")
        if state[1] % 3 == 0 and len(state) == 3:
            raise ValueError("odd")
        return super().step(state, action)


@pytest.mark.parametrize("fails_at", [15, 25, 35])
def test_episodes_in_the_place_of_others_are_not_played_again(actor, tmp_path, fails_at):
    whole = play(tmp_path / "whole", Breaks(), actor, spare=9, warnings=[])
    replaced = {key for key, count in zip(whole.keys, whole.replaced.to_list(), strict=True) if count}
    assert replaced and set(whole.outcome.to_list()) == {"finished"}
    with pytest.raises(WorkerError, match="its process ends"):
        play(tmp_path / "run", Breaks(fails_at), actor, spare=9, warnings=[])
    kept, again = set(journalled(tmp_path / "run")), Breaks()
    assert bool(kept & replaced) == (fails_at > 25)
    made = play(tmp_path / "run", again, actor, spare=9, warnings=[])
    for name in ("response_ids", "rewards", "replaced", "turns"):
        assert made[name].to_list() == whole[name].to_list(), name
    torch.testing.assert_close(made.rollout_logprobs.values, whole.rollout_logprobs.values, atol=1e-4, rtol=0)
    counts = dict(zip(whole.keys, whole.replaced.to_list(), strict=True))
    assert len(again.resets) == sum(1 + count for key, count in counts.items() if key not in kept)


class Published(Counted):
    """Weights are published between two tokens of its second turns, and rows that run keep their cache."""

    def __init__(self, actor, fails_at=-1):
        super().__init__(fails_at)
        self.stream, self.left, step = actor.stream, 3, actor.engine.step

        def publishing():
            self.left -= bool(self.steps)
            if self.steps and not self.left:
                self.stream.kept_cache = True
                actor.engine.pause()
                actor.engine.resume(1, keep_cache=True)
            return step()

        actor.engine.step = publishing


def has_kept_its_cache(rows) -> bool:
    """Whether a turn of some row has tokens of several versions."""
    pairs = zip(rows.versions.to_list(), rows.turn_ids.to_list(), strict=True)
    mixed = [Counter(turn for turn, _ in {*zip(turns, versions, strict=True)}) for versions, turns in pairs]
    return any(count > 1 for each in mixed for turn, count in each.items() if turn >= 0)


def test_what_kept_its_cache_through_a_publish_says_so_in_the_journal_and_after_a_resume(tmp_path):
    """As the rows of a generate do: an update measures the gap to the engine of tokens alone that come from their weights."""
    actor = fl.open(fl.Actor(LETTERS, max_tokens=4))
    actor.stream.publish(lambda: None, 0)
    actor.stream.follows = True
    with pytest.raises(RewardError, match="down"):
        play(tmp_path / "run", Published(actor, fails_at=27), actor)
    text = (tmp_path / "run" / "journal.jsonl").read_text()
    found = [fl.Batch.from_record(line["adds"]) for line in map(json.loads, text.splitlines()) if "adds" in line]
    told = {(has_kept_its_cache(rows), "kept" in values(rows["versions"].marks, "cache")) for rows in found}
    assert (True, True) in told and told <= {(True, True), (False, False)}
    del actor.engine.step
    again = play(tmp_path / "run", Counted(), actor)
    assert has_kept_its_cache(again) and values(again["versions"].marks, "cache") == {"kept"}
    third = play(tmp_path / "run", Counted(), actor)
    assert third.digest() == again.digest() and third["versions"].marks == again["versions"].marks
