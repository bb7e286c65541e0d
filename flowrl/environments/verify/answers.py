r"""Grades short answers by comparison: a text, a number, a letter of a choice; and finds the answer in a response."""

from __future__ import annotations

import math
import re
from fractions import Fraction

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+(?![\d.]))?\s*%?"
)
_LETTER = re.compile(r"(?<![A-Za-z0-9'])\(?([A-Z])\)?(?![A-Za-z0-9'])")
_LONGEST = 10_000  # characters of a response that are looked through, from its end


def final_answer(response: str) -> str:
    r"""The answer in a response: what is in its last ``\boxed{}``, else in its last ``<answer>``, else behind its last
    ``####``; all of it where it has none of them.

    >>> from flowrl.environments import verify
    >>> verify.final_answer(r"So x is \boxed{\frac{1}{2}}."), verify.final_answer("2+2\n#### 4")
    ('\\frac{1}{2}', '4')
    """
    boxed = _boxed(response)
    if boxed is not None:
        return boxed.strip()
    if tagged := _TAGGED.findall(response[-_LONGEST:]):
        return tagged[-1].strip()
    return response.rpartition("####")[2].strip()


def _boxed(response: str) -> str | None:
    """What is in the last box that is closed; None without one."""
    text, opened, found = response[-_LONGEST:], list[tuple[bool, int]](), (-1, -1)
    for brace in re.finditer(r"(\\boxed)?\{|\}", text):
        if brace[0] != "}":
            opened.append((brace[1] is not None, brace.end()))
        elif opened:
            is_box, begin = opened.pop()
            if is_box and begin > found[0]:
                found = begin, brace.start()
    return text[found[0] : found[1]] if found[0] >= 0 else None


def exact(response: str, answer: str, *, ignore_case: bool = False) -> float:
    """1 where the answer of a response is the text that is expected, else 0; runs of white space are one blank.

    >>> fl.environments.verify.exact("It is a short name. #### Ada  Lovelace", "Ada Lovelace")
    1.0
    """
    given, expected = (" ".join(text.split()) for text in (final_answer(response), str(answer)))
    if ignore_case:
        given, expected = given.casefold(), expected.casefold()
    return float(given == expected)


def numeric(response: str, answer: str | float, *, relative: float = 1e-6, absolute: float = 0.0) -> float:
    """1 where the last number of a response's answer is the one that is expected, else 0.

    ``1,234.5``, ``6e-3``, ``3/4`` and ``75%`` are numbers. They may differ by ``relative`` of the larger one, or by
    ``absolute``. Raises ValueError where what is expected is no number.

    >>> fl.environments.verify.numeric("That makes 3/4 of it.", "0.75")
    1.0
    """
    expected = number_in(str(answer))
    if expected is None:
        raise ValueError(f"the expected answer {answer!r} is no number")
    given = number_in(final_answer(response))
    if given is None:
        return 0.0
    return float(given == expected or math.isclose(given, expected, rel_tol=relative, abs_tol=absolute))


def number_in(text: str) -> float | None:
    """The last number in a text; None without one."""
    found = _NUMBER.findall(text[-_LONGEST:])
    if not found:
        return None
    written = found[-1].replace(",", "").replace(" ", "")
    percent = written.endswith("%")
    above, _, below = written.rstrip("%").partition("/")
    try:
        value = float(Fraction(above) / Fraction(below or "1")) if "e" not in above.lower() else float(above)
    except (ZeroDivisionError, OverflowError, ValueError):
        return None
    return (value / 100 if percent else value) if math.isfinite(value) else None


def choice(response: str, answer: str) -> float:
    """1 where the letter that a response chooses is the one that is expected, else 0.

    It is the last capital letter that stands alone, perhaps in parentheses, in the response's answer. Raises ValueError
    where what is expected is no such letter.

    >>> fl.environments.verify.choice("Both A and B look right; the answer is (B).", "B")
    1.0
    """
    expected = _LETTER.findall(str(answer).strip())
    if len(expected) != 1:
        raise ValueError(f"the expected answer {answer!r} is no letter of a choice")
    given = _LETTER.findall(final_answer(response)[-_LONGEST:])
    return float(bool(given) and given[-1] == expected[0])
