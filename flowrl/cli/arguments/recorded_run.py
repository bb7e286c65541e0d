"""A run that is opened again from its folder: its record, its script, and the words that it was started with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...flow import Flow
from ...runtime.storage.run_record import read_record
from ...runtime.values.values_in_records import spelled
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
    begun = [str(word) for word in record.get("arguments") or []]
    return flow, parse(flow, "run", [], add_options, begun=begun)


def recorded_parameters(flow: Flow, record: Mapping[str, Any], said: Words) -> dict[str, dict[str, Any]]:
    """What each program was given: what its words, presets and defaults give where the record says the same of it, and
    other plain values as the record has them. Raises UsageError for a value that only the code has which began the run.
    """
    found: dict[str, dict[str, Any]] = {}
    between = {said["program"]: said["parameters"] for said in record.get("evaluations", ())}
    pairs = [*zip(record["programs"], record["parameters"], strict=True), *between.items()]
    for name, recorded in pairs:
        here = flow.find_program(name).arguments(said.parameters.get(name, {}))
        found[name] = {n: here[n] if n in here and spelled(here[n]) == v else v for n, v in recorded.items()}
        for n, v in found[name].items():
            if not (_is_plain(v) and _is_plain(here.get(n))) and v is not here.get(n):
                raise UsageError(
                    f"'{name}' was given {n}={v} by the code that began the run, and no option says that.",
                    fix="Make it a preset or a default of the program, or begin the run again with flow.run.",
                )
    return found


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
