"""Rows of a lost rank that come back from another one, which has a copy of them."""

from __future__ import annotations

from typing import Any, cast

from flowrl.runtime.distributed.rank_client import RankClient
from flowrl.runtime.distributed.recovery import remake_rows
from flowrl.runtime.values.rows_to_fetch import Fetch, Take, Together


class Link:
    """Ranks that bring 7 bytes, while another thread of the driver counts 5."""

    def send(self, rank: int, method: str, *args: Any) -> Any:
        return method, rank, args

    def wait(self, begun: Any, what: str, deadline: Any = None, on_death: Any = None) -> dict[int, Any]:
        assert begun == {0: ("keep_copy", 0, (1, 3))}
        client.traffic.add(between=5)
        return {0: 7}


client = RankClient(cast("Any", Link()), {"gpu": range(2)})


def test_what_others_count_while_a_copy_comes_is_not_lost():
    """The bytes counted so far were read before the copy was waited for, and written after."""
    wanted = Fetch(((0,),), (Together((Take(0, 3, ("a",), (0,)),), (0,), ((("a",), "a"),)),))
    client.lineage.note_copy(3, 1)
    client.lineage.lose([0], 10)
    remake_rows(client, wanted)
    assert client.traffic.between == 12 and not list(client.lineage.missing(wanted))
