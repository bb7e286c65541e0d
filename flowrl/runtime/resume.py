"""Where a resumed run goes on: its newest checkpoint, held against the programs, parameters and seed of now."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from ..errors import ResumeError
from . import checkpoint

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class StageLike(Protocol):
    """What a run is asked to do, as far as it is looked at here."""

    @property
    def program(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...


def find_resume_point(out: Path, stages: Sequence[StageLike], seed: int) -> dict[str, Any] | None:
    """The manifest to go on from; None where the run was stopped before its first checkpoint.

    The last program that the run has done goes on where its parameters are others now, such as more ``steps``: from the
    end of its last loop, or from the checkpoint before where it has done more since then. Raises ResumeError where the
    run cannot become the one that is asked for.
    """
    folder = out / "checkpoints"
    newest = checkpoint.latest(folder)
    if newest is None:
        return None
    record = json.loads((out / "run.json").read_text())
    manifest = checkpoint.load_manifest(newest)
    _check_programs(record["programs"], [s.program for s in stages])
    if manifest["seed"] != seed:
        raise ResumeError(
            f"the run has seed {manifest['seed']}, and was asked to go on with {seed}.",
            fix=f"Leave out --seed, or give --seed {manifest['seed']}.",
        )
    before = manifest.get("parameters") or record["parameters"]
    ended = manifest["stage"] - (manifest["program"] is None)  # the last program that has begun
    changed = [n for n, (a, b) in enumerate(zip(before, stages, strict=False)) if _differ(a, b.parameters)]
    if early := [n for n in changed if n < ended]:
        stage = stages[early[0]]
        raise ResumeError(
            f"'{stage.program}' has ended, and '{stages[early[0] + 1].program}' has gone on from what it gave: its "
            f"parameters stay as they were ({_changes(before[early[0]], stage.parameters)}).",
            fix="Leave them out, or start another run with --out.",
        )
    if manifest["program"] is not None or ended not in changed:
        return manifest
    return _reopened(folder, newest, ended, before[ended], stages[ended])


def parameter_changes(before: Sequence[Mapping[str, Any]], stages: Sequence[StageLike]) -> list[str]:
    """What the programs are given now that they were not before: ``train: steps 4 -> 7``."""
    pairs = zip(before, stages, strict=False)
    return [f"{s.program}: {_changes(b, s.parameters)}" for b, s in pairs if _differ(b, s.parameters)]


def _reopened(
    folder: Path, newest: Path, ended: int, before: Mapping[str, Any], stage: StageLike
) -> dict[str, Any] | None:
    """The manifest from which a program that has ended goes on."""
    if checkpoint.reopen(newest):
        return checkpoint.load_manifest(newest)
    had, asked = before.get("steps"), stage.parameters.get("steps")
    if isinstance(had, int) and isinstance(asked, int) and asked < had:  # before anything of the run is taken away
        raise ResumeError(
            f"'{stage.program}' has ended with {had} steps, and was asked to go on with {asked}.",
            fix="Give it at least the steps that are done.",
        )
    while (found := checkpoint.latest(folder)) is not None:
        manifest = checkpoint.load_manifest(found)
        if manifest["stage"] <= ended:
            return manifest
        checkpoint.remove(found)  # of a program that has done more after its loop
    return None


def _check_programs(before: Sequence[str], now: Sequence[str]) -> None:
    if list(now[: len(before)]) != list(before):
        raise ResumeError(
            f"the run is one of {','.join(before)}, and was asked to go on with {','.join(now)}.",
            fix="Leave out --program; programs can only be added, after those of the run.",
        )


def _differ(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return _comparable(before) != _comparable({n: spelled(v) for n, v in now.items()})


def _comparable(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Parameters as texts; the address of an object, which older records have, says nothing."""
    return {n: _ADDRESS.sub("", json.dumps(v, sort_keys=True)) for n, v in parameters.items()}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is different, in words: ``steps 4 -> 7``."""
    first, then = _comparable(before), _comparable({n: spelled(v) for n, v in now.items()})
    return ", ".join(
        f"{name} {first.get(name, 'not there')} -> {then.get(name, 'not there')}"
        for name in dict.fromkeys([*first, *then])
        if first.get(name) != then.get(name)
    )


def spelled(value: Any) -> Any:
    """A parameter as a record holds it: plain values as they are, a loss and the like as a text without addresses."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): spelled(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [spelled(v) for v in cast("Sequence[Any]", value)]
    if isinstance(value, partial):
        made = cast("partial[Any]", value)
        inside = [*map(repr, made.args), *(f"{k}={v!r}" for k, v in made.keywords.items())]
        return _ADDRESS.sub("", f"{spelled(made.func)}({', '.join(inside)})")
    return getattr(value, "__name__", None) or _ADDRESS.sub("", repr(value))
