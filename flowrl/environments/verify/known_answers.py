"""What verifiers have said, by the content of what they were asked: each thing is asked for once, also by several."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from .verdict import Verdict

T = TypeVar("T")
#: Outcomes that another machine, or a less busy one, may not give.
BY_MACHINE = ("timed_out", "out_of_memory", "killed")


def name_of(asked: Any) -> str:
    """A name for what can be written as JSON, or else as Python writes it: equal where it says the same."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=repr).encode()).hexdigest()


class KnownAnswers:
    """Texts that were said, in memory, and in a file of lines where one is named, for later runs too."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, Future[str]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                with suppress(ValueError, LookupError, TypeError):  # a line that was cut off
                    found = json.loads(line)
                    self._known[found["request"]] = _there(found["said"])

    def read(
        self,
        name: str,
        ask: Callable[[], str],
        read: Callable[[str], T],
        keeps: Callable[[T], bool] = lambda found: True,
    ) -> T:
        """What is read from the answer to a request, which is asked for where it is not known.

        One that cannot be read, or that ``keeps`` does not want, is asked for anew next time.
        """
        with self._lock:
            known = self._known.get(name)
            own = None if known else self._known.setdefault(name, Future())
        if own is None:
            assert known is not None, "somebody asks, or has asked"
            return read(known.result())
        try:
            said = ask()
            found = read(said)
        except BaseException as error:
            self._forget(name)
            own.set_exception(error)
            raise
        own.set_result(said)
        if not keeps(found):
            self._forget(name)
        elif self._path is not None:
            with self._lock, self._path.open("a") as file:
                file.write(json.dumps({"request": name, "said": said}) + "\n")
        return found

    def _forget(self, name: str) -> None:
        with self._lock:
            del self._known[name]


class VerdictCache:
    """Verdicts by the content of what was graded: equal answers to equal tasks are graded once.

    They are kept in memory, and in the file ``path`` where one is named, for later runs and other processes. What the
    machine has a part in (a limit of time, of memory or of output that was broken) is graded anew each time; so is
    what raises.

    >>> from flowrl.environments import verify
    >>> cache = verify.VerdictCache()
    >>> [verify.unit_tests("print(input())", [{"input": "1", "output": "1"}], cache=cache) for _ in range(2)]
    [1.0, 1.0]
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = path
        self._answers = KnownAnswers(None if path is None else Path(path))

    def __getstate__(self) -> dict[str, Any]:
        """As it is sent to another process: where its file is."""
        return {"path": self.path}

    def __setstate__(self, found: dict[str, Any]) -> None:
        self.__init__(found["path"])

    def graded(self, asked: Any, grade: Callable[[], Verdict]) -> Verdict:
        """The verdict on what was ``asked``, which JSON can say; by ``grade`` where it is not known."""
        return self._answers.read(
            name_of(asked), lambda: _written(grade()), _read, lambda verdict: verdict.outcome not in BY_MACHINE
        )


def _written(verdict: Verdict) -> str:
    more = {"why": verdict.why, "passed": verdict.passed, "total": verdict.total}
    return json.dumps({"value": float(verdict), "outcome": verdict.outcome, "outcomes": verdict.outcomes, **more})


def _read(said: str) -> Verdict:
    found = json.loads(said)
    more = {name: found[name] for name in ("why", "passed", "total")}
    return Verdict(found["value"], found["outcome"], tuple(found["outcomes"]), **more)


def _there(said: str) -> Future[str]:
    found: Future[str] = Future()
    found.set_result(said)
    return found
