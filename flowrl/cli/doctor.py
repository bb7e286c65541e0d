"""``flowrl doctor``: tell what a run waits for and who is to blame, from its folder alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ..analysis.wait_story import wait_story
from .options import put, read_run_words


def doctor_command(words: Sequence[str]) -> int:
    """Print the chain of waits of a run. Returns the exit status: 1 where somebody is to blame."""
    options = read_options(words)
    story = wait_story(options.run)
    put(json.dumps(story.to_json(), indent=1) if options.format == "json" else story.text(), options.out)
    return 1 if story.blame else 0


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    return read_run_words("doctor", words, _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the folder of the run")
