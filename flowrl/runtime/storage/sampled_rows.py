"""The rows that each call has sampled, kept in the folder of a run, and given again in a replay of it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...batch import Batch
from ...errors import RunError, shown
from .disk import replace_file, write_tensors, writing

FOLDER = "sampled"
COMPARED = "sampled_again.jsonl"  # of a replay: what its engines gave beside what was recorded


@dataclass(frozen=True)
class SampledAgain:
    """How what a replay has sampled compares with the record: ``SampledAgain("actor.generate", 3, 17, 256, 2)``.

    Of ``rows``, ``parted`` have other tokens; the first place where any does is ``token`` of the row ``key``. So many
    ``tokens`` were sampled alike, from the start of each row on; their log-probabilities differ by ``gap`` at most.
    """

    node: str
    step: int
    call: int
    rows: int
    parted: int
    tokens: int
    gap: float
    token: int | None = None
    key: tuple[int, ...] | None = None


class SampledRows:
    """What calls of a run have sampled, a file for each: ``SampledRows(Path("runs/a"))``. Calls are known by the number
    of their program, their own, and the number of their chunk or prompt group."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER

    def write(self, program: int, call: int, part: int, rows: Batch) -> None:
        """Keep the rows of a call; what is there of it already, from before a resume, is replaced. Raises DiskError."""
        file = self._file(program, call, part)
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        new = file.with_suffix(".part")
        write_tensors(new, rows.tensors())
        replace_file(file.with_suffix(".json"), json.dumps(rows.meta()))
        with writing(file):
            os.replace(new, file)  # with it the rows are there

    def read(self, program: int, call: int, part: int) -> Batch | None:
        """Return the rows of a call; None where they are not kept. Raises RunError for files that are damaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = self._file(program, call, part)
        if not file.exists():
            return None
        try:
            return Batch.from_tensors(load_file(file), json.loads(file.with_suffix(".json").read_bytes()))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise RunError(f"The rows in {shown(str(file))} cannot be read: {error}.") from error

    def _file(self, program: int, call: int, part: int) -> Path:
        return self.folder / f"{program}-{call}-{part}.safetensors"


def compare_rows(sampled: Batch, recorded: Batch) -> dict[str, Any]:
    """Return the entries of :class:`SampledAgain` that two batches of the same keys decide.

    >>> import flowrl as fl
    >>> fields = {"response_ids": [[1, 2], [3]], "rollout_logprobs": [[-1.0, -2.0], [-0.5]]}
    >>> other = {"response_ids": [[1, 4], [3]], "rollout_logprobs": [[-1.0, -3.0], [-0.25]]}
    >>> compare_rows(fl.Batch.of(2, **fields), fl.Batch.of(2, **other))
    {'rows': 2, 'parted': 1, 'tokens': 2, 'gap': 0.25, 'token': 1, 'key': (0,)}
    """
    place = {key: i for i, key in enumerate(sampled.keys)}
    columns = [(rows["response_ids"].to_list(), _logprobs(rows)) for rows in (sampled, recorded)]
    (mine, my_logprobs), (theirs, their_logprobs) = columns
    parted, tokens, gap = 0, 0, 0.0
    first: tuple[int, Any] | None = None
    for j, key in enumerate(recorded.keys):
        i = place[key]
        a, b = mine[i], theirs[j]
        same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        tokens += same
        if my_logprobs is not None and their_logprobs is not None:
            pairs = zip(my_logprobs[i][:same], their_logprobs[j][:same], strict=False)
            gap = max([gap, *(abs(x - y) for x, y in pairs)])
        if a != b:
            parted += 1
            first = (same, key) if first is None or same < first[0] else first
    found: dict[str, Any] = {"rows": len(recorded), "parted": parted, "tokens": tokens, "gap": gap}
    return found if first is None else {**found, "token": first[0], "key": first[1]}


def _logprobs(rows: Batch) -> list[list[float]] | None:
    return rows["rollout_logprobs"].to_list() if "rollout_logprobs" in rows.fields else None


def read_sampled_again(folder: Path) -> list[SampledAgain]:
    """Return how each call of a replay compares with the record."""
    file = folder / COMPARED
    lines = list(map(json.loads, file.read_text().splitlines())) if file.exists() else []
    return [SampledAgain(**{**line, "key": None if line["key"] is None else tuple(line["key"])}) for line in lines]


class RecordedRows:
    """The rows of an earlier run, in the place of those that a replay samples. ``out`` is the folder of the replay."""

    def __init__(self, run: Path, out: Path) -> None:
        self._rows, self._out = SampledRows(run), out

    def take(self, program: int, node: str, step: int, call: int, part: int, sampled: Batch) -> Batch:
        """Return what the run has recorded of a call, and note how ``sampled`` differs. Raises RunError where it has
        not recorded these rows."""
        recorded = self._rows.read(program, call, part)
        if recorded is None:
            raise RunError(
                f"The run has not kept the rows of {node} in step {step}.",
                fix="Replay without --forced, or replay a run that was made with --keep-sampled.",
            )
        if set(recorded.keys) != set(sampled.keys):
            raise RunError(
                f"{node} of step {step} is asked for other rows than in the run.",
                fix="Replay it with the prompts and the n= of the run, or without --forced.",
            )
        compared = SampledAgain(node=node, step=step, call=call, **compare_rows(sampled, recorded))
        with (self._out / COMPARED).open("a") as file:
            file.write(json.dumps(asdict(compared)) + "\n")
        return recorded.take([recorded.keys.index(key) for key in sampled.keys])
