"""A test that neither ends nor fails by its limit is ended with its process, says where it was, and is run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = """
import importlib.util
spec = importlib.util.spec_from_file_location("of_all_tests", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.GRACE = 0.5
globals().update({{name: value for name, value in vars(module).items() if not name.startswith("__")}})
"""
HANGS = """
import os, time, pytest

@pytest.mark.timeout(0.5)
def test_hangs():
    first = not os.path.exists("been_here")
    open("been_here", "a").close()
    while first or {always}:
        try:
            time.sleep(100)
        except BaseException:
            pass

def test_of_the_same_file():
    pass
"""


def run_tests(folder: Path, *, always: bool) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.format(path=str(Path(__file__).with_name("conftest.py"))))
    (folder / "test_hangs.py").write_text(HANGS.format(always=always))
    (folder / "test_others.py").write_text("def test_another():\n    pass\n")
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 100\n")
    words = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--reruns", "1", "-rR"]
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300)


def test_one_that_catches_the_error_is_ended_and_run_again(tmp_path):
    done = run_tests(tmp_path, always=False)
    assert done.returncode == 0 and "3 passed, 1 rerun" in done.stdout, done.stdout
    assert "failed before it was run again: test_hangs.py::test_hangs" in done.stdout
    assert 'test_hangs.py", line 10 in test_hangs' in done.stderr


def test_one_that_hangs_again_fails_and_the_others_go_on(tmp_path):
    done = run_tests(tmp_path, always=True)
    assert done.returncode == 1 and "1 failed, 2 passed, 1 rerun" in done.stdout, done.stdout
