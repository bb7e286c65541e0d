"""How much memory of its host a process may still take, where it is in a container also of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: The part of the memory that stays free. Ray's memory monitor ends processes at 0.05.
LEFT_FREE = 0.1
#: The names that the two versions of cgroups have for a limit, for what is in use, and for files that can be let go of.
_NAMES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory() -> int:
    """Bytes that nobody needs, less a tenth of all; without end where the system does not say."""
    return min((int(free - LEFT_FREE * total) for free, total in _limits()), default=1 << 62)


def memory() -> tuple[int, int] | None:
    """Return the bytes that are free and all, of the host or of the tightest container; None where nothing is said."""
    return min(_limits(), default=None)


def _limits() -> Iterator[tuple[int, int]]:
    """Of the host and of every container around this process: the bytes that are free, and all."""
    with suppress(OSError, KeyError, ValueError):
        said = _table(Path("/proc/meminfo"))
        yield said["MemAvailable:"] << 10, said["MemTotal:"] << 10
    for folder in _groups():
        for limit, used, files in _NAMES:
            with suppress(OSError, KeyError, ValueError):  # no such file, or no limit
                total = int((folder / limit).read_text())
                yield total - int((folder / used).read_text()) + _table(folder / "memory.stat")[files], total


def _groups() -> Iterator[Path]:
    """The folders of the cgroups that this process is in, as deep as they can be seen."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                root = Path("/sys/fs/cgroup") / kinds
                inside = root / path.lstrip("/")
                yield from (p for p in (inside, *inside.parents) if p.is_relative_to(root))


def _table(file: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}
