"""Ray's own processes on this host, as far as they were started from here: whether they are there still."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ray._private import worker

from ....errors import ClusterLost

_NAMES = {"raylet": "raylet", "gcs_server": "head (gcs_server)"}


def check_head() -> None:
    """Raise ClusterLost where a process of Ray's that this one has started has ended: no rank can go on without it.

    Ray itself finds out after up to a minute, and then ends this process from the inside.
    """
    for kind, process in _processes():
        if process.poll() is not None:
            name = _NAMES[kind]
            raise ClusterLost(
                f"Ray's {name} on this host, process {process.pid}, has ended, and all ranks with it.",
                fix="Go on with --resume. If it happens again, look into Ray's logs: memory is the usual reason.",
            )


def end_head() -> None:
    """End what is left of Ray's processes, and the ranks with them."""
    for _, process in _processes():
        with suppress(OSError):
            process.kill()


def _processes() -> list[tuple[str, Any]]:
    """Those that a run depends on; none of a cluster that others have started."""
    node: Any = getattr(worker, "_global_node", None)
    started: dict[str, list[Any]] = getattr(node, "all_processes", None) or {}
    return [(kind, said.process) for kind in _NAMES for said in started.get(kind, ())]
