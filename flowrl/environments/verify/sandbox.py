"""Runs Python code that nobody trusts: namespaces without network or files, limits on what it uses, unprivileged.

The kernel keeps it in: user, mount, process, network and IPC namespaces, resource limits, and a filter of system calls.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .line_reader import LineReader
from .verdict import VerifierFailed

_PROGRAM = Path(__file__).with_name("sandboxed.py")
_SLACK = 30.0  # seconds that a sandbox may take besides what a test may
_AT_ONCE = threading.BoundedSemaphore(max(1, os.cpu_count() or 1))
_NOBODY = 65534
_MB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a test may use: ``Limits(cpu_seconds=5, seconds=30.0, memory_mb=512)``.

    ``cpu_seconds`` and ``memory_mb`` hold for each process and for all of a test together; ``seconds`` is by the clock.
    ``file_mb`` bounds all files, ``output_kb`` what is printed, ``processes`` counts threads, too.

    >>> fl.environments.verify.Limits(memory_mb=256).processes
    16
    """

    cpu_seconds: int = 5
    seconds: float = 30.0
    memory_mb: int = 512
    file_mb: int = 16
    output_kb: int = 256
    processes: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(f"{name}={value!r} is no number above 0")
        if not isinstance(self.cpu_seconds, int):
            raise ValueError(f"cpu_seconds={self.cpu_seconds!r}: the kernel counts whole seconds")

    @property
    def record(self) -> dict[str, Any]:
        """As the program in the sandbox takes it."""
        return {
            "cpu_seconds": self.cpu_seconds,
            "seconds": self.seconds,
            "memory_bytes": int(self.memory_mb * _MB),
            "file_bytes": int(self.file_mb * _MB),
            "output_bytes": int(self.output_kb * 1024),
            "processes": int(self.processes),
        }


class Sandbox:
    """A sandbox that is open: :meth:`run` one test after another in it."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits) -> None:
        self._process, self._limits = process, limits
        assert process.stdout is not None, "it was opened with a pipe"
        self._lines = LineReader(process.stdout.fileno())

    def run(self, test: Mapping[str, Any]) -> dict[str, Any]:
        """Run a test as ``sandboxed.py`` takes it; return what it says of it. Raises VerifierFailed."""
        self.send(test)
        answer = self.receive(self._limits.seconds + _SLACK)
        if answer["trouble"]:
            raise VerifierFailed(f"the sandbox failed before it ran anything: {answer['trouble']}")
        return answer

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a line."""
        assert self._process.stdin is not None, "it was opened with a pipe"
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise VerifierFailed(f"the sandbox has ended: {self._said()}") from error

    def receive(self, seconds: float) -> dict[str, Any]:
        """Read a line. Raises VerifierFailed where none comes in time."""
        try:
            answer = json.loads(self._lines.read(seconds))
        except TimeoutError:
            raise VerifierFailed(f"the sandbox has not answered for {seconds:.0f} s") from None
        except EOFError:
            raise VerifierFailed(f"the sandbox has ended: {self._said()}") from None
        if "refused" in answer:
            raise VerifierFailed(
                f"this machine lets nobody make a sandbox ({answer['refused']}): it takes Linux 5.14 or later, user "
                "namespaces and a /proc that may be mounted in them"
            )
        return answer

    def _said(self) -> str:
        self._process.kill()
        assert self._process.stderr is not None, "it was opened with a pipe"
        return self._process.stderr.read(2000).decode(errors="replace").strip() or f"exit {self._process.wait()}"


@contextmanager
def opened_sandbox(limits: Limits, *, packages: bool = False, places: Sequence[str] = ()) -> Iterator[Sandbox]:
    """Open a sandbox for tests of one answer; as many are open at once as the machine has cores.

    ``places`` are folders that commands of a shell may write to; without them there is ``/tmp``.
    """
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise VerifierFailed(f"there is no sandbox on {platform.system()} {platform.machine()}: it takes Linux")
    with _AT_ONCE, tempfile.TemporaryDirectory(prefix="flowrl-sandbox-") as root:
        command = [sys._base_executable, "-I", "-S", str(_PROGRAM)]  # type: ignore[attr-defined]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env={}, cwd="/")
        try:
            sandbox = Sandbox(process, limits)
            sandbox.receive(_SLACK)
            is_root = os.geteuid() == 0
            _map_users(process.pid, is_root=is_root)
            shown, path = _shown(packages)
            about = {"root": root, "shown": shown, "path": path, "is_root": is_root, "limits": limits.record}
            about["places"] = list(places)
            sandbox.send(about)
            sandbox.receive(_SLACK)
            yield sandbox
        finally:
            process.kill()
            for file in (process.stdin, process.stdout, process.stderr):
                assert file is not None, "it was opened with pipes"
                with suppress(OSError):  # a line that it has not read
                    file.close()
            process.wait()


def _map_users(pid: int, *, is_root: bool) -> None:
    """Say who the users inside are outside: nobody where that may be said, else who runs this."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        if not is_root:
            Path(f"/proc/{pid}/setgroups").write_text("deny")
        Path(f"/proc/{pid}/gid_map").write_text(f"0 0 1\n1 {_NOBODY} 1\n" if is_root else f"1 {gid} 1\n")
        Path(f"/proc/{pid}/uid_map").write_text(f"0 0 1\n1 {_NOBODY} 1\n" if is_root else f"1 {uid} 1\n")
    except OSError as error:
        raise VerifierFailed(f"this machine lets nobody map users of a sandbox: {error}") from error


@cache
def _shown(packages: bool) -> tuple[list[str], list[str]]:
    """Which folders are shown in a sandbox, and where Python looks for modules."""
    stdlib = sysconfig.get_path("stdlib")
    path = [stdlib, sysconfig.get_config_var("DESTSHARED") or f"{stdlib}/lib-dynload"]
    wanted = ["/usr", "/lib", "/lib64", "/bin", os.path.realpath(sys.base_prefix), *path]
    if packages:
        sites = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        path, wanted = path + sites, wanted + sites
    shown: list[str] = []
    for folder in dict.fromkeys(wanted):
        whole = [other for other in shown if not os.path.islink(other)]
        if os.path.exists(folder) and not any(Path(folder).is_relative_to(other) for other in whole):
            shown.append(folder)
    return shown, list(dict.fromkeys(path))
