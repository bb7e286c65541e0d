"""Installs a package whose environments are tested, in a folder of its own, and runs a script that plays there.

The packages bring up to a hundred others. A folder is kept where FLOWRL_PACKAGES names a place, as `make adapters-test`
does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
#: What starts a script: packages of the folder are found after those that are here already.
START = "import runpy, sys; sys.path[0] = sys.argv.pop(1); sys.path.append(sys.argv.pop(1)); "
START += "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


def packages(extra: str, temporary: Path, *more: str) -> Path:
    """A folder with the packages of an extra of flowrl; the test is skipped where the package index gives none."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return installed(extra, temporary, [*extras[extra], *more])


def installed(name: str, temporary: Path, *installs: list[str]) -> Path:
    """A folder of this name with what pip installs, given its arguments; the test is skipped where it fails."""
    kept = os.environ.get("FLOWRL_PACKAGES")
    folder = Path(kept).resolve() / name if kept else temporary
    if not (done := folder / ".installed").exists():
        for each in installs:
            install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *each]
            if (tried := subprocess.run(install, capture_output=True, text=True)).returncode:
                pytest.skip(f"the package index gives no packages for {name}: {tried.stderr[-300:]}")
        done.touch()
    return folder


def own_python(name: str, temporary: Path, least: tuple[int, int], *packages: str) -> Path:
    """The Python of a virtual environment with these packages, for those that need a later Python than this one has.

    The test is skipped where no such Python is on the PATH, or the package index gives no packages.
    """
    kept = os.environ.get("FLOWRL_PACKAGES")
    folder = Path(kept).resolve() / name if kept else temporary
    python = folder / "bin" / "python"
    if not (done := folder / ".installed").exists():
        asked = f"import sys; sys.exit(sys.version_info < {least})"
        there = (shutil.which(f"python3.{minor}") for minor in range(least[1], least[1] + 3))
        later = [each for each in [sys.executable, *there] if each and not subprocess.call([each, "-c", asked])]
        if not later:
            pytest.skip(f"{name} needs Python {least[0]}.{least[1]} or later, and none is on the PATH")
        subprocess.run([later[0], "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", *packages]
        if (tried := subprocess.run(install, capture_output=True, text=True)).returncode:
            pytest.skip(f"the package index gives no packages for {name}: {tried.stderr[-300:]}")
        done.touch()
    return python


def said_by(script: str, folder: Path, *arguments: str) -> Any:
    """What a script of this folder prints, read as JSON: it is started with the packages of ``folder`` behind ours."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", START, str(here), str(folder), str(here / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def started(script: str, folder: Path) -> Iterator[str]:
    """Run a script of this folder beside the test, as :func:`said_by` does; what it prints first."""
    here = Path(__file__).parent
    with running(sys.executable, "-c", START, str(here), str(folder), str(here / script)) as said:
        yield said


@contextmanager
def running(*command: str) -> Iterator[str]:
    """Run a program beside the test; the first line that it prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def expect_trained(page: Any) -> None:
    """The program of a page is short, all its episodes have an end, and each step had a gradient from its own tokens."""
    assert page["lines"] <= 25 and len(page["metrics"]) == 2
    for line in page["metrics"]:
        assert line["game/delivered_fraction"] == 1 and line["game/failures"] == 0
        assert line["actor/gap_max"] < 1e-3 and line["actor/grad_norm"] > 0
