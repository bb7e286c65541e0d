"""Which names can be files, options and actors: those of workers, and of the pools that a plan makes."""

from __future__ import annotations

from typing import Any

LONGEST = 64
FIX = f"Use letters, digits, _ and -, a letter first, at most {LONGEST} of them:"
#: What file systems keep for devices, whatever comes after a dot.
_DEVICES = frozenset(["con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(10))])


def name_problem(name: Any, *, number: bool = False) -> str | None:
    """Why something cannot be a name; None where it can. ``number``: it may begin with a digit.

    >>> name_problem("judge"), name_problem("../judge")
    (None, 'has characters that a file, an option or a plan does not take')
    """
    if not isinstance(name, str):
        return "is no text"
    if not name:
        return "is empty"
    if len(name) > LONGEST:
        return f"has {len(name)} characters"
    first = name[0].isalnum() if number else name[0].isalpha()
    if not (first or name[0] == "_") or not all(c.isalnum() or c in "_-" for c in name):
        return "has characters that a file, an option or a plan does not take"
    return "is the name of a device on some systems" if name.lower() in _DEVICES else None
