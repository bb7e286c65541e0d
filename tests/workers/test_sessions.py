"""Episodes run on their own: one that is slow, hangs or fails is no other's concern, and each says how it ended."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
import weakref
from collections import Counter

import pytest
import torch
from letters import build_tokenizer, model_of
from policy_ranks import Walk

import flowrl as fl
from flowrl import rl
from flowrl.batch import CallInfo
from flowrl.environments import Environment, reward
from flowrl.errors import CheckError, FlowError, ProgramError, RewardError, RunError
from flowrl.testing import FakeEngine
from flowrl.workers.decode_slots import DecodeSlots, counted_in
from flowrl.workers.episodes import OUTCOMES
from flowrl.workers.policy_calls import Answer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def fake(**how):
    return fl.testing.FakeEngine(vocab=8, stop=(1,), tokenizer=build_tokenizer(), **how)


def player(engine=None, cls=fl.Actor, **how):
    return fl.open(cls(model_of(), max_tokens=3, **how), name="actor", engine=engine or fake())


def rows(count=6):
    ids = fl.Column.of([[2 + i % 6, 3] for i in range(count)], dim="prompt", dtype="i32")
    number = fl.Column.of(list(range(count)), dtype="any")
    return fl.Batch.of(count, prompt_ids=ids, number=number).with_call(CallInfo(seed=3, op="game.rollout"))


def walk(at, **attributes):
    made = type("Walk", (Walk,), {"at": lambda self, number, turn: at(number, turn), **attributes})
    return fl.open(made(), name="game")


WHAT = ("response_ids", "response_mask", "rewards", "turns", "finish_reason", "versions", "turn_states")


def same(found, expected, *, names=WHAT):
    for name in names:
        assert found[name].to_list() == expected[name].to_list(), name
    torch.testing.assert_close(found.rollout_logprobs.values, expected.rollout_logprobs.values, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def plain():
    return walk(lambda number, turn: None).rollout(rows(), policy=player(), n=2)


# -- beside each other ----------------------------------------------------------------------------------------------


def test_a_straggler_delays_nobody_and_is_not_dropped(plain):
    """Row 2 goes on once all others have ended: were they to wait for it, nothing would ever end."""
    others, done = threading.Event(), Counter()

    def at(number, turn):
        if number == 2 and turn == 1:
            assert others.wait(60), "the others wait for the straggler"
        done[number] += 1
        if sum(done.values()) == 30 + 2:
            others.set()

    same(walk(at).rollout(rows(), policy=player(), n=2), plain)


def test_an_async_straggler_delays_nobody(plain):
    left, go = [10], asyncio.Event()

    class Waits(Walk):
        async def step(self, state, action):
            number, turn = state
            if turn == 1 and number == 2:
                await asyncio.wait_for(go.wait(), 60)
            if turn == 2 and number != 2:
                left[0] -= 1
                if not left[0]:
                    go.set()
            return Walk.step(self, state, action)

    same(fl.open(Waits()).rollout(rows(), policy=player(), n=2), plain)


def test_the_state_of_an_episode_that_failed_is_let_go_at_once():
    """It may hold a browser, say; the exception that is known of it has frames that have the state."""
    alive = weakref.WeakSet()

    class State:
        pass

    class Fails(fl.Env):
        def reset(self, row, seed):
            alive.add(state := State())
            return state, "a"

        def step(self, state, action):
            raise OSError("gone")

    gc.collect()
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="12 of 12 rows"):
            found = fl.open(Fails()).rollout(rows(), policy=player(), n=2, on_error="mark", max_failed=1.0)
        assert found.failed.values.all() and len(alive) <= 1, "the thread that called it last may still be ending"
    finally:
        gc.enable()


def test_slow_calls_wait_beside_each_other(plain):
    """None of twelve blocking calls returns before all have begun."""
    met = threading.Barrier(12)

    def at(number, turn):
        if turn == 1:
            met.wait(60)

    same(walk(at).rollout(rows(), policy=player(), n=2), plain)


def test_async_functions_give_what_plain_ones_give(plain):
    class Async(Walk):
        async def reset(self, row, seed):
            await asyncio.sleep(0)
            return Walk.reset(self, row, seed)

        async def step(self, state, action):
            await asyncio.sleep(0)
            return Walk.step(self, state, action)

        async def anchor(self, state, observation):
            return observation

    same(fl.open(Async(), name="game").rollout(rows(), policy=player(), n=2), plain)


def test_thousands_of_sessions_are_live_at_once():
    live, most = [0], [0]

    class Counts(Walk):
        def reset(self, row, seed):
            live[0] += 1
            return super().reset(row, seed)

        def at(self, number, turn):
            most[0] = max(most[0], live[0])
            live[0] -= turn == 2

    played = fl.open(Counts()).rollout(rows(2000), policy=player())
    assert most[0] == 2000 and live[0] == 0 and set(played.outcome.to_list()) == {"finished"}


def test_whole_calls_and_rows_one_by_one_give_the_same_tokens(plain):
    class Whole(fl.Actor):
        asked = 0

        def respond(self, prompts, seeds, starts, said):
            self.asked += 1
            return super().respond(prompts, seeds, starts, said)

    policy = player(cls=Whole)
    same(walk(lambda number, turn: None).rollout(rows(), policy=policy, n=2), plain)
    assert policy.stream is None and policy.asked == 3 and player().stream is not None


def test_a_model_gives_the_same_tokens_one_by_one_as_in_whole_calls():
    class Whole(fl.Actor):
        def respond(self, prompts, seeds, starts, said):
            return super().respond(prompts, seeds, starts, said)

    found = []
    for cls in (fl.Actor, Whole):
        policy = fl.open(cls(model_of(**SIZES), max_tokens=3), name="actor")
        found.append(walk(lambda number, turn: None).rollout(rows(), policy=policy, n=3))
        logprobs, mask = policy.logprobs(found[-1]).old_logprobs.values, found[-1].response_mask.values
        torch.testing.assert_close(logprobs[mask], found[-1].rollout_logprobs.values[mask], atol=1e-4, rtol=0)
    same(found[0], found[1])


def test_sessions_meet_in_one_batch():
    """A row takes a step of the engine for each token; all rows together take no more than the longest."""
    engine = fake(lengths=lambda seed: 1 + seed % 3)
    played = walk(lambda number, turn: None).rollout(rows(), policy=player(engine), n=4)
    longest = max(played.response_mask.row_sum().to_list())
    assert longest == engine.steps and engine.running() == []


def test_decode_slots_are_a_token_of_each_session_in_each_step():
    """Six sessions of three turns with one token each, one of which is over after its first: 16 of 18 slots."""

    class Ends(Walk):
        def step(self, state, action):
            (number, turn), said, reward, _ = super().step(state, action)
            return (number, turn), said, reward, turn == 3 or number == 2

    slots, engine = DecodeSlots(), FakeEngine(vocab=8, stop=(), tokenizer=build_tokenizer())
    with counted_in(slots):
        fl.open(Ends(), name="game").rollout(rows(), policy=player(engine), turn_tokens=1)
    assert slots == DecodeSlots(used=16, there=18)
    engine.most_rows = 4  # as of an engine that has no place for all
    with counted_in(slots):
        fl.open(Ends(), name="game").rollout(rows(), policy=player(engine), turn_tokens=1)
    assert slots == DecodeSlots(used=32, there=30)


def test_an_engine_whose_steps_are_no_tokens_has_no_slots():
    slots = DecodeSlots()

    class Whole(fl.Actor):
        def respond(self, prompts, seeds, starts, said):
            return super().respond(prompts, seeds, starts, said)

    with counted_in(slots):
        walk(lambda number, turn: None).rollout(rows(), policy=player(cls=Whole))
    assert slots.share is None


# -- how they end ---------------------------------------------------------------------------------------------------


def test_each_says_how_it_ended(plain):
    assert plain.outcome.to_list() == ["finished"] * 12 and "failed" not in plain
    assert plain.sampled_tokens.to_list() == plain.response_mask.row_sum().to_list()
    short = walk(lambda number, turn: None).rollout(rows(), policy=player(), turns=2)
    wanted = {"turns": "truncated_turns", "length": "truncated_tokens"}
    assert short.outcome.to_list() == [wanted[reason] for reason in short.finish_reason.to_list()]
    assert not short.finished.values.any() and len(set(short.outcome.to_list())) == 2


def test_an_episode_has_so_many_tokens_at_most(plain):
    for tokens in (1, 4, 5):
        found = walk(lambda number, turn: None).rollout(rows(), policy=player(), n=2, tokens=tokens)
        counts = found.response_mask.row_sum().to_list()
        whole = plain.response_mask.row_sum().to_list()
        assert counts == [min(tokens, count) for count in whole]
        for ids, more in zip(found.response_ids.to_list(), plain.response_ids.to_list(), strict=True):
            assert ids[: len(more)] == more[: len(ids)], "the same tokens, fewer of them"
        ends = ["finished" if turns == 3 else "truncated_tokens" for turns in found.turns.to_list()]
        assert found.outcome.to_list() == ends and "truncated_tokens" in ends


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("where", ["code", "policy"])
def test_an_episode_has_so_many_seconds_at_most(plain, where):
    """Time is up while some wait for user code and others for the policy; what turns gave is kept."""
    clock, engine, release = Clock(), fake(), threading.Event()

    def at(number, turn):
        if turn == 1 and number == 5:
            clock.now += 100
            if where == "code":
                release.wait(60)

    env = walk(at)
    env._now = clock
    found = env.rollout(rows(), policy=player(engine), n=1, seconds=50)
    release.set()
    assert "truncated_wall" in found.outcome.to_list() and engine.running() == []
    late = [i for i, outcome in enumerate(found.outcome.to_list()) if outcome == "truncated_wall"]
    for i in late:
        ids, more = found.response_ids[i].tolist(), plain.response_ids[2 * i].tolist()
        assert ids == more[: len(ids)] and found.finish_reason[i] == "time"
        assert found.rewards.to_list()[i] == found.turns.to_list()[i] == len(found.turn_states[i])
    assert not math.isnan(sum(found.rewards.to_list()))


@pytest.mark.filterwarnings("ignore:game.rollout failed")
@pytest.mark.parametrize("fails", [False, True])
def test_an_episode_that_is_being_graded_when_time_is_up_has_its_grade(fails):
    """Row 0 is graded meanwhile, and row 1 is within a step; an episode whose grade fails then is not played anew.

    Row 2 is there to end a step, so that the time is looked at.
    """
    clock, grades = Clock(), Counter()
    time_is_up, another_is_late, release = threading.Event(), threading.Event(), threading.Event()

    class Graded(Environment):
        def respond(self, state):
            if state.row["number"] > 0:
                (release if state.row["number"] == 1 else time_is_up).wait(60)

        @reward()
        def right(self, state, number):
            grades[number] += 1
            if number == 0:
                clock.now += 100
                time_is_up.set()
                another_is_late.wait(60)
                if fails:
                    raise ValueError("no grade")
            elif number == 1:
                another_is_late.set()
            return number + 1

    env = fl.open(Graded(), name="game")
    env._now = clock
    found = env.rollout(rows(3), policy=player(), seconds=50, on_error="mark", retries=2, spare=2)
    release.set()
    assert found.outcome.to_list()[:2] == ["grader_failure" if fails else "finished", "truncated_wall"]
    assert grades == {0: 1, 1: 1, 2: 1} and found.rewards.to_list()[1:] == [2.0, 3.0]
    assert "no grade" in found.failed_why[0] if fails else found.rewards.to_list()[0] == 1.0


def boom(error):
    def at(number, turn):
        if number == 3 and turn == 1:
            raise error

    return at


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ZeroDivisionError("by nothing"), "environment_failure"),
        (SystemExit(3), "environment_failure"),
        (ConnectionResetError("gone"), "infrastructure_failure"),
        (TimeoutError("no answer"), "infrastructure_failure"),
    ],
)
@pytest.mark.filterwarnings("ignore:game.rollout failed")
def test_a_failure_is_marked_and_no_reward(plain, error, outcome):
    found = walk(boom(error)).rollout(rows(), policy=player(), n=2, on_error="mark")
    assert found.failed.to_list() == [k // 2 == 3 for k in range(12)]
    assert found.outcome.to_list() == [outcome if k // 2 == 3 else "finished" for k in range(12)]
    assert type(error).__name__ in found.failed_why[6] and found.failed_why[0] == ""
    assert math.isnan(found.rewards.to_list()[6]) and found.finish_reason[6] == "failed" and not found.finished[6]
    same(found.filter(~found.failed), plain.filter(~found.failed))


def test_failures_of_a_call_are_one_warning():
    with pytest.warns(
        UserWarning, match=r"game.rollout failed for 2 of 12 rows: ZeroDivisionError: no \(row 3, sample"
    ):
        walk(boom(ZeroDivisionError("no"))).rollout(rows(), policy=player(), n=2, on_error="mark")


@pytest.mark.filterwarnings("ignore:game.rollout failed")
@pytest.mark.parametrize("wrong", [None, (1, 2), (0, 5, 1.0, True), (0, "b", None, True), (0, "b", math.nan, True)])
def test_a_result_of_the_wrong_type_is_a_failure(wrong):
    class Wrong(Walk):
        def step(self, state, action):
            return wrong if state[0] == 3 else super().step(state, action)

    found = fl.open(Wrong(), name="game").rollout(rows(), policy=player(), on_error="mark")
    assert found.outcome.to_list() == ["finished"] * 3 + ["environment_failure"] + ["finished"] * 2


@pytest.mark.filterwarnings("ignore:game.rollout failed")
@pytest.mark.parametrize("where", ["reset", "step", "anchor"])
def test_a_call_that_does_not_return_fails_its_row_alone(plain, where):
    go = threading.Event()

    def hang(self, *given):
        number = given[0]["number"] if where == "reset" else given[0][0]
        if number == 3:
            go.wait(60)
        return getattr(Walk, where)(self, *given)

    env = fl.open(type("Hangs", (Walk,), {where: hang, "timeout": 0.5})(), name="game")
    found = env.rollout(rows(), policy=player(), n=2, on_error="mark")
    go.set()
    assert [o == "infrastructure_failure" for o in found.outcome.to_list()] == [k // 2 == 3 for k in range(12)]
    assert found.failed_why[6] == "it took longer than 0.5 s"
    same(found.filter(~found.failed), plain.filter(~found.failed))


@pytest.mark.filterwarnings("ignore:game.rollout failed")
def test_a_coroutine_that_blocks_its_loop_is_named():
    go = threading.Event()

    class Blocks(Walk):
        timeout = 0.5

        async def step(self, state, action):
            if state == (3, 1):
                go.wait(60)
            return Walk.step(self, state, action)

    found = fl.open(Blocks(), name="game").rollout(rows(), policy=player(), on_error="mark")
    go.set()
    assert "waits without await, which stops all others" in found.failed_why[3]
    assert found.outcome[3] == "infrastructure_failure"


def test_a_failure_raises_unless_it_is_marked_and_leaves_the_engine_clean():
    engine = fake()
    with pytest.raises(RewardError, match=r"game.step failed for row 3, sample 0: ZeroDivisionError: no"):
        walk(boom(ZeroDivisionError("no"))).rollout(rows(), policy=player(engine), n=2)
    assert engine.running() == []
    walk(lambda number, turn: None).rollout(rows(), policy=player(engine), n=2)


def test_an_engine_that_fails_ends_the_call():
    engine = fake()
    engine.table[4] = math.nan
    with pytest.raises(FlowError, match="not finite"):
        walk(lambda number, turn: None).rollout(rows(), policy=player(engine))


@pytest.mark.filterwarnings("ignore:game.rollout failed")
def test_many_failures_are_a_service_that_is_down():
    def at(number, turn):
        raise OSError("down")

    with pytest.raises(RewardError, match="failed for 12 of 12 rows; max_failed is 0.5"):
        walk(at).rollout(rows(), policy=player(), n=2, on_error="mark")


def test_what_fails_is_played_again_to_the_same_bits(plain):
    failed = Counter()

    def at(number, turn):
        if number in (1, 3) and turn == 1 and failed[number] < 4:
            failed[number] += 1
            raise OSError("down")

    found = walk(at).rollout(rows(), policy=player(), n=2, retries=4, backoff=0)
    same(found, plain)
    assert failed == {1: 4, 3: 4} and found.outcome.to_list() == ["finished"] * 12
    more = [a - b for a, b in zip(found.sampled_tokens.to_list(), plain.sampled_tokens.to_list(), strict=True)]
    assert [count > 0 for count in more] == [k // 2 in (1, 3) for k in range(12)]
    env = walk(at)
    told = env.outcomes(found)
    delivered = int(plain.response_mask.values.sum())
    assert told["delivered_fraction"] == pytest.approx(delivered / (delivered + sum(more)))
    assert told["finished"] == 12 and told["failures"] == told["truncated"] == 0


# -- others in their place ------------------------------------------------------------------------------------------


class Breaks(Walk):
    """Fails in the second turn of episodes whose own seed says so, or of some rows whatever it is."""

    always = ()

    def __init__(self, of=2):
        self.of, self.begun = of, []

    def reset(self, row, seed):
        self.begun.append((row["number"], seed, row["task_seed"]))
        return ((row["number"], seed), 0), "a"

    def step(self, state, action):
        (number, seed), turn = state
        if turn == 1 and (seed % self.of == 0 or number in self.always):
            raise OSError(f"down at {number}")
        return ((number, seed), turn + 1), "b", 1.0, turn + 1 == 3


def test_another_episode_takes_the_place_of_one_that_failed(plain):
    """Which one does not depend on timing; the rows that did not fail are as they were."""
    with pytest.warns(
        UserWarning, match=r"game.rollout: \d+ episodes that failed have others in their place; first row 0"
    ):
        found = (env := fl.open(Breaks(), name="game")).rollout(rows(), policy=player(), n=4, spare=8)
    replaced = found.replaced.to_list()
    assert set(found.outcome.to_list()) == {"finished"} and 0 < sum(replaced) < 24 * 8 and 0 in replaced
    assert len(env.begun) == len(set(env.begun)) == 24 + sum(replaced), "each has seeds of its own"
    for number in range(6):
        assert len({task for of, _, task in env.begun if of == number}) == 1, "and the seed of the task"
    told = env.outcomes(found)
    assert told["replaced"] == sum(replaced) and told["finished"] == 24 and told["failures"] == 0
    assert told["delivered_fraction"] < 1
    calm = fl.open(Breaks(10**20), name="game").rollout(rows(), policy=player(), n=4)
    kept = [k for k, times in enumerate(replaced) if not times]
    same(found.take(kept), calm.take(kept))
    others = [k for k, times in enumerate(replaced) if times]
    assert found.take(others).response_ids.to_list() != calm.take(others).response_ids.to_list()

    class Slow(Breaks):
        def step(self, state, action):
            threading.Event().wait(0.002 * (hash(state) % 5))
            return super().step(state, action)

    with pytest.warns(UserWarning, match="have others in their place"):
        again = fl.open(Slow(), name="game").rollout(rows(), policy=player(), n=4, spare=8)
    same(again, found, names=(*WHAT, "replaced"))


def test_there_are_so_many_others_at_most_and_each_is_played_anew_first():
    env = fl.open(type("Always", (Breaks,), {"always": (3,)})(10**20), name="game")
    how = {"policy": player(), "n": 2, "retries": 1, "backoff": 0, "spare": 2}
    with pytest.warns(UserWarning) as told:
        found = env.rollout(rows(), on_error="mark", **how)
    texts = [str(each.message) for each in told]
    assert any("4 episodes that failed have others in their place; first row 3, sample 0: OSError" in t for t in texts)
    assert any("failed for 2 of 12 rows" in text for text in texts)
    assert found.failed.to_list() == [k // 2 == 3 for k in range(12)]
    assert found.replaced.to_list() == [2 * (k // 2 == 3) for k in range(12)]
    assert found.retries.to_list() == [3 * (k // 2 == 3) for k in range(12)], "each of the three once"
    assert sum(number == 3 for number, *_ in env.begun) == 2 * 3 * 2
    with pytest.raises(RewardError, match=r"game.step failed for row 3, sample 0: OSError: down at 3"):
        env.rollout(rows(), **how)
    with pytest.raises(ProgramError, match="spare"):
        env.rollout(rows(), policy=player(), spare=-1)


@pytest.mark.filterwarnings("ignore:game.rollout")
def test_time_that_is_up_is_up_for_others_too():
    clock = Clock()

    class Late(Breaks):
        def step(self, state, action):
            clock.now += 100 * (state[0][0] == 3)
            return super().step(state, action)

    env = fl.open(type("Late", (Late,), {"always": (3,)})(10**20), name="game")
    env._now = clock
    found = env.rollout(rows(), policy=player(), seconds=50, spare=5, on_error="mark")
    assert max(found.replaced.to_list()) <= 1 and sum(number == 3 for number, *_ in env.begun) <= 2


@pytest.mark.filterwarnings("ignore:game.rollout failed")
def test_outcomes_are_counted():
    found = walk(boom(OSError("down"))).rollout(rows(), policy=player(), n=2, on_error="mark", retries=1, backoff=0)
    told = walk(lambda number, turn: None).outcomes(found)
    assert told["infrastructure_failure"] == told["failures"] == 2 and told["finished"] == 10
    assert 0 < told["delivered_fraction"] < 1


def test_tokens_that_differ_from_those_sampled_are_found(plain):
    from flowrl.workers.episodes import Episode, check_ids

    episode = Episode(None, "", [2, 3])
    episode.act(Answer(0, [4, 5], [-1.0, -1.0], [-1.0, -1.0], [0, 0], 1.0, True))
    made = fl.Batch.of(
        1,
        response_ids=fl.Column.of([[4, 6]], dim="response", dtype="i32"),
        response_mask=fl.Column.of([[True, True]], dim="response", dtype="bool"),
    )
    with pytest.raises(RunError, match="not the 2 that the engine sampled"):
        check_ids(made, [episode])


# -- in a program ---------------------------------------------------------------------------------------------------


class Fails(Walk):
    def at(self, number, turn):
        STEPS[number] += 1
        if number % 4 == 1:
            raise OSError("down")


STEPS: Counter[int] = Counter()


def make_flow(*, filtered):
    flow = fl.Flow("failing")
    actor = flow.worker(fl.Actor, model_of(**SIZES), lr=1e-2, max_tokens=3, name="actor")
    game = flow.worker(Fails, name="game")
    source = fl.data.rows([{"prompt": "ab", "number": i} for i in range(16)], batch=4, shuffle=False)

    @flow.program
    def train(steps: int = 2):
        for step, batch in flow.steps(source, steps):
            batch = game.rollout(batch, policy=actor, n=2, on_error="mark")
            ends = game.outcomes(batch)
            if filtered:
                batch = batch.filter(~batch.failed)
            batch = rl.group_advantages(batch)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), ends, reward=batch.rewards.mean())

    return flow


def test_a_program_leaves_out_what_failed(tmp_path):
    STEPS.clear()
    done = make_flow(filtered=True).run(out=tmp_path / "run", quiet=True, checkpoint_every=1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        told = {name.split("/")[-1]: value for name, value in line.items()}
        assert told["infrastructure_failure"] == 2 and told["finished"] == 6 and told["reward"] == 3
        assert 0.3 < line["game.rollout/decode_slots_used"] <= 1.0
        unasked = {name: value for name, value in line.items() if name.startswith("game.rollout/")}
        asked = {name: line[f"game/{name}"] for name in (*OUTCOMES, "truncated", "failures", "delivered_fraction")}
        assert {name: unasked[f"game.rollout/{name}"] for name in asked} == asked
        assert all(unasked[f"game.rollout/{name}"] == 0 for name in ("retries", "replaced", "forks", "repairs"))
    assert STEPS[1] == 2 and done.weights_digest
    dropped = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["train"]["rows"]["dropped"]
    assert [(why.partition(":")[0], count) for why, count in dropped.items()] == [("infrastructure_failure", 4)]
    assert "batch.filter, test_sessions.py:" in next(iter(dropped))
    rows = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert {row["outcome"] for row in rows if row.get("failed")} == {"infrastructure_failure"}
    again = make_flow(filtered=True).run(out=tmp_path / "more", quiet=True)
    assert again.weights_digest == done.weights_digest


def test_a_program_that_trains_on_failures_is_refused(tmp_path):
    with pytest.raises(CheckError, match="marks rows that failed in 'failed', and nothing leaves them out"):
        make_flow(filtered=False).run(out=tmp_path / "run", quiet=True)
