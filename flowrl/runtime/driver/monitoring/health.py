"""Whether a run goes well: what its curves, its stalled updates and its gap say, as events that are also shown."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...values.step_records import Step
from .gap_alarm import GapAlarm
from .health_rules import RULES, WINDOW, Curve
from .learning_stalled import stalled

_WATCHED = frozenset(rule.metric for rule in RULES)


@dataclass
class _Watched:
    """One number of a program: what rules need of its steps, and which of them ring."""

    first: list[float] = field(default_factory=list[float])
    last: deque[float] = field(default_factory=lambda: deque[float](maxlen=WINDOW))
    steps: int = 0
    calm: dict[int, int] = field(default_factory=dict[int, int])  # of rules that rang, the steps that they are silent

    def add(self, value: float) -> None:
        if len(self.first) < WINDOW:
            self.first.append(value)
        self.last.append(value)
        self.steps += 1


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
            [*key, watched.first, list(watched.last), watched.steps, list(watched.calm.items())]
            for key, watched in self._watched.items()
        ]

    def restore(self, state: Iterable[Any]) -> None:
        """Go back to where this was the state; what it rang for is not told again."""
        self._watched = {
            (program, name): _Watched(list(first), deque(last, maxlen=WINDOW), steps, dict(calm))
            for program, name, first, last, steps, calm in state
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
        for name, value in line.items():
            metric = name.rpartition("/")[2]
            if metric not in _WATCHED or not isinstance(value, (int, float)) or not math.isfinite(value):
                continue
            watched = self._watched.setdefault((program, name), _Watched())
            watched.add(float(value))
            curve = Curve(watched.first, list(watched.last), watched.steps)
            for number, rule in enumerate(RULES):
                if rule.metric != metric or watched.steps < rule.least:
                    continue
                silent = watched.calm.get(number, WINDOW)
                watched.calm[number] = 0 if rule.rings(curve) else silent + 1
                if watched.calm[number] == 0 and silent >= WINDOW:
                    yield rule.alarm, rule.tell(curve, name)
