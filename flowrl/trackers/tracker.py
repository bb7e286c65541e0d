"""What a tracker is told of a run, and what it is told it with: the protocol that one of your own keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from ..errors import FlowError


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker first hears of it: ``TrackedRun("first", "grpo", "0c5e", Path("runs/first"))``.

    ``id`` stays the same when the run is resumed, so a tracker goes on with what it has under it; ``resumed`` says
    that this is so. ``configuration`` is JSON: parameters of the programs, arguments of the workers, seed, versions.
    ``plan`` is JSON too, and ``graphs`` are those of the programs, by name.
    """

    name: str
    project: str
    id: str
    folder: Path
    resumed: bool = False
    configuration: Mapping[str, Any] = field(default_factory=dict[str, Any])
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    graphs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def plan_text(self) -> str:
        """Return the plan as YAML, as a plan file has it."""
        return yaml.safe_dump(dict(self.plan), sort_keys=False)

    def flat_configuration(self) -> dict[str, str]:
        """Return the configuration as texts by name: ``{"workers/actor: lr": "0.001"}``."""
        return dict(_flat("", self.configuration))

    def pictures(self) -> dict[str, bytes]:
        """Return the graph of each program as a PNG picture; none where pygraphviz is missing, which draws them."""
        from ..graph.draw.png import png
        from ..graph.record import Graph

        try:
            return {name: png(Graph.from_json(graph)) for name, graph in self.graphs.items()}
        except FlowError:
            return {}


class Tracker(Protocol):
    """What a run calls a tracker with. A class keeps this protocol by having these methods; it is made with the run.

    A thread of its own makes it and calls it, so it may be slow. What it raises is told once, and never ends a run.
    One that has the method of :class:`TakesEvents` too is told of alarms and other events.

    >>> class Printed:
    ...     def __init__(self, run: TrackedRun) -> None:
    ...         self.run = run
    ...     def log(self, program, step, numbers):
    ...         print(program, step, numbers)
    ...     def samples(self, program, step, rows): ...
    ...     def close(self, status): ...
    >>> tracker: Tracker = Printed(TrackedRun("first", "grpo", "0c5e", Path("runs/first")))
    >>> tracker.log("grpo", 0, {"reward": 0.5})
    grpo 0 {'reward': 0.5}
    """

    def log(self, program: str, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step. A step that is not above the last one begins what is done again."""
        ...

    def samples(self, program: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rows of a step, as ``trajectories.jsonl`` has them."""
        ...

    def close(self, status: str) -> None:
        """Write what waits; the run has ended ``done``, ``interrupted`` or ``failed``."""
        ...


Level = Literal["alarm", "warning", "note"]

#: How grave events of a kind are; those of other kinds are notes.
LEVELS: Mapping[str, Level] = {
    **dict.fromkeys(("alarm", "gap", "failed", "lost", "not finite", "damaged"), "alarm"),
    **dict.fromkeys(("hint", "warning", "not kept", "checkpoint", "changed", "unlocked", "stopped"), "warning"),
}


class TakesEvents(Protocol):
    """What a tracker may have beside its three methods, and is then called with; without it events stay in the run."""

    def event(self, kind: str, text: str, level: Level) -> None:
        """Take an event of ``events.jsonl``: an alarm or a hint of the health rules, a lost rank, a resume."""
        ...


def level_of(kind: str) -> Level:
    """Return how grave an event is: ``alarm``, ``warning`` or ``note``.

    >>> level_of("not finite"), level_of("hint"), level_of("resumed")
    ('alarm', 'warning', 'note')
    """
    return LEVELS.get(kind, "note")


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return rows as the names of their columns and their entries; lists, such as token ids, are left out.

    >>> table([{"key": [3, 0], "response": "4", "response_ids": [7]}, {"key": [3, 1], "response": "5", "rewards": 1.0}])
    (['key', 'response', 'rewards'], [['3.0', '4', ''], ['3.1', '5', 1.0]])
    """
    rows = [{**row, "key": ".".join(map(str, row.get("key", ())))} for row in rows]
    names = dict.fromkeys(name for row in rows for name, x in row.items() if not isinstance(x, (list, dict)))
    names = [name for name in names if name not in ("program", "step")]
    return names, [["" if row.get(name) is None else row[name] for name in names] for row in rows]


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flat(f"{name}/{key}" if name else str(key), item)]
    if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        return [pair for place, item in enumerate(value) for pair in _flat(f"{name}/{place}", item)]
    return [(name, str(value))]
