"""Jobs of pools that run in threads: what one of them fails with reaches whoever waits."""

import threading

import pytest

from flowrl.runtime.driver.pool_threads import Pools


class Job:
    """One that fails where it is told to, without having told anybody."""

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def start(self) -> bool:
        return self._do("start")

    def finish(self) -> bool:
        return self._do("finish")

    def _do(self, what: str) -> bool:
        if self.fails == what:
            raise ValueError(f"it cannot {what}")
        return True


@pytest.mark.parametrize("fails", ["start", "finish"])
def test_a_job_that_fails_untold_ends_the_wait(fails):
    """The thread is gone with it, and nothing would ever come of what is waited for."""
    pools = Pools((), threading.Condition())
    pools.put("rollout", Job(fails))
    with pytest.raises(ValueError, match=f"it cannot {fails}"):
        pools.wait(lambda: False)
    pools.close()
