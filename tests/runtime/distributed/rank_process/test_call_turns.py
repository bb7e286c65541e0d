"""A call that a rank is sent anew while it is still at it: the world is asked once, and what is given up is not kept."""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from policy_ranks import Gated, PolicyRank, rows

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.errors import RunError
from flowrl.lowering.deployment import WorkerSpec
from flowrl.runtime.distributed.protocol import Failed, Named, RankCall, RankConfig, Reply, Serving
from flowrl.runtime.distributed.rank_process.call_turns import CallTurns
from flowrl.runtime.distributed.rank_process.rank import EARLY, Rank
from flowrl.workers.tokens.tokenizer import Tokenizers

WAIT = 60  # seconds, far more than any of this takes
GAME = ("game", False)


class Slow(fl.Env):
    """A game that counts how often each of its episodes was begun, and goes on once it may."""

    turns = 2

    def __init__(self) -> None:
        self.asked, self.goes_on, self.begun = Counter[int](), threading.Event(), threading.Event()

    def reset(self, row, seed):
        self.asked[seed] += 1
        self.begun.set()
        assert self.goes_on.wait(WAIT)
        return 0, "1"

    def step(self, state, action):
        return state + 1, "1", float(len(action)), state == 1


def until(said: Callable[[], bool]) -> None:
    """Wait until something is so."""
    while not said():
        time.sleep(0.001)


def rank_with(game: Slow, folder) -> Rank:
    """A rank that has the game and the actor that plays it."""
    config = RankConfig({}, cast("Any", None), cast("Any", None), str(folder))
    rank = Rank(0, "games", config, cast("Any", None))
    rank._tokenizers = cast("Tokenizers", type("None_", (), {"find": lambda self, said: None})())
    rank.workers[GAME], rank.specs[GAME] = fl.open(game, name="game"), WorkerSpec("game")
    rank.workers |= PolicyRank(Gated()).workers
    return rank


def call(keep: int, frees: tuple[int, ...] = (), chunk: slice = slice(None)) -> RankCall:
    """A rollout of some rows; each time that it is sent it is to be kept under another number."""
    info = CallInfo(program="p", op="game.rollout")
    some = rows(3).take(list(range(3))[chunk])
    given = cast("Any", inspect.getattr_static(Slow, "rollout")).bind((some,), {"policy": Named("actor"), "n": 2})
    at = {"actor": Serving("actor", (0,), 0)}
    return RankCall("game.rollout", "rollout", GAME, given, info, keep=keep, journal=(0, 17), frees=frees, policies=at)


def test_a_call_that_is_sent_again_waits_for_the_first_and_asks_nothing_twice(tmp_path):
    """Both played all episodes beside each other, and what the first made was kept for ever."""
    game = Slow()
    rank = rank_with(game, tmp_path)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(rank.run, call(1))
        assert game.begun.wait(WAIT)
        second = threads.submit(rank.run, call(2, frees=(1,)))
        until(lambda: 1 in rank._freed_early)
        game.goes_on.set()
        replies = [first.result(WAIT), second.result(WAIT)]
    assert len(game.asked) == 6 and set(game.asked.values()) == {1}
    assert list(rank.objects) == [2] and len(rank.objects[2]) == 6
    assert len({reply.check for reply in replies if isinstance(reply, Reply)}) == 1, replies


def test_of_calls_that_wait_for_a_place_the_newest_alone_gets_it(tmp_path):
    """They would fill the lane in which episodes are played."""
    game = Slow()
    rank = rank_with(game, tmp_path)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(rank.run, call(1))
        assert game.begun.wait(WAIT)
        second = threads.submit(rank.run, call(2, frees=(1,)))
        until(lambda: rank._turns._waiting)
        third = threads.submit(rank.run, call(3, frees=(2,)))
        given_up = second.result(WAIT)
        assert isinstance(given_up, Failed) and "nobody waits" in given_up.text and not first.done()
        game.goes_on.set()
        assert isinstance(third.result(WAIT), Reply)
    assert set(game.asked.values()) == {1} and list(rank.objects) == [3]


def test_a_call_that_comes_with_rows_of_a_lost_rank_too_plays_none_of_its_own_twice(tmp_path):
    """The first of its rows told it from others: with those of a rank that is gone it played its own beside itself."""
    game = Slow()
    rank = rank_with(game, tmp_path)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(rank.run, call(1, chunk=slice(1, 3)))
        assert game.begun.wait(WAIT)
        second = threads.submit(rank.run, call(2, frees=(1,)))
        until(lambda: rank._turns._waiting)
        game.goes_on.set()
        replies = [first.result(WAIT), second.result(WAIT)]
    assert all(isinstance(reply, Reply) for reply in replies), replies
    assert len(game.asked) == 6 and set(game.asked.values()) == {1}
    assert list(rank.objects) == [2] and len(rank.objects[2]) == 6


def test_a_turn_waits_for_all_that_have_rows_of_it():
    turns, begun = CallTurns(), []

    def take(*rows: int) -> None:
        with turns.turn("place", rows):
            begun.append(rows)

    with ThreadPoolExecutor(1) as threads, turns.turn("place", (1,)):
        with turns.turn("place", (2,)):
            waiting = threads.submit(take, 0, 1, 2)
            until(lambda: turns._waiting)
            take(3)
        assert not waiting.done() and begun == [(3,)]
        take(4)
        waits = turns._waiting
    waiting.result(WAIT)
    assert begun == [(3,), (4,), (0, 1, 2)] and not turns._running and not waits


def test_chunks_of_a_call_are_beside_each_other(tmp_path):
    game = Slow()
    rank = rank_with(game, tmp_path)
    with ThreadPoolExecutor(3) as threads:
        chunks = [threads.submit(rank.run, call(i + 1, chunk=slice(i, i + 1))) for i in range(3)]
        until(lambda: len(game.asked) == 6)  # all of them are under way
        game.goes_on.set()
        assert all(isinstance(chunk.result(WAIT), Reply) for chunk in chunks)
    assert sorted(rank.objects) == [1, 2, 3] and set(game.asked.values()) == {1}


def test_a_call_that_fails_leaves_its_place_to_the_next():
    turns = CallTurns()
    with pytest.raises(ZeroDivisionError), turns.turn((0, 1)):
        raise ZeroDivisionError
    with turns.turn((0, 1)), turns.turn((0, 2)):  # another place is free
        pass
    assert not turns._running and not turns._waiting


def test_what_comes_after_the_run_has_gone_back_waits_for_nobody():
    """Who has the place may wait for rows of a policy that is closed, and never end."""
    turns, waits = CallTurns(), threading.Event()

    def wait() -> None:
        waits.set()
        with turns.turn("place"):
            raise AssertionError("nobody waits for it")

    with ThreadPoolExecutor(1) as threads, turns.turn("place"):
        waiting = threads.submit(wait)
        assert waits.wait(WAIT)
        until(lambda: turns._waiting)
        turns.forget()
        with pytest.raises(RunError, match="gone back"):
            waiting.result(WAIT)
        with turns.turn("place"):
            pass
    assert not turns._running


def test_few_numbers_are_remembered_of_what_is_freed_before_it_is_there(tmp_path):
    rank = rank_with(Slow(), tmp_path)
    rank.free(range(1, 5 * EARLY))
    assert len(rank._freed_early) == EARLY and 5 * EARLY - 1 in rank._freed_early
