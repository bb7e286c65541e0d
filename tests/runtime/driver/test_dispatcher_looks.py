"""Who looks at what a run is at, such as its ledger after a step, does so while calls begin and end in other threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from flowrl.runtime.driver.dispatcher import Dispatcher
from flowrl.runtime.driver.exchanged_groups import ExchangedGroups
from flowrl.runtime.driver.under_way import UnderWay

WAIT = 60  # seconds, far more than any of this takes


def beside(job) -> None:
    """Do something in another thread, now."""
    thread = threading.Thread(target=job)
    thread.start()
    thread.join(WAIT)


class Ending:
    """A call that another one ends beside, as somebody looks at it."""

    op = SimpleNamespace(external=True, fn=None)

    def __init__(self, ends) -> None:
        self._ends = ends

    @property
    def values(self) -> tuple[()]:
        beside(self._ends)
        return ()


def test_the_prompts_of_calls_are_looked_at_as_one_of_them_ends():
    """The ledger of a step asked for them in the driver's thread, which ended the run with an error of Python's."""
    under_way = UnderWay()
    calls: dict[int, Any] = cast("Any", under_way.calls)
    calls |= {0: Ending(lambda: calls.pop(1, None)), 1: Ending(lambda: None)}
    looked_at = SimpleNamespace(under_way=under_way, runner=SimpleNamespace(exchanged=ExchangedGroups()))
    assert Dispatcher.prompts_under_way(cast("Any", looked_at)) == set()


def test_what_runs_is_looked_at_as_a_call_begins():
    """The watch of a run that has come to a standstill, and the notes for the doctor, have missed such a look."""
    under_way = UnderWay()

    class Begun(float):
        def __rsub__(self, now: float) -> float:
            beside(lambda: under_way.since.update({2: 3.0}))
            return 7.0

    under_way.since |= {0: Begun(1.0), 1: 2.0}
    calls, quiet = under_way.waits(cast("Any", SimpleNamespace(unfinished=list)))
    assert calls == [] and quiet >= 7.0


def test_whose_ops_run_is_looked_at_as_a_call_begins():
    under_way = UnderWay()
    under_way.since |= {0: 1.0, 1: 2.0}

    class Issued(dict[int, Any]):
        def get(self, number: int, default: Any = None) -> Any:
            beside(lambda: under_way.since.update({2 + len(under_way.since): 3.0}))
            return super().get(number, default)

    under_way.calls = Issued()
    assert under_way.runs_own_ops_alone(), "moves of weights alone"
