"""A rank that Ray's memory monitor has ended is told as one that ran out of memory; others are not."""

import pytest

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from ray.exceptions import ActorDiedError, OutOfMemoryError

from flowrl.runtime.distributed.ray import start_ranks as cluster


@pytest.mark.parametrize(("error", "said"), [(OutOfMemoryError("killed"), True), (ActorDiedError(), False)])
def test_a_rank_says_that_it_ran_out_of_memory(monkeypatch, error, said):
    def get(refs, timeout=None):
        raise error

    ranks = cluster.RayRanks([cluster.PoolOfRanks("cpu", (0,))])
    monkeypatch.setattr(cluster.ray, "get", get)
    monkeypatch.setattr(cluster.ray, "wait", lambda refs, **how: (list(refs), []))
    with pytest.raises(cluster.RankLost) as lost:
        ranks.wait({0: ("ref", "handle")}, "reward.score of step 3")
    what = "rank 0 of pool 'cpu' died during reward.score of step 3"
    memory = ": it ran out of memory, and Ray's memory monitor ended it"
    assert lost.value.what == what + (memory if said else "") + "."
