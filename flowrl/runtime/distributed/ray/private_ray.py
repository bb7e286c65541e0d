"""A Ray that is started here is this user's alone: a token for each run, loopback, and a folder nobody else can read.

Without the token Ray would run what anybody sends it; in its own folder, ``/tmp/ray``, all users may write, and the
store of objects there asks nobody who they are.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

#: What the processes of a run are told by their environment, unless the user has said something else.
LOOPBACK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo" if sys.platform == "linux" else "lo0")
#: What one process may leave in Ray's logs, whatever prints there: a file of so many bytes, and the one before it.
LOGS = {"RAY_ROTATION_MAX_BYTES": str(32 << 20), "RAY_ROTATION_BACKUP_COUNT": "1"}
#: Ray would begin with a process for each processor, for work to come; a rank of a CPU, which has an environment of its
#: own, gets another one all the same.
IDLE = {"RAY_prestart_worker_first_driver": "0"}
#: Turned off, Ray takes 127.0.0.1 for the address of this machine and listens there alone, on Linux too.
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
#: Bytes that the name of a socket may have, and those that Ray puts behind the name of its folder.
_LONGEST, _BEHIND = 107, len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")


class PrivateRay:
    """``settings = private.open()`` for ``ray.init(address="local", ...)``; ``close`` when it is shut down.

    Inside, the environment of this process has what Ray's processes and the ranks inherit.
    """

    def __init__(self) -> None:
        self._token: Path | None = None
        self._before: dict[str, str | None] = {}
        self._clusters: Any = None

    def open(self) -> dict[str, Any]:
        """Make the token and the folder; returns settings for ``ray.init``."""
        folder = private_folder()
        self._token = folder / f"token-{secrets.token_hex(8)}"
        handle = os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(handle, "w") as file:
            file.write(secrets.token_hex(32))
        self._set({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(self._token)})
        self._set({_CLUSTERS: "0", **{n: os.environ.get(n, said) for n, said in {**LOOPBACK, **LOGS, **IDLE}.items()}})
        self._clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
        _read_again()
        inside = folder / "ray"  # Ray lets everybody into the folder that it is given, but not into those above
        inside.mkdir(mode=0o700, exist_ok=True)
        return {"_temp_dir": str(inside), "include_dashboard": False}

    def close(self) -> None:
        """Forget the token; the environment is what it was."""
        if self._token is None:
            return
        with suppress(OSError):
            self._token.unlink()
        self._token = None
        self._set(self._before)
        self._before.clear()
        ray_constants.ENABLE_RAY_CLUSTER = self._clusters
        _read_again()

    def _set(self, said: dict[str, str | None]) -> None:
        for name, value in list(said.items()):
            self._before.setdefault(name, os.environ.get(name))
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def private_folder() -> Path:
    """Return a folder for sockets and logs that this user alone can read, the same for all runs.

    Another one is made where somebody else has taken its name, or has let others in.
    """
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) + len(f"/flowrl-{os.getuid()}") + _BEHIND > _LONGEST:
        base = Path("/tmp")
    folder = base / f"flowrl-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="flowrl-", dir=base))


def _read_again() -> None:
    """Have Ray read the environment again: it remembers what it was when it was imported."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
