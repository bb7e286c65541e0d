"""Settles when calls and publishes of a run come, so that each publish comes in the middle of a call."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

from flowrl.runtime.driver.pool_threads import Pools
from flowrl.schedule.events import Publish, Start

BOUND = 120.0  # seconds that a wait for another thread may take


class PublishGate:
    """The second call joins the first, and each later one is interrupted by the publish of the update before it.
    Whoever steps the engines asks :meth:`held`, which waits until that stands in line."""

    def __init__(self, monkeypatch) -> None:
        self.together = 0  # calls in the engines, at most
        self._steps: dict[int, int] = defaultdict(int)
        self._passed: set[int] = set()
        self._joined = threading.Event()
        self._queued: dict[int, threading.Event] = defaultdict(threading.Event)
        put, starts = Pools.put, []

        def noted(pools, pool, job):
            put(pools, pool, job)
            if isinstance(job.command, Publish):
                self._queued[job.command.version].set()
            elif pool == "rollout" and isinstance(job.command, Start):
                starts.append(job.command.id)
                if len(starts) == 2:
                    self._joined.set()

        monkeypatch.setattr(Pools, "put", noted)

    def held(self, inside: Sequence[int], first: int) -> bool:
        """Wait, once for each call, where it is alone and has made three steps. Returns whether this was such a step.

        ``inside``: the numbers of the calls in the engines, of which the run's first is ``first``.
        """
        self.together = max(self.together, len(inside))
        for call in inside:
            self._steps[call] += 1
        call = max(inside)
        if len(inside) != 1 or self._steps[call] <= 3 or call in self._passed:
            return False
        self._passed.add(call)
        assert (self._joined if call == first else self._queued[call - first]).wait(BOUND), "nothing came"
        return True
