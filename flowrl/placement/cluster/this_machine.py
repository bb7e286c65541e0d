"""The devices of the machine at hand: its GPUs as nvidia-smi names them, or else its CPU cores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from itertools import groupby

from .device_specs import kind_of_card


def devices_here() -> list[tuple[str, int]]:
    """Return kind and number of the devices; those that alternate become several groups, in the order of the devices.

    Raises PlanError for a GPU of a kind that is not known.
    """
    cards = _cards()
    if not cards:
        return [("cpu", os.cpu_count() or 1)]
    return [(kind, len(list(same))) for kind, same in groupby(map(kind_of_card, cards))]


def _cards() -> Sequence[str]:
    """Names of the GPUs of this machine, none where the driver or its tool is not there."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else ()


def host_bytes() -> float:
    """Return the bytes of memory of this machine's host."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
