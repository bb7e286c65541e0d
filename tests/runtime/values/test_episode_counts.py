"""Episodes are counted as they ended, here and on ranks; rows of other kinds are not."""

from __future__ import annotations

from collections import Counter

import pytest

from flowrl.batch import Batch, Column
from flowrl.runtime.values.episode_counts import EpisodeCounts, count_episodes, failed_episodes
from flowrl.runtime.values.remote_batch import COUNTED, OUTCOME, RemoteBatch, sizes_of
from flowrl.workers.episodes import OUTCOMES

ENDED = ["finished", "grader_failure", "truncated_wall", "finished", "environment_failure"]
KEYS = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def rows(ended=ENDED, **other):
    counts = {name: [10 * place + i for i in range(len(ended))] for place, name in enumerate(COUNTED)} | other
    return Batch.of(KEYS[: len(ended)], outcome=Column.of(ended, dtype="any"), **counts)


@pytest.mark.parametrize("remote", [False, True])
def test_all_episodes_are_counted_also_where_rows_lie_on_ranks(remote):
    found = count_episodes(RemoteBatch.drawn(rows()) if remote else rows())
    assert found is not None and found.ended == Counter(ENDED)
    assert found.sums == {name: 50 * place + 10 for place, name in enumerate(COUNTED)}


@pytest.mark.parametrize("remote", [False, True])
def test_failures_are_known_by_their_rows(remote):
    some = RemoteBatch.drawn(rows()) if remote else rows()
    assert failed_episodes(some) == {(0, 1): "grader_failure", (2, 0): "environment_failure"}
    kept = some.take([0, 3, 4])
    assert failed_episodes(kept) == {(2, 0): "environment_failure"}


def test_metrics_have_each_outcome_and_what_was_delivered():
    counts = EpisodeCounts()
    for _ in range(2):
        found = count_episodes(rows(sampled_tokens=[4, 4, 4, 4, 4], delivered_tokens=[4, 0, 4, 4, 3]))
        assert found is not None
        counts.add(found)
    told = counts.metrics()
    assert {name: told[name] for name in OUTCOMES} == {name: 2 * ENDED.count(name) for name in OUTCOMES}
    assert (told["truncated"], told["failures"], told["delivered_fraction"]) == (2, 4, 0.75)
    assert EpisodeCounts().metrics()["delivered_fraction"] == 1.0


@pytest.mark.parametrize(
    "batch",
    [
        Batch.of([(0,)], rewards=[1.0]),
        Batch.of([(0,)], outcome=Column.of(["won"], dtype="any")),
        rows(["won", "lost"]),  # names of a user's own
    ],
)
def test_rows_that_are_no_episodes_have_no_counts(batch):
    assert count_episodes(batch) is None and failed_episodes(batch) == {}
    assert OUTCOME not in sizes_of(batch) and count_episodes(RemoteBatch.drawn(batch)) is None


def test_what_is_no_batch_has_no_counts():
    assert count_episodes(None) is None and count_episodes(0.5) is None
