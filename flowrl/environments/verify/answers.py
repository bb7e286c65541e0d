r"""Grades short answers by comparison: a text, a number, a letter of a choice; and finds the answer in a response."""

from __future__ import annotations

import math
import re
import unicodedata

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:(?:{_WHOLE}(?:\.\d*)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+)?)"
#: A sign belongs to a number where nothing before it makes it a range or a difference, and no line makes it a bullet.
_SIGN = r"(?<![\w)%°-])(?<!\d\$)(?:[-+]|(?<![\w)%°$*}\]-] )(?<!\n)(?<!\n )[-+] )\$?\(?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})?(?:(?P<whole>{_WHOLE}) (?=\d+ ?/ ?\d))?(?P<above>{_DECIMAL})(?: ?/ ?(?P<below>-?{_DECIMAL}))?"
    r"(?P<percent> ?%)?"
)
_LATEX_NUMBER = rf"(?:\{{ ?(-?{_DECIMAL}) ?\}}|(\d))"
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
#: What is written otherwise in Unicode or LaTeX, and how it is written plainly, in this order.
_PLAINLY = [
    (re.compile(pattern), plainly)
    for pattern, plainly in (
        ("[−–]", "-"),
        ("[¼-¾⅐-⅞]", lambda found: " " + unicodedata.normalize("NFKC", found[0])),
        ("[⁄∕]", "/"),
        ("[⁰¹²³⁴-⁹⁺⁻]+", lambda found: "^" + found[0].translate(_RAISED)),
        (r"\\([%$])", r"\1"),
        (r"\\(?:left|right)\b", ""),
        (r"\\!|\{,\}|(?<=\d)(?:\\,|[\u2009\u202f])(?=\d)", ""),  # between thousands
        (r"(?:\\[,;: ]|~|[^\S\n])+", " "),
        (r" ?\^ ?\{? ?(?:\\circ|(?:\\(?:text|mathrm)\{)?(?:st|nd|rd|th))\b ?\}{0,2}", ""),  # of degrees and ordinals
        (r"([^\W\d_] ?\}?) ?\^ ?(?:\{[^{}]*\}|[-+]?\w+)", r"\1"),  # of units
        (
            rf"(?<![\d.,/])(?<!/ )({_DECIMAL}) ?(?:\\times|\\cdot|[×·*x]) ?10 ?(?:\^|\*\*) ?"
            r"(?:\{ ?([-+]?\d+) ?\}|([-+]?\d+))",
            r"\1e\2\3",
        ),
        (r"(?<=\d) ?(?=\\[cdt]?frac)", " "),  # of mixed numbers
        (rf"\\[cdt]?frac ?{_LATEX_NUMBER} ?{_LATEX_NUMBER}", r"\1\2/\3\4"),
    )
]
#: What makes a number a part of what is not read: a power, a root, a multiple of pi, a fraction of something else.
_BEFORE = re.compile(r"(?:(?:\^|[\d)]\*\*|√|\\sqrt(?: ?\[\w*\])?|/)[ {(]*[-+]?|\\[cdt]?frac ?\{? ?|\} ?\{ ?)$")
_PARTS = {"whole": "0", "above": "0", "below": "1"}  # of a number, and what they are where they are not written
_BEHIND = re.compile(r"[ })]*(?:\^|√|\\sqrt|\\pi|π)")
_LETTER = re.compile(r"(?<![A-Za-z0-9'’])\(?([A-Z])\)?(?![A-Za-z0-9'’])")
_DECORATION = re.compile(r"\\[a-z]+ ?\{|[*_$`\"“”\[\]{}]")
#: "The answer is B", "Answer: (B)"; but not "Answer: I think" or "the answer is B?".
_SAID = re.compile(
    r"\b(?i:answer|choice|option)(?: (?i:is|(?:must|should|would) be)\b| ?[:=])\s?:?\s?"
    r"(?i:(?:the|option|choice|letter) )*\(?(?!I [a-z])([A-Z])(?![A-Za-z0-9'’?])"
)
_BEGINS = re.compile(r"\(?(?!I,)([A-Z])(?:[.):,]|$)", re.MULTILINE)
_LISTED = re.compile(r"^(?:[-•] )?\(?([A-Z])[.):]|(?<![\w'’(])([A-Z])[):]", re.MULTILINE)
_PRONOUN, _WORD = re.compile("I [a-z]"), re.compile("I|A [a-z]")
_IN_PARENTHESES = re.compile(r"(?<![\w'’])\(([A-Z])\)")
_LONGEST = 10_000  # characters of a response that are looked through, from its end


def final_answer(response: str) -> str:
    r"""The answer in a response: what is in its last ``\boxed{}``, else in its last ``<answer>``, else behind its last
    ``####``; all of it where it has none of them.

    >>> from flowrl.environments import verify
    >>> verify.final_answer(r"So x is \boxed{\frac{1}{2}}."), verify.final_answer("2+2\n#### 4")
    ('\\frac{1}{2}', '4')
    """
    marked = marked_answer(response)
    return response.strip() if marked is None else marked


def marked_answer(response: str) -> str | None:
    """The final answer that a response marks: in a box or a tag, or behind ``####``; None where it marks none."""
    boxed = boxed_in(response)
    if boxed is not None:
        return boxed.strip()
    if tagged := _TAGGED.findall(response[-_LONGEST:]):
        return tagged[-1].strip()
    return response.rpartition("####")[2].strip() if "####" in response else None


def answer_value(answer: str) -> float | str:
    r"""What equal answers have in common: their number where they are nothing else, else their text.

    Runs of white space in a text are one blank.

    >>> answer_value(r"\frac{1}{2}"), answer_value("x  =\n7")
    (0.5, 'x = 7')
    """
    whole = _NUMBER.fullmatch(_plain(answer[-_LONGEST:]).strip(" $."))
    number = None if whole is None else number_in(answer)
    return " ".join(answer.split()) if number is None else number


def boxed_in(response: str) -> str | None:
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

    ``1,234.5``, ``6e-3``, ``3/4``, ``2 1/2`` and ``75%`` are numbers, also in LaTeX. They may differ by ``relative`` of
    the larger one, or by ``absolute``. Raises ValueError where what is expected is no number.

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
    """The last number in a text; None without one, or where it is a part of what is not read, such as a root."""
    text = _plain(text[-_LONGEST:])
    *_, found = (None, *_NUMBER.finditer(text))
    if found is None or _BEFORE.search(text[: found.start()][-40:]) or _BEHIND.match(text, found.end()):
        return None
    whole, above, below = (float((found[name] or empty).replace(",", "")) for name, empty in _PARTS.items())
    try:
        value = above / below
    except ZeroDivisionError:
        return None
    if above < below:
        value += whole  # a mixed number
    if found["percent"]:
        value /= 100
    if (found["sign"] or "").startswith("-"):
        value = -value
    return value if math.isfinite(value) else None


def _plain(text: str) -> str:
    """A text as it is written without LaTeX and Unicode, as far as numbers have them."""
    for pattern, plainly in _PLAINLY:
        text = pattern.sub(plainly, text)
    return text


def choice(response: str, answer: str) -> float:
    """1 where the letter that a response chooses is the one that is expected, else 0.

    It is the one behind the last "answer is" or "Answer:", else the one that the response's answer begins with, else
    the last one in parentheses, else the last capital letter that stands alone, where it is no word, as I and A may be.
    Raises ValueError where what is expected is no such letter.

    >>> fl.environments.verify.choice("Both A and B look right; the answer is (B).", "B")
    1.0
    """
    expected = _LETTER.findall(str(answer).strip())
    if len(expected) != 1:
        raise ValueError(f"the expected answer {answer!r} is no letter of a choice")
    return float(_letter_in(final_answer(response)[-_LONGEST:]) == expected[0])


def _letter_in(text: str) -> str | None:
    """The letter that a text chooses; None without one."""
    lines = (" ".join(line.split()) for line in _DECORATION.sub("", text).splitlines())
    text = "\n".join(line for line in lines if line)
    if said := _SAID.findall(text):
        return said[-1]
    begins = _BEGINS.match(text)
    if begins and len({first or second for first, second in _LISTED.findall(text)} | {begins[1]}) == 1:
        return begins[1]
    if found := _IN_PARENTHESES.findall(text):
        return found[-1]
    alone = [text[found.start(1) :][:3] for found in _LETTER.finditer(text)]  # with two characters behind it
    alone = [found for found in alone if not _PRONOUN.match(found)]
    sure = [found for found in alone if not _WORD.match(found)]
    return (sure or alone)[-1][0] if alone else None
