"""What a reward function returned: a number for a row, a list of them for all; else what it was in words."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST = 60  # characters of a value in a message


def number_of(outcome: Any) -> float | BaseException:
    """What a function returned as a reward; the error where it is none. A text is none, whatever it says."""
    if isinstance(outcome, BaseException):
        return outcome
    if isinstance(outcome, (str, bytes)) or getattr(outcome, "shape", ()) != ():
        return TypeError(f"it returned {in_words(outcome)}, which is no number")
    try:
        number = float(outcome)
    except Exception:  # of whatever class it is, it may raise what it likes
        return TypeError(f"it returned {in_words(outcome)}, which is no number")
    return number if math.isfinite(number) else ValueError(f"it returned {number}")


def numbers_of(outcome: Any, rows: int) -> list[Any] | BaseException:
    """What a function of all rows returned, in their order; the error where it is no list of so many."""
    shape = getattr(outcome, "shape", None)
    listed = isinstance(outcome, Sequence) and not isinstance(outcome, (str, bytes, bytearray))
    if not (listed if shape is None else len(shape) == 1) and not hasattr(outcome, "to_list"):
        return TypeError(f"it returned {in_words(outcome)}, not a list with a reward for each row")
    values = list(outcome)
    return values if len(values) == rows else ValueError(f"it returned {len(values)} rewards for {rows} rows")


def in_words(value: Any) -> str:
    """A value in a message: as it is written where that is short, else what it is. Never an address in memory."""
    if (shape := getattr(value, "shape", None)) is not None and not isinstance(value, (int, float)):
        return f"an array of shape {list(shape)}" if shape != () else repr(value)[:_LONGEST]
    if inspect.iscoroutine(value):
        value.close()  # nobody awaits it
        return "a coroutine (an async function is given as it is, not called in a lambda)"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "a generator"
    if isinstance(value, Mapping):
        return f"a dict of {len(value)} items with the keys {_short(list(value)[:3])}"
    if isinstance(value, (Set, memoryview)):
        return f"a {type(value).__name__} of {len(value)} items"
    written = _short(value)
    return f"a {type(value).__name__}" if _ADDRESS.search(written) else written


def _short(value: Any) -> str:
    """A value as it is written, in one line that any terminal can show."""
    try:
        written = " ".join(repr(value).split())
    except Exception as error:  # a __repr__ of the user's own
        return f"a {type(value).__name__}, whose repr raises {type(error).__name__}"
    written = written.encode(errors="backslashreplace").decode()
    return written if len(written) <= _LONGEST else f"{written[: _LONGEST - 3]}..."
