"""``flowrl new``: write a project from a shipped algorithm."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError, did_you_mean
from ..shipped import find_driver, names
from .arguments.options import read_words
from .arguments.script import load_script
from .help import new_parser
from .new_project.project_files import first_run, project_files


def new_command(words: Sequence[str]) -> int:
    """Write the files of a project, and print the commands that train and test it. Returns the exit status."""
    options = read_options(words)
    name, folder = options.name, options.folder
    driver = find_driver(name)
    if driver is None:
        fix = did_you_mean(name, names(), "Name one of these.", form="Did you mean {}?")
        raise UsageError(f"there is no shipped algorithm {name}.", have=names(), fix=fix)
    flow = load_script(str(driver))
    files = project_files(name, flow)
    _write(files, folder)
    script, plan, out = (str(folder / part) for part in (f"{name}.py", "plan.yaml", "runs/first"))
    print(f"{folder} has {', '.join(path for path in files if not path.endswith('__init__.py'))}")
    print(f"train it:  {shlex.join(['flowrl', 'run', script, '--plan', plan, *first_run(flow), '--out', out])}")
    print(f"test it:   {shlex.join(['python', '-m', 'pytest', str(folder)])}")
    return 0


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    parser = new_parser("new", "NAME FOLDER")
    parser.add_argument("name", metavar="NAME", help=f"a shipped algorithm: {', '.join(names())}")
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="where the project goes: a new folder, or an empty one"
    )
    return read_words(parser, words, "flowrl new --help")


def _write(files: dict[str, str], folder: Path) -> None:
    """Write files into a folder, with the folders they are in. Raises UsageError where something is there already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty.", fix="Name a folder that is not there yet.")
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}.", fix="Name a folder that can be written.") from None
