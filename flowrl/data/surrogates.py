"""Half of a surrogate pair: JSON can write one (``\\ud800``), Python keeps it, and no tokenizer of UTF-8 takes it."""

from __future__ import annotations

from ..errors import At, DataError


def half_of_pair(text: str) -> int | None:
    """Return where a text has half of a surrogate pair; None where nowhere.

    >>> half_of_pair("a" + chr(0xD800)), half_of_pair("a")
    (1, None)
    """
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def half_error(what: str, text: str, place: int, at: At | None = None) -> DataError:
    """Return the error of a text with half of a surrogate pair at ``place``."""
    around = text[max(0, place - 20) : place + 20]
    return DataError(
        f"{what} has half of a surrogate pair at character {place}, which is no character: {around!a}.",
        at=at,
        fix='Mend the data: text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") has none.',
    )
