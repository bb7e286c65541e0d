"""The conversations of a run as rows to learn from: those whose reward, or another number, is large enough."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.file_stores import import_package
from ..errors import DataError, UsageError
from ..runtime.storage.disk import replace_file
from ..runtime.storage.run_record import records_within

#: What a file of conversations may end with.
SUFFIXES = (".jsonl", ".parquet")


def export_conversations(run: Path, file: Path, least: Mapping[str, float]) -> tuple[int, int]:
    """Write conversations of a run's trajectories, one a row: ``messages``, ``reward``, and what graded it.

    Kept are those in which each name of ``least`` has so large a number: ``rewards``, a name in ``scores``, or another
    column. One without that number is not kept; ``reward`` is None of a row that has none, as where ``into=`` renamed
    it. Returns how many are kept, and of how many. DataError where the run has no conversations, UsageError for a
    name that no row has.
    """
    lines = list(_conversations(run / "trajectories.jsonl"))
    if not lines:
        raise DataError(
            f"{run} has no conversations among its trajectories.",
            fix="Run it with game.rollout(..., messages=True), and --trajectories 1000 --trajectories-every 1 for all.",
        )
    numbers = [_numbers(line) for line in lines]
    for name in least:
        if not any(name in each for each in numbers):
            have = ", ".join(sorted({name for each in numbers for name in each}))
            raise UsageError(f"No conversation of {run} has a number '{name}'; there are {have}.", fix="Use one.")
    pairs = zip(lines, numbers, strict=True)
    kept = [
        {"messages": line["conversation"], "reward": line.get("rewards"), **_scores(line), **_place(line)}
        for line, each in pairs
        if all(each.get(name, float("-inf")) >= number for name, number in least.items())
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        replace_file(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    else:
        _write_parquet(file, kept)
    return len(kept), len(lines)


def _conversations(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that have messages and did not fail."""
    return (line for line in records_within(path) if line.get("conversation") and not line.get("failed"))


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by which it may be chosen."""
    values = {**line, **_scores(line), "reward": line.get("rewards")}
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def _scores(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in (line.get("scores") or {}).items() if name not in ("messages", "reward")}


def _place(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"program": line["program"], "step": line["step"], "key": line["key"]}


def _write_parquet(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    parquet, pyarrow = import_package("pyarrow.parquet"), import_package("pyarrow")
    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow would take those of the first row alone
    parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), file)
