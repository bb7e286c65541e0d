"""A run that is opened again from its folder: its record, its script, and the words that it was started with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...flow import Flow
from ...runtime.storage.run_record import read_record
from ..run import add_options
from .options import Words, parse
from .script import load_script


def recorded_run(folder: Path) -> dict[str, Any]:
    """The record of a run. Raises UsageError for a folder that holds none."""
    if not (folder / "run.json").exists():
        raise UsageError(f"{folder} holds no run.", fix="Name the folder of a run.")
    return read_record(folder)[0]


def reopen(record: Mapping[str, Any]) -> tuple[Flow, Words]:
    """The flow of the script of a run, which is loaded and not run, and what its words say."""
    flow = load_script(record["script"])
    return flow, parse(flow, "run", [str(word) for word in record.get("arguments") or []], add_options)
