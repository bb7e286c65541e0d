"""Grades mathematics by value, as the package math-verify finds it: 1/2 is 0.5, and x + 1 is 1 + x."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import WorkerError
from .answers import boxed_in, final_answer
from .known_answers import VerdictCache
from .line_reader import LineReader
from .verdict import Verdict, VerifierFailed

#: How an answer ends: right, wrong, none that can be read, none found within its time, more memory than it may have, or
#: the comparison raised.
OUTCOMES = ("right", "wrong", "no_answer", "timed_out", "out_of_memory", "crashed")
_PROGRAM = Path(__file__).with_name("mathematics_worker.py")
_MEMORY_MB = 2048  # of address space; sympy takes 300
_WALL = 60.0  # seconds by the clock that a machine may be busy with other things
_LONGEST = 20_000  # characters of a response, from its end
#: What math-verify finds in a text by itself: mathematics that is marked, or numbers among words.
_FOUND = re.compile(r"\$|\\[(\[]|(?<![\\A-Za-z])[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\[A-Za-z]+ ?\{[A-Za-z. *]*\}")  # \text{cm}


def symbolic(response: str, answer: str, *, seconds: float = 5.0, cache: VerdictCache | None = None) -> Verdict:
    r"""1 where the mathematics of a response's answer has the value that is expected, else 0.

    Both are read by the package math-verify (``pip install math-verify``), as LaTeX, expressions, numbers, sets or
    intervals. It runs in a process of its own, which ends where an answer takes ``seconds`` on a CPU, or too much
    memory. With a ``cache`` equal responses are compared with equal answers once. Raises ValueError where what is
    expected is no mathematics, and VerifierFailed, an OSError, where the machine does not answer.

    >>> from flowrl.environments import verify
    >>> verify.symbolic(r"It is \boxed{\frac{2}{4}}.", "0.5").outcome
    'right'
    """
    if find_spec("math_verify") is None:
        raise WorkerError("verify.symbolic needs the package math-verify.", fix="pip install math-verify.")
    asked = {"response": _final(response[-_LONGEST:]), "answer": _written(str(answer)), "seconds": seconds}
    if cache is None:
        return _compared(asked, answer)
    return cache.graded(["symbolic", version("math-verify"), asked], lambda: _compared(asked, answer))


def _compared(asked: dict[str, Any], answer: str) -> Verdict:
    """Compare the mathematics of a response with what is expected."""
    said, seconds = _pool().ask(asked), asked["seconds"]
    if "ended" in said:
        outcome = "timed_out" if said["ended"] == signal.SIGPROF else "crashed"
        why = f"it took more than {seconds} s" if outcome == "timed_out" else f"signal {said['ended']} ended it"
        return Verdict(0.0, outcome, OUTCOMES, why=why)
    if "memory" in said:
        return Verdict(0.0, "out_of_memory", OUTCOMES, why=f"it took more than {_MEMORY_MB} MB")
    if "error" in said:
        return Verdict(0.0, "crashed", OUTCOMES, why=said["error"])
    if not said["expected"]:
        raise ValueError(f"the expected answer {answer!r} is no mathematics that math-verify can read")
    if not said["found"]:
        return Verdict(0.0, "no_answer", OUTCOMES, why="there is no mathematics in it")
    return Verdict(float(said["right"]), "right" if said["right"] else "wrong", OUTCOMES)


def _final(response: str) -> str:
    """A response as math-verify finds its final answer, which knows boxes alone."""
    final = final_answer(response)
    if boxed_in(response) is not None or final == response.strip():
        return response
    return final if _FOUND.search(_COMMAND.sub("", final)) else rf"\boxed{{{final}}}"


def _written(expected: str) -> str:
    """An expected answer as math-verify finds it: LaTeX between dollars."""
    return expected if "$" in expected or r"\boxed" in expected else f"${expected}$"


@cache
def _pool() -> _Pool:
    return _Pool(max(1, min(8, os.cpu_count() or 1)))


class _Pool:
    """Processes that compare, begun when they are needed; one that has ended is replaced."""

    def __init__(self, size: int) -> None:
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(size):
            self._free.put(None)

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What a process says, or ``{"ended": signal}``. Raises VerifierFailed."""
        process = self._free.get()
        try:
            process = process or _Process()
            said = process.ask(asked)
        except BaseException:
            if process is not None:
                process.end()
            process = None
            raise
        finally:
            self._free.put(None if process is None or process.ended else process)
        return said


class _Process:
    """A process of ``mathematics_worker.py``."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", str(_PROGRAM), str(_MEMORY_MB)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None, "it was opened with a pipe"
        self._lines, self.ended = LineReader(self._process.stdout.fileno()), False
        if "ready" not in self._read(_WALL):
            raise VerifierFailed(f"the process that compares mathematics ended as it began: exit {self.end()}")

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What it says, or ``{"ended": signal}``. Raises VerifierFailed."""
        assert self._process.stdin is not None, "it was opened with a pipe"
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise VerifierFailed(f"the process that compares mathematics has ended: exit {self.end()}") from error
        return self._read(10 * asked["seconds"] + _WALL)

    def _read(self, seconds: float) -> dict[str, Any]:
        try:
            return json.loads(self._lines.read(seconds))
        except TimeoutError:
            self.end()
            raise VerifierFailed(
                f"the process that compares mathematics has not answered for {seconds:.0f} s"
            ) from None
        except EOFError:
            return self._end_of()

    def _end_of(self) -> dict[str, Any]:
        status = self._process.wait()
        self.end()
        if status in (-signal.SIGKILL, -signal.SIGTERM) or status >= 0:
            raise VerifierFailed(f"the process that compares mathematics has ended: exit {status}")
        return {"ended": -status}

    def end(self) -> int:
        """End it."""
        self.ended = True
        self._process.kill()
        for file in (self._process.stdin, self._process.stdout):
            assert file is not None, "it was opened with pipes"
            with suppress(OSError):
                file.close()
        return self._process.wait()
