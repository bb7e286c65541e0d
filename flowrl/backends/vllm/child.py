"""The process of a replica, as the process that began it sees it: started, asked, ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from weakref import finalize

import torch

from ...errors import DataError, EngineLost, ModelError, RunError
from ...workers.headway import make_headway

LOOK = 1.0  # seconds between two looks at whether it is alive
START_SECONDS = 900.0  # a compiled engine takes three minutes on two cores
END_SECONDS = 10.0
SHOWN = 12  # lines of what it wrote that an error shows


class Child:
    """A process of its own: ``Child({"folder": ..., "version": "0.32.0"}, torch.device("cuda:1"))`` returns when its
    engine is there, on that device.

    It ends with this object and with this process, however that ends. Raises ModelError where it does not start.
    """

    def __init__(self, opened: Mapping[str, Any], device: torch.device) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._calls = 0
        self._log = tempfile.TemporaryFile(prefix="flowrl-vllm-")  # noqa: SIM115  what the process writes
        here, there = socket.socketpair()
        try:
            self._process = self._start(there.fileno(), device)
        finally:
            there.close()
        self._connection = Connection(here.detach())
        self._end = finalize(self, _end, self._process, self._connection)
        try:
            self._send(opened)
            self.version: str = self._receive(START_SECONDS)["ready"]
        except RunError as error:
            self.close()
            raise ModelError(f"vLLM does not start: {error.what}", fix="See what it says above.") from error

    def _start(self, number: int, device: torch.device) -> subprocess.Popen[bytes]:
        source = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
        return subprocess.Popen(
            # -P: no file beside the user is taken for a library
            [sys.executable, "-P", "-m", f"{__package__}.server", str(number), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": _visible(device)},
            pass_fds=(number,),
            start_new_session=True,  # Ctrl-C is for the run, which then ends it
        )

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def ask(
        self, do: str, answers: int, *, meanwhile: Callable[[], None] = lambda: None, **said: Any
    ) -> Iterator[dict[str, Any]]:
        """Ask for something, and yield the answers as they come. Raises RunError for what went wrong there, and once it
        is closed, EngineLost where the process is gone, DataError for rows that cannot be answered.

        ``meanwhile`` is done here once it was asked for.
        """
        with self._lock:
            self._calls += 1
            call = self._calls
            self._send({"do": do, **said, "call": call})
            meanwhile()
            while answers:
                got = self._receive()
                if got["call"] != call:
                    continue  # of a call that somebody did not wait for
                if "what" in got:
                    raise DataError(got["what"], fix=got["fix"])
                if "error" in got:
                    raise RunError(f"vLLM: {got['error']}") from RuntimeError(got["trace"])
                answers -= 1
                yield got

    def close(self) -> None:
        """End the process. Nothing is left of it. A call that another thread waits for raises RunError."""
        self._closed = True
        self._end()
        if self._lock.acquire(timeout=END_SECONDS):  # else somebody has not taken all answers of a call
            self._connection.close()
            self._log.close()
            self._lock.release()

    def _send(self, said: Mapping[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(said).encode())
        except OSError:
            raise self._lost() from None

    def _receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next message. Raises EngineLost where the process is gone, RunError for none in so many seconds."""
        waited = 0.0
        try:
            while not self._connection.poll(LOOK):
                waited += LOOK
                if self._process.poll() is not None and not self._connection.poll():
                    raise self._lost()
                if seconds is not None and waited >= seconds:
                    raise RunError(f"it has not answered in {seconds:g} seconds.{self._written()}")
            got = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._lost() from None
        make_headway()
        if "ended" in got:
            raise EngineLost(f"it ended with {got['ended'].rstrip('.')}.{self._written()}")
        return got

    def _lost(self) -> RunError:
        if self._closed:
            return RunError("vLLM was closed: no call of it comes to its end any more.")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        return EngineLost(f"the process of vLLM is gone, with exit status {self._process.returncode}.{self._written()}")

    def _written(self) -> str:
        """The last lines that it wrote."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 20_000))
        lines = self._log.read().decode(errors="replace").splitlines()
        return "".join(f"\n  | {line}" for line in lines[-SHOWN:])


def _visible(device: torch.device) -> str:
    """Name the device as the driver does, of those that this process sees; nothing for a CPU."""
    if device.type != "cuda":
        return ""
    place = torch.cuda.current_device() if device.index is None else device.index
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[place] if seen else str(place)


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Ask a process to end, and end it. Who reads what it says reads that nothing more comes.

    The connection stays open: its number may be that of another file as soon as it is closed.
    """
    with suppress(OSError):
        connection.send_bytes(b'{"do": "close"}')
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
