"""Prompt groups by the age of the weights that sampled them: each is counted once, with the version of its chunk."""

import pytest

from flowrl.runtime.values.chunks import Cutter
from flowrl.schedule.events import Call, Take
from flowrl.schedule.trained_lags import TrainedLags


def lags_of(steps, groups, versions, take=None):
    """The lags of a program whose step k is trained on version k, from groups that came in chunks of these versions."""
    found = TrainedLags({2 * step: versions(step) for step in range(steps)})
    for step in range(steps):
        generate = Call(2 * step, step, "actor.generate", ("main",), (), serves=("actor",), relaxed=True, groups=groups)
        found.issue(generate, 0)
        if take:
            found.take(take(step))
        found.issue(Call(2 * step + 1, step, "actor.update", ("main",), (2 * step,), updates="actor"), step)
    return found.count()


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 64])
def test_every_group_is_counted_once_with_the_version_of_the_chunk_that_a_run_puts_it_in(groups, chunks):
    steps = 10
    found = lags_of(steps, groups, lambda step: [step - number for number in range(chunks)])
    cutter = Cutter(chunks)
    cutter.assign(0, list(range(groups)))
    by_chunk = [cutter.of(0, uid) for uid in range(groups)]
    assert found == {chunk: steps * by_chunk.count(chunk) for chunk in range(chunks) if chunk in by_chunk}
    assert sum(found.values()) == steps * groups


def test_groups_that_were_exchanged_have_the_versions_of_their_own_generates():
    take = lambda step: Take(2 * step, ((2 * step, 0), (2 * max(step - 1, 0), 1)))  # noqa: E731
    assert lags_of(3, 2, lambda step: [step], take) == {0: 4, 1: 2}
