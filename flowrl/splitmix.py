"""SplitMix64 on many numbers at once: whole numbers of 64 bits whose bits are mixed, modulo 2**64."""

from __future__ import annotations

from typing import Any

#: The step from one number to the next (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195).
GOLDEN = -0x61C8864680B583EB


def mix(z: Any) -> Any:
    """Return the finish of SplitMix64 of i64, a tensor or an array: every bit of one moves about half of those out.

    >>> import torch
    >>> mix(torch.tensor([GOLDEN])).item()
    -2152535657050944081
    """
    for shift, mask, factor in ((30, 0x3FFFFFFFF, -0x40A7B892E31B1A47), (27, 0x1FFFFFFFFF, -0x6B2FB644ECCEEE15)):
        high = z >> shift  # a new one; what follows is in place, in the caches of a CPU
        high &= mask
        high ^= z
        high *= factor
        z = high
    high = z >> 31
    high &= 0x1FFFFFFFF
    high ^= z
    return high
