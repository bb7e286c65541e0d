"""How a run is asked for, as opposed to what is run, and what it came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...html_tables import picture, table
from ...lowering.lower import Execution
from ...trackers.tracker import TrackedRun, Tracker
from ..storage.run_inputs import Inputs


@dataclass(frozen=True)
class Evaluation:
    """A program that is run between the steps of others: ``Evaluation(execution, every=20)``."""

    execution: Execution
    every: int  # steps

    @property
    def name(self) -> str:
        return self.execution.program


@dataclass(frozen=True)
class Settings:
    """How to run, as opposed to what: ``Settings(Path("runs/a"), inputs, runtime="local", checkpoint_every=50)``."""

    out: Path
    inputs: Inputs  # what the run is made of
    runtime: str = "local"
    seed: int = 0
    resume: bool = False
    allow_changed: bool = False
    unlock: bool = False
    overwrite: bool = False
    checkpoint_every: int = 50
    keep_last: int = 2  # checkpoints
    keep_best: str = ""  # the metric whose best checkpoint is kept too
    stop_when: str = ""  # the metric that ends a loop which does not improve it any more, and its patience
    save_models: bool = True
    trajectories: int = 2  # prompt groups of a step that are written down
    trajectories_every: int = 10  # steps
    keep_sampled: bool = False  # all rows that calls sample, for a replay that is given them
    quiet: bool = False
    track: Mapping[str, Callable[[TrackedRun], Tracker]] = field(default_factory=dict)  # what makes each tracker
    script: str = ""
    plan: Mapping[str, Any] | None = None
    arguments: tuple[str, ...] = ()  # the words of the command line
    programs: tuple[Callable[..., Any], ...] = ()  # all that the script has, in its order
    graphs: tuple[Mapping[str, Any], ...] = ()  # of the programs that are run, for the records
    forecasts: tuple[Mapping[str, Any] | None, ...] = ()  # of the same, what the plan foretells of them
    evaluations: tuple[Evaluation, ...] = ()
    evaluation_graphs: tuple[Mapping[str, Any], ...] = ()  # of the same
    trained: tuple[bool, ...] = ()  # of the programs that are run, whether they train
    checkpoint: Path | None = None  # of another run, with whose weights the workers begin


@dataclass(frozen=True)
class Outcome:
    """What a run came to. ``status`` is ``done`` or ``interrupted``; ``last`` are the last metrics of each program.

    ``exit_status`` is what a process ends with that was interrupted: 130 by Ctrl-C, 143 by SIGTERM.
    """

    status: str
    out: Path
    weights_digest: str | None
    last: tuple[tuple[str, Mapping[str, Any]], ...]
    exit_status: int = 0

    def _repr_html_(self) -> str:
        """Its last metrics and the curve of its rewards, for a notebook."""
        rows = [(program, name, value) for program, last in self.last for name, value in last.items()]
        title = f"{self.status}: {self.out}"
        return table(["program", "metric", "last"], rows, title=title) + picture(self.out / "reward.png", "reward")
