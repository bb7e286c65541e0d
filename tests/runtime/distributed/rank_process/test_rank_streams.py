"""What a rank tells of rows that run: each token until it is known, within bounds of time and bytes."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.errors import DataError, EngineLost
from flowrl.runtime.distributed.protocol import Failed, RankCall, Reply
from flowrl.runtime.distributed.rank_process import rank_streams
from flowrl.runtime.distributed.rank_process.rank_streams import MOST_TOLD, RankStreams, Teller, _collect_told
from flowrl.runtime.distributed.told_tokens import HeardTokens
from flowrl.runtime.local.shared_engine import NOTHING, KeptRows, Rows, SharedEngine
from flowrl.testing import FakeEngine, Sampling
from flowrl.workers.streaming import SampleRequest
from flowrl.workers.user_code.rows_in_progress import Notes


@dataclass
class Streamed:
    first_rows: Rows | None


@dataclass
class Begun:
    streamed: Streamed
    teller: Teller


def begin(engine: FakeEngine, kept: KeptRows = NOTHING, tokens: int = 9) -> tuple[SharedEngine, Rows, Begun]:
    shared = SharedEngine(engine, 3)
    prompts = fl.Column.of([[3], [5]], dim="prompt", dtype="i32")
    asked = SampleRequest(prompts, 2, torch.arange(4), Sampling(max_tokens=tokens), kept=kept.rows)
    rows = shared.submit(asked, kept_cache=kept.kept_cache)
    return shared, rows, Begun(Streamed(rows), Teller(kept))


def tell(shared: SharedEngine, begun: Begun, heard: int):
    _collect_told(shared, [begun])
    return begun.teller.tell(heard)


@pytest.mark.parametrize("lose", [0, 1, 3])
def test_tokens_are_told_until_they_are_known_and_another_engine_ends_the_rows(lose):
    """Every so many answers are lost on their way; what was heard and the rest are the rows of the undisturbed call."""
    engine = FakeEngine(stop=(0,))
    shared, _, begun = begin(engine)
    prompts = fl.Column.of([[3], [5]], dim="prompt", dtype="i32")
    wanted = FakeEngine(stop=(0,)).generate(prompts, 2, torch.arange(4), Sampling(max_tokens=9)).ids.to_list()
    heard, sizes = HeardTokens(), []
    for step in range(5):
        shared.step()
        messages = tell(shared, begun, heard.last)
        sizes.append(len(messages))
        if not lose or step % (lose + 1) == lose:
            heard.take(messages)
    assert max(sizes) <= lose + 2, "what is known is not told again"
    kept = KeptRows(heard.rows())
    assert all(list(row.ids) == wanted[row.row][: len(row.ids)] for row in kept.rows) and kept.rows
    other, more, next_one = begin(FakeEngine(stop=(0,)), kept)
    while not more.are_over:
        other.step()
    made = other.take(more)
    assert made.ids.to_list() == wanted and made.versions is not None
    (message,) = tell(other, next_one, 0)
    known = {row.row: len(row.ids) for row in kept.rows}
    ended = {row.row for row in kept.rows if row.reason != "aborted"}
    told = {row.row: row for row in message}
    assert set(told) == set(range(4)) - ended, "those that are known to have ended are not told"
    assert all(list(row.ids) == wanted[number][known.get(number, 0) :] for number, row in told.items())
    assert {row.reason for row in told.values()} <= {"stop", "length"}


def test_nothing_is_told_of_an_engine_that_has_failed_or_of_what_is_past_the_bound(monkeypatch):
    engine = FakeEngine(stop=())
    shared, _, begun = begin(engine)
    shared.step()
    assert tell(shared, begun, 0)
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shared.step()
    monkeypatch.setattr(engine, "tokens_since", lambda known: pytest.fail("it is of no more use"))
    assert len(tell(shared, begun, 1)) == 0
    begun.teller._bytes = MOST_TOLD
    assert begun.teller.is_full and tell(shared, begun, 1) == ()


def test_rows_that_kept_their_cache_say_so():
    shared, _, begun = begin(FakeEngine(stop=()))
    shared.step()
    assert not tell(shared, begun, 0)[0].kept_cache
    shared.publish(lambda: 0, 4, keep_cache=True)
    shared.step()
    (message,) = tell(shared, begun, 1)
    assert message.kept_cache and {row.versions for row in message} == {((4, 1),)}
    _, again, _ = begin(FakeEngine(stop=()), KeptRows(tuple(message), message.kept_cache))
    assert again.kept_cache


class OnRanks(FakeEngine):
    """An engine that two ranks have together: each asks the other whether to go on, as gloo would have it."""

    def __init__(self, place: int, table: list[bool], meeting: threading.Barrier, **how) -> None:
        super().__init__(vocab=32, stop=(), tokenizer=SimpleNamespace(), **how)
        self.place, self.said, self.meeting, self.ranks = place, table, meeting, 2

    def any_rank(self, said: bool) -> bool:
        self.said[self.place] = said
        self.meeting.wait(20)
        found = any(self.said)
        self.meeting.wait(20)  # the other one has seen it too
        return found


def on_two_ranks(work, lose=None):
    """What ``work(place, streams, begin, advance)`` gives on each of two ranks that have an engine together.

    ``lose``: the step in which the engine of the second rank fails.
    """
    table, meeting, found = [False, False], threading.Barrier(2), [None, None]

    def rank(place: int) -> None:
        engine = OnRanks(place, table, meeting)
        if lose is not None and place == 1:
            step, steps = engine.step, iter(range(lose))
            engine.step = lambda: step() if next(steps, None) is not None else fail()
        actor = fl.open(fl.Actor("none", lr=None, max_tokens=40), engine=engine)
        streams = RankStreams(Notes())
        op = type(actor).__dict__["generate"]
        prompts = fl.Column.of([[3], [5]], dim="prompt", dtype="i32")

        def begin(number: int, batch=None) -> None:
            rows = fl.Batch.of(2, prompt_ids=prompts) if batch is None else batch
            info = CallInfo(number, "grpo", 0, "actor.generate")
            call = RankCall("actor.generate", "generate", KEY, {}, info, keep=1 - place)
            said = op.bind((rows,), {"n": 2})
            try:
                streams.begin(number, call, op, actor, said, lambda made: Reply(made["response_ids"].to_list()))
            except DataError as error:  # as Rank.begin does
                streams.fail(number, KEY, Failed.of(error))

        found[place] = work(place, streams, begin, engine)

    threads = [threading.Thread(target=rank, args=(place,), daemon=True) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


KEY = ("actor", True)


def fail():
    raise EngineLost("the process of the engine is gone.")


def test_ranks_that_have_an_engine_together_make_as_many_steps(monkeypatch):
    """Each has a clock of its own, and they stop together whichever says so first."""
    for name, seconds in (("SLICE", 0.01), ("TOLD_EVERY", 0.0), ("TOLD_TIMES", 0.0)):
        monkeypatch.setattr(rank_streams, name, seconds)

    def work(place, streams, begin, engine):
        step = engine.step
        engine.step = lambda: time.sleep(random.random() * 0.004 * (1 + 3 * place)) or step()
        steps, rows = [], {}
        for number in (7, 8, 9):
            begin(number)
            steps.append(streams.advance(KEY, {7: 0, 8: 0, 9: 0}).steps)
        told = []
        while len(rows) < 3:
            found = streams.advance(KEY, {number: 0 for number in (7, 8, 9) if number not in rows})

            rows |= {number: reply.value for number, reply in found.over.items()}
            steps.append(found.steps)
            told += found.told
        return steps, rows, told

    (steps, rows, told), (others, same, silent) = on_two_ranks(work)
    assert steps == others and len(set(steps)) > 5 and rows == same and len(rows) == 3
    assert told and not silent, "the first one tells for both"


def test_a_rank_whose_engine_is_gone_as_a_call_begins_asks_nobody_and_says_so_itself(monkeypatch):
    """The other one may be in the midst of a publish that the call has begun with, and would take the question for it."""
    engine = OnRanks(0, [False, False], threading.Barrier(2))
    monkeypatch.setattr(engine, "any_rank", lambda said: pytest.fail("it asked"))
    monkeypatch.setattr(engine, "submit", lambda request: fail())
    actor = fl.open(fl.Actor("none", lr=None, max_tokens=4), engine=engine)
    streams, op = RankStreams(Notes()), type(actor).__dict__["generate"]
    rows = fl.Batch.of(1, prompt_ids=fl.Column.of([[3]], dim="prompt", dtype="i32"))
    call = RankCall("actor.generate", "generate", KEY, {}, CallInfo(1, "grpo", 0, "actor.generate"))
    with pytest.raises(EngineLost):
        streams.begin(1, call, op, actor, op.bind((rows,), {}), Reply)
    with pytest.raises(EngineLost, match="the process of the engine is gone"):
        streams.advance(KEY, {1: 0})


def test_what_one_of_them_cannot_begin_neither_has_begun():
    def work(place, streams, begin, engine):
        begin(1, fl.Batch.of(2, prompt_ids=fl.Column.of([[3], []], dim="prompt", dtype="i32")) if place else None)
        failed = streams.advance(KEY, {1: 0}).over[1]
        running = engine.running()
        begin(2)
        over = {}
        while not over:
            over = streams.advance(KEY, {2: 0}).over
        return failed, running, list(over)

    (first, running, over), (second, others, too) = on_two_ranks(work)
    assert running == others == [] and over == too == [2]
    assert first.elsewhere and "another rank could not begin it" in first.text
    assert not second.elsewhere and "The prompt of row 1 is empty" in str(second.error)


def test_an_engine_that_fails_on_one_of_them_is_of_no_more_use_to_both():
    """The rank that has lost it says so at once: the other one would wait for it in the middle of a step."""

    def work(place, streams, begin, engine):
        begin(1)
        try:
            for _ in range(100):
                streams.advance(KEY, {1: 0}, most=1)
        except EngineLost as error:
            engine.meeting.abort()
            return error.what
        except threading.BrokenBarrierError:
            return "alone"

    found = on_two_ranks(work, lose=5)
    assert found == ["alone", "the process of the engine is gone."]
