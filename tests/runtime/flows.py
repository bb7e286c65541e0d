"""The flows that the runtime tests run, each loaded anew, and what their runs recorded."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path


def module_of(name: str):
    """A module beside this one, fresh."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def events(out: Path, kind: str) -> list[dict]:
    """The events of a kind."""
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def metrics(out: Path) -> list[dict]:
    """The recorded metrics, without the seconds."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@contextmanager
def room_for(count, out, number=errno.ENOSPC):
    """A disk that takes so many bytes more, and of the write in which they end a part, as disks do."""
    real, left, lock = os.write, [count], threading.Lock()

    def write(handle, data):
        name = os.readlink(f"/proc/self/fd/{handle}")
        if not name.startswith(str(out)):
            return real(handle, data)
        with lock:  # a checkpoint is written beside the journal
            if data and not left[0]:
                raise OSError(number, os.strerror(number))
            taken = real(handle, data[: left[0]])
            left[0] -= taken
            return taken

    os.write = write
    try:
        yield left
    finally:
        os.write = real
