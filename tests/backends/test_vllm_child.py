"""The process of vLLM as the one that began it sees it: what becomes of a call while it is closed. No vLLM is there."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection

import pytest
import torch

from flowrl.backends.vllm import child as module
from flowrl.backends.vllm.child import Child
from flowrl.errors import ModelError, RunError


class Process:
    """What stands for the process: it ends once its line says that nothing more comes."""

    pid, returncode = 0, None

    def __init__(self, line):
        self.line, self.asked = line, threading.Event()
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        self.line.send_bytes(b'{"ready": "0"}')
        try:
            while b'"step"' not in self.line.recv_bytes():
                pass
            self.asked.set()
            while True:
                self.line.recv_bytes()
        except (EOFError, OSError):
            self.returncode = 0

    def poll(self):
        return self.returncode

    def wait(self, seconds=None):
        self.thread.join(seconds)
        return self.returncode


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setattr(Child, "_start", lambda child, number, device: Process(Connection(os.dup(number))))
    child = Child({}, torch.device("cpu"))
    yield child
    child.close()


def test_a_call_that_is_under_way_while_it_is_closed_says_so(opened):
    failed = []

    def ask():
        try:
            list(opened.ask("step", 1))
        except BaseException as error:
            failed.append(error)

    asks = threading.Thread(target=ask)
    asks.start()
    assert opened._process.asked.wait(10)
    opened.close()
    asks.join(10)
    assert not asks.is_alive()
    assert [type(error) for error in failed] == [RunError]
    assert "was closed" in failed[0].what
    assert opened._connection.closed and opened._log.closed


def test_nothing_can_be_asked_of_one_that_is_closed(opened):
    opened.close()
    with pytest.raises(RunError, match="was closed"):
        list(opened.ask("step", 1))


def test_it_is_closed_beside_a_call_whose_answers_nobody_takes(opened, monkeypatch):
    monkeypatch.setattr(module, "END_SECONDS", 0.01)
    answers = opened.ask("step", 2)
    opened._process.line.send_bytes(b'{"call": 1}')
    next(answers)
    opened.close()
    with pytest.raises(RunError, match="was closed"):
        next(answers)


def test_no_file_beside_the_user_is_taken_for_a_library(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('this is no library')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"vLLM 0\.1 is installed; flowrl supports"):
        Child({"version": "0.1"}, torch.device("cpu"))
