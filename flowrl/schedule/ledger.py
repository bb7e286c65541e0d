"""Which steps are open, which may start, which are done: steps commit in order, and at most S stay behind."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Bookkeeping of one program's steps. Events in, commits out; no clock and no threads.

    Calls are numbered in program order. A step commits once it is closed, every call of it has finished, and all steps
    before it have committed.

    >>> ledger = Ledger()
    >>> ledger.open(0); ledger.issued(0); ledger.close(0), ledger.may_open(1)
    ([], False)
    >>> ledger.finished(0), ledger.may_open(1)
    ([0], True)
    """

    staleness: int = 0
    committed: int = 0  # steps committed so far: the next one to commit has this number
    _open: int | None = None
    _step_of: dict[int, int] = field(default_factory=dict[int, int])
    _left: dict[int, int] = field(default_factory=dict[int, int])
    _closed: set[int] = field(default_factory=set[int])

    def may_open(self, step: int) -> bool:
        """Whether step may start: at most ``staleness`` earlier steps are uncommitted."""
        return step - self.committed <= self.staleness

    def open(self, step: int) -> None:
        """The program enters a step."""
        assert self.may_open(step), f"step {step} was opened with {step - self.committed} steps uncommitted"
        self._open = step
        self._left.setdefault(step, 0)

    def issued(self, call: int) -> None:
        """A call was issued; outside of steps it belongs to none."""
        if self._open is not None:
            self._step_of[call] = self._open
            self._left[self._open] += 1

    def finished(self, call: int) -> list[int]:
        """A call is done. Returns the steps that commit by it."""
        step = self._step_of.pop(call, None)
        if step is not None:
            self._left[step] -= 1
        return self._commit()

    def close(self, step: int) -> list[int]:
        """The program leaves a step. Returns the steps that commit by it."""
        self._closed.add(step)
        self._open = None
        return self._commit()

    def _commit(self) -> list[int]:
        done: list[int] = []
        while self.committed in self._closed and self._left.get(self.committed, 0) == 0:
            self._closed.discard(self.committed)
            self._left.pop(self.committed, None)
            done.append(self.committed)
            self.committed += 1
        return done
