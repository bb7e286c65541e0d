"""Whether arguments of ops and losses are valid: words out of a list, weights of 0, prompts with a single row."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ProgramError
from ..graph.ops import allowed
from ..graph.ops.allowed import check_values
from ..graph.ops.signature import CallShape
from ..graph.stand_ins import current_session as sessions

if TYPE_CHECKING:
    from ..batch import Batch

KL_KINDS = ("k1", "k2", "k3")
ANCHORS = ("rollout", "sampling", "old")


def refusal(what: str, fix: str) -> ProgramError:
    """Return the error of an argument that an op or a loss does not take, at the driver's line."""
    return ProgramError(what, at=sessions.caller(), fix=fix)


def is_zero(number: Any) -> bool:
    """Whether a weight is 0 for good: one that the program computes is not."""
    return isinstance(number, (int, float)) and number == 0


def one_of(title: str, name: str, value: Any, words: Sequence[str]) -> str:
    """Return the value if it is one of the words: for what decides which fields an op reads. Raises ProgramError."""
    check_values(title, {name: value}, {name: allowed.one_of(*words)})
    return value


def refuse_lone_rows(title: str, call: CallShape, outcome: str, *, instead: str = "") -> None:
    """Refuse an op that compares the rows of a prompt, where each has one and a trace knows it.

    ``outcome`` is what it would come to: ``every advantage would be 0``. Raises ProgramError.
    """
    if call.rows_each == 1:
        raise refusal(
            f"{title} compares the rows of a prompt, and each has one here: {outcome}.",
            f"Write n=8 in {call.sampled_by}{instead}.",
        )


def warn_of_lone_rows(title: str, batch: Batch, outcome: str, *, least: int = 2) -> None:
    """Warn where several prompts of a real call have less than ``least`` rows each, which no trace could know.

    ``outcome`` is as in :func:`refuse_lone_rows`.
    """
    sizes = Counter(key[0] for key in batch.keys).values()
    if len(sizes) > 1 and max(sizes) < least:
        has = "one" if max(sizes) == 1 else f"{max(sizes)} at most"
        warnings.warn(
            f"{title} compares the rows of a prompt, and each of these {len(sizes)} prompts has {has}: {outcome}. "
            f"Sample at least {least} rows of each.",
            stacklevel=3,
        )
