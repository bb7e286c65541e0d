"""Runs of answers_driver.py and its like in a process of their own, which a test can watch, wait for and kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from flowrl.cli import main

HERE = Path(__file__).parent


def journalled(folder):
    """The keys of the rows that are answered in the journal of a folder, in its order."""
    file = folder / "journal.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [tuple(key) for line in lines if line.endswith("\n") for key in json.loads(line)["keys"]]


def wait_for(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def run_here(monkeypatch, folder, *words, driver="answers_driver.py", **environment):
    """The same as :class:`Run` to its end, in this process, which has imported what others take seconds for."""
    for name, value in {"ANSWERS": str(folder), **environment}.items():
        monkeypatch.setenv(name, value)
    sys.modules.pop("answers_driver", None)  # it reads where its answers go as it is imported
    assert main(["run", str(HERE / driver), "--quiet", "--out", str(folder / "run"), *words]) == 0


class Run:
    """A run in a process of its own, whose reward waits for the test."""

    def __init__(self, folder, *words, driver="answers_driver.py", **environment):
        self.folder = folder
        paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "flowrl", "run", str(HERE / driver), "--quiet", "--out"]
        self.process = subprocess.Popen(
            [*command, str(folder / "run"), *words],
            env={**os.environ, "ANSWERS": str(folder), "PYTHONPATH": paths, **environment},
            stdout=subprocess.DEVNULL,
            stderr=(folder / "said").open("a"),
        )

    def calls(self, what):
        file = self.folder / "calls"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(x), int(pid)) for kind, x, pid in lines if kind == what]

    def until(self, what):
        def there():
            assert self.process.poll() is None, (self.folder / "said").read_text()
            return what()

        wait_for(there, 240)

    def answered(self):
        files = list((self.folder / "run").glob("journal*.jsonl"))
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return {key[0] for line in map(json.loads, lines) for key in line.get("keys", ())}
