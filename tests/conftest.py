"""What holds for every test: scripts that it writes and loads are gone after it, no example has a time limit, and what
hangs is ended."""

from __future__ import annotations

import faulthandler
import os
import sys

import pytest
from hypothesis import settings

#: An example may take long where the machine is busy: a test as a whole has a limit.
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")

#: Torch has one thread, in the processes that tests start too: of several, at work on a few numbers beside other tests,
#: each waits for the others in every call.
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: Ray has its workers give way to all other processes (15): beside other tests they would hardly get on.
os.environ.setdefault("RAY_worker_niceness", "0")
#: Nor is it to begin with a process for each processor that it is told of, which no rank uses.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


#: Seconds that a test has to end in, once its time is up: what it waits for on the way out may hang too.
GRACE = 60.0
#: Where that is printed: standard error, which pytest captures while tests run.
STDERR = pytest.StashKey[int]()


def pytest_configure(config):
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    return (yield from _ended_if_it_hangs(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    return (yield from _ended_if_it_hangs(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    return (yield from _ended_if_it_hangs(item))


def _ended_if_it_hangs(item):
    """Print where all threads are and end this process, where a test neither ends nor fails by its time limit.

    pytest-timeout fails it by an error in the main thread. A test that catches it, or that waits as it fails, goes on,
    and a second attempt has no limit.
    """
    marker, config = item.get_closest_marker("timeout"), item.config
    asked = config.getoption("timeout")
    usual = asked if asked is not None else os.environ.get("PYTEST_TIMEOUT", config.getini("timeout"))
    seconds = float(usual if marker is None else marker.args[0])
    if not seconds or config.getoption("usepdb"):
        return (yield)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem, report, sched):
    """Say of a test whose process was ended that it is run again, where tests are: xdist has another process do so."""
    if sched.config.getoption("reruns", 0) and crashitem not in _crashed:
        _crashed.add(crashitem)
        report.outcome = "rerun"


_crashed: set[str] = set()


@pytest.fixture(scope="module")
def one_thread():
    """One thread for torch, and the number of before afterwards: ``pytest.mark.usefixtures("one_thread")``."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def forget_scripts(tmp_path_factory):
    """Take modules of temporary folders out of ``sys.modules``, and put ``sys.path`` back: a later test may use their names."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    temporary = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(temporary):
            del sys.modules[name]


def pytest_terminal_summary(terminalreporter):
    """Say why tests failed that passed when they were run again: a rerun hides it otherwise."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.write_line(f"failed before it was run again: {report.nodeid}")
        for line in report.longreprtext.splitlines()[-40:]:
            terminalreporter.write_line(f"    {line}")
