"""Marks functions of an environment: what ends an episode, what it is worth, and what is only told."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ..errors import WorkerError
from ..graph.script.site import defined_at

F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["stop", "reward", "metric", "group_reward"]


@dataclass(frozen=True)
class Hook:
    """A marked function: ``Hook("reward", "right", 1.0, ("state", "answer"))``, with the names of its parameters.

    ``takes`` are those with a default, which it is given where there is such a column; ``takes_all`` has ``**columns``.
    """

    kind: Kind
    name: str
    weight: float
    asks: tuple[str, ...]
    takes: tuple[str, ...] = ()
    takes_all: bool = False


def stop(fn: F) -> F:
    """Mark a function that says whether an episode is over; its name is then the ``finish_reason``.

    >>> class Talk(fl.environments.Environment):
    ...     @fl.environments.stop
    ...     def said_goodbye(self, state):
    ...         return "bye" in state.response
    """
    return _marked(fn, "stop", 0.0)


def reward(weight: float = 1.0) -> Callable[[F], F]:
    """Mark a function whose number, times ``weight``, is a part of the reward of an episode.

    Its parameters are found by name: ``state``, ``response`` (the latest text of the policy), ``responses`` (all of
    them), and columns of the data. One with a default is left out where there is none; ``**columns`` takes all.

    >>> class Sum(fl.environments.Environment):
    ...     @fl.environments.reward(weight=0.5)
    ...     def right(self, response, answer):
    ...         return float(response.strip() == answer)
    """
    if callable(weight):
        raise WorkerError("@reward is written without a weight.", fix="Write @reward(), or @reward(weight=0.5).")
    number = _weight(weight, "reward")
    return lambda fn: _marked(fn, "reward", number)


def metric(fn: F) -> F:
    """Mark a function whose number is told and no part of the reward. Its parameters are those of :func:`reward`.

    >>> class Sum(fl.environments.Environment):
    ...     @fl.environments.metric
    ...     def length(self, response):
    ...         return len(response)
    """
    return _marked(fn, "metric", 0.0)


def group_reward(weight: float = 1.0) -> Callable[[F], F]:
    """Mark a function of the ``states`` of all episodes of a prompt, which gives a number for each.

    It is asked when all of them have ended; those that failed are not among them.

    >>> class Sum(fl.environments.Environment):
    ...     @fl.environments.group_reward(weight=0.1)
    ...     def shortest(self, states):
    ...         least = min(len(state.response) for state in states)
    ...         return [float(len(state.response) == least) for state in states]
    """
    if callable(weight):
        fix = "Write @group_reward(), or @group_reward(weight=0.5)."
        raise WorkerError("@group_reward is written without a weight.", fix=fix)
    number = _weight(weight, "group_reward")
    return lambda fn: _marked(fn, "group_reward", number)


def _weight(weight: float, kind: str) -> float:
    """The weight as a number. Raises WorkerError for what is none, or not finite."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise WorkerError(f"@{kind}(weight={weight!r}): a weight is a number.", fix=f"Write @{kind}(weight=0.5).")
    return float(weight)


def _marked(fn: F, kind: Kind, weight: float) -> F:
    asks: list[str] = []
    parameters = inspect.signature(fn).parameters.values()
    takes = tuple(p.name for p in parameters if p.default is not p.empty)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for parameter in list(parameters)[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise WorkerError(
                f"{fn.__name__}: its parameter '{parameter.name}' cannot be given by name.",
                at=defined_at(fn),
                fix="Give parameters names: state, response, or columns of the data.",
            )
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            asks.append(parameter.name)
    if kind == "stop" and asks != ["state"]:
        raise WorkerError(
            f"@stop {fn.__name__}({', '.join(asks)}) is asked with the state alone.",
            at=defined_at(fn),
            fix=f"Write def {fn.__name__}(self, state).",
        )
    if kind == "group_reward" and asks != ["states"]:
        raise WorkerError(
            f"@group_reward {fn.__name__}({', '.join(asks)}) is asked with the states of a prompt's episodes.",
            at=defined_at(fn),
            fix=f"Write def {fn.__name__}(self, states), which returns a list with a number for each.",
        )
    fn.__flowrl_hook__ = Hook(kind, fn.__name__, weight, tuple(asks), takes, takes_all)  # type: ignore[attr-defined]
    return fn


def hooks_of(cls: type) -> Mapping[str, Hook]:
    """The marked functions of a class by name, those of its bases first, in the order in which they are written."""
    found: dict[str, Hook] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if name in found and not hasattr(value, "__flowrl_hook__"):
                del found[name]  # a subclass has put something else in its place
            elif hasattr(value, "__flowrl_hook__"):
                found[name] = value.__flowrl_hook__
    return found
