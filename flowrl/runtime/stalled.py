"""Whether a program still learns: updates whose gradient is 0, step after step, change nothing, and nobody is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: So many steps in a row say that it is no accident; a shorter program is told of at its end.
STEPS = 10
_LEAST = 3


def stalled(lines: Sequence[Mapping[str, Any]], *, ended: bool = False) -> str | None:
    """What to tell of the lines of metrics of a program so far, the latest last; None where there is nothing.

    Told once, with the tenth step in a row whose ``grad_norm`` is 0; at the end where all of a shorter program are.
    """
    norms = [norm for line in lines[-STEPS - 1 :] if (norm := _largest(line)) is not None]
    if ended:
        told = _LEAST <= len(norms) < STEPS and not any(norms)
    else:
        told = len(norms) >= STEPS and not any(norms[-STEPS:]) and (len(norms) == STEPS or norms[-STEPS - 1] > 0)
    if not told:
        return None
    return (
        f"the updates of {'all' if ended else 'the last'} {len(norms) if ended else STEPS} steps changed nothing: "
        "grad_norm is 0. Where advantages are within a prompt, all of its rewards are equal: look at rewards and "
        "responses in trajectories.jsonl, at the reward function, at n= and at temperature="
    )


def _largest(line: Mapping[str, Any]) -> float | None:
    """The largest gradient norm of a step; None where no update of it was logged."""
    norms = [v for k, v in line.items() if k.rpartition("/")[2] == "grad_norm" and isinstance(v, (int, float))]
    return max(norms, default=None)
