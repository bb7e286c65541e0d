"""How wide a text is in a Helvetica-like font, so that a picture is laid out the same on every machine.

Arial, Helvetica, Liberation Sans and Arimo share these advance widths. They are given for ASCII in
thousandths of the font size; other characters are guessed.
"""

from __future__ import annotations

import unicodedata

STACK = "Helvetica, Arial, 'Liberation Sans', Arimo, 'Nimbus Sans', sans-serif"

_REGULAR = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 "
    "556 278 278 584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 "
    "722 667 611 722 667 944 667 667 611 278 278 278 469 556 333 556 556 500 556 556 278 556 556 222 222 "
    "500 222 833 556 556 556 556 333 500 278 556 500 722 500 500 500 334 260 334 584"
)
_BOLD = (
    "278 333 474 556 556 889 722 238 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 "
    "556 333 333 584 584 584 611 975 722 722 722 722 667 611 778 722 278 556 722 611 833 722 778 667 778 "
    "722 667 611 722 667 944 667 667 611 333 278 333 584 556 333 556 611 556 611 556 333 611 611 278 278 "
    "556 278 889 611 611 611 611 389 556 333 611 556 778 556 556 500 389 280 389 584"
)
_WIDTHS = {weight: tuple(map(int, text.split())) for weight, text in (("normal", _REGULAR), ("bold", _BOLD))}


_OTHERS = {"·": 278, "×": 584, "≤": 549, "→": 1000, "←": 1000, "…": 1000}


def width(text: str, size: float, weight: str = "normal") -> float:
    """Width of one line of text in the unit of ``size``."""
    table = _WIDTHS[weight]
    return sum(table[ord(c) - 32] if " " <= c <= "~" else _other(c) for c in text) * size / 1000


def _other(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    if char in _OTHERS:
        return _OTHERS[char]
    return 1000 if unicodedata.east_asian_width(char) in "WF" else 700
