"""How answers of a reward or an environment are handed over one by one, so that a call that is cut off keeps them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

#: Takes rows of the call, by their places in its batch, and the fields that the op adds to them.
Keep = Callable[[Sequence[int], Mapping[str, Any]], None]
_PLACE = "\0place"  # beside the arguments of a function, where no parameter can be called so
_KEEP: ContextVar[Keep | None] = ContextVar("keep", default=None)


@contextmanager
def handed_to(keep: Keep | None) -> Iterator[None]:
    """Have ``keep`` take the answers of a call as they come; None where they depend on each other."""
    token = _KEEP.set(keep)
    try:
        yield
    finally:
        _KEEP.reset(token)


def keeper() -> Keep | None:
    """Who takes the answers of this call; asked in the thread of the call."""
    return _KEEP.get()


def telling(
    fn: Callable[..., Any], rows: Sequence[Mapping[str, Any]], tell: Callable[[int, Any], None]
) -> tuple[Callable[..., Any], list[dict[str, Any]]]:
    """A function and rows that are called alike, and ``tell`` what each row gave as soon as it is there.

    A child that the function has forked off, and that comes back from it, tells nothing: locks are as the other threads
    left them, and the answer is not its own.
    """
    process = os.getpid()
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__):

        async def waited(**row: Any) -> Any:
            place = row.pop(_PLACE)
            answer = await fn(**row)
            if os.getpid() == process:
                tell(place, answer)
            return answer

        asked: Callable[..., Any] = waited
    else:

        def called(**row: Any) -> Any:
            place = row.pop(_PLACE)
            answer = fn(**row)
            if os.getpid() == process:
                tell(place, answer)
            return answer

        asked = called
    return asked, [{**row, _PLACE: place} for place, row in enumerate(rows)]
