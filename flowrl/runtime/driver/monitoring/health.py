"""Whether a run goes well: what its curves, its stalled updates and its gap say, as events that are also shown."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...values.step_records import Step
from .gap_alarm import GapAlarm
from .health_rules import RULES, WINDOW, Curve, Rule
from .learning_stalled import stalled

_WATCHED = frozenset(rule.metric for rule in RULES)


@dataclass
class _Watched:
    """One number of a program: what rules need of its steps, and which of them ring."""

    first: list[float] = field(default_factory=list[float])
    last: deque[float] = field(default_factory=lambda: deque[float](maxlen=WINDOW))
    steps: int = 0
    calm: dict[int, int] = field(default_factory=dict[int, int])  # of rules that rang, the steps that they are silent
    moved: float = 0.0  # from each step to the next, added up
    best: float = -math.inf  # the highest mean of a window

    @property
    def known_best(self) -> list[float]:
        """The best mean, once there was a window."""
        return [self.best] if math.isfinite(self.best) else []

    def add(self, value: float) -> None:
        if len(self.first) < WINDOW:
            self.first.append(value)
        self.moved += abs(value - self.last[-1]) if self.last else 0.0
        self.last.append(value)
        self.steps += 1
        if self.steps >= WINDOW:
            self.best = max(self.best, sum(self.last) / len(self.last))


class Health:
    """Looks at each step: ``for kind, text in health.look("grpo", line, step, latest): ...``.

    Kinds are ``warning`` (updates that change nothing), ``gap``, ``alarm`` and ``hint``. A rule rings once, and again
    when it was silent for a window of steps in between.
    """

    def __init__(self) -> None:
        self.gap_alarm = GapAlarm()
        self._watched: dict[tuple[str, str], _Watched] = {}

    def state(self) -> list[Any]:
        """Return what it has seen, as JSON, for :meth:`restore`."""
        return [
            [*key, w.first, list(w.last), w.steps, list(w.calm.items()), w.moved, *w.known_best]
            for key, w in self._watched.items()
        ]

    def restore(self, state: Iterable[Any]) -> None:
        """Go back to where this was the state; what it rang for is not told again."""
        self._watched = {
            (program, name): _Watched(list(first), deque(last, maxlen=WINDOW), steps, dict(calm), *more)
            for program, name, first, last, steps, calm, *more in state  # an older flowrl has noted no more
        }

    def rewind(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Go back to where these were the lines of metrics; what they rang for is not told again."""
        self._watched.clear()
        for line in history:
            for _ in self._rules(line["program"], line):
                pass

    def look(
        self, program: str, line: Mapping[str, Any], step: Step, latest: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, str]]:
        """Yield the kind and the text of what a step makes worth telling; its ``line`` is the last of ``latest``."""
        if (text := stalled(latest)) is not None:
            yield "warning", f"{program}: {text}"
        for text in self.gap_alarm.look(program, line["step"], step.gaps):
            yield "gap", text
        for alarm, text in sorted(self._rules(program, line), key=lambda told: not told[0]):
            yield "alarm" if alarm else "hint", f"{program}: step {line['step']}, {text}"

    def _rules(self, program: str, line: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
        """Yield what rules begin to ring for, and whether that is an alarm."""
        ringing = list(self._ringing(program, line))
        for rule, text in ringing:
            if text and not any(other.metric == rule.unless for other, _ in ringing if other is not rule):
                yield rule.alarm, text

    def _ringing(self, program: str, line: Mapping[str, Any]) -> Iterator[tuple[Rule, str]]:
        """Yield each rule that rings at a step, with what is to be said of it where it was silent before."""
        for name, value in line.items():
            metric = name.rpartition("/")[2]
            if metric not in _WATCHED or not isinstance(value, (int, float)) or not math.isfinite(value):
                continue
            watched = self._watched.setdefault((program, name), _Watched())
            watched.add(float(value))
            curve = Curve(watched.first, list(watched.last), watched.steps, watched.best, watched.moved)
            for number, rule in enumerate(RULES):
                if rule.metric != metric or watched.steps < rule.least:
                    continue
                silent = watched.calm.get(number, WINDOW)
                watched.calm[number] = 0 if rule.rings(curve) else silent + 1
                if watched.calm[number] == 0:
                    yield rule, rule.tell(curve, name) if silent >= WINDOW else ""
