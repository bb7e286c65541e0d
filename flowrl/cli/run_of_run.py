"""``flowrl run RUN``: programs of the script of a run, on the weights of one of its checkpoints; or more of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..runtime.storage.checkpoints.other_run import chosen_checkpoint
from .arguments.recorded_run import recorded_run
from .arguments.script import load_script
from .run import run_command


def run_of_run_command(words: Sequence[str]) -> int:
    """Run programs of the script of a run, from one of its checkpoints, or go on with it. Returns the exit status."""
    run, rest = Path(words[0]), list(words[1:])
    record = recorded_run(run)
    flow = load_script(record["script"])
    if "--resume" in rest:
        return run_command(flow, ["--out", str(run), *rest])
    which, left = _words_of(("--checkpoint",), rest, kept=False)
    point = chosen_checkpoint(run, record, which[-1] if which else "last")
    words_of_run = [str(word) for word in record.get("arguments") or []]
    begun, _ = _words_of(("--model", "--arg", "--preset", "--seed"), words_of_run)
    return run_command(flow, [*begun, "--checkpoint", str(point.absolute()), *left])


def _words_of(names: Sequence[str], words: Sequence[str], *, kept: bool = True) -> tuple[list[str], list[str]]:
    """Return the values of some options, with the options where they are ``kept``; and all other words."""
    found: list[str] = []
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        name, is_one, value = word.partition("=")
        if name not in names:
            left.append(word)
        else:
            found += [name, value if is_one else next(rest, "")][0 if kept else 1 :]
    return found, left
