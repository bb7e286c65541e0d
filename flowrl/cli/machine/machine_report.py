"""What this machine has, and what of flowrl can run on it: processors, memory, packages, backends."""

from __future__ import annotations

import os
import platform
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ... import __version__
from ...errors import UsageError
from ...placement.backends import BACKENDS, Backend
from ...shipped import FOLDER
from ...trackers.open_tracker import TRACKERS

NAME = "flowrl-lm"  # of the distribution
#: What the extras are for that are no runtime, no backend and no tracker; ``dev`` and ``docs`` are for contributors.
EXTRAS = {
    "lora": "low-rank adapters",
    "data": "prompts from data sets and parquet",
    "math": "mathematical answers compared by value",
    "agents": "agents that talk to a policy as to an API",
    "gymnasium": "environments of Gymnasium",
    "textarena": "games of textarena",
    "reasoning-gym": "tasks of reasoning-gym",
    "aviary": "environments of Aviary",
    "openenv": "environments of a server of OpenEnv",
    "verifiers": "environments of verifiers up to 0.3",
    "verifiers-tasksets": "tasksets of verifiers 0.4",
}
FOR_CONTRIBUTORS = ("dev", "docs")
FOR_TRACKERS = "trackers"  # all of them in one


@dataclass(frozen=True)
class Part:
    """What a run may use: ``Part("ray", "a process for each device", {"ray": "2.60.0"}, (), "pip install ...")``.

    ``has`` are its packages that are installed; ``lacks`` says what is missing or does not fit, ``fix`` installs it.
    """

    name: str
    what: str
    has: Mapping[str, str]
    lacks: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True)
class Machine:
    """``Machine({"cores": "2"}, {"backends": (part, ...)})``; the parts named ``needed`` must be there for any run."""

    facts: Mapping[str, str]
    groups: Mapping[str, tuple[Part, ...]] = field(default_factory=dict[str, tuple[Part, ...]])

    @property
    def is_fine(self) -> bool:
        """Whether what every run needs is there."""
        return not any(part.lacks for part in self.groups["needed"])

    def can(self, name: str) -> bool:
        """Return whether a part of that name has all it needs."""
        return any(part.name == name and not part.lacks for group in self.groups.values() for part in group)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """Return the facts, and a line for each part with its fix below it."""
        lines = [f"{name:<10}{value}" for name, value in self.facts.items()]
        for group, parts in self.groups.items():
            lines += ["", group]
            for part in parts:
                has = ", ".join(f"{name} {version}".rstrip() for name, version in part.has.items())
                state = "; ".join(part.lacks) or (f"ready: {has}" if has else "ready")
                lines.append(f"  {part.name:<19}{part.what:<43}{state}")
                lines += [f"{'':<21}{part.fix}"] if part.lacks and part.fix else []
        return "\n".join(lines)


def this_machine(folder: Path) -> Machine:
    """Return what this machine has; ``folder`` is where runs would be written."""
    wanted = _requirements()
    needed = _part("packages", "what every run needs", wanted.get("", []))
    ray = _part("ray", "a process for each device of a plan", wanted.get("ray", []))
    extras = [_part(name, what, wanted.get(name, [])) for name, what in EXTRAS.items()]
    trackers = [_part(name, "--track", [Requirement(package)]) for name, (_, package) in TRACKERS.items()]
    return Machine(
        dict(_facts(folder)),
        {
            "needed": (needed,),
            "runtimes": (Part("eager, local", "one process", {}), ray),
            "backends": tuple(_backend(row, wanted, ray) for row in BACKENDS.values() if row.built),
            "more": tuple(extras),
            "trackers": tuple(trackers),
        },
    )


def _facts(folder: Path) -> Iterator[tuple[str, str]]:
    from ...runtime.storage.checkpoints.host_memory import memory
    from ...runtime.storage.run_origin import device

    yield "flowrl", f"{__version__} in {Path(__file__).parents[2]}"
    yield "python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    try:
        yield "device", device()
        yield from _cards()
    except ImportError:
        yield "device", "unknown without torch"
    yield "cores", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
    if (limits := memory()) is not None:
        yield "memory", f"{_size(limits[0])} free of {_size(limits[1])}"
    for name, place in (("disk", folder), ("/dev/shm", Path("/dev/shm"))):
        if place.exists():
            usage = shutil.disk_usage(place)
            yield (
                name,
                f"{_size(usage.free)} free of {_size(usage.total)}" + (f", in {place}" if name == "disk" else ""),
            )


def _cards() -> Iterator[tuple[str, str]]:
    """Yield the memory of each GPU that torch sees."""
    import torch

    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        yield f"cuda:{number}", f"{_size(free)} free of {_size(total)}"


def _backend(row: Backend, wanted: Mapping[str, list[Requirement]], ray: Part) -> Part:
    """Return a backend: its own packages, one of several that are the same, and the ranks that it needs."""
    does = " and ".join(word for word, can in (("trains", row.trains), ("generates", row.generates)) if can)
    own = [r for r in wanted.get(row.extra, []) if r.name in row.packages] if row.extra else []
    part = _part(row.name, does, own, others=row.packages)
    missing = [part, *([ray] if row.collective and row.trains else [])]
    lacks = (*part.lacks, *("needs the runtime ray" for other in missing[1:] if other.lacks))
    fix = " && ".join(other.fix for other in missing if other.lacks)
    if part.lacks and row.apart:
        made = f"make {row.name}, or " if _make_has(row.name) else ""
        fix = f"{made}in an environment of its own: {fix}"
    return Part(row.name, does, part.has, lacks, fix)


def _part(name: str, what: str, wanted: list[Requirement], *, others: tuple[str, ...] = ()) -> Part:
    """Return a part by the packages that it wants; ``others`` are names under which its own one is distributed, too."""
    has: dict[str, str] = {}
    lacks: list[str] = []
    for requirement in wanted:
        names = dict.fromkeys((requirement.name, *(others if requirement.name in others else ())))
        found = next(((n, v) for n in names if (v := _version(n)) is not None), None)
        if found is None:
            lacks.append(f"{requirement.name} is not installed")
            continue
        has[found[0]] = found[1]
        if not requirement.specifier.contains(found[1], prereleases=True):
            lacks.append(f"{found[0]} {found[1]} is installed, and {requirement.specifier} is supported")
    words = " ".join(f"'{_bare(r)}'" for r in wanted)
    return Part(name, what, has, tuple(lacks), f"pip install {words}")


def _requirements() -> dict[str, list[Requirement]]:
    """Return what flowrl wants, by extra, ``""`` for what every run needs: by the source tree, else by the package."""
    project = FOLDER.parent / "pyproject.toml"
    if project.is_file():
        said = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        by_extra = {"": said["dependencies"], **said["optional-dependencies"]}
        return {extra: [Requirement(text) for text in texts] for extra, texts in by_extra.items()}
    if _version(NAME) is None:
        raise UsageError(f"{NAME} is not installed, so what it needs is not known.", fix="Install it with pip.")
    found: dict[str, list[Requirement]] = {}
    extras = metadata.metadata(NAME).get_all("Provides-Extra") or []
    for requirement in map(Requirement, metadata.requires(NAME) or []):
        for extra in ("", *extras):
            if requirement.marker is None:
                matches = extra == ""
            else:
                matches = extra != "" and requirement.marker.evaluate({"extra": extra})
            if matches:
                found.setdefault(extra, []).append(requirement)
    return found


def _bare(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _make_has(target: str) -> bool:
    """Return whether this is a source tree whose Makefile installs it."""
    makefile = FOLDER.parent / "Makefile"
    return makefile.is_file() and f"\n{target}:" in makefile.read_text(encoding="utf-8")


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
