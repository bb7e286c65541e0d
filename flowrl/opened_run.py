"""A recorded run from Python, done or going on: its metrics, rows, events, configuration and plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from time import localtime, strftime
from typing import Any

from .errors import UsageError, did_you_mean, shown
from .graph.record import Graph
from .html_tables import picture, table
from .runtime.storage.run_record import configuration_of, read_record, records_within


def open_run(path: str | Path) -> OpenedRun:
    """Open the folder of a run to read what it has recorded: ``fl.open_run("runs/first").metrics()``.

    Nothing in the folder is changed, and no script is loaded. Raises UsageError for a folder that holds no run, and
    ResumeError where its record cannot be read.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     folder = pathlib.Path(name)
    ...     _ = (folder / "run.json").write_text('{"programs": ["grpo"], "status": "done", "seed": 5}')
    ...     _ = (folder / "metrics.jsonl").write_text('{"program": "grpo", "step": 0, "reward": 0.5}\\n')
    ...     run = fl.open_run(folder)
    ...     run.status, run.metrics(), run.config
    ('done', [{'program': 'grpo', 'step': 0, 'reward': 0.5}], {'programs': ['grpo'], 'seed': 5})
    """
    folder = Path(path)
    try:
        is_one = (folder / "run.json").exists() or (folder / "checkpoints").is_dir()
    except OSError as error:
        raise UsageError(
            f"{shown(str(folder))} cannot be read: {error.strerror}.", fix="Name a folder of yours that holds a run."
        ) from None
    if not is_one:
        raise UsageError(f"{shown(str(folder))} holds no run.", fix="Name the folder of a run, such as runs/first.")
    record, note = read_record(folder)
    return OpenedRun(folder, record, note)


@dataclass(frozen=True, repr=False, eq=False)
class OpenedRun:
    """A run as :func:`open_run` gives it. ``record`` is what run.json held then; all else is read when it is asked for.

    ``note`` says what is wrong with the record, and is empty where nothing is.

    >>> from pathlib import Path
    >>> run = fl.OpenedRun(Path("runs/first"), {"status": "done", "programs": ["grpo"], "seed": 5})
    >>> run, run.config, run.metrics()
    (<run runs/first: grpo; done>, {'programs': ['grpo'], 'seed': 5}, [])
    """

    folder: Path
    record: Mapping[str, Any]
    note: str = ""

    @property
    def status(self) -> str:
        """``running``, ``done``, ``interrupted`` or ``failed``; ``running`` also stands in a run that was killed."""
        return str(self.record.get("status") or "")

    @property
    def config(self) -> dict[str, Any]:
        """Script, programs and their parameters, arguments of workers, data, seed, versions and commit."""
        return configuration_of(self.record)

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, as a plan file has it: written down as YAML, it is one."""
        return dict(self.record.get("plan") or {})

    def graph(self, program: str | None = None) -> Graph:
        """Return the graph of a program, by default of the only or the largest one. Raises UsageError for another."""
        graphs: Mapping[str, Any] = self.record.get("graphs") or {}
        if program is None and "graph" in self.record:
            return self._graph_of(self.record["graph"])
        if program is None or program not in graphs:
            raise UsageError(
                f"{shown(str(self.folder))} has no graph{'' if program is None else f' of {shown(repr(program))}'}.",
                have=graphs,
                fix=did_you_mean(program or "", graphs, "Name a program of the run."),
            )
        return self._graph_of(graphs[program])

    def _graph_of(self, said: Mapping[str, Any]) -> Graph:
        try:
            return Graph.from_json(said)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise UsageError(
                f"the graph in {shown(str(self.folder / 'run.json'))} is none that this flowrl reads: {error}.",
                fix="Open the run with the flowrl that wrote it, or draw the graph of its script: flowrl graph SCRIPT.",
            ) from None

    def metrics(self, program: str | None = None) -> list[dict[str, Any]]:
        """Return what was logged, a dictionary for each step, of all programs or of one.

        ``[{"program": "grpo", "step": 0, "reward": 0.5, "seconds": 1.25, ...}, ...]``; what was not finite is None.
        """
        return list(self._lines("metrics", program))

    def frame(self, program: str | None = None) -> Any:
        """Return :meth:`metrics` as a ``pandas.DataFrame``. Raises UsageError where pandas is not installed."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise UsageError("run.frame() needs pandas, which is not installed.", fix="pip install pandas") from None
        return pandas.DataFrame(self.metrics(program))

    def rows(
        self, program: str | None = None, *, step: int | None = None, skip: int = 0, count: int | None = 50
    ) -> list[dict[str, Any]]:
        """Return rows of the trajectories in the order in which they were recorded: ``count`` of them after ``skip``.

        ``step``: those of one step alone. ``count=None`` gives all that are left. The file is read from its beginning;
        :meth:`each_row` goes through a large one without holding it.
        """
        for name, value in (("skip", skip), ("count", count)):
            if (name, value) != ("count", None) and (type(value) is not int or value < 0):
                raise UsageError(f"rows({name}={value!r}): it is a number of rows, 0 or more.")
        if step is not None and (type(step) is not int or step < 0):
            raise UsageError(f"rows(step={step!r}): it is the number of a step, from 0.")
        found = (row for row in self.each_row(program) if step is None or row.get("step") == step)
        return list(islice(found, skip, None if count is None else skip + count))

    def each_row(self, program: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of the trajectories, one at a time."""
        return self._lines("trajectories", program)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the events, or those of a kind: ``[{"time": 1.7e9, "kind": "alarm", "text": "..."}, ...]``."""
        return [line for line in self._lines("events") if kind in (None, line.get("kind"))]

    def _lines(self, name: str, program: str | None = None) -> Iterator[dict[str, Any]]:
        for line in records_within(self.folder / f"{name}.jsonl"):
            if program is None or line.get("program") == program:
                yield line

    def __repr__(self) -> str:
        programs = ", ".join(map(str, self.record.get("programs") or ()))
        return f"<run {shown(str(self.folder))}: {programs}; {self.status}>"

    def _repr_html_(self) -> str:
        """Its last metrics, its last alarms and the curve of its rewards, for a notebook."""
        last = {str(line.get("program", "")): line for line in self._lines("metrics")}
        numbers = [(program, n, value) for program, line in last.items() for n, value in line.items() if n != "program"]
        alarms = [(_clock(event.get("time")), event.get("text", "")) for event in self.events("alarm")][-10:]
        return (
            table(["program", "metric", "last"], numbers, title=f"{self.status}: {self.folder}", note=self.note)
            + (table(["time", "alarm"], alarms) if alarms else "")
            + picture(self.folder / "reward.png", "reward")
        )


def _clock(time: Any) -> str:
    """A time of an event as people read it; empty where it is none."""
    try:
        return strftime("%Y-%m-%d %H:%M:%S", localtime(time)) if isinstance(time, (int, float)) else ""
    except (ValueError, OverflowError, OSError):  # not finite, or beyond the calendar
        return ""
