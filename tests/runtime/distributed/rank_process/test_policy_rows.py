"""Those that ask a policy of a rank: their rows are in one batch, and nobody gets those of another."""

from __future__ import annotations

import threading

import pytest
import torch
from policy_ranks import WAIT, Gated, beside

import flowrl as fl
from flowrl.backends.stream import Stream
from flowrl.errors import FlowError, RunError
from flowrl.runtime.distributed.protocol import Asked
from flowrl.runtime.distributed.rank_process import policy_rows
from flowrl.runtime.distributed.rank_process.policy_rows import PolicyRows
from flowrl.workers.model_options import Sampling
from flowrl.workers.streaming import SampleRequest


def asked(number, *seeds, tokens=5, token=3):
    column = fl.Column.of([[token]] * len(seeds), dim="prompt", dtype="i32")
    return Asked(number, SampleRequest(column, 1, torch.tensor(seeds), Sampling(max_tokens=tokens)))


def test_each_gets_its_own_rows_under_its_own_numbers():
    engine = Gated()
    rows = PolicyRows(engine.stream)
    assert rows.poll("a", [asked(7, 1, 2)], 0).open == 2
    assert rows.poll("b", [asked(7, 3), asked(9, 4, tokens=3)], 0).latest == 9
    first = rows.poll("b", [], WAIT)
    assert [(row.call, row.row, len(row.ids)) for row in first.rows] == [(9, 0, 3)] and first.open == 1
    second = rows.poll("a", [], WAIT)
    assert [(row.call, row.row, len(row.ids)) for row in second.rows] == [(7, 0, 5), (7, 1, 5)] and second.open == 0
    assert [row.call for row in rows.poll("b", [], 0).rows] == [7], "it has ended in the steps of the other"
    assert engine.steps == 5 and (first.first, first.steps, second.steps) == (0, 3, 5)


def test_steps_are_made_while_somebody_waits_and_no_longer():
    engine = Gated()
    rows = PolicyRows(engine.stream)
    rows.poll("a", [asked(1, 1, tokens=4), asked(2, 2, tokens=200)], WAIT)
    assert engine.steps == 4
    assert rows.poll("nobody", [], WAIT).rows == () and engine.steps == 4


def test_who_waits_is_told_in_time_that_there_is_nothing():
    engine = Gated(calls=2)
    said = PolicyRows(engine.stream).poll("a", [asked(1, 1)], 0.05)
    assert said.rows == () and said.open == 1 and engine.steps == 0


def test_the_thread_that_makes_steps_ends_and_begins_again(monkeypatch):
    monkeypatch.setattr(policy_rows, "LINGER", 0.01)
    engine = Gated()
    rows = PolicyRows(engine.stream)
    for number in (1, 2):
        assert len(rows.poll("a", [asked(number, number)], WAIT).rows) == 1
        thread = rows._thread
        if thread is not None:
            thread.join(WAIT)
        assert rows._thread is None


def test_what_comes_while_somebody_waits_joins_at_once():
    """Both of two questions of one process wait for the same rows, of which each is answered once."""
    engine = Gated(calls=2)
    rows = PolicyRows(engine.stream)
    found = beside(lambda: rows.poll("a", [asked(1, 1)], WAIT), lambda: rows.poll("a", [asked(2, 2)], WAIT))
    both = [row.call for polled in found for row in polled.rows]
    assert sorted([*both, *(row.call for row in rows.poll("a", [], 0).rows)]) == [1, 2] and engine.steps == 5


def test_rows_that_are_ended_come_back_with_their_tokens():
    engine = Gated()
    rows = PolicyRows(engine.stream)
    rows.poll("a", [asked(1, 1, 2, 3, tokens=50), asked(2, 4, tokens=3)], WAIT)
    rows.poll("b", [asked(5, 5, tokens=2)], WAIT)
    ended = rows.abort("a", {1: [2, 0], 8: [0]}, latest=2)
    assert sorted((row.call, row.row, len(row.ids)) for row in ended) == [(1, 0, 5), (1, 2, 5)]
    assert [(row.row, row.reason) for row in rows.leave("a", 2)] == [(1, "aborted")] and engine.running() == []
    assert rows.leave("a", 0) == [] and rows.leave("never", 0) == []


def test_an_end_that_overtakes_its_call_waits_for_it():
    """Messages of one process take different lanes: a row whose end came first would run for nobody."""
    engine, ended = Gated(), []
    rows = PolicyRows(engine.stream)
    thread = threading.Thread(target=lambda: ended.extend(rows.leave("a", 3)))
    thread.start()
    rows.poll("a", [asked(3, 1)], 0)
    thread.join(WAIT)
    assert [row.call for row in ended] == [3] and engine.running() == []


def test_rows_of_a_process_that_died_are_ended():
    engine = Gated()
    rows = PolicyRows(engine.stream)
    rows.poll("died", [asked(1, 1, 2, tokens=50)], 0)
    rows.end()
    assert engine.running() == [] and rows._callers == {}
    with pytest.raises(RunError, match="rows that were asked for before are ended"):  # it lives, and the call is over
        rows.poll("died", [asked(2, 3)], 0)
    assert engine.running() == [] and rows.poll("other", [asked(1, 3)], 0).open == 1


def test_rows_that_join_as_those_of_a_process_that_died_are_ended_end_too():
    """They went on for nobody, beside those of whoever came next, and were there as the weights changed."""
    joining, go, said = threading.Event(), threading.Event(), []

    class Slow(Gated):
        def submit(self, request):
            joining.set()
            assert go.wait(WAIT)
            return super().submit(request)

    def poll():
        with pytest.raises(RunError, match="rows that were asked for before are ended"):
            rows.poll("died", [asked(1, 1, 2, tokens=50)], 0)
        said.append("ended")

    engine = Slow()
    rows = PolicyRows(engine.stream)
    late = threading.Thread(target=poll)
    late.start()
    assert joining.wait(WAIT)
    rows.end()
    go.set()
    late.join(WAIT)
    assert engine.running() == [] and said == ["ended"] and rows._callers == {}
    assert len(rows.poll("other", [asked(1, 3)], WAIT).rows) == 1


def test_a_call_that_cannot_go_on_fails_alone_once_its_rows_are_there():
    engine = Gated()
    engine.table[6] = float("nan")
    rows = PolicyRows(engine.stream)
    rows.poll("b", [asked(1, 1, tokens=2)], 0)
    with pytest.raises(FlowError, match="not finite"):
        rows.poll("a", [asked(1, 1, token=6)], WAIT)
    assert rows.poll("b", [], WAIT).open == 0


def test_an_engine_that_breaks_tells_all():
    class Breaks(Gated):
        def step(self):
            raise RunError("out of memory")

    rows = PolicyRows(Breaks().stream)
    rows.poll("b", [asked(1, 1)], 0)
    for name in ("a", "b"):
        with pytest.raises(RunError, match="out of memory|has failed"):
            rows.poll(name, [asked(2, 1)], WAIT)
    rows.end()
    assert rows._callers == {}


def test_what_waited_for_a_publish_that_failed_is_told_and_over_once_the_run_has_gone_back():
    engine = Gated()
    rows = PolicyRows(engine.stream)
    rows.poll("a", [asked(1, 1, tokens=200)], 0)
    engine.stream.hold()
    waiting = threading.Timer(0.05, engine.stream.give_up)
    waiting.start()
    with pytest.raises(RunError, match="a publish has failed"):
        rows.poll("a", [], WAIT)
    waiting.join()
    with pytest.raises(RunError, match="a publish has failed"):
        rows.poll("b", [], WAIT)
    engine.stream.let_go()
    rows.renew()
    assert not engine.running()
    with pytest.raises(RunError, match="rows that were asked for before are ended"):
        rows.poll("a", [asked(2, 1)], WAIT)
    (row,) = rows.poll("c", [asked(1, 2)], WAIT).rows
    assert len(row.ids) == 5


def test_a_step_that_fails_as_the_run_goes_back_fails_nobody_after_that():
    """What it had met was kept after it had been forgotten: whoever asked next was told of it for ever."""
    under_way, go = threading.Event(), threading.Event()

    class Late(Stream):
        def step(self):
            if under_way.is_set():
                return super().step()
            under_way.set()
            assert go.wait(WAIT)
            raise RunError("a publish has failed")

    rows = PolicyRows(Late(Gated()))
    rows.poll("a", [asked(1, 1, tokens=200)], 0.001)
    assert under_way.wait(WAIT)
    thread = rows._thread
    rows.renew()
    go.set()
    thread.join(WAIT)
    assert len(rows.poll("b", [asked(1, 2)], WAIT).rows) == 1
