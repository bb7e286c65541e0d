"""The chunks of a step's prompts are the same for all that cut rows of it, in whichever threads they do."""

from __future__ import annotations

import threading
from typing import Any

from flowrl.runtime.values.chunks import Cutter

WAIT = 60  # seconds, far more than any of this takes


class Meanwhile:
    """Does something in another thread the first time that it is asked to, unless that has to wait."""

    def __init__(self, job) -> None:
        self.thread = threading.Thread(target=job)

    def __call__(self) -> None:
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join(0.2)


def test_steps_are_forgotten_as_another_one_is_cut():
    """The steps were gone through as one came, in the driver's thread: the run failed as it had recorded a step."""
    cutter = Cutter(2)
    for step in range(2):
        cutter.assign(step, [7, 8])
    meanwhile = Meanwhile(lambda: cutter.assign(2, [9]))

    class Before(int):
        def __gt__(self, step: Any) -> bool:
            meanwhile()
            return int(self) > step

    cutter.forget(Before(1))
    meanwhile.thread.join(WAIT)
    assert cutter.of(1, 8) == 1 and cutter.of(2, 9) == 0 and sorted(cutter._piece) == [1, 2]


def test_rows_and_some_of_them_that_are_cut_at_the_same_time_are_cut_alike():
    """Each took prompts of the other for new ones: one was in the first chunk of some rows, and in the second of all."""
    cutter, seen = Cutter(2), []

    def cut_some() -> None:
        cutter.assign(0, [2, 3])
        seen.extend(cutter.of(0, uid) for uid in (2, 3))

    meanwhile = Meanwhile(cut_some)

    class Uid(int):
        def __hash__(self) -> int:
            meanwhile()
            return super().__hash__()

    cutter.assign(0, [0, 1, 2, Uid(3)])
    meanwhile.thread.join(WAIT)
    assert [cutter.of(0, uid) for uid in range(4)] == [0, 0, *seen] == [0, 0, 1, 1]
