"""Which part of an answer that is being sampled can be shown: the text that stays, whatever is sampled behind it."""

from __future__ import annotations

from ..tool_calls import MARKS, thought_end
from .requests import Request


def sure_text(text: str, request: Request) -> str:
    """The part of a text that its answer will begin with; ``text`` is what the tokens so far are.

    Held back are the bytes of a character that lacks some, what may begin a text that stops, what may be a call of a
    tool where the request has tools, and white space before it. What is thought is no call.

    >>> asked = Request([{"role": "user", "content": "1+1?"}], stop=("Observation:",))
    >>> sure_text("I add. Obs", asked)
    'I add. '
    """
    found = text.rstrip("\ufffd")
    if stops := [at for stop in request.stop if (at := found.find(stop)) >= 0]:
        found = found[: min(stops)]
    else:
        found = found[: min((_begins(found, stop) for stop in request.stop), default=len(found))]
    if not request.tools:
        return found
    begin = thought_end(found, goes_on=True)
    if found[begin:].lstrip()[:1] in ("", "{"):  # a call may be JSON and nothing else
        return found[:begin].rstrip()
    return found[: min(_begins(found, mark, begin) for mark in MARKS)].rstrip()


def _begins(text: str, mark: str, begin: int = 0) -> int:
    """Where a mark begins in a text from a place on, or may begin at its end; the length of the text else."""
    if (at := text.find(mark, begin)) >= 0:
        return at
    ends = (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size]))
    return len(text) - next(ends, 0)
