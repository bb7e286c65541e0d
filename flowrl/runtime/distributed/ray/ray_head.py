"""What a run on Ray depends on: the processes of Ray that were started from here, or those of a running cluster."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

from ray._private import worker

from ....errors import ClusterLost

_NAMES = {"raylet": "raylet", "gcs_server": "head (gcs_server)"}
PATIENCE = 30.0  # seconds that the head of a cluster may be away: one with a store of its own is started again
LOOK = 1.0  # seconds between two looks at a cluster
_MEND = "Go on with --resume. If it happens again, look into Ray's logs: memory is the usual reason."


def check_head() -> None:
    """Raise ClusterLost where a process of Ray's has ended that no rank can go on without.

    Ray itself finds out after up to a minute, and then ends this process from the inside.
    """
    for kind, process in _processes():
        if process.poll() is not None:
            name = _NAMES[kind]
            raise ClusterLost(
                f"Ray's {name} on this host, process {process.pid}, has ended, and all ranks with it.", fix=_MEND
            )
    if not _processes():
        _CLUSTER.check()


class Cluster:
    """A Ray that others have started, as this host reaches it: its head, and the raylet of this host."""

    def __init__(self) -> None:
        self._node: Any = None
        self._looked, self._met = 0.0, 0.0
        self._lost = ""

    def check(self) -> None:
        """Raise ClusterLost where the raylet is gone, or the head was not reached for :data:`PATIENCE` seconds."""
        node: Any = getattr(worker, "_global_node", None)
        if node is None:
            return
        now = time.monotonic()
        if node is not self._node:
            self._node, self._looked, self._met, self._lost = node, 0.0, now, ""
        if not self._lost and now - self._looked >= LOOK:
            self._looked = now
            head, answers = f"the head of Ray's cluster (gcs_server) at {node.gcs_address}", _answers(node.gcs_address)
            self._met = time.monotonic() if answers else self._met
            if _is_gone(node.raylet_socket_name):
                more = "" if answers else f", and {head} does not answer"
                self._lost = f"Ray's raylet on this host has ended, and all ranks here with it{more}."
            elif now - self._met > PATIENCE:
                away = now - self._met
                self._lost = f"{head} has not answered for {away:.0f} s, and no rank can go on without it."
        if self._lost:
            raise ClusterLost(self._lost, fix=f"Start the cluster again. {_MEND}")


_CLUSTER = Cluster()


def _answers(address: str) -> bool:
    """Whether somebody listens at an address such as ``10.0.0.1:6379``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK).close()
    except OSError:
        return False
    return True


def _is_gone(path: str) -> bool:
    """Whether nobody listens at a socket of this host any more; one that is busy does not say so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.settimeout(LOOK)
        try:
            tried.connect(path)
        except OSError as error:
            return isinstance(error, (ConnectionRefusedError, FileNotFoundError))
    return False


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
