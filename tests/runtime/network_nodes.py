"""Machines of a cluster on this one: each has a network, shared memory, processes and a folder for sockets of its own.

They are Linux namespaces, which root alone may make, joined by a switch that can cut any of them off.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

PORT, WAIT = 6379, 90.0
ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """Return why there can be no such machines here; nothing where there can."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need root on Linux"
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return "unshare, nsenter or ip is not installed"
    tried = "ip link add one type veth peer name two && ip link add three type bridge && mount -t tmpfs none /dev/shm"
    made = subprocess.run(["unshare", "-n", "-m", "sh", "-c", tried], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


class Machine:
    """One of them: ``Machine()``; its processes end with it."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="node-", dir="/tmp")  # the names of sockets may not be long
        waits = "mount -t tmpfs none /dev/shm && ip link set lo up && echo there && while :; do sleep 1; done"
        made = ["unshare", "-n", "-m", "-p", "--fork", "--kill-child", "--mount-proc", "bash", "-c", waits]
        self._holder = subprocess.Popen(made, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._holder.stdout is not None and self._holder.stdout.readline() == "there\n"
        own = self._holder.pid
        self.pid = int(Path(f"/proc/{own}/task/{own}/children").read_text())  # the first process inside

    def words(self, *words: str) -> list[str]:
        """Return the command line that runs another one there."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", f"--wdns={os.getcwd()}", *words]

    def ip(self, *words: str) -> None:
        """Have its network be another one; processes are named as they are here."""
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", "ip", *words], check=True, capture_output=True)

    def kill(self) -> None:
        """Have all of its processes die at once."""
        os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(WAIT)

    def close(self) -> None:
        """End it."""
        if self._holder.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Node(Machine):
    """A machine behind a switch, with Ray on it: ``Node(switch, 2, cpus=1, head="10.77.0.1")``."""

    def __init__(self, switch: Machine, number: int, *, cpus: int, head: str = "") -> None:
        super().__init__()
        self.address, self._switch, self._port = f"10.77.0.{number}", switch, f"port{number}"
        switch.ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        switch.ip("link", "set", self._port, "up", "master", "switch")
        self.ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if not head else [f"--address={head}:{PORT}"]
        few = [f"--node-ip-address={self.address}", f"--num-cpus={cpus}", "--object-store-memory=100000000"]
        temp = [f"--temp-dir={self.folder}"] if not head else []
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        self._log = open(f"{self.folder}/log", "w+")  # noqa: SIM115
        self._ray = self.popen(*ray, *where, *few, *temp, output=self._log)

    def popen(self, *words: str, output: object = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Begin a command there, as a user with this project would."""
        return subprocess.Popen(
            self.words(*words),
            stdout=output,
            stderr=output,
            env=self._environment(),
            text=True,  # type: ignore[call-overload]
        )

    def _environment(self) -> Mapping[str, str]:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "runtime"), str(ROOT / "tests")])
        ours = {"PYTHONPATH": paths, "TMPDIR": self.folder, "RAY_AUTH_MODE": "disabled"}
        return {**os.environ, **ours, "OMP_NUM_THREADS": "1"}

    def wait(self) -> None:
        """Until Ray is there."""
        until = time.monotonic() + WAIT
        while "Ray runtime started" not in Path(self._log.name).read_text():
            assert self._ray.poll() is None and time.monotonic() < until, Path(self._log.name).read_text()
            time.sleep(0.1)

    def cut(self) -> None:
        """Have whatever is sent to it or by it be lost, and nobody told."""
        self._switch.ip("link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Have it be reached again."""
        self._switch.ip("link", "set", self._port, "master", "switch")

    def close(self) -> None:
        """End it."""
        super().close()
        self._log.close()
        self._ray.wait(WAIT)


class Network:
    """A switch, and the nodes behind it; the first one has the head of Ray."""

    def __init__(self, ends: ExitStack) -> None:
        self._ends, self._numbers = ends, itertools.count(1)
        self.switch = Machine()
        ends.callback(self.switch.close)
        self.switch.ip("link", "add", "switch", "type", "bridge")
        self.switch.ip("link", "set", "switch", "up")
        self.nodes: list[Node] = []

    def add(self, cpus: int) -> Node:
        """Have one more node, with room for so many ranks."""
        head = self.nodes[0].address if self.nodes else ""
        node = Node(self.switch, next(self._numbers), cpus=cpus, head=head)
        self._ends.callback(node.close)
        node.wait()
        self.nodes.append(node)
        return node

    @property
    def address(self) -> str:
        """Of the cluster, for ``--address``."""
        return f"{self.nodes[0].address}:{PORT}"


@contextmanager
def network() -> Iterator[Network]:
    """A network without a node; all that is in it ends with it."""
    with ExitStack() as ends:
        yield Network(ends)
