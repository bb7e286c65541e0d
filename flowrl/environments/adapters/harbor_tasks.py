"""Reads task folders of Harbor: what a task asks and needs; one that needs a container is refused with the reason."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import WorkerError
from ..verify.commands import Files, files_below

#: Images for which this machine stands in.
IMAGES = ("ubuntu", "debian", "python")
_NETWORK = re.compile(r"(?<![\w./-])(apt-get|apt|apk|curl|wget|uvx|uv|pip3? install|npm|git clone)(?![\w-])")
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_IGNORED = ("LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "ARG", "SHELL", "STOPSIGNAL", "MAINTAINER")
#: Settings that ask for more than a shell, and why none is run.
_SETTINGS = {
    "steps": "it has several steps",
    "environment.mcp_servers": "it needs servers of tools",
    "environment.healthcheck": "it needs services that run",
    "environment.gpus": "it needs a GPU",
    "environment.tpu": "it needs a TPU",
    "environment.skills_dir": "it has skills for an agent of its own",
    "environment.allowed_hosts": "it needs the network",
    "agent.allowed_hosts": "it needs the network",
    "verifier.allowed_hosts": "its tests need the network",
    "verifier.collect": "it collects from services",
    "verifier.environment": "its tests have a container of their own",
}


@dataclass(frozen=True)
class HarborTask:
    """A task: its folder, what it asks, where its commands run, and its limits."""

    name: str
    folder: Path
    instruction: str
    workdir: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    agent_seconds: float | None = None
    verifier_seconds: float = 600.0
    files: Files = field(default_factory=list)

    @property
    def tests(self) -> Files:
        """The folder of its tests, as the verifier finds it."""
        return files_below(self.folder / "tests", "/tests")


def read_tasks(folder: str | Path, *, memory_mb: float) -> list[HarborTask]:
    """The tasks of a folder: itself, or each folder in it. Raises WorkerError for one that is none, or is refused."""
    root = Path(folder)
    found = [root] if (root / "task.toml").is_file() else sorted(path.parent for path in root.glob("*/task.toml"))
    if not found:
        fix = "Name a folder with a task.toml, or one whose folders have that."
        raise WorkerError(f"{root} has no task of Harbor.", fix=fix)
    tasks = [read_task(each, memory_mb=memory_mb) for each in found]
    names = [task.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise WorkerError(f"Two tasks of {root} have the name '{twice}'.", fix="Rename one.")
    return tasks


def read_task(folder: Path, *, memory_mb: float) -> HarborTask:
    """Read a task folder. Raises WorkerError where it is none, or needs more than a shell without network."""
    config = _config(folder)
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    for name, why in _SETTINGS.items():
        section, _, key = name.rpartition(".")
        if (config.get(section, {}) if section else config).get(key):
            raise _refused(folder / "task.toml", f"[{section}] {key}: {why}" if section else f"{key}: {why}")
    if environment.get("os", "linux") != "linux":
        raise _refused(folder / "task.toml", f"[environment] os: it needs {environment['os']}")
    if verifier.get("environment_mode", "shared") != "shared":
        raise _refused(folder / "task.toml", "[verifier] environment_mode: its tests have a container of their own")
    if environment.get("memory_mb") and environment["memory_mb"] > memory_mb:
        why = f"[environment] memory_mb: it needs {environment['memory_mb']} MB, and limits= gives {memory_mb:g}"
        raise _refused(folder / "task.toml", why)
    for name in ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml"):
        if (folder / "environment" / name).exists():
            raise _refused(folder / "environment" / name, "it needs several containers")
    if (folder / "trajectory.json").exists():
        raise _refused(folder / "trajectory.json", "it goes on where another agent has stopped")
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise WorkerError(f"{folder / name} is not there, and a task of Harbor has it.", fix="Add it.")
    _expect_no_network(folder / "tests" / "test.sh")
    workdir, env, files = _built(folder, environment)
    agent = config.get("agent", {})
    return HarborTask(
        name=config.get("task", {}).get("name") or folder.resolve().name,
        folder=folder.resolve(),
        instruction=_without_canary((folder / "instruction.md").read_text()),
        workdir=workdir,
        env={**env, **_plain(folder, "environment.env", environment.get("env", {}))},
        verifier_env=_plain(folder, "verifier.env", verifier.get("env", {})),
        agent_seconds=agent.get("timeout_sec"),
        verifier_seconds=float(verifier.get("timeout_sec", 600.0)),
        files=files,
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "task.toml").read_text())
    except (OSError, ValueError) as error:
        fix = "Write it as Harbor has it."
        raise WorkerError(f"{folder / 'task.toml'} cannot be read: {error}", fix=fix) from error


def _refused(file: Path, why: str) -> WorkerError:
    return WorkerError(f"{file}: {why}.", fix="No container is started here: take tasks that need none.")


def _plain(folder: Path, name: str, given: Mapping[str, Any]) -> dict[str, str]:
    for key, value in given.items():
        if "${" in str(value):
            raise _refused(folder / "task.toml", f"[{name}] {key}: it takes a variable of whoever runs it")
    return {key: str(value) for key, value in given.items()}


def _without_canary(text: str) -> str:
    """The text behind lines that mark it as no training data, as Harbor shows it to agents."""
    lines = text.split("\n")
    at = next((i for i, line in enumerate(lines) if not _CANARY.match(line.strip())), len(lines))
    return "\n".join(lines[at:]).lstrip("\n") if at else text


def _expect_no_network(script: Path) -> None:
    for number, line in enumerate(script.read_text().splitlines(), 1):
        found = _NETWORK.search(line.split("#", 1)[0])
        if found:
            raise _refused(script, f"line {number} runs {found[1]}, which needs the network")


# -- what its container would have ------------------------------------------------------------------------------------


def _built(folder: Path, environment: Mapping[str, Any]) -> tuple[str, dict[str, str], Files]:
    """The working directory, variables and files that its image would have."""
    dockerfile, image = folder / "environment" / "Dockerfile", environment.get("docker_image")
    if image is not None:
        _expect_image(folder / "task.toml", f"[environment] docker_image {image}", image)
        workdir = _place(folder / "task.toml", environment.get("workdir") or "/", "/")
        below = folder / "environment"
        return workdir, {}, files_below(below, workdir) if below.is_dir() else []
    if not dockerfile.is_file():
        raise WorkerError(f"{dockerfile} is not there, and task.toml names no docker_image.", fix="Add one of them.")
    workdir, env, files, bases = "/", dict[str, str](), list[dict[str, Any]](), 0
    for number, word, rest in _instructions(dockerfile.read_text()):
        at = f"line {number}: {word}"
        if word == "FROM":
            bases += 1
            if bases > 1:
                raise _refused(dockerfile, f"{at}: it is built from several images")
            _expect_image(dockerfile, at, rest.split()[0])
        elif word == "WORKDIR":
            workdir = _place(dockerfile, rest.strip("\"'"), workdir)
        elif word == "ENV":
            env |= _variables(rest)
        elif word in ("COPY", "ADD"):
            files += _copied(dockerfile, at, rest, workdir)
        elif word not in _IGNORED:
            raise _refused(dockerfile, f"{at} {rest[:60]}: an image has to be built")
    for entry in files:
        if "data" in entry and entry["path"].count("/") == 1:
            raise _refused(dockerfile, f"{entry['path']} lies in /, where a task may write nothing")
    return environment.get("workdir") or workdir, env, files


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, name and rest of each instruction; lines that end with a backslash go on."""
    begun, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or joined):
            continue
        begun = begun or number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        word, _, rest = (joined + line).strip().partition(" ")
        if word:
            yield begun, word.upper(), rest.strip()
        begun, joined = 0, ""


def _expect_image(file: Path, at: str, image: str) -> None:
    name = image.split("@")[0].split(":")[0].removeprefix("docker.io/").removeprefix("library/")
    if name not in IMAGES:
        raise _refused(file, f"{at}: it needs the image {image}")


def _place(file: Path, path: str, workdir: str) -> str:
    """An absolute path of the image. Raises WorkerError for one that this machine has itself."""
    whole = path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"
    parts = [part for part in whole.split("/") if part not in ("", ".")]
    if ".." in parts or "$" in whole:
        raise _refused(file, f"{path} is no plain path")
    if parts and parts[0] in ("usr", "bin", "sbin", "lib", "lib64", "dev", "proc", "sys", "etc", "tests", "logs"):
        raise _refused(file, f"{path} lies in /{parts[0]}, where a task may write nothing")
    return "/" + "/".join(parts)


def _variables(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return dict(word.split("=", 1) for word in words if "=" in word)


def _copied(dockerfile: Path, at: str, rest: str, workdir: str) -> Files:
    words = shlex.split(rest.strip().strip("[]").replace('",', '"'))
    if any(word.startswith("--from") for word in words):
        raise _refused(dockerfile, f"{at} {rest[:60]}: it takes files of another image")
    *sources, target = [word for word in words if not word.startswith("--")]
    below, found = dockerfile.parent.resolve(), list[dict[str, Any]]()
    for source in sources:
        if "://" in source or any(char in source for char in "*?$") or source.startswith("git@"):
            raise _refused(dockerfile, f"{at} {source}: it is no file of the folder")
        path = (below / source.lstrip("/")).resolve()
        if not path.is_relative_to(below) or not path.exists():
            raise _refused(dockerfile, f"{at} {source}: it is not in {below.name}/")
        place = _place(dockerfile, target, workdir)
        if path.is_file() and (target.endswith("/") or target in (".", "./") or len(sources) > 1):
            place = f"{place.rstrip('/')}/{path.name}"
        found += files_below(path, place)
    return found


def places_of(workdir: str, files: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which folders have to be there to be written to, besides those that every sandbox of commands has."""
    tops = [workdir, *(str(entry["path"]) for entry in files)]
    return list(dict.fromkeys("/" + top.strip("/").split("/")[0] for top in tops if top.strip("/")))
