"""What a user wrote, checked: words out of a list, weights that are 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ProgramError, near
from ..graph import session as sessions

KL_KINDS = ("k1", "k2", "k3")
ANCHORS = ("rollout", "old")


def is_zero(number: Any) -> bool:
    """Whether a weight is 0 for good: one that the program computes is not."""
    return isinstance(number, (int, float)) and number == 0


def one_of(title: str, name: str, said: Any, words: Sequence[str]) -> str:
    """``said``, where it is one of the words. Raises ProgramError with the nearest of them."""
    if said not in words:
        meant = near(str(said), words) or words[0]
        raise ProgramError(
            f"{title}: {name}={said!r} is none of {', '.join(words)}.",
            at=sessions.caller(),
            fix=f'Write {name}="{meant}".',
        )
    return said
