"""``flowrl timeline``: show what ran when in a run, finished or not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..analysis.run_pages import look_at
from ..errors import UsageError
from ..schedule.report import FORMATS, render
from .arguments.options import put, read_run_words


def timeline_command(words: Sequence[str]) -> int:
    """Print or write the timeline of a run. Returns the exit status."""
    options = read_options(words)
    _, flown = look_at(options.run, options.program)
    if flown is None:
        raise UsageError(f"the run in {options.run} has no step that is done.", fix="Look again when one is.")
    put(render(flown, options.format), options.out)
    return 0


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    return read_run_words("timeline", words, add_run, formats=FORMATS)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add what commands that look at a program of a run have."""
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--program", help="which program of the run; default: the one with most nodes")
