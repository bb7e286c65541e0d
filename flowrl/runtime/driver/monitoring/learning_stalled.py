"""Whether a program still learns: gradients of 0, or rewards that never differ, step after step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: So many steps in a row say that it is no accident; a shorter program is told of at its end.
STEPS = 10
_LEAST = 3


def stalled(lines: Sequence[Mapping[str, Any]], *, ended: bool = False) -> str | None:
    """What to tell of the lines of metrics of a program so far, the latest last; None where there is nothing.

    Told once: with the tenth step in a row whose ``grad_norm`` is 0, or whose ``reward`` is the same number; at the end
    where all of a shorter program are.
    """
    steps = f"the updates of {'all {n}' if ended else 'the last {n}'} steps changed nothing: grad_norm is 0. "
    found = [(line, _largest(line)) for line in list(lines)[-STEPS - 1 :]]
    trained = [line for line, norm in found if norm is not None]
    norms = [norm for _, norm in found if norm is not None]
    if (count := _in_a_row(norms, lambda norm, _: norm == 0, ended=ended)) is not None:
        return steps.format(n=count) + (
            "Where advantages are within a prompt, all of its rewards are equal: look at rewards and responses in "
            "trajectories.jsonl, at the reward function, at n= and at temperature="
        )
    rewards = [reward for line in trained if (reward := _reward(line)) is not None]
    if (count := _in_a_row(rewards, lambda reward, last: reward == last, ended=ended)) is not None:
        return (
            f"reward is {rewards[-1]:g} in {'all' if ended else 'each of the last'} {count} steps: where rewards do "
            "not differ, other terms of the loss alone move the weights. Look at rewards and responses in "
            "trajectories.jsonl, at the reward function and at temperature="
        )
    return None


def _in_a_row(numbers: Sequence[float], alike: Callable[[float, float], bool], *, ended: bool) -> int | None:
    """How many steps in a row to tell of, the last ones; None where it is too early, was told already, or is not so."""
    latest = numbers[-STEPS:]
    if len(latest) < (_LEAST if ended else STEPS) or not all(alike(number, latest[-1]) for number in latest):
        return None
    if ended:
        return len(latest) if len(numbers) < STEPS else None
    return None if len(numbers) > STEPS and alike(numbers[-STEPS - 1], latest[-1]) else STEPS


def _reward(line: Mapping[str, Any]) -> float | None:
    """The mean reward that a step has logged, under that name; None where there is none."""
    value = line.get("reward")
    return value if isinstance(value, (int, float)) else None


def _largest(line: Mapping[str, Any]) -> float | None:
    """The largest gradient norm of a step; None where no update of it was logged."""
    norms = [v for k, v in line.items() if k.endswith("grad_norm") and k.rpartition("/")[2] == "grad_norm"]
    return max((norm for norm in norms if isinstance(norm, (int, float))), default=None)
