"""What is known of where rows lie holds while ranks are lost: threads of pools note where others are meanwhile."""

from __future__ import annotations

import threading

from flowrl.runtime.distributed.calls.lineage import Lineage

WAIT = 60  # seconds, far more than any of this takes


class Lost(list[int]):
    """Ranks that are lost; while they are looked at another thread does something, unless it has to wait."""

    def __init__(self, ranks, job) -> None:
        super().__init__(ranks)
        self.thread = threading.Thread(target=job)

    def __contains__(self, rank: object) -> bool:
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join(0.2)
        return super().__contains__(rank)


def test_a_copy_that_is_noted_as_another_rank_is_lost_stays_known():
    """The copies were gone through as one came: the restart failed, and the run went back to a checkpoint."""
    lineage = Lineage()
    lineage.note_copy(0, 5)
    lineage.note_copy(1, 5)
    lost = Lost([9], lambda: lineage.note_copy(70, 6))
    lineage.lose(lost, 100)
    lost.thread.join(WAIT)
    assert [lineage.copy_of(id) for id in (0, 70)] == [5, 6]


def test_rows_that_are_made_again_as_another_rank_is_lost_stay_known():
    lineage = Lineage()
    lineage.note_remade({1: 5, 2: 5})
    lost = Lost([9], lambda: lineage.note_remade({70: 6}))
    lineage.lose(lost, 100)
    lost.thread.join(WAIT)
    assert lineage._remade == {1: 5, 2: 5, 70: 6}
