"""``flowrl diff``: name the first step, call, field and row in which two runs part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ..analysis.run_difference import compare_runs, in_words
from ..errors import shown
from .arguments.options import put, read_run_words


def diff_command(words: Sequence[str]) -> int:
    """Print where two runs part. Returns the exit status: 0 where all that both did is equal, bit for bit."""
    options = read_options(words)
    found = compare_runs(options.first, options.second, program=options.program)
    names = [shown(str(run)) for run in (options.first, options.second)]
    put(json.dumps(found.to_json(), indent=1) if options.format == "json" else in_words(found, *names), options.out)
    return 0 if found.is_equal else 1


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    return read_run_words("diff", words, _add_options, runs=("RUN1", "RUN2"))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="RUN1", help="the folder of a run")
    parser.add_argument("second", type=Path, metavar="RUN2", help="the folder of another one")
    parser.add_argument("--program", help="which program of the runs; default: all")
