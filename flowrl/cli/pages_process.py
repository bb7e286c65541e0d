"""The pages of a run, written at its end in a process of their own: ``python -m flowrl.cli.pages_process FOLDER``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from itertools import groupby
from pathlib import Path

from ..analysis.run_pages import write_pages
from ..errors import FlowError


def draw_apart(run: Path, *, seconds: float = 20.0) -> str:
    """Write the pages of a run in a process of its own, so that nothing about them can harm or delay what ran.

    Returns words for the user: where the pages are, a line for each program; that they are still being drawn after
    ``seconds`` (the process goes on by itself); or why there are none.
    """
    home = str(Path(__file__).parents[2])
    paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-P", "-m", __name__, str(run)]  # -P: no file beside the user is taken for a library
    try:
        process = subprocess.Popen(
            words,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:  # there may be no memory or no process left: the run is done all the same
        return _not_drawn(run, f"Python was not started: {error.strerror or error}")
    try:
        pages, complaint = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"the pages of the run are still being drawn into {run}, by process {process.pid}"
    if process.returncode:
        last = (complaint.strip() or f"exit status {process.returncode}").splitlines()[-1]
        return _not_drawn(run, last)
    return pages.strip()


def _not_drawn(run: Path, why: str) -> str:
    """Say why there are no pages, and how to draw them."""
    return f"the pages of the run were not drawn: {why}\n  fix  flowrl graph {shlex.quote(str(run))}"


def _main(folder: str) -> int:
    try:
        pages = write_pages(Path(folder))
    except (FlowError, OSError) as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return 1
    for _, of in groupby(pages.items(), key=lambda page: page[0].partition(" of ")[2]):  # a line for each program
        print("   ".join(f"{what}: {page}" for what, page in of))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
