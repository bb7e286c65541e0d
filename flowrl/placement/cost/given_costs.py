"""Costs in a file: seconds per call by title or node, and each mistake in it with its line and the nearest word."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ...errors import At, PlanError, UsageError, did_you_mean, near_file, shown
from .work import Work

#: Seconds of a call at most, about 30 years: sums of them stay numbers.
MOST_SECONDS = 1e9


@dataclass(frozen=True)
class GivenCosts:
    """Seconds of whole calls: ``GivenCosts({"actor.generate": 6.0, "actor.generate#2": 2.0}, "costs.yaml")``.

    A node's id goes before its title. What is not listed costs 0, and so does a publish inside one pool, listed or
    not, unless steps overlap: then the copy that generates is another. ``at``: the line of each name.

    >>> fl.GivenCosts({"actor.generate": 6.0, "actor.update": 3.0, "actor.publish": 0.5}).source
    'given'
    """

    given: Mapping[str, float]
    file: str = ""
    at: Mapping[str, At] = field(default_factory=dict[str, At])

    @property
    def source(self) -> str:
        return f"given: {self.file}" if self.file else "given"

    @staticmethod
    def load(path: str | Path) -> GivenCosts:
        """Read ``{actor.generate: 6.0, actor.publish: 0.5}``. Raises PlanError with file and line."""
        entries = read_entries(path)
        seconds = {e.name: e.seconds("a call") for e in entries}
        return GivenCosts(seconds, shown(str(path)), {e.name: e.at for e in entries})

    def seconds(self, work: Work) -> float:
        """Return the given seconds times the part of the op that this call does."""
        if inside_one_pool(work):
            return 0.0
        return self.given.get(work.node, self.given.get(work.title, 0.0)) * work.share

    def check_names(self, names: Iterable[str]) -> None:
        """Raise PlanError for a listed name that is none of ``names``: titles and node ids of the program."""
        check_names(self.given, names, self.at)


@dataclass(frozen=True)
class Entry:
    """``name: value`` of a mapping, with its line. ``value`` is a node of PyYAML."""

    name: str
    value: Any
    at: At

    @property
    def text(self) -> str:
        """The value as it is written; raises PlanError where it is no single word."""
        if type(self.value).__name__ != "ScalarNode":
            raise PlanError(f"'{self.name}' takes a single value.", at=self.at, fix="Write a number, as in 6.0.")
        return str(self.value.value)

    def seconds(self, what: str) -> float:
        """The value as seconds that ``what`` takes. Raises PlanError for anything that is no number from 0 up."""
        try:
            number = float(self.text)
        except ValueError:
            number = math.nan
        fix = f"Write the seconds that {what} takes, 0 or more, as in {self.name}: 6.0."
        if not 0 <= number < math.inf:
            raise PlanError(f"'{self.name}': '{self.text}' is no number of seconds.", at=self.at, fix=fix)
        if number > MOST_SECONDS:
            raise PlanError(f"'{self.name}': {self.text} seconds are more than 30 years.", at=self.at, fix=fix)
        return number

    def entries(self) -> list[Entry]:
        """Return the entries of a value that is itself a mapping."""
        return _entries(self.value, self.at.file, f"'{self.name}'")


def read_entries(path: str | Path) -> list[Entry]:
    """Return the entries of a YAML file that is one mapping, none if it is empty. Raises PlanError with its line,
    UsageError where there is no file."""
    import yaml

    path = Path(path)
    if not path.exists():
        meant = near_file(path, "*.y*ml")
        fix = f"Did you mean {shown(meant)}?" if meant else "Name a YAML file."
        raise UsageError(f"there is no file {shown(str(path))}.", fix=fix)
    try:
        root = cast("Any", yaml).compose(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"the costs {shown(str(path))} cannot be read: {error}.", fix="Name a YAML file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = At(str(path), mark.line + 1 if mark else 0)
        raise PlanError(f"the costs are no YAML: {getattr(error, 'problem', error)}.", at=at) from None
    return [] if root is None else _entries(root, str(path), "a file of costs")


def is_calibrated(path: str | Path) -> bool:
    """Whether a file is what ``flowrl calibrate`` saved. Raises PlanError where it cannot be read."""
    return any(entry.name == "calibrated" for entry in read_entries(path))


def inside_one_pool(work: Work) -> bool:
    """Whether a call is a publish into weights that the worker trains itself, in its pool."""
    if work.kind != "publish" or work.copied:
        return False
    if work.pool or work.source_pool:
        return work.pool == work.source_pool
    return work.source is None or work.source[1] == work.devices


def check_names(listed: Iterable[str], names: Iterable[str], at: Mapping[str, At]) -> None:
    """Raise PlanError for the first listed name that is none of ``names``."""
    known = sorted(set(names))
    for name in listed:
        if name not in known:
            what = f"costs are given for '{name}', which this program does not call."
            raise PlanError(what, at=at.get(name), have=known, fix=did_you_mean(name, known, "Take it out."))


def _entries(node: Any, file: str, what: str) -> list[Entry]:
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    if type(node).__name__ != "MappingNode":
        fix = "Write actor.generate: 6.0, one line for each op."
        raise PlanError(f"{what} is a mapping of names.", at=_at(node, file, lines), fix=fix)
    found: dict[str, Entry] = {}
    for key, value in node.value:
        entry = Entry(str(key.value), value, _at(key, file, lines))
        if entry.name in found:
            raise PlanError(f"{what} has '{entry.name}' twice.", at=entry.at, fix="Take one out.")
        found[entry.name] = entry
    return list(found.values())


def _at(node: Any, file: str, lines: list[str]) -> At:
    line: int = node.start_mark.line
    return At(file, line + 1, lines[line].strip() if line < len(lines) else "")
