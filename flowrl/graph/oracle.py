"""Which way a traced program goes where it asks for a value: every outcome is tried, in a run of the program each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import At

SAME_IN_A_ROW = 2  # how often a loop may go round on one condition within a step


@dataclass(frozen=True)
class Decision:
    """An outcome on a path: ``Decision("step % 50 == 0", True, At("grpo.py", 21), iteration=1)``."""

    condition: str
    outcome: bool
    at: At
    iteration: int
    calls: frozenset[int] = frozenset()  # whose results the condition looks at
    time: int = 1  # how often this line asked it in the step
    forced: bool = False  # it ends a loop that would go on for ever

    @property
    def label(self) -> str:
        """The condition in words of the program."""
        said = self.condition if self.outcome else f"not ({self.condition})"
        return said + " again" * (self.time - 1)


@dataclass
class Path:
    """One run of the program: the outcomes it was told, and those it went on to take."""

    told: tuple[bool, ...] = ()
    taken: list[Decision] = field(default_factory=list[Decision])
    free: list[bool] = field(default_factory=list[bool])  # whether the other outcome is worth a run
    _known: dict[str, bool] = field(default_factory=dict[str, bool])
    _rounds: dict[tuple[str, int, int], list[bool]] = field(default_factory=dict[tuple[str, int, int], "list[bool]"])

    def ask(self, key: str, condition: str, at: At, iteration: int, calls: frozenset[int] = frozenset()) -> bool:
        """The outcome of a condition; the same one for the same ``key`` throughout the path."""
        rounds = self._rounds.setdefault((at.file, at.line, iteration), [])
        looping = len(rounds) >= SAME_IN_A_ROW and len(set(rounds[-SAME_IN_A_ROW:])) == 1
        if looping:  # a loop that would go on for ever on this path
            outcome, open_ = not rounds[-1], False
        elif key in self._known:
            rounds.append(self._known[key])
            return self._known[key]
        else:
            place = len(self.taken)
            outcome = self.told[place] if place < len(self.told) else False
            open_ = True
        rounds.append(outcome)
        self._known[key] = outcome
        before = [d for d in self.taken if (d.condition, d.at, d.iteration) == (condition, at, iteration)]
        self.taken.append(Decision(condition, outcome, at, iteration, calls, len(before) + 1, forced=looping))
        self.free.append(open_)
        return outcome

    def others(self) -> Iterator[tuple[bool, ...]]:
        """The paths that leave this one at a decision it made by itself."""
        outcomes = [d.outcome for d in self.taken]
        for place in range(len(self.told), len(outcomes)):
            if self.free[place]:
                yield (*outcomes[:place], not outcomes[place])
