"""The program inside the sandbox: it builds a root of its own, then runs tests, each in a process with limits.

It is started by path, with the standard library alone. Requests come as lines of JSON on its standard input, answers go
to its standard output; what is tested has neither. docs/verification.md says what the sandbox does not protect from.
"""

from __future__ import annotations

import atexit
import base64
import ctypes
import fcntl
import json
import os
import platform
import resource
import select
import signal
import stat
import struct
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _SECCOMP, _NO_NEW_PRIVS = 1, 4, 24, 22, 38
#: Who the tested code is inside, mapped to somebody without rights outside.
USER = 1
#: System calls by machine: pivot_root, mount_setattr, capset.
_OWN = {"x86_64": (155, 442, 126), "aarch64": (41, 442, 91)}
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: System calls that no test needs and that reach into the kernel or into other processes, and the number of socket.
_REFUSED = {
    "x86_64": {
        *(101, 310, 311, 165, 166, 155, 272, 308, 321, 298, 250, 248, 249, 323, 425, 426, 427, 246, 320, 175, 313),
        *(176, 304, 303, 428, 429, 430, 431, 432, 433, 442, 438, 135, 179, 163, 167, 168, 169, 161, 447, 312, 103),
    },
    "aarch64": {
        *(117, 270, 271, 40, 39, 41, 97, 268, 280, 241, 219, 217, 218, 282, 425, 426, 427, 104, 294, 105, 273),
        *(106, 265, 264, 428, 429, 430, 431, 432, 433, 442, 438, 92, 60, 89, 224, 225, 142, 51, 447, 272, 116),
    },
}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_FAMILIES = (1, 2, 10)  # unix and internet, of a network that has no interface; others reach past it
_RESULT, _TROUBLE = 3, 4  # where a test says what it gave, and what failed before it was run
_LOOK = 0.05  # seconds between two looks at what is used


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    given = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_LIBC.mount(*given), f"mount {source} on {target}")


def _set_attributes(path: str, attributes: int) -> None:
    """Set attributes of a mount and of all below it."""
    number = _OWN[platform.machine()][1]
    packed = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, 0, 0))
    _check(_LIBC.syscall(number, _AT_FDCWD, path.encode(), _AT_RECURSIVE, packed, 32), f"mount_setattr {path}")


def _build_root(request: dict[str, Any]) -> None:
    """Make a root that holds what Python needs, read-only, and a place for files of limited size; go into it."""
    root = request["root"]
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,nr_inodes=4096,mode=755")
    os.makedirs(f"{root}/tmp")  # before what is shown: packages may lie below it
    most = request["limits"]["file_bytes"]
    if request["places"]:
        _make_places(request, most)
    else:
        _mount("tmpfs", f"{root}/tmp", "tmpfs", _NOSUID | _NODEV, f"size={most},nr_inodes=1024,mode=1777")
    for path in request["shown"]:
        inside = root + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.symlink(os.readlink(path), inside)
        elif os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
            _mount(path, inside, "", _BIND | _REC)
            _set_attributes(inside, _READ_ONLY | _ATTR_NOSUID | _ATTR_NODEV)
    os.makedirs(f"{root}/dev")
    for name in ("null", "zero", "full", "random", "urandom"):
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        _mount(f"/dev/{name}", f"{root}/dev/{name}", "", _BIND)
    os.makedirs(f"{root}/etc")
    os.makedirs(f"{root}/proc")
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV)
    with open(f"{root}/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    _set_attributes(f"{root}/proc", _READ_ONLY)
    os.chdir(root)
    _check(_LIBC.syscall(_OWN[platform.machine()][0], b".", b"."), "pivot_root")
    _check(_LIBC.umount2(b".", _MNT_DETACH), "umount")
    _mount("none", "/", "", 32 | _BIND | 1 | _NOSUID | _NODEV)  # remount read-only
    os.chdir("/tmp")


def _make_places(request: dict[str, Any], most: int) -> None:
    """Make the folders that commands may write to; the limit is one of all of them together."""
    root = request["root"]
    kept = f"{root}/.kept"
    os.makedirs(kept)
    _mount("tmpfs", kept, "tmpfs", _NOSUID | _NODEV, f"size={most},nr_inodes=4096,mode=755")
    for number, place in enumerate(request["places"]):
        os.makedirs(f"{kept}/{number}")
        os.chmod(f"{kept}/{number}", 0o1777 if place == "/tmp" else 0o755)
        _give_away(f"{kept}/{number}", request)
        os.makedirs(root + place, exist_ok=True)
        _mount(f"{kept}/{number}", root + place, "", _BIND)
    _check(_LIBC.umount2(kept.encode(), _MNT_DETACH), "umount")


def _give_away(path: str, request: dict[str, Any]) -> None:
    """Let the tested code own a file; where somebody else than root made the sandbox, it does."""
    if request["is_root"]:
        os.lchown(path, USER, USER)


def _unpack(request: dict[str, Any], files: list[dict[str, Any]]) -> None:
    """Lay files where commands find them."""
    for entry in files:
        path = entry["path"]
        above = os.path.dirname(path)
        missing = []
        while not os.path.lexists(above):
            missing.append(above)
            above = os.path.dirname(above)
        for folder in reversed(missing):
            os.mkdir(folder)
            _give_away(folder, request)
        if "link" in entry:
            os.symlink(entry["link"], path)
        elif "data" in entry:
            fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW)
            with os.fdopen(fd, "wb") as file:
                file.write(base64.b64decode(entry["data"]))
                os.fchmod(fd, entry["mode"])
        else:
            with suppress(FileExistsError):
                os.mkdir(path)
            os.chmod(path, entry["mode"])
        if path not in request["places"]:
            _give_away(path, request)


def _pack(request: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The files that commands have left; None where they are more than may be. No other process runs meanwhile."""
    found: list[dict[str, Any]] = []
    left = request["limits"]["file_bytes"]
    try:
        for place in request["places"]:
            device, folders = os.lstat(place).st_dev, [place]
            while folders:
                for each in sorted(os.listdir(folder := folders.pop())):
                    path = f"{folder}/{each}"
                    about = os.lstat(path)
                    if about.st_dev != device:
                        continue  # something of this machine that is shown below it
                    entry: dict[str, Any] = {"path": path}
                    if stat.S_ISLNK(about.st_mode):
                        entry["link"] = os.readlink(path)
                    elif stat.S_ISDIR(about.st_mode):
                        entry["mode"] = stat.S_IMODE(about.st_mode)
                        folders.append(path)
                    elif stat.S_ISREG(about.st_mode):
                        left -= about.st_size  # as it is read: a file with holes takes less on a disk
                        if left < 0:
                            return None
                        with open(path, "rb") as file:
                            entry |= {
                                "mode": stat.S_IMODE(about.st_mode),
                                "data": base64.b64encode(file.read()).decode(),
                            }
                    else:
                        continue  # a pipe or a socket is nothing without its processes
                    found.append(entry)
    except OSError:  # such as a path that is longer than may be
        return None
    return found


def _drop_rights(is_root: bool) -> None:
    for capability in range(64):
        if _LIBC.prctl(_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    if is_root:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    header, none = struct.pack("II", 0x20080522, 0), bytes(24)
    _check(_LIBC.syscall(_OWN[platform.machine()][2], header, none), "capset")
    _check(_LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _check(_LIBC.prctl(_DUMPABLE, 1, 0, 0, 0), "dumpable")
    _refuse_system_calls()


def _refuse_system_calls() -> None:
    machine = platform.machine()
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000 | 1
    lines = [(load, 0, 0, 4), (equal, 1, 0, _ARCH[machine]), (give, 0, 0, kill), (load, 0, 0, 0)]
    if machine == "x86_64":
        lines += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]
    for number in sorted(_REFUSED[machine]):
        lines += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    lines += [(equal, 0, len(_FAMILIES) + 2, _SOCKET[machine]), (load, 0, 0, 16)]
    lines += [(equal, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
    lines += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    held = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(held)))
    _check(_LIBC.prctl(_SECCOMP, 2, program, 0, 0), "seccomp")


def _limit(limits: dict[str, Any]) -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (most, most))


# -- what is tested ---------------------------------------------------------------------------------------------------


def _run_test(test: dict[str, Any], result: int) -> None:
    """Run the code with one test, in the process of the test; what it gives is written to ``result``."""
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    answer: dict[str, Any] = {}
    try:
        exec(compile(test["code"], "answer.py", "exec"), names)
        if test["kind"] == "call":
            name, arguments = test["call"], test["arguments"]
            fn = names[name] if name in names else getattr(names["Solution"](), name)
            answer["value"] = fn(*arguments)
        elif test["kind"] == "check":
            exec(compile(test["check"], "test.py", "exec"), names)
        answer["done"] = test["word"]
    except SystemExit as error:
        if test["kind"] == "print" and error.code in (None, 0):
            answer["done"] = test["word"]
        else:
            answer["error"] = f"SystemExit: {error.code}"
    except AssertionError as error:
        answer["wrong"] = f"AssertionError: {error}"
    except MemoryError:
        answer["memory"] = True
    except BaseException as error:
        answer["error"] = "".join(traceback.format_exception_only(type(error), error)).strip()
    if test["kind"] == "print" and "done" in answer:
        _end_program(names)
    _flush()
    try:
        line = json.dumps(answer)
    except MemoryError:
        line = '{"memory": true}'
    except (TypeError, ValueError, RecursionError) as error:
        line = json.dumps({"error": f"what it returned is no JSON: {error}"})
    with open(result, "w") as file:
        file.write(line)


def _end_program(names: dict[str, Any]) -> None:
    """End a program as Python ends one: its threads, what it has for its exit, and files that it left open."""
    threads: Any = sys.modules.get("threading")
    with suppress(BaseException):
        if threads is not None:
            threads._shutdown()
    with suppress(BaseException):
        atexit._run_exitfuncs()
    _flush()  # before a file of the program closes standard output
    with suppress(BaseException):
        names.clear()


def _flush() -> None:
    files: tuple[Any, ...] = (sys.stdout, sys.__stdout__)
    for file in files:
        with suppress(BaseException):  # it may be closed, or something else
            file.flush()


def _run_shell(test: dict[str, Any]) -> None:
    """Become the shell that runs a command; what it prints and its errors are one text."""
    with suppress(OSError):  # an earlier command may have removed it
        os.chdir(test["cwd"])
    os.dup2(1, 2)
    os.close(_RESULT)
    os.set_inheritable(_TROUBLE, False)
    for name in ("INT", "PIPE", "XFSZ"):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
    path = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{sys.base_prefix}/bin"
    os.execve("/bin/bash", ["bash", "-c", test["command"]], {**os.environ, "PATH": path, **test["env"]})


def _child(request: dict[str, Any], test: dict[str, Any], pipes: tuple[int, ...]) -> None:
    given = os.memfd_create("input")
    os.write(given, test.get("input", "").encode("utf-8", "surrogatepass"))
    os.lseek(given, 0, os.SEEK_SET)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (given, *pipes)]
    for target, source in enumerate(moved):
        os.dup2(source, target)
    os.closerange(len(moved), 1024)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))  # they stay open where the code puts others in their places
    sys.path[:] = request["path"]
    sys.argv = ["answer.py"]
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that is too large is an OSError
    os.environ.clear()
    os.environ.update(HOME="/tmp", LANG="C.UTF-8", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PATH="/usr/bin:/bin")
    _drop_rights(request["is_root"])
    _limit(request["limits"])
    if test["kind"] == "shell":
        _run_shell(test)
    os.close(_TROUBLE)  # from here on, what fails is a matter of the code
    _run_test(test, _RESULT)


# -- who watches it ---------------------------------------------------------------------------------------------------


def _used() -> tuple[int, float]:
    """The bytes of memory of all processes of the sandbox but this one, and their seconds on a CPU."""
    memory, seconds = 0, 0.0
    page, tick = resource.getpagesize(), os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/statm") as file:
                numbers = file.read().split()
                memory += (int(numbers[1]) - int(numbers[2])) * page
            with open(f"/proc/{name}/stat") as file:
                times = file.read().rsplit(")", 1)[1].split()[11:15]
                seconds += sum(map(int, times)) / tick
        except (OSError, IndexError):
            continue  # it has ended
    return memory, seconds


def _watch(main: int, pipes: dict[int, bytearray], limits: dict[str, Any]) -> str:
    """Read what a test writes until it has ended; return the limit that it broke, if any."""
    poll = select.poll()
    for fd in pipes:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    ended = os.pidfd_open(main)
    poll.register(ended, select.POLLIN)
    poll.register(0, 0)  # whoever asked has gone
    deadline, next_look = time.monotonic() + limits["seconds"], time.monotonic() + _LOOK
    try:
        while True:
            ready = dict(poll.poll(_LOOK * 1000))
            if 0 in ready:
                os._exit(1)
            for fd in pipes:
                if fd in ready and not _read(fd, pipes[fd], limits["output_bytes"]):
                    poll.unregister(fd)
                if len(pipes[fd]) > limits["output_bytes"]:
                    return "output"
            if ended in ready:
                return ""
            now = time.monotonic()
            if now >= deadline:
                return "seconds"
            if now >= next_look:
                next_look = now + _LOOK
                memory, seconds = _used()
                if memory > limits["memory_bytes"]:
                    return "memory"
                if seconds > limits["cpu_seconds"]:
                    return "cpu_seconds"
    finally:
        os.close(ended)


def _read(fd: int, into: bytearray, most: int) -> bool:
    """Read what is there, not much more than ``most`` in all; return whether more may come."""
    while len(into) <= most:
        try:
            found = os.read(fd, 65536)
        except BlockingIOError:
            return True
        if not found:
            return False
        into += found
    return True


def _end_all(main: int) -> tuple[int, resource.struct_rusage | None]:
    """End all processes of the sandbox but this one; how the main one ended, and what it used."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    status, used = 0, None
    while True:
        try:
            pid, how, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return status, used
        if pid == main:
            status, used = how, usage


def _one_test(request: dict[str, Any], test: dict[str, Any]) -> dict[str, Any]:
    limits = request["limits"]
    if test["kind"] == "shell":
        try:
            _unpack(request, test["files"])
        except OSError as error:
            return {"trouble": f"its files cannot be laid out: {error}"}
    began = time.monotonic()
    ends = [os.pipe() for _ in range(_TROUBLE)]
    main = os.fork()
    if main == 0:
        try:
            _child(request, test, tuple(end[1] for end in ends))
        except BaseException as error:
            with suppress(BaseException):
                os.write(_TROUBLE, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    for end in ends:
        os.close(end[1])
    pipes = {end[0]: bytearray() for end in ends}
    broke = _watch(main, pipes, limits)
    status, used = _end_all(main)
    for fd, found in pipes.items():
        _read(fd, found, limits["output_bytes"])
        os.close(fd)
    if not broke and any(len(found) > limits["output_bytes"] for found in pipes.values()):
        broke = "output"
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    seconds = used.ru_utime + used.ru_stime if used else 0.0
    # The kernel holds the limit by whole ticks: where many processes share a processor it counts more than was used.
    if not broke and ended in (signal.SIGKILL, signal.SIGXCPU) and seconds >= limits["cpu_seconds"] / 2:
        broke = "cpu_seconds"
    out, err, result, trouble = (found.decode("utf-8", "replace") for found in pipes.values())
    told = {"broke": broke, "signal": ended, "out": out, "err": err[-2000:], "result": result, "trouble": trouble}
    if test["kind"] != "shell":
        return told
    files, code = _pack(request), os.waitstatus_to_exitcode(status)
    broke = broke or ("" if files is not None else "files")
    more = {"files": files, "exit": 128 - code if code < 0 else code, "seconds": time.monotonic() - began}
    return {**told, **more, "broke": broke}


def _serve(request: dict[str, Any], requests: Any, answers: int) -> None:
    """Answer requests, until there are no more."""
    while line := requests.readline():
        found = json.dumps(_one_test(request, json.loads(line))).encode() + b"\n"
        while found:
            found = found[os.write(answers, found) :]


def main() -> None:
    """Enter namespaces of its own, have the users mapped from outside, and serve from the first process of them."""
    requests, answers = os.fdopen(os.dup(0), "r", buffering=1), os.dup(1)
    for fd in (answers, requests.fileno()):
        os.set_inheritable(fd, False)
    flags = _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    _check(_LIBC.unshare(flags), "unshare")
    os.write(answers, b'{"unshared": true}\n')
    request = json.loads(requests.readline())
    first = os.fork()
    if first:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _LIBC.prctl(_DUMPABLE, 0, 0, 0, 0)
    for name in ("INT", "TERM", "HUP", "PIPE", "USR1", "USR2"):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)  # the first process is told of none
    try:
        _build_root(request)
    except OSError as error:
        os.write(answers, json.dumps({"refused": str(error)}).encode() + b"\n")
        os._exit(1)
    os.write(answers, b'{"ready": true}\n')
    _serve(request, requests, answers)
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        os.write(1, json.dumps({"refused": str(error)}).encode() + b"\n")
