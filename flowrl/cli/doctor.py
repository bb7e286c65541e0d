"""``flowrl doctor``: tell what a run waits for and who is to blame, from its folder alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ..analysis.wait_story import wait_story
from ..errors import UsageError
from .help import new_parser
from .options import put, read_known


def doctor_command(words: Sequence[str]) -> int:
    """Print the chain of waits of a run. Returns the exit status: 1 where somebody is to blame."""
    options = read_options(words)
    story = wait_story(options.run)
    put(json.dumps(story.to_json(), indent=1) if options.format == "json" else story.text(), options.out)
    return 1 if story.blame else 0


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    if not words:
        raise UsageError("flowrl doctor needs the folder of a run.", fix="Write flowrl doctor RUN.")
    parser = new_parser("doctor", "RUN")
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--format", default="text", choices=("text", "json"), help="text, json")
    parser.add_argument("--out", "-o", metavar="FILE", help="write to a file instead of the screen")
    fix = "See flowrl doctor --help."
    options, unknown = read_known(parser, words, fix)
    if unknown:
        raise UsageError(f"'{unknown[0]}' is no option here.", fix=fix)
    return options
