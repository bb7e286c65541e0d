"""What holds for every test: scripts that it writes and loads are gone after it, and no example has a time limit."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

#: An example may take long where the machine is busy: a test as a whole has a limit.
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")

#: Ray has its workers give way to all other processes (15): beside other tests they would hardly get on.
os.environ.setdefault("RAY_worker_niceness", "0")


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
