"""What tests of the command line share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[1] / "runtime"


@pytest.fixture
def evaluated_script(tmp_path):
    """The flow of the tests of evaluations, as a script of its own; its programs train and evaluate."""
    for name in ("small_flow", "evaluated_flow"):
        shutil.copy(RUNTIME / f"{name}.py", tmp_path)
    return str(tmp_path / "evaluated_flow.py")
