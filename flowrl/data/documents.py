"""Documents to learn from: long texts as rows of a bounded number of tokens, of each on its own or packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A part of a document, or of documents that follow each other: ``Piece(0, 1, [2, 17, 9, 3])``.

    ``document`` is the number of the one that its second token is of, ``part`` counts the pieces that have the same
    number. The first token is there to begin with, and is not learned: the last one of the piece before.
    """

    document: int
    part: int
    tokens: list[int]


def cut_documents(documents: Sequence[Sequence[int]], *, begin: int, length: int, pack: bool) -> list[Piece]:
    """Return rows of at most ``length`` tokens that have every token of the documents once after their first one.

    ``begin`` is put before the first token. With ``pack`` the documents follow each other, and a row may have parts of
    several; only the last row is shorter. Without, each row has tokens of one document.

    >>> [piece.tokens for piece in cut_documents([[5, 6, 7, 3], [8, 3]], begin=3, length=4, pack=True)]
    [[3, 5, 6, 7], [7, 3, 8, 3]]
    >>> [piece.tokens for piece in cut_documents([[5, 6, 7, 3], [8, 3]], begin=3, length=4, pack=False)]
    [[3, 5, 6, 7], [7, 3], [3, 8, 3]]
    """
    if not pack:
        return [
            Piece(number, part, tokens)
            for number, document in enumerate(documents)
            for part, tokens in enumerate(_windows([begin, *document], length))
        ]
    owners = [number for number, document in enumerate(documents) for _ in document]
    joined = [begin, *(token for document in documents for token in document)]
    pieces: list[Piece] = []
    for number, tokens in enumerate(_windows(joined, length)):
        owner = owners[number * (length - 1)]
        part = pieces[-1].part + 1 if pieces and pieces[-1].document == owner else 0
        pieces.append(Piece(owner, part, tokens))
    return pieces


def _windows(tokens: list[int], length: int) -> Iterator[list[int]]:
    """Parts of so many tokens, each beginning with the last token of the one before."""
    for first in range(0, len(tokens) - 1, length - 1):
        yield tokens[first : first + length]
