"""Where a run comes from: the commit of its script, the host, and the device that it is driven from."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

SECONDS = 10.0  # that git may take


def origin(script: str) -> dict[str, Any]:
    """``{"commit": "9efa5d5...", "dirty": False, "host": "node7", "device": "NVIDIA H200"}``.

    ``commit`` is that of the repository that the script lies in, None outside of one; ``dirty`` whether files of it
    were changed since, None where git does not say. ``device``: the GPUs of this host, else its processor.
    """
    folder = Path(script).resolve().parent if os.path.exists(script) else Path.cwd()
    commit = _git(folder, "rev-parse", "HEAD")
    changed = None if commit is None else _git(folder, "status", "--porcelain", "--untracked-files=no")
    dirty = None if changed is None else bool(changed)
    return {"commit": commit, "dirty": dirty, "host": platform.node(), "device": device()}


def device() -> str:
    """The GPUs that this process sees, else the processor: ``2 x NVIDIA H200``, ``cpu (AMD EPYC 7B13, 16 cores)``."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        counted = {name: names.count(name) for name in dict.fromkeys(names)}
        return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counted.items())
    return f"cpu ({_processor()}, {os.cpu_count()} cores)"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _git(folder: Path, *words: str) -> str | None:
    """What git says; None where there is no git, no repository, or no answer in time. Nothing is locked meanwhile."""
    try:
        said = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()
