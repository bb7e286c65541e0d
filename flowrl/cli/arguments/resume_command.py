"""The command that goes on with a run: what a stopped run prints, and the words that ``--resume`` takes over."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError, shown
from ...flow import Flow
from ...runtime.storage.run_record import read_record
from .config_file import OF_ONE_START, expand_config


def how_to_go_on(flow: Flow, out: Path) -> str:
    """The command that goes on with a run that was stopped, or that nothing is there to go on from."""
    if not (out / "run.json").exists():
        return "nothing was recorded, so there is nothing to go on from"
    command = shlex.join(["flowrl", "run", shown(flow.script), "--out", str(out), "--resume"])
    there = any((out / "checkpoints").glob("[0-9]*"))
    return f"go on with: {command}" if there else f"it has no checkpoint yet; it begins again with: {command}"


_OF_ONE_START = [f"--{name}" for name in OF_ONE_START]


def lasting_words(words: Sequence[str], begun: Sequence[str]) -> list[str]:
    """The words that a later ``--resume`` needs again; those that a run began with name its folder already."""
    lasting, rest = [], iter(words)
    for word in rest:
        if begun and word == "--out":
            next(rest, None)
        elif word not in _OF_ONE_START and not (begun and word.startswith("--out=")):
            lasting.append(word)
    return lasting


def recorded_words(words: Sequence[str]) -> list[str]:
    """The words that the run in ``--out`` was started with; words given now come after them and win.

    With another ``--plan`` the changes to the former one are not among them.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--out")
    out = finder.parse_known_args(list(words))[0].out
    if out is None:
        raise UsageError("--resume needs to know which run.", fix="Name its folder: --out DIR --resume.")
    if not (Path(out) / "run.json").exists() and not (Path(out) / "checkpoints").exists():
        fix = "Name the folder of a run with --out, or leave out --resume."
        raise UsageError(f"--resume: {out} holds no run.", fix=fix)
    begun = [str(w) for w in read_record(Path(out))[0].get("arguments", [])]
    another = any(word.partition("=")[0] == "--plan" for word in expand_config(words)[0])
    return _without_changes(begun) if another else begun


def _without_changes(words: Sequence[str]) -> list[str]:
    """The words without those that change the plan: another plan is what it says.

    >>> _without_changes(["--plan", "a.yaml", "--set", "pipeline.chunks=2", "--seed", "1"])
    ['--plan', 'a.yaml', '--seed', '1']
    """
    rest, kept = iter(words), list[str]()
    for word in rest:
        if word == "--set":
            next(rest, None)
        elif not word.startswith("--set="):
            kept.append(word)
    return kept
