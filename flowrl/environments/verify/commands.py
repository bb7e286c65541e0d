"""Runs commands of a shell that nobody trusts, one after another over the same files, in the sandbox of unit tests."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sandbox import Limits, opened_sandbox

#: Files as they go into a sandbox and come out of it: each has a ``path`` and a ``mode``, or a ``link``, and its
#: ``data`` in base64. Nothing of them is written outside a sandbox.
Files = list[dict[str, Any]]
#: How a command ends: it ends itself, with whatever exit status; it broke a limit, of time, of memory, or another.
ENDS = ("done", "timed_out", "out_of_memory", "killed")
_BROKE = {"seconds": "timed_out", "cpu_seconds": "timed_out", "memory": "out_of_memory"}


@dataclass(frozen=True)
class Ran:
    """What became of a command: its ``end``, its exit ``status``, its ``output``, and the ``files`` that it leaves.

    ``end`` is ``done`` where it ended itself, else ``timed_out``, ``out_of_memory`` or ``killed``; ``why`` says which
    limit it broke.

    >>> fl.environments.verify.Ran("done", 2, "3\\n", [], 0.1).status
    2
    """

    end: str
    status: int
    output: str
    files: Files
    seconds: float
    why: str = ""


def run_command(
    command: str,
    files: Files = [],  # noqa: B006 - it is not changed
    *,
    cwd: str = "/tmp",
    env: Mapping[str, str] | None = None,
    places: Sequence[str] = (),
    limits: Limits | None = None,
) -> Ran:
    """Run a command by ``bash`` in a sandbox over ``files``; return what it printed, and the files as it leaves them.

    Only ``/tmp`` and the folders ``places`` can be written to; together their files are as large as ``limits`` say.
    A process that it leaves running ends with it. A command that broke a limit leaves its files behind too, except one
    that left more than may be: there the files stay as they were.

    Raises VerifierFailed, an OSError, where the sandbox fails: no command is to blame for that.

    >>> from flowrl.environments.verify import run_command
    >>> ran = run_command("echo 3 > a; cat a; exit 2")
    >>> ran.end, ran.status, ran.output, [entry["path"] for entry in ran.files]
    ('done', 2, '3\\n', ['/tmp/a'])
    >>> run_command("cat a", ran.files).output
    '3\\n'
    """
    limits = limits or Limits()
    if "\0" in command:
        return Ran("done", 126, "a command has no NUL\n", files, 0.0)
    asked = {"kind": "shell", "command": command, "cwd": cwd, "env": dict(env or {}), "files": files}
    with opened_sandbox(limits, places=["/tmp", *(place for place in places if place != "/tmp")]) as sandbox:
        found = sandbox.run(asked)
    broke = found["broke"]
    kept = files if found["files"] is None else found["files"]
    why = f"it broke the limit of {broke}" if broke else ""
    end = _BROKE.get(broke, "killed") if broke else "done"
    return Ran(end, found["exit"], found["out"], kept, found["seconds"], why)


def files_below(path: Path, at: str) -> Files:
    """The files of a folder, or one file, as they are to be found at ``at``. Links stay links."""
    if path.is_symlink() or not path.is_dir():
        return [_entry(path, at)]
    found: Files = [{"path": at.rstrip("/") or "/", "mode": 0o755}]
    for each in sorted(path.iterdir()):
        found += files_below(each, f"{at.rstrip('/')}/{each.name}")
    return found


def _entry(path: Path, at: str) -> dict[str, Any]:
    if path.is_symlink():
        return {"path": at, "link": os.readlink(path)}
    data = base64.b64encode(path.read_bytes()).decode()
    return {"path": at, "mode": path.stat().st_mode & 0o777, "data": data}


def text_of(files: Sequence[Mapping[str, Any]], path: str) -> str | None:
    """The text of a file, or None where there is none."""
    found = next((entry for entry in files if entry["path"] == path and "data" in entry), None)
    return None if found is None else base64.b64decode(found["data"]).decode("utf-8", "replace")
