"""The ledger of steps: they commit in order, when all of them is done, and at most S are left behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.schedule.ledger import Ledger


def test_a_step_commits_when_it_is_closed_and_its_calls_are_done():
    ledger = Ledger()
    ledger.open(0)
    ledger.issued(0)
    ledger.issued(1)
    assert ledger.finished(1) == []
    assert ledger.close(0) == []
    assert not ledger.may_open(1)
    assert ledger.finished(0) == [0]
    assert ledger.may_open(1) and ledger.committed == 1


def test_a_step_without_calls_commits_as_it_closes():
    ledger = Ledger()
    ledger.open(0)
    assert ledger.close(0) == [0]


def test_a_step_that_is_done_first_waits_for_the_one_before():
    ledger = Ledger(staleness=1)
    ledger.open(0)
    ledger.issued(0)
    ledger.close(0)
    ledger.open(1)
    ledger.issued(1)
    assert ledger.finished(1) == []
    assert ledger.close(1) == []
    assert not ledger.may_open(2)
    assert ledger.finished(0) == [0, 1]
    assert ledger.may_open(2) and ledger.may_open(3) and not ledger.may_open(4)


def test_calls_outside_of_steps_belong_to_none():
    ledger = Ledger()
    ledger.issued(0)
    ledger.open(0)
    ledger.issued(1)
    ledger.close(0)
    ledger.issued(2)
    assert ledger.finished(2) == ledger.finished(0) == []
    assert ledger.finished(1) == [0]


def test_opening_too_early_is_our_own_bug():
    ledger = Ledger()
    ledger.open(0)
    ledger.issued(0)
    ledger.close(0)
    with pytest.raises(AssertionError, match="step 1 was opened with 1 steps uncommitted"):
        ledger.open(1)


@given(
    staleness=st.integers(0, 3),
    calls=st.lists(st.integers(0, 3), max_size=8),
    data=st.data(),
)
def test_whatever_finishes_first_steps_commit_in_order_and_few_stay_open(staleness, calls, data):
    """``calls[k]`` calls in step k; at each turn either the program goes on or some call finishes."""
    ledger = Ledger(staleness)
    running: dict[int, int] = {}  # call -> step
    open_calls = dict.fromkeys(range(len(calls)), 0)
    closed: set[int] = set()
    committed: list[int] = []
    number = step = issued = 0
    inside = False

    def commit(steps):
        for done in steps:
            assert done == len(committed), "steps commit in order"
            assert done in closed and open_calls[done] == 0, "all of a step is done when it commits"
            committed.append(done)

    while step < len(calls) or running:
        may_go_on = step < len(calls) and (inside or ledger.may_open(step))
        assert may_go_on or running, "nobody can go on: a deadlock"
        if may_go_on and (not running or data.draw(st.booleans())):
            if not inside:
                behind = step - len(committed)
                assert behind <= staleness, "at most S earlier steps are uncommitted"
                ledger.open(step)
                inside, issued = True, 0
            elif issued < calls[step]:
                ledger.issued(number)
                running[number] = step
                open_calls[step] += 1
                number, issued = number + 1, issued + 1
            else:
                closed.add(step)
                commit(ledger.close(step))
                inside, step = False, step + 1
        else:
            call = data.draw(st.sampled_from(sorted(running)))
            open_calls[running.pop(call)] -= 1
            commit(ledger.finished(call))
    assert committed == list(range(len(calls))) and ledger.committed == len(calls)
