"""MLflow: a run below ``mlruns/`` in the run folder, or on the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .tracker import Level, TrackedRun, table

_TAG = "flowrl_run"
_LONGEST = 500  # characters of a parameter
_AT_ONCE = 90  # parameters of one call
_TAG_TEXT = 5000  # characters of a tag
_EVENTS = "events.txt"


class MLflow:
    """Keeps runs with a client of its own: what a program does with ``mlflow`` itself is another run."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._events: list[str] = []
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").as_uri())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        there = self._client.get_experiment_by_name(name)
        experiment = there.experiment_id if there is not None else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.{_TAG} = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.set_terminated(self._id, "RUNNING")
            self._events = self._earlier_events()
            return
        self._id = self._client.create_run(experiment, run_name=run.name, tags={_TAG: run.id}).info.run_id
        given = [Param(_plain(n), v[:_LONGEST]) for n, v in run.flat_configuration().items()]
        for first in range(0, len(given), _AT_ONCE):
            self._client.log_batch(self._id, params=given[first : first + _AT_ONCE])
        self._client.log_text(self._id, json.dumps(run.configuration, indent=1, default=str), "configuration.json")
        self._client.log_text(self._id, run.plan_text(), "plan.yaml")
        for program, picture in run.pictures().items():
            with TemporaryDirectory() as folder:
                file = Path(folder) / f"graph.{program}.png"
                file.write_bytes(picture)
                self._client.log_artifact(self._id, str(file))

    def log(self, program: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a program under its name."""
        now = int(time.time() * 1000)
        named = [self._metric(_plain(f"{program}/{name}"), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=named)

    def samples(self, program: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table as MLflow's own ``log_table`` writes one, without pandas."""
        names, entries = table(rows)
        text = json.dumps({"columns": names, "data": entries}, default=str)
        self._client.log_text(self._id, text, f"samples/{program}-{step}.json")

    def event(self, kind: str, text: str, level: Level) -> None:
        """Set a tag to the last event of a kind, ``flowrl.alarm``, and keep all events as a text beside the samples."""
        self._client.set_tag(self._id, f"flowrl.{_plain(kind)}", text[:_TAG_TEXT])
        self._events.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {level}, {kind}: {text}")
        self._client.log_text(self._id, "\n".join(self._events) + "\n", _EVENTS)

    def close(self, status: str) -> None:
        ended = {"done": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED")
        self._client.set_terminated(self._id, ended)

    def _earlier_events(self) -> list[str]:
        """The events that the run had before it was resumed."""
        if all(item.path != _EVENTS for item in self._client.list_artifacts(self._id)):
            return []
        with TemporaryDirectory() as folder:
            return Path(self._client.download_artifacts(self._id, _EVENTS, folder)).read_text().splitlines()


def _plain(name: str) -> str:
    """A name of the characters that MLflow takes."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)
