"""Signals that a whole group of processes is sent: the driver answers them, and needs Ray and its ranks until then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import worker

#: What Slurm, systemd, Kubernetes or a terminal sends to all processes of a job. Ray sees to SIGINT by itself.
GROUP = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, n))


@contextmanager
def deaf() -> Iterator[None]:
    """Processes of Ray's that are started inside the block leave these signals to the driver, and so does Ray in it.

    They end with the driver, or as it lets go of them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in GROUP}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    node: Any = getattr(worker, "_global_node", None)
    for started in (getattr(node, "all_processes", None) or {}).values():
        for said in started:
            said.process.terminate = said.process.kill  # Ray ends them so, and gives each a second to hear it


def overhear() -> None:
    """Have the process of a rank, in its main thread, take no notice of these signals."""
    if threading.current_thread() is threading.main_thread():
        for number in GROUP:
            signal.signal(number, lambda *said: None)  # no SIG_IGN: processes of user code would ignore them too


def hear() -> None:
    """Let what user code starts from this thread hear these signals, as ``Popen.terminate`` expects."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP)
