"""Who receives the calls of a program: the trace, or a runtime. One session is current in a thread at a time."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import ProgramError
from ..script.site import caller

if TYPE_CHECKING:
    from ..ops.op import Op
    from .values import Value


class Session(Protocol):
    """What stands behind the values of a program."""

    def call(self, op: Op, worker: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An op was called; ``worker`` is its handle, None for a library op. Returns the value of its result."""
        ...

    def field(self, value: Value, name: str) -> Any:
        """A field of a batch, or an entry of metrics, was named."""
        ...

    def read(self, value: Value, kind: type) -> Any:
        """The program uses a value: ``kind`` is float, int, bool or str."""
        ...


def nested_steps() -> ProgramError:
    """The error of ``flow.steps`` within the steps of another."""
    return ProgramError(
        "flow.steps was called within a step.",
        at=caller(),
        fix="Draw the rows with flow.take(source), or make a program of its own of it and name both with --program.",
    )


_CURRENT: ContextVar[Session | None] = ContextVar("flowrl_session", default=None)


def current() -> Session | None:
    """The session of the program that is running in this thread, if one is."""
    return _CURRENT.get()


@contextmanager
def using(session: Session) -> Generator[None]:
    """Make ``session`` the current one inside the block."""
    token = _CURRENT.set(session)
    try:
        yield
    finally:
        _CURRENT.reset(token)
