"""What the words of a question say: texts, numbers and the filter of rows. Words that say nothing are refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from .search_rows import ORDERS, Filter

LABEL = "is."  # before the name of a label: ``is.finish_reason=length``
ALSO = ("run", "token", "kind", "silent", "page")  # words beside a filter
LONGEST = 200  # characters of a word that a message repeats

Words = Mapping[str, Sequence[str]]

#: The bounds of a filter: what is bounded, and the words for the least value and the largest.
_BOUNDS = (
    ("steps", "first", "last"),
    ("rewards", "least", "most"),
    ("numbers of tokens", "min_tokens", "max_tokens"),
)


class BadQuestionError(Exception):
    """A question that has no answer: ``status`` is that of HTTP."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def text_of(words: Words, name: str) -> str:
    """The text of a word, the first where there are several; empty where there is none."""
    return (words.get(name) or ("",))[0]


def number_of(words: Words, name: str) -> float | None:
    """The number of a word; None where there is none. Raises BadQuestionError for what is no finite number."""
    text = text_of(words, name)
    return _as_number(text, name) if text else None


def whole_of(words: Words, name: str) -> int | None:
    """The whole number of a word; None where there is none. Raises BadQuestionError for what is none."""
    number = number_of(words, name)
    if number is not None and not number.is_integer():
        raise BadQuestionError(f"{name}={_shown(text_of(words, name))} is no whole number.")
    return None if number is None else int(number)


def filter_of(words: Words, labels: Mapping[str, Collection[str]]) -> Filter:
    """The filter of rows that the words say; ``labels`` are the names and values that the rows of the program have.

    Raises BadQuestionError, which says what is wrong and what there is.
    """
    order = text_of(words, "order") or "newest"
    if order not in ORDERS:
        raise BadQuestionError(f"There is no order '{_shown(order)}'; there are {', '.join(ORDERS)}.")
    bounds = [name for _, *names in _BOUNDS for name in names]
    known = {"program", "text", "order", "after", *bounds, *ALSO}
    for name, values in words.items():
        if name.startswith(LABEL):
            continue
        if name not in known:
            has = ", ".join([*bounds, f"{LABEL}NAME"])
            raise BadQuestionError(f"There is no filter '{_shown(name)}'; there are {has}.")
        if len(values) > 1 and name != "after":
            raise BadQuestionError(f"{name}= is there {len(values)} times, and one of them would count.")
    asked = Filter(
        text_of(words, "program"),
        text_of(words, "text"),
        order,
        whole_of(words, "first"),
        whole_of(words, "last"),
        number_of(words, "least"),
        number_of(words, "most"),
        whole_of(words, "min_tokens"),
        whole_of(words, "max_tokens"),
        _labels(words, labels),
        _after(words),
    )
    for (_, least, most), (what, low, high) in zip(asked.bounds, _BOUNDS, strict=True):
        if least is not None and most is not None and least > most:
            raise BadQuestionError(f"No {what} are from {least:g} to {most:g}: {low} is above {high}.")
    return asked


def _labels(words: Words, labels: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """The labels that are asked for. While there are no rows at all nothing is said of them."""
    asked = {name.removeprefix(LABEL): list(values) for name, values in words.items() if name.startswith(LABEL)}
    for name, values in asked.items() if labels else ():
        if name not in labels:
            has = ", ".join(map(_shown, labels))
            raise BadQuestionError(f"Rows are not filtered by '{_shown(name)}'; they are by {has}.")
        for value in values:
            if value not in labels[name]:
                has = ", ".join(map(_shown, labels[name]))
                raise BadQuestionError(f"No row has '{_shown(value)}' as its {_shown(name)}; there are {has}.")
    return asked


def _after(words: Words) -> tuple[float, int] | None:
    after = words.get("after") or ()
    if len(after) not in (0, 2):
        raise BadQuestionError("after= is there twice: a value of the order, and the number of a row.")
    return (_as_number(after[0], "after"), int(_as_number(after[1], "after"))) if after else None


def _as_number(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise BadQuestionError(f"{name}={_shown(text)} is no number.") from None
    if not math.isfinite(number) or abs(number) > 1 << 62:
        raise BadQuestionError(f"{name}={_shown(text)} is no number that can be asked for.")
    return number


def _shown(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
