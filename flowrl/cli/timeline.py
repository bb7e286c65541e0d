"""``flowrl timeline``: show what ran when in a run, finished or not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..analysis.run_pages import look_at
from ..errors import UsageError
from ..schedule.report import FORMATS, render
from .help import new_parser
from .options import put, read_known


def timeline_command(words: Sequence[str]) -> int:
    """Print or write the timeline of a run. Returns the exit status."""
    options = read_run("timeline", words, FORMATS, "table")
    _, flown = look_at(options.run, options.program)
    if flown is None:
        raise UsageError(f"the run in {options.run} has no step that is done.", fix="Look again when one is.")
    put(render(flown, options.format), options.out)
    return 0


def read_run(command: str, words: Sequence[str], formats: Sequence[str], usual: str) -> argparse.Namespace:
    """The options of a command that looks at a run. Raises UsageError."""
    if not words:
        raise UsageError(f"flowrl {command} needs the folder of a run.", fix=f"Write flowrl {command} RUN.")
    parser = new_parser(command, "RUN")
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--program", help="which program of the run; default: the one with most nodes")
    parser.add_argument("--format", default=usual, choices=formats, help=", ".join(formats))
    if "svg" in formats:
        parser.add_argument("--narrow", action="store_true", help="with --format svg: one column, for a narrow screen")
    parser.add_argument("--out", "-o", metavar="FILE", help="write to a file instead of the screen")
    fix = f"See flowrl {command} --help."
    options, unknown = read_known(parser, words, fix)
    if unknown:
        raise UsageError(f"'{unknown[0]}' is no option here.", fix=fix)
    return options
