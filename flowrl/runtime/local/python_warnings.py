"""Python's warnings in a run: what an op warns of becomes an event of the run, with the op and the step.

Python shows a warning once for each place and text, in the process that it happens in. So the thread that runs an op
says to whom its warnings go, on every runtime; the run tells each of them once, whichever rank it came from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ...batch import CallInfo
from ...errors import cut, shown


class Raised(str):
    """The text of a warning that an op raised: ``actor.update of step 3: lr is 0 (rewards.py:7)``."""

    @property
    def key(self) -> str:
        """What is told once: the text and its place, without op and step."""
        return self.partition(": ")[2]


MOST = 20  # warnings of one call that are told


class _Listener:
    """To whom the warnings of a call go, and how many there were."""

    def __init__(self, tell: Callable[[str], None], info: CallInfo) -> None:
        self._tell, self._info, self._count = tell, info, 0

    def hear(self, text: str) -> None:
        """Tell of a warning; of the one after the last that is told, that there are more."""
        self._count += 1
        if self._count <= MOST + 1:
            said = text if self._count <= MOST else f"it has warned {MOST} times; what else it warns of is left out"
            self._tell(Raised(f"{self._info.op} of step {self._info.step}: {said}"))


_LISTENER: ContextVar[_Listener | None] = ContextVar("flowrl_warnings", default=None)


@contextmanager
def hear_warnings(tell: Callable[[str], None], info: CallInfo) -> Generator[None]:
    """Tell warnings of this thread inside the block to ``tell``, as texts of :class:`Raised`."""
    global _shown_before
    if warnings.showwarning is not _show:
        _shown_before, warnings.showwarning = warnings.showwarning, _show
    token = _LISTENER.set(_Listener(tell, info))
    try:
        yield
    finally:
        _LISTENER.reset(token)


def show_again() -> None:
    """Have Python show warnings again that it has shown in this process: to another run they are new."""
    with warnings.catch_warnings():
        pass


def _show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
    """What Python calls for a warning that its filters let through."""
    listener = _LISTENER.get()
    if listener is None:
        _shown_before(message, category, filename, lineno, *rest)
        return
    kind = "" if category is UserWarning else f"{category.__name__}: "
    text = " ".join(str(message).split())
    listener.hear(f"{kind}{cut(text)} ({shown(filename)}:{lineno})")


_shown_before: Callable[..., None] = warnings.showwarning
