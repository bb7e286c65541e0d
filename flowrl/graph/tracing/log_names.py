"""What a program logs: under which names, whose numbers they are, and where two of them would have one name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ...errors import At, ProgramError
from ..ops.check_arguments import described
from ..stand_ins.values import BatchValue, FieldValue, MetricsValue, find

#: Names that every line of ``metrics.jsonl`` has or may have.
ALWAYS = ("program", "step", "seconds", "response_length", "tokens_per_second")
#: What calls of no worker are called in a graph.
LIBRARIES = ("rl", "batch", "data", "user")


@dataclass(frozen=True)
class Logged:
    """One thing that ``flow.log`` was given: ``Logged("critic", metrics, "critic.update", At("ppo.py", 34))``.

    A number is recorded under its name. Metrics are recorded under theirs, after that name and a slash where there is
    one: ``critic/loss``. ``of`` is the call that made them; empty for numbers, and for metrics made by hand.
    """

    name: str
    value: Any
    of: str
    at: At

    @property
    def is_metrics(self) -> bool:
        """Whether it has several numbers."""
        return isinstance(self.value, (MetricsValue, Mapping))

    def under(self, entry: str) -> str:
        """The name of one of its metrics in a record."""
        return f"{self.name}/{entry}" if self.name else entry


def logged(metrics: Sequence[Any], values: Mapping[str, Any], at: At) -> list[Logged]:
    """The arguments of one ``flow.log`` as they will be recorded. Raises ProgramError for what cannot be.

    Names depend on this line alone: one update keeps the names of its metrics, those of several are told apart by their
    workers.
    """
    entries: list[Logged] = []
    for entry in metrics:
        if not isinstance(entry, (MetricsValue, Mapping)):
            what = f"flow.log takes metrics and named numbers, and was given {described(entry)}."
            raise ProgramError(what, at=at, fix="Give it a name: flow.log(step, name=...).")
        of = str(getattr(getattr(cast("Any", entry), "ref", None), "title", ""))
        name = "" if len(metrics) == 1 else _prefix(_owner(of), entries, at)
        _refuse_unrecordable(name, entry, at)
        entries.append(Logged(name, entry, of, at))
    for name, value in values.items():
        if isinstance(value, BatchValue):
            fix = f"Log a number of it: {name}=batch.rewards.mean()."
            raise ProgramError(f"flow.log: '{name}' is a batch.", at=at, fix=fix)
        if isinstance(value, FieldValue):
            raise ProgramError(
                f"flow.log: '{name}' has a value for each row, and a record has one number.",
                at=at,
                fix=f"Log a number of it, such as its mean: {name}=....mean().",
            )
        _refuse_unrecordable(name, value, at)
        of = str(getattr(value.ref, "title", "")) if isinstance(value, MetricsValue) else ""
        entries.append(Logged(name, value, of, at))
    return entries


def _refuse_unrecordable(name: str, value: Any, at: At, *, nested: bool = False) -> None:
    """Raise ProgramError for a value of plain Python that a line of ``metrics.jsonl`` cannot hold."""
    if next(find(value), None) is not None:  # it is known when its call is done, and is a number then
        return
    if isinstance(value, Mapping) and not nested:
        for entry, inner in cast("Mapping[str, Any]", value).items():
            _refuse_unrecordable(f"{name}/{entry}" if name else entry, inner, at, nested=True)
        return
    of: Any = cast("Any", value)
    if hasattr(of, "item"):  # an array or a tensor
        count = int(of.numel() if hasattr(of, "numel") else getattr(of, "size", 1))
        if count != 1:
            what = f"flow.log: '{name}' has {count} values, and a record has one number."
            raise ProgramError(what, at=at, fix="Log a number of it, such as its mean: x.mean().")
    else:
        try:
            json.dumps(of)
        except (TypeError, ValueError):
            what = f"flow.log: '{name}' is {described(of)}, which a record cannot hold."
            raise ProgramError(what, at=at, fix="Log a number or a text: str(...).") from None


def _prefix(owner: str, before: Sequence[Logged], at: At) -> str:
    """The name before the metrics of a worker: its own, with a number from the second time on."""
    number = 1 + sum(_owner(entry.of) == owner for entry in before)
    name = owner if number == 1 else f"{owner}_{number}"
    if any(entry.name == name for entry in before):
        fix = f"Give them names: flow.log(step, {owner}=..., {owner}_again=...)."
        raise ProgramError(f"flow.log: two of these metrics would be called '{name}/...'.", at=at, fix=fix)
    return name


def _owner(of: str) -> str:
    """The worker behind metrics; those of functions and those made by hand are called ``metrics``."""
    worker = of.partition(".")[0]
    return worker if worker and worker not in LIBRARIES else "metrics"


class Names:
    """The names in the records of one or more steps: each means one thing in a step, and the same over the run.

    ``meanings`` are those of the steps before, by name: the call that metrics are of, and the line that logged them.

    >>> names = Names({})
    >>> names.add(7, "loss", "actor.update", At("a.py", 3))
    >>> print(names.add(7, "loss", "", At("a.py", 4)).what)
    flow.log: a step has two numbers called 'loss': of actor.update (line 3), and the keyword loss= (line 4).
    """

    def __init__(self, meanings: dict[str, tuple[str, At]]) -> None:
        self._meanings = meanings
        self._steps: dict[Any, dict[str, tuple[str, At]]] = {}

    def add(self, step: Any, name: str, of: str, at: At) -> ProgramError | None:
        """Note a name. Returns what is wrong with it, if anything."""
        if name in ALWAYS:
            return ProgramError(
                f"flow.log: every step has its own '{name}'.", at=at, fix=f"Use another name, such as my_{name}."
            )
        here = self._steps.setdefault(step, {})
        if name in here:
            return _collision(name, here[name], (of, at))
        here[name] = of, at
        first = self._meanings.setdefault(name, (of, at))
        if first[0] == of:
            return None
        return ProgramError(
            f"flow.log: '{name}' is {_meaning(name, *first)} in some steps, and {_meaning(name, of, at)} in others.",
            at=at,
            fix=_fix(of or first[0]),
        )


def _collision(name: str, first: tuple[str, At], second: tuple[str, At]) -> ProgramError:
    if first[1] == second[1] and first[0] == second[0]:
        return ProgramError(
            f"flow.log: this line is run more than once in a step, and its '{name}' is recorded once.",
            at=second[1],
            fix="Log once in a step: gather the numbers in a list first, or give each a name of its own.",
        )
    return ProgramError(
        f"flow.log: a step has two numbers called '{name}': {_meaning(name, *first)}, and {_meaning(name, *second)}.",
        at=second[1],
        fix=_fix(second[0] or first[0]),
    )


def _meaning(name: str, of: str, at: At) -> str:
    return f"{'of ' + of if of else f'the keyword {name}='} (line {at.line})"


def _fix(of: str) -> str:
    """Return the fix of two equal names: metrics under a name, or another keyword."""
    owner = of.partition(".")[0]
    if not owner:
        return "Use another name for one of them."
    return f"Name the metrics, flow.log(step, {owner}=metrics), or use another keyword."
