"""What a rank tells of rows that run: each token until it is known, within bounds of time and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import flowrl as fl
from flowrl.runtime.distributed.rank_process.rank_streams import MOST_TOLD, Teller, _collect_told
from flowrl.runtime.distributed.told_tokens import HeardTokens
from flowrl.runtime.local.shared_engine import NOTHING, KeptRows, Rows, SharedEngine
from flowrl.testing import FakeEngine, Sampling
from flowrl.workers.streaming import SampleRequest


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
