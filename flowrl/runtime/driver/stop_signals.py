"""How a run is stopped: by a signal it ends after its step, with a checkpoint; by a second one or an error, at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: Ctrl-C, what Kubernetes, Slurm and systemd send, a terminal that closes, and what Slurm is told to send before.
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
PATIENCE = 10.0  # seconds that the driver's thread has to answer the second signal


class StopNow(KeyboardInterrupt):
    """A second signal, in the thread of the driver: ``StopNow(signal.SIGTERM)``."""

    def __init__(self, number: int) -> None:
        super().__init__(f"a second {signal.Signals(number).name}")
        self.status = 128 + number


class Stop:
    """Whether a run was asked to stop. ``tell`` is told so in words, once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.signal: int | None = None  # the first that came
        self._ended = False
        self._error: BaseException | None = None  # with which the run is ended from within
        self._listens = False

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status of a run that a signal has stopped, as shells write it: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or signal.SIGINT)

    def end_with(self, error: BaseException) -> None:
        """Have the driver's thread raise an error whatever it is at, where that is the main thread and this listens.

        Where it does not leave the run, the process is ended.
        """
        self._error = error
        if self._listens:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            threading.Thread(target=self._end_later, args=(error,), daemon=True, name="flowrl-end").start()

    def _end_later(self, error: BaseException) -> None:
        time.sleep(PATIENCE)
        if not self._ended:
            with suppress(OSError):
                os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="backslashreplace"))
            os._exit(1)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals inside the block; only the main thread of a process can. What is ignored stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {}
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        woken = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._listens = True
        try:
            for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
                if number == signal.SIGINT or _is_free(number):
                    before[number] = signal.signal(number, self._came)
            threading.Thread(target=self._insist, args=(ours, set(before)), daemon=True, name="flowrl-signals").start()
            yield
        finally:
            self._ended, self._listens = True, False  # a signal that comes now changes nothing
            for number, handler in before.items():
                signal.signal(number, handler)
            with suppress(OSError, ValueError):  # whoever listened before is gone, or its number is another file's
                signal.set_wakeup_fd(-1)
                signal.set_wakeup_fd(woken)
            theirs.close()

    def _came(self, number: int, frame: Any) -> None:
        del frame
        if not self._listens:
            return
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        name = signal.Signals(number).name
        if self.signal is not None:
            raise StopNow(number)
        self.signal = number
        again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
        said = "" if number == signal.SIGINT else f"{name}: "
        self._tell(f"{said}stopping after this step, with a checkpoint; {again} stops at once")

    def _insist(self, signals: socket.socket, known: set[int]) -> None:
        """End the process where a second signal has come and its main thread does not leave the run.

        That thread is told of a signal between two steps of Python: one that is in a call of C's is told after it.
        """
        came: list[int] = []
        with signals:
            while len(came) < 2:
                if not (said := signals.recv(64)):
                    return
                came += [number for number in said if number in known]
        time.sleep(PATIENCE)
        if not self._ended:
            with suppress(OSError):
                os.write(2, b"stopped at once; what was running did not end by itself\n")
            os._exit(128 + came[1])


def _is_free(number: int) -> bool:
    """Whether nobody else answers a signal. nohup has SIGHUP ignored; Ray ends a driver at SIGTERM."""
    found = signal.getsignal(number)
    return found == signal.SIG_DFL or str(getattr(found, "__module__", "")).startswith("ray.")
