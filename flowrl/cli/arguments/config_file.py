"""Options from a file: ``--config FILE`` stands for the options in it, at its place, so that later words win."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...errors import At, UsageError, near_file

#: Options that say how a run starts this time: no file has them, and no record of a run.
OF_ONE_START = ("resume", "allow-changed", "unlock", "overwrite")


@dataclass(frozen=True)
class FromFile:
    """An option as a file has it: ``FromFile("steps", ("100",), At("run.yaml", 3, "steps: 100"))``."""

    name: str
    texts: tuple[str, ...]
    at: At

    @property
    def words(self) -> list[str]:
        """The words that say the same; those of a list of programs are one."""
        texts = (",".join(self.texts),) if self.name == "program" else self.texts
        return [f"--{self.name}={text}" for text in texts]


def expand_config(words: Sequence[str]) -> tuple[list[str], list[FromFile]]:
    """Return the words with those of files in the place of ``--config FILE``, and the options that files have.

    Raises UsageError with file and line.
    """
    found, options = list[str](), list[FromFile]()
    rest = iter(words)
    for word in rest:
        name, equals, file = word.partition("=")
        if name != "--config":
            found.append(word)
            continue
        file = file if equals else next(rest, "")
        read = _read(file)
        found += [word for option in read for word in option.words]
        options += read
    return found, options


def _read(file: str) -> list[FromFile]:
    """The options of a file, in its order."""
    import yaml

    if not file or file.startswith("--"):
        raise UsageError("--config names no file.", fix="Write --config FILE.yaml.")
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        meant = near_file(path, "*.y*ml")
        fix = f"Did you mean {meant}?" if meant else "Name a YAML file with an option on each line, such as steps: 100."
        raise UsageError(f"--config: there is no file {file}.", fix=fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {file} cannot be read: {error}.", fix="Name a YAML file.") from None
    lines = text.splitlines()

    def line_of(mark: Any) -> At:
        number = mark.line + 1 if mark is not None else 0
        return At(file, number, lines[number - 1].strip() if 0 < number <= len(lines) else "")

    try:
        root = cast("Any", yaml).compose(text)  # nodes, which know their lines, have no types
    except yaml.YAMLError as error:
        at = line_of(getattr(error, "problem_mark", None))
        what = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise UsageError(f"--config: this is no YAML: {what}.", at=at, fix="Write NAME: VALUE on each line.") from None
    if root is None:
        return []
    if type(root).__name__ != "MappingNode":
        raise UsageError("--config: a file has options.", at=line_of(root.start_mark), fix="Write NAME: VALUE.")
    read = [FromFile(name, texts, line_of(mark)) for name, texts, mark in _options(root, "", line_of)]
    first: dict[str, FromFile] = {}
    for option in read:
        if (other := first.setdefault(option.name, option)) is not option:
            what = f"--config: {option.name} is in line {other.at.line} too."
            raise UsageError(what, at=option.at, fix="Keep one of them.")
    return read


def _options(node: Any, before: str, line_of: Any) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield name, texts and mark of each option; those of a program may stand below its name."""
    for key, value in node.value:
        program, dot, own = f"{before}{key.value}".rpartition(".")
        name = f"{program}{dot}{own.replace('_', '-')}"
        if name in (*OF_ONE_START, "config", "help"):
            what = f"--config: {name} is for one start of a run, and not for a file."
            raise UsageError(what, at=line_of(key.start_mark), fix=f"Write --{name} on the command line.")
        kind = type(value).__name__
        if kind == "MappingNode" and not before:
            yield from _options(value, f"{key.value}.", line_of)
            continue
        parts = value.value if kind == "SequenceNode" else [value]
        if any(type(part).__name__ != "ScalarNode" for part in parts):
            what = f"--config: {name} has values within values."
            raise UsageError(what, at=line_of(key.start_mark), fix="Give it a value, or a list of values.")
        yield name, tuple("none" if part.tag.endswith(":null") else str(part.value) for part in parts), key.start_mark
