"""What a server of SGLang answers is read in threads, which end with the engine."""

from __future__ import annotations

import queue
import threading
from typing import Any, cast

import pytest

from flowrl.backends.sglang.answers import AskedRow
from flowrl.backends.sglang.calls import Calls
from flowrl.workers.model_options import Sampling

WAIT = 60  # seconds, far more than any of this takes


def test_weights_are_forgotten_that_no_open_row_has_tokens_of():
    """All were remembered for ever, and gone through for each part of an answer."""
    calls = Calls(cast("Any", None), lambda seconds: None, 32)
    for number in range(1000):
        calls.note_publish(f"w.{number}", number)
    assert calls.labels == {"w.999": 999}
    row = AskedRow(1, 0, (5,), 7, 0, 64, frozenset({2}), Sampling(64), label="w.999")
    calls.rows[1, 0] = row
    for number in (1000, 1001, 1002):
        calls.note_publish(f"w.{number}", number)
    assert list(calls.labels.values()) == [999, 1000, 1001, 1002]
    row.label = "w.1001"
    calls.note_publish("w.1003", 1003)
    assert list(calls.labels.values()) == [1001, 1002, 1003]


@pytest.mark.parametrize("limit", [24, 512, 4096, 32768])
def test_what_is_told_of_a_row_grows_with_its_length(limit):
    """Each part has all tokens so far: with one for every 32 tokens, a row of 32,768 was told in 16 million."""
    bodies: queue.SimpleQueue[Any] = queue.SimpleQueue()

    class Client:
        def stream(self, path: str, body: Any) -> list[Any]:
            bodies.put(body)
            return []

    calls = Calls(cast("Any", Client()), lambda seconds: None, 32)
    calls.note_publish("w.1", 0)
    calls.begin([AskedRow(1, 0, (5,), 7, 0, limit, frozenset({2}), Sampling(limit))])
    interval = bodies.get(timeout=WAIT)["sampling_params"][0]["stream_interval"]
    told = sum(range(1, limit, interval)) + limit  # as SGLang does: the first token, and each so many behind it
    assert interval >= 32 and told <= 10 * limit


def test_an_answer_that_begins_after_the_engine_was_closed_is_not_read():
    """It was read to its end: a server that is not the run's own went on with rows of which nobody knew any more."""
    asked, answers, closed = threading.Event(), threading.Event(), threading.Event()

    class Answer:
        def __iter__(self):
            assert closed.wait(1), "it is read to its end"
            raise ConnectionError("the connection ended")

        def close(self) -> None:
            closed.set()

    class Busy:
        """A client of a server that has no place for the rows yet."""

        def stream(self, path: str, body: Any) -> Answer:
            asked.set()
            assert answers.wait(WAIT)
            return Answer()

    calls = Calls(cast("Any", Busy()), lambda seconds: None, 32)
    reading = threading.Thread(target=calls._read, args=(1, {}))
    reading.start()
    assert asked.wait(WAIT)
    calls.close()
    answers.set()
    reading.join(WAIT)
    assert closed.is_set() and calls._streams == {}
