"""In which order rows are drawn: permutations that depend on the seed of a source and a few numbers alone."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence


def order_seed(*numbers: int) -> int:
    """Return a seed that depends on some numbers only, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=16).digest(), "little")


def shuffled(size: int, seed: int, epoch: int) -> Sequence[int]:
    """Return the order of an epoch: a permutation of range(size) that depends on seed and epoch only."""
    order = array("Q", range(size))
    random.Random(order_seed(seed, epoch)).shuffle(order)
    return order
