"""Moves cut and put together into messages of bounded size, in an order in which no process waits for another forever.

All messages of all pairs stand in one order. Whoever takes its own in that order, with any number of them on the way at
a time, cannot be part of a deadlock: of the messages that are not through, the first one has both its ends open. What a
process passes on to its node, after it has got it itself, stands behind everything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...placement.reshard.boxes import Box, split, volume
from ...placement.reshard.senders import Move
from .plan_moves import Moves

#: Bytes from which a piece is a message of its own: it can then leave and arrive without being copied on the way.
ALONE = 1 << 20


@dataclass(frozen=True)
class Piece:
    """A part of a message: ``Piece("model.norm.weight", ((0, 32),), "bfloat16", first=128, last=192)``, in bytes."""

    name: str
    box: Box
    dtype: str
    first: int
    last: int


@dataclass(frozen=True)
class Message:
    """What goes at once from one process to another, ``number`` counted for the pair; ``relayed``: that it has got."""

    source: int
    target: int
    number: int
    pieces: tuple[Piece, ...]
    relayed: bool = False

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.pieces[-1].last


def messages_of(
    moves: Moves, me: int, *, size: int, most: int, shares: Callable[[int, int], bool] | None = None
) -> list[Message]:
    """The messages that a process sends and receives among ``size`` processes, in the order that all keep.

    None has more than ``most`` bytes (or one number). First each process sends to the next one, then to the one behind
    that and so on, one message each, and again while there are more: so nobody is everybody's first target. Between a
    source and a target that share memory (``shares``) large pieces too are put together, as nothing leaves uncopied.
    """
    found = [m for moving in _pairs(moves, me) for m in _packed(moving, moves, most, shares)]
    return sorted(found, key=lambda m: (m.relayed, m.number, (m.target - m.source) % size, m.source))


def fingerprint(messages: Iterable[Message]) -> int:
    """63 bits that both ends of a pair have to agree on before anything is sent."""
    made = hashlib.blake2b(digest_size=8)
    for message in messages:
        made.update(repr(message).encode())
    return int.from_bytes(made.digest(), "big") >> 1


def _pairs(moves: Moves, me: int) -> Iterable[list[Move]]:
    """The moves that one process takes part in, those of one pair together, relayed ones apart, the widest first.

    As every size of a number divides the wider ones, each piece then begins where its numbers may stand.
    """
    found: dict[tuple[int, int, bool], list[Move]] = {}
    for move in moves.moves:
        if not move.local and me in (move.source, move.target):
            found.setdefault((move.source, move.target, move.relayed), []).append(move)
    return (sorted(pair, key=lambda m: -moves.dtypes[m.name][1]) for pair in found.values())


def _packed(
    pair: Sequence[Move], moves: Moves, most: int, shares: Callable[[int, int], bool] | None
) -> Iterable[Message]:
    """The messages of one pair: large boxes are cut, the pieces of small ones put behind each other."""
    source, target, later = pair[0].source, pair[0].target, pair[0].relayed
    found, small, end = 0, list[Piece](), 0
    alone = most + 1 if shares and shares(source, target) else ALONE
    for move in pair:
        dtype, size = moves.dtypes[move.name]
        for box in split(move.box, most // size):
            length = volume(box) * size
            if length >= alone:
                yield Message(source, target, found, (Piece(move.name, box, dtype, 0, length),), later)
                found += 1
                continue
            if end + length > most and small:
                yield Message(source, target, found, tuple(small), later)
                found, small, end = found + 1, [], 0
            small.append(Piece(move.name, box, dtype, end, end + length))
            end += length
    if small:
        yield Message(source, target, found, tuple(small), later)
