"""The memory of a process, and of those that it has started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HELD = 1 << 26
PROBES = f"""
import json, mmap, subprocess, sys
from flowrl.runtime.values.process_memory import MemoryProbe

before = MemoryProbe().look()
held = mmap.mmap(-1, {HELD})  # pages of its own: a large heap would serve an array from pages that it has already
held.write(b"x" * {HELD})
code = "held = bytearray(b'x') * {HELD}; print('held', flush=True); input()"
with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    assert child.stdout.readline() == b"held\\n"
    after, alone = MemoryProbe().look(), MemoryProbe(children=False).look()
    child.communicate(b"\\n")
print(json.dumps([before.to_json(), after.to_json(), alone.to_json()]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what processes hold")
def test_a_probe_sees_what_the_process_and_its_children_hold() -> None:
    # in a process of its own: this one may have children of earlier tests, which come and go
    done = subprocess.run([sys.executable, "-c", PROBES], capture_output=True, text=True, check=True)
    before, after, alone = json.loads(done.stdout)
    assert after["resident"] - before["resident"] > 0.9 * HELD and after["peak"] >= 0.9 * after["resident"]
    assert after["children"] > 0.9 * HELD and "children" not in before and "children" not in alone
    assert set(after) == {"resident", "peak", "children"}
