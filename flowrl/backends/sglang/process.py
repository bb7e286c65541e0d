"""The process of a server, as the one that began it sees it: started in a Python that has SGLang, watched, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import finalize

from ...errors import ModelError

END_SECONDS = 10.0
SHOWN = 12  # lines of what it wrote that an error shows
#: What has to be in its environment before SGLang is imported.
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the few places that SGLang keeps back
    "HF_HUB_OFFLINE": "1",  # all that it needs lies in a folder
    "TORCHDYNAMO_DISABLE": "1",
}
_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"


def installed(python: str) -> str:
    """Return the version of SGLang that a Python has. Raises ModelError where it has none."""
    asked = None
    with suppress(OSError):
        asked = subprocess.run([python, "-P", "-c", _VERSION], capture_output=True, text=True, timeout=60, check=False)
    if asked is None or asked.returncode != 0:
        why = "is no Python" if asked is None else "does not have it"
        raise ModelError(
            f"The engine 'sglang' needs a Python with SGLang, and {python} {why}.",
            fix="Write python: PATH beside it, the interpreter of an environment of its own, or url: of a server.",
        )
    return asked.stdout.strip()


def free_port() -> int:
    """Return a port of this host that nobody has."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


class ServerProcess:
    """A server that is starting: ``ServerProcess("/venv/bin/python", {"folder": ..., "port": 30000, ...})``.

    It ends with this object and with this process, however that ends.
    """

    def __init__(self, python: str, opened: Mapping[str, Any]) -> None:
        self._log = tempfile.TemporaryFile(prefix="flowrl-sglang-")  # noqa: SIM115  what the process writes
        # Only flowrl of this Python is found there: the other one has its own torch.
        self._source = tempfile.TemporaryDirectory(prefix="flowrl-sglang-")
        (Path(self._source.name) / "flowrl").symlink_to(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [python, "-P", "-m", f"{__package__}.server"],  # -P: no file beside the user is taken for a library
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": self._source.name},
            start_new_session=True,  # its own processes end with it, and Ctrl-C is for the run
        )
        self._end = finalize(self, _end, self._process, self._source)
        assert self._process.stdin is not None, "it was asked for"
        with suppress(OSError):  # what has ended is seen by who waits for it
            self._process.stdin.write(json.dumps({**opened, "parent": os.getpid()}).encode() + b"\n")
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def ended(self, seconds: float = 0.0) -> str | None:
        """Return how it ended, with its last lines, where it does so in so many seconds; else None."""
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(seconds)
            return f"Its process ended with status {status}.{self.written()}"
        return None

    def written(self) -> str:
        """Return the last lines that it wrote."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 20_000))
        lines = self._log.read().decode(errors="replace").splitlines()
        return "".join(f"\n  | {line}" for line in lines[-SHOWN:])

    def close(self) -> None:
        """End the process and those that it has started."""
        self._end()


def _end(process: subprocess.Popen[bytes], source: tempfile.TemporaryDirectory[str]) -> None:
    """Ask a group of processes to end, and end it."""
    for sign, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    source.cleanup()
