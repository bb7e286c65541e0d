"""What the driver knows of ranks can be asked while another thread goes on without one of them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowrl.errors import RankLost
from flowrl.runtime.distributed.executor import DistributedExecutor
from flowrl.runtime.distributed.rank_client import RankClient, Traffic

WAIT = 60  # seconds, far more than any of this takes


def goes_on_without(client: RankClient, rank: int, stand_in: int) -> threading.Thread:
    """A thread that takes a rank out as a restart does which has not come to its end in time."""

    def take_over() -> None:
        with client.order:
            client.take_over({rank: stand_in})
            cast("dict[int, Any]", client.link.where).pop(rank, None)

    return threading.Thread(target=take_over)


class Meanwhile(dict[int, Any]):
    """What is known of ranks. As one is looked up first, another thread goes on, and comes to its end."""

    thread: threading.Thread

    def __getitem__(self, rank: int) -> Any:
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join(WAIT)
        return super().__getitem__(rank)


def test_a_rank_for_copies_is_chosen_as_another_thread_goes_on_without_one():
    """The machine of the one that went was asked for: the call that was to be copied failed, and the run with it."""

    class Where(Meanwhile):
        def items(self) -> Any:
            found = list(super().items())
            self[0]
            return found

    where = Where({rank: {"node": str(rank % 2)} for rank in range(4)})
    client = RankClient(cast("Any", SimpleNamespace(where=where)), {"gpu": range(4)})
    where.thread = goes_on_without(client, 3, 2)
    assert client.another_rank(0) in (1, 3)
    assert client.another_rank(0) == 1


def test_the_memory_of_ranks_is_told_as_another_thread_goes_on_without_one():
    client = RankClient(cast("Any", SimpleNamespace(where={})), {"gpu": range(2)})
    client.memory = known = Meanwhile({0: "some", 1: "more"})
    known.thread = goes_on_without(client, 1, 0)
    executor = SimpleNamespace(client=client, _probe=SimpleNamespace(look=lambda: "mine"))
    found = DistributedExecutor.memory(cast("Any", executor))
    assert found == {"driver": "mine", "rank 0": "some", "rank 1": "more"}


def test_bytes_are_counted_as_another_thread_counts_some():
    """What one thread had counted was lost where another one counted at the same time."""
    traffic = Traffic()
    other = threading.Thread(target=lambda: traffic.add(between=5))

    class Bytes(int):
        """A number of bytes. While it is added another thread counts some, unless it has to wait."""

        def __radd__(self, before: int) -> int:
            other.start()
            other.join(0.2)
            return before + int(self)

    traffic.add(between=Bytes(7))
    other.join(WAIT)
    assert vars(traffic) == {"drawn": 0, "between": 12, "records": 0, "told": 0, "payload": 0}


@pytest.mark.parametrize("lost", [(), (0,), (1,)], ids=["none is lost", "the other is lost", "the copy is lost"])
def test_a_copy_is_known_unless_its_rank_is_started_again_once_it_has_answered(lost):
    """It was noted after the restart had forgotten all copies: the run went back, as nothing came from there."""

    class Link:
        def send(self, rank: int, method: str, *args: Any) -> Any:
            return rank, method, args

        def wait(self, begun: Any, what: str, deadline: Any = None, on_death: Any = None) -> dict[int, Any]:
            assert begun == {1: (1, "keep_copy", (0, 3))}
            if lost:
                restarts = threading.Thread(target=client.restart_lost, args=(RankLost("it died", ranks=lost), 0))
                restarts.start()
                restarts.join(WAIT)
            return {1: 7}

    def restart(lost: RankLost) -> list[int]:
        client.forget_ranks(lost.ranks)
        return list(lost.ranks)

    client = RankClient(cast("Any", Link()), {"gpu": range(2)})
    client.restart = restart
    client.begin_copy(3, 0, 1, "a copy")()
    assert client.lineage.copy_of(3) == (None if lost == (1,) else 1)
    assert client.traffic.between == 7 and client.epoch == len(lost)


def test_nothing_is_asked_any_more_once_a_restart_has_failed_in_its_midst():
    """Of two groups that a rank samples the first one failed, and the second one asked the new process of a call that
    it had never heard of, for ever."""
    client = RankClient(cast("Any", SimpleNamespace(where={})), {"gpu": range(2)})
    asked: list[str] = []

    def restart(lost: RankLost) -> list[int]:
        raise RankLost("rank 1 died as rank 0 was given its weights.", ranks=(0, 1), inconsistent=True)

    def ask() -> str:
        asked.append("asked")
        if len(asked) == 1:
            raise RankLost("rank 0 died.", ranks=(0,))
        return "an answer"

    client.restart = restart
    for _ in range(2):
        with pytest.raises(RankLost, match="rank 1 died as rank 0 was given its weights") as info:
            client.retry(ask)
        assert info.value.inconsistent and info.value.ranks == (0, 1)
    assert asked == ["asked"]
    client.forget()  # the run has gone back
    assert client.retry(ask) == "an answer"


def test_a_loss_that_cannot_be_mended_in_place_is_no_restart_that_has_failed():
    """Nothing was begun: the ranks that are there are what they were."""
    client = RankClient(cast("Any", SimpleNamespace(where={})), {"gpu": range(2)})

    def restart(lost: RankLost) -> list[int]:
        raise lost

    def fails() -> None:
        raise RankLost("rank 0 died.", ranks=(0,))

    client.restart = restart
    with pytest.raises(RankLost, match="rank 0 died"):
        client.retry(fails)
    assert client.retry(lambda: "an answer") == "an answer"
