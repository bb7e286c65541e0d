"""How long prompts and responses are, from what a script says of itself: the rows of its data, its ``max_tokens``.

No tokenizer is loaded for a forecast. The tokens of a text are reckoned from its characters and the vocabulary of the
model: a small vocabulary has a token for each character, a large one for four of them on average (both assumed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

from ..data.source import Source
from ..errors import FlowError

CHARACTERS = 1024  # entries of a vocabulary, up to which a token is taken to be a character
EACH = 4  # characters of a token of a larger vocabulary


@dataclass(frozen=True)
class Texts:
    """Characters of an average row of a source: ``Texts(rows=32, prompt=6.2)``.

    ``response`` is that of data to learn from, None where responses are sampled. ``rows``: those that were looked at.
    """

    rows: int
    prompt: float
    response: float | None = None

    def tokens(self, characters: float, vocab: int) -> float:
        """Tokens of so many characters, one at least."""
        return max(1.0, characters if vocab <= CHARACTERS else characters / EACH)

    def basis(self, vocab: int) -> str:
        """Return what figures of these texts rest on, in words."""
        each = "a token a character" if vocab <= CHARACTERS else f"{EACH} characters a token"
        return f"{self.rows} rows of the data, {each}"


def texts_of(source: Any) -> Texts | None:
    """The texts of a source, from its first rows; None where they are not known without reading all of it."""
    if not isinstance(source, Source):
        return None
    reading = source.reading
    try:
        rows = source.look()
    except FlowError:  # said with its line when the source is used
        return None
    prompts = [_characters(row.get(reading.column)) for row in rows]
    if not prompts or reading.messages or reading.text:
        return None
    response = None
    if reading.response is not None:
        response = fmean(_characters(row.get(reading.response)) for row in rows)
    return Texts(len(rows), fmean(prompts), response)


def _characters(value: Any) -> int:
    """Characters of a text, or of all messages of a list of them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Sequence):
        messages = cast("Sequence[Any]", value)
        contents = (cast("Mapping[str, Any]", m).get("content") for m in messages if isinstance(m, Mapping))
        return sum(len(text) for text in contents if isinstance(text, str))
    return 0
