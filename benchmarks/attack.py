"""Another user of the same host attacks a run: ``sudo python benchmarks/attack.py PID --folder runs/first``.

PID is the driver of the run. Its processes are found as root; the attack itself is done by a process of ``--user``,
which is told where they listen as soon as they do: more than a stranger would know. It connects to every socket, comes
in as whatever rank may be waited for, sends garbage, lengths of 2^62 bytes, requests of HTTP, gRPC and of PyTorch's
store, and opens every file. What it gets is printed as JSON; the exit status is 1 where that is anything.
"""

from __future__ import annotations

import argparse
import encodings.idna  # noqa: F401  the other user may not be able to read the files of this Python
import json
import os
import pwd
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Calls of Ray that would tell something, or end a process: path and request.
CALLS = {
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo": b"",
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo": b"",
    "/ray.rpc.ActorInfoGcsService/GetAllActorInfo": b"",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys": b"",
    "/ray.rpc.NodeManagerService/GetNodeStats": b"",
    "/ray.rpc.NodeManagerService/ShutdownRaylet": b"\x08\x00",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats": b"",
    "/ray.rpc.CoreWorkerService/Exit": b"\x08\x01",
}
HUGE = 1 << 62
#: Where flowrl and its packages lie, which everybody may read.
OPEN_TO_ALL = (f"{sys.prefix}/", f"{os.path.realpath(sys.prefix)}/", f"{Path(__file__).resolve().parents[1]}/")
EVERYWHERE = ("0.0.0.0", "::")
_ENOUGH = threading.Event()  # SIGTERM ends the attack before its time


# ---- as root: where the run can be reached ---------------------------------------------------------------------------


def family(root: int) -> set[int]:
    """A process and all that it has started, directly or not, but for this one and what it has started."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, size = {root}, 0
    while len(found) != size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found and pid != os.getpid()}
    return found


def opened_by(pids: set[int]) -> tuple[set[str], set[str]]:
    """Numbers of the sockets that these processes have open, and names of files in memory or for the moment."""
    found, files = set[str](), set[str]()
    for pid in pids:
        try:
            links = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for fd in set(links) - {"0", "1", "2"}:
            try:
                said = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if said.startswith("socket:["):
                found.add(said[8:-1])
            elif said.startswith(("/dev/shm/", "/tmp/")) and os.path.exists(said):
                files.add(said)
    return found, files


def places(numbers: set[str]) -> list[tuple[str, int]]:
    """Where these sockets listen."""
    found = []
    for file, kind in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for row in (line.split() for line in Path(file).read_text().splitlines()[1:]):
            if row[3] == "0A" and row[9] in numbers:
                host, port = row[1].split(":")
                words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
                name = socket.inet_ntop(kind, struct.pack(f"<{len(words)}I", *words))
                found.append((name.removeprefix("::ffff:"), int(port, 16)))
    return found


def doors(numbers: set[str]) -> list[str]:
    """Names of the Unix sockets among them; abstract ones begin with an @."""
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return sorted({row[7] for row in rows if len(row) > 7 and row[6] in numbers})


def secrets_of(root: int) -> list[str]:
    """The tokens of the run, to be looked for where everybody can read."""
    for pid in family(root):
        try:
            said = dict(x.split("=", 1) for x in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in x)
            return [Path(said["RAY_AUTH_TOKEN_PATH"]).read_text()]
        except (OSError, KeyError):
            continue
    return []


# ---- as another user -------------------------------------------------------------------------------------------------


class Attack:
    """What the other user does. ``got`` is what that brought."""

    def __init__(self) -> None:
        self.got: dict[str, set[str]] = {name: set() for name in ("answers", "doors", "files")}
        self.tries = self.connections = self.refused = 0
        self.held: list[socket.socket] = []
        self.lock = threading.Lock()

    def connect(self, place: tuple[str, int]) -> socket.socket:
        made = socket.create_connection(("127.0.0.1" if place[0] in EVERYWHERE else place[0], place[1]), timeout=2)
        with self.lock:
            self.connections += 1
            self.held.append(made)
            while len(self.held) > 2000:
                self.held.pop(0).close()
        return made

    def race(self, place: tuple[str, int]) -> None:
        """Be there before the rank that is waited for, whichever it is, and say that more will come than there is."""
        for number in range(8):
            self.connect(place).sendall(struct.pack("<q", number))
        for number in range(4):
            self.connect(place).sendall(struct.pack("<qQQ", number, HUGE, HUGE) + os.urandom(48))

    def say(self, place: tuple[str, int]) -> None:
        """All else that can be said to a port."""
        for path, request in CALLS.items():
            one = self.connect(place)
            one.sendall(grpc(path, request))
            self.listen(one, place, path)
        for path in ("/", "/get_or_create_runtime_env", "/api/jobs/", "/metrics"):
            for verb in ("GET", "POST"):
                one = self.connect(place)
                one.sendall(f"{verb} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
                self.listen(one, place, f"{verb} {path}")
        for words in (
            b"",
            os.urandom(4096),
            struct.pack("<Q", HUGE) * 8,
            struct.pack(">Q", HUGE) * 8,
            b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + struct.pack("<Q", 3) + b"key" + struct.pack("<Q", HUGE),
        ):
            one = self.connect(place)
            one.sendall(words)
            self.listen(one, place, "words")

    def listen(self, one: socket.socket, place: tuple[str, int], what: str) -> None:
        """Note an answer, if it is one: not a refusal, and not the greeting of a protocol."""
        one.settimeout(0.3 if what == "words" else 10.0)
        said = b""
        with suppress(OSError):
            while len(said) < 1 << 20 and (more := one.recv(1 << 16)):
                said += more
                if b"grpc-status" in said or said.startswith(b"HTTP/1."):
                    break
        refused = said.startswith(b"HTTP/1.") and said.split()[1] in (b"400", b"401", b"403", b"404", b"405")
        if said.startswith(b"\0") or said[3:4] == b"\4":  # frames of HTTP/2
            refused = not any(data for kind, data in frames(said) if kind == 0)
        self.refused += b"InvalidAuthToken" in said or b" 401 " in said[:20]
        if said and not refused:
            self.got["answers"].add(f"{what}: {said[:120]!r}")

    def knock(self, name: str) -> None:
        """At a Unix socket."""
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(0.3)
        self.tries += 1
        with one, suppress(OSError):
            one.connect("\0" + name[1:] if name.startswith("@") else name)
            self.got["doors"].add(name)

    def open(self, name: str) -> None:
        """Read a file or a folder, and write to it."""
        for how in (os.O_RDONLY, os.O_WRONLY):
            self.tries += 1
            with suppress(OSError):
                file = os.open(name, how | os.O_NONBLOCK)
                reads = how == os.O_RDONLY
                if not reads or (os.listdir(file) if os.path.isdir(name) else os.read(file, 1)):
                    self.got["files"].add(f"{'read' if reads else 'written'}: {name}")
                os.close(file)


def frames(said: bytes) -> Iterator[tuple[int, bytes]]:
    """Kinds and contents of the frames of HTTP/2."""
    at = 0
    while at + 9 <= len(said):
        size = int.from_bytes(said[at : at + 3], "big")
        yield said[at + 3], said[at + 9 : at + 9 + size]
        at += 9 + size


def grpc(path: str, request: bytes) -> bytes:
    """A call of gRPC by somebody who has no token."""

    def header(name: str, value: str) -> bytes:
        return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()

    def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
        return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content

    said = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
    said |= {"te": "trailers", "content-type": "application/grpc"}
    head = b"".join(header(*pair) for pair in said.items())
    body = b"\0" + len(request).to_bytes(4, "big") + request
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, head) + frame(0, 1, 1, body)


def attacker(pipe: int, answer: int, user: str) -> None:
    """The process of the other user: it reads where to go from a pipe, until that is closed."""
    who = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(who.pw_gid)
    os.setuid(who.pw_uid)
    attack, seen = Attack(), set[str]()
    threads: list[threading.Thread] = []
    with open(pipe) as lines:
        for line in lines:
            for kind, name in json.loads(line):
                work = {"race": race, "tcp": say, "unix": knock, "file": look}[kind]
                if kind == "race" or f"{kind} {name}" not in seen or random.random() < 0.2:
                    seen.add(f"{kind} {name}")
                    threads.append(threading.Thread(target=work, args=(attack, name), daemon=True))
                    threads[-1].start()
            threads = [one for one in threads if one.is_alive()]
    until = time.monotonic() + 15
    for one in threads:
        one.join(max(0.0, until - time.monotonic()))
    with open(answer, "w") as out:
        json.dump(
            {
                "tries": attack.tries,
                "connections": attack.connections,
                "refused": attack.refused,
                **{n: sorted(v) for n, v in attack.got.items()},
            },
            out,
        )


def race(attack: Attack, place: list) -> None:
    with suppress(OSError):
        attack.race((place[0], place[1]))


def say(attack: Attack, place: list) -> None:
    with suppress(OSError):
        attack.say((place[0], place[1]))


def knock(attack: Attack, name: str) -> None:
    attack.knock(name)


def look(attack: Attack, name: str) -> None:
    attack.open(name)


# ---- both ------------------------------------------------------------------------------------------------------------


def spot(pid: int, folder: Path, pipe: int, seconds: float) -> dict:
    """Tell the attacker where the run can be reached, at once when it is somewhere new."""
    known: set[tuple[str, int]] = set()
    names: set[str] = set()
    before = opened_by({pid})[1]  # the log of a terminal, say; what the run has open is in its folder, or comes later
    until, often = time.monotonic() + seconds, 0.0
    with open(pipe, "w") as out:
        while time.monotonic() < until and not _ENOUGH.is_set() and Path(f"/proc/{pid}").exists():
            pids = family(pid)
            numbers, files = opened_by(pids)
            now = set(places(numbers))
            said: list[tuple[str, object]] = [("race", place) for place in now - known]
            known |= now
            if time.monotonic() > often:  # all of it, about every second
                often = time.monotonic() + 1
                inside = [f"/proc/{p}/{what}" for p in pids for what in ("environ", "mem", "maps", "fd")]
                private = [str(p) for p in (folder, *folder.rglob("*"))]
                said += [("tcp", place) for place in now] + [("unix", door) for door in doors(numbers)]
                held = [name for name in files - before if not name.startswith(OPEN_TO_ALL)]
                said += [("file", name) for name in (*inside, *private, *held)]
                names |= {str(name) for kind, name in said if kind in ("unix", "file")}
            try:
                out.write(json.dumps(said) + "\n")
                out.flush()
            except BrokenPipeError:
                break
            time.sleep(0.005)
    return {"ports": len(known), "names": len(names), "hosts": sorted({host for host, _ in known})}


def attacked(pid: int, folder: Path, seconds: float, user: str = "nobody") -> dict:
    """Attack for so many seconds, or as long as the process lives; what the attacker got."""
    (there, told), (answers, answer) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        os.close(answers)
        try:
            attacker(there, answer, user)
        finally:
            os._exit(0)
    os.close(there)
    os.close(answer)
    tokens = secrets_of(pid)
    signal.signal(signal.SIGTERM, lambda *_: _ENOUGH.set())
    found: dict = spot(pid, folder, told, seconds)
    with open(answers) as said:
        found |= json.load(said)
    os.waitpid(child, 0)
    commands = [Path(f"/proc/{p}/cmdline") for p in family(pid)]
    tokens = tokens or secrets_of(pid)
    open_to_all = [file for file in (*commands, *folder.rglob("*.json*")) if file.is_file()]
    found["leaks"] = [str(file) for file in open_to_all if any(t in file.read_text("utf-8", "ignore") for t in tokens)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", type=int)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--user", default="nobody")
    options = parser.parse_args()
    if os.getuid():
        sys.exit("Only root can become another user; run this with sudo.")
    found = attacked(options.pid, options.folder, options.seconds, options.user)
    print(json.dumps(found, indent=1))
    sys.exit(any(found[name] for name in ("answers", "doors", "files", "leaks")))


if __name__ == "__main__":
    main()
