"""Jobs of pools that run in threads: what one of them fails with reaches whoever waits."""

import threading

import pytest
from flows import module_of

from flowrl.placement.plan.plan import Pipeline, Place, Plan
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


def test_a_thread_that_the_system_does_not_give_is_told_and_leaves_nothing_behind(monkeypatch):
    """As where a limit of processes is reached; whoever puts a job learns of it, and the end waits for no such thread."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    pools, job = Pools((), threading.Condition()), Job("nothing")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pools.put("rollout", job)
    pools.close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_run_that_gets_no_more_threads_ends_with_that(number, tmp_path, monkeypatch):
    """Whoever asks for it: the driver, or the thread of another pool, whose event it was."""
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
    plan = Plan({"train": "cpu", "rollout": "cpu", "cpu": "cpu"}, place, pipeline=Pipeline(staleness=2))
    start, seen = threading.Thread.start, []

    def refuse(thread):
        if thread.name.startswith("flowrl-"):
            seen.append(thread.name)
            if len(seen) > number:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        module_of("overlap_flow").flow.run(out=tmp_path / "run", plan=plan, quiet=True, save_models=False)
    assert len(seen) == number + 1


@pytest.mark.timeout(60)
def test_jobs_that_wait_for_each_other_end_at_the_close_too():
    """One goes on only once another has finished: an engine lets the result of a call be taken first."""
    done, begun = [], threading.Event()

    class Waits:
        def __init__(self, name, after):
            self.name, self.after = name, after

        def start(self):
            begun.wait()
            return True

        def finish(self):
            if not set(self.after) <= set(done):
                return False
            done.append(self.name)
            return True

    pools = Pools(frozenset(), threading.Condition())
    for name, after in (("first", ["second"]), ("second", ["third"]), ("third", [])):
        pools.put("pool", Waits(name, after))
    threading.Timer(0.1, begun.set).start()  # all are there, and the end, before one of them is gone on with
    pools.close()
    assert done == ["third", "second", "first"]
