"""What holds for every test: scripts that it writes and loads are gone after it."""

from __future__ import annotations

import sys

import pytest


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
