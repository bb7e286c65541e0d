"""Sizes of memory as a plan writes them: ``2TiB``, ``512GB``, or a number of bytes."""

from __future__ import annotations

import re
from math import isfinite

from ...errors import PlanError

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_UNITS["TiB"] = 1 << 40
_SIZE = re.compile(r"^\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*$", re.ASCII)
_EVERY = {unit.lower(): factor for unit, factor in _UNITS.items()}


def read_size(text: str) -> float:
    """Return the bytes of ``2TiB``, ``1.5TB`` or ``2e12``. Raises PlanError for anything else, and for nothing.

    >>> read_size("2TiB"), read_size("512 GB"), read_size("1e9")
    (2199023255552.0, 512000000000.0, 1000000000.0)
    """
    found = _SIZE.match(text)
    unit = found[2].lower() if found else ""
    try:
        size = float(found[1]) * _EVERY[unit or "b"] if found else 0.0
    except (KeyError, ValueError):
        size = 0.0
    if not (size >= 1 and isfinite(size)):
        raise PlanError(f"'{text.strip()}' is no size of memory.", have=_UNITS, fix="Write a number with a unit: 2TiB.")
    return size


def written_size(size: float) -> str:
    """Return the shortest text that :func:`read_size` reads as exactly so many bytes.

    >>> written_size(2 * 2.0**40), written_size(1.5e12), written_size(12345.0)
    ('2TiB', '1.5TB', '12345B')
    """
    texts = (f"{size / factor:.12g}{unit}" for unit, factor in _UNITS.items())
    exact = [text for text in texts if "e" not in text and read_size(text) == size]
    return min(exact, key=len, default=f"{size!r}B")
