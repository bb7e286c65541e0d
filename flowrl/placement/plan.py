"""Which worker runs in which pool of this process, from a YAML file whose mistakes are named by line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..errors import At, PlanError, near

_TOP = ("pools", "place", "pipeline")
_POOL = ("device",)
_PLACE = ("pool", "backend")
_PIPELINE = ("staleness",)
_DEVICE = re.compile(r"^(auto|cpu|cuda(:\d+)?)$")


@dataclass(frozen=True)
class Place:
    """Where one worker runs: ``Place("main", backend="hf")``."""

    pool: str
    backend: str = "hf"
    at: At | None = None


@dataclass(frozen=True)
class Plan:
    """Pools with their devices, and a place for each worker.

    ``Plan({"gpu": "cuda:0", "cpu": "cpu"}, {"actor": Place("gpu"), "reward": Place("cpu")})``. A pool is a queue of
    this process; workers of one pool take turns in program order, pools overlap. A worker without a place goes to the
    first pool.
    """

    pools: Mapping[str, str] = field(default_factory=lambda: {"main": "auto"})
    place: Mapping[str, Place] = field(default_factory=dict[str, Place])

    @staticmethod
    def one_process() -> Plan:
        """No plan: everything in one pool, on a GPU if there is one."""
        return Plan()

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Raises PlanError with file, line and the nearest right word."""
        import yaml

        path = Path(path)
        if not path.exists():
            beside = [p.name for p in path.parent.glob("*.yaml")] if path.parent.exists() else []
            meant = near(path.name, beside)
            raise PlanError(f"there is no plan {path}.", fix=f"Did you mean {path.parent / meant}?" if meant else None)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the plan {path} cannot be read: {error}.", fix="Name a YAML file.") from None
        try:
            root = cast("Any", yaml).compose(text)  # nodes, which know their lines, have no types
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            at = At(str(path), mark.line + 1 if mark else 0)
            raise PlanError(f"the plan is no YAML: {getattr(error, 'problem', error)}.", at=at) from None
        return _Reader(str(path), text.splitlines()).plan(root)

    def pool(self, worker: str) -> str:
        """The pool of a worker."""
        place = self.place.get(worker)
        return place.pool if place else next(iter(self.pools))

    def device(self, worker: str) -> str:
        """The device of a worker: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``."""
        return self.pools[self.pool(worker)]

    def backend(self, worker: str) -> str:
        """The backend of a worker."""
        place = self.place.get(worker)
        return place.backend if place else "hf"

    def check_workers(self, names: Iterable[str], backends: Iterable[str]) -> None:
        """Raise PlanError for a place of a worker that the flow does not have, or a backend that is not there."""
        known, engines = list(names), list(backends)
        for name, place in self.place.items():
            if place.backend not in engines:
                meant = near(place.backend, engines)
                raise PlanError(
                    f"'{name}' is placed with backend '{place.backend}', which is not there.",
                    at=place.at,
                    have=engines,
                    fix=f"Did you mean '{meant}'?" if meant else None,
                )
            if name not in known:
                meant = near(name, known)
                raise PlanError(
                    f"the plan places '{name}', which is no worker of this flow.",
                    at=place.at,
                    have=known,
                    fix=f"Did you mean '{meant}'?" if meant else None,
                )

    def to_json(self) -> dict[str, Any]:
        """The plan as a record: ``{"pools": {...}, "place": {...}}``."""
        return {
            "pools": {n: {"device": d} for n, d in self.pools.items()},
            "place": {n: {"pool": p.pool, "backend": p.backend} for n, p in self.place.items()},
        }


class _Reader:
    """Walks YAML nodes, which know their lines."""

    def __init__(self, file: str, lines: list[str]) -> None:
        self.file, self.lines = file, lines

    def plan(self, root: Any) -> Plan:
        if root is None:
            return Plan()
        top = self._mapping(root, _TOP, "a plan")
        pools = {"main": "auto"}
        if "pools" in top:
            pools = {n: self._pool(n, v) for n, v in self._mapping(top["pools"], None, "pools").items()}
            if not pools:
                raise PlanError("a plan needs a pool.", at=self._at(top["pools"]), fix="Write main: {device: auto}.")
        place = (
            {n: self._place(n, v, pools) for n, v in self._mapping(top["place"], None, "place").items()}
            if "place" in top
            else {}
        )
        if "pipeline" in top:
            self._pipeline(top["pipeline"])
        return Plan(pools, place)

    def _pool(self, name: str, node: Any) -> str:
        entries = self._mapping(node, _POOL, f"pool '{name}'")
        device = self._text(entries["device"]) if "device" in entries else "auto"
        if not _DEVICE.match(device):
            raise PlanError(
                f"pool '{name}': '{device}' is no device.",
                at=self._at(entries["device"]),
                fix="Write auto, cpu, cuda, or cuda:1.",
            )
        return device

    def _place(self, name: str, node: Any, pools: Mapping[str, str]) -> Place:
        entries = self._mapping(node, _PLACE, f"the place of '{name}'")
        pool = self._text(entries["pool"]) if "pool" in entries else next(iter(pools))
        if pool not in pools:
            meant = near(pool, pools)
            raise PlanError(
                f"'{name}' is placed in pool '{pool}', which the plan does not have.",
                at=self._at(entries["pool"]),
                have=pools,
                fix=f"Did you mean '{meant}'?" if meant else None,
            )
        return Place(pool, self._text(entries["backend"]) if "backend" in entries else "hf", self._at(node))

    def _pipeline(self, node: Any) -> None:
        entries = self._mapping(node, _PIPELINE, "pipeline")
        if "staleness" in entries and self._text(entries["staleness"]) != "0":
            raise PlanError(
                "this version runs steps one after another: staleness is 0.",
                at=self._at(entries["staleness"]),
                fix="Write staleness: 0.",
            )

    def _mapping(self, node: Any, known: tuple[str, ...] | None, what: str) -> dict[str, Any]:
        if type(node).__name__ != "MappingNode":
            raise PlanError(
                f"{what} is a mapping of names.", at=self._at(node), fix="Write key: value lines, or {key: value}."
            )
        found: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value)
            if known is not None and name not in known:
                meant = near(name, known)
                raise PlanError(
                    f"{what} has no '{name}'.",
                    at=self._at(key),
                    have=known,
                    fix=f"Did you mean '{meant}'?"
                    if meant
                    else "Take it out; meshes and clusters come with a later version.",
                )
            if name in found:
                raise PlanError(f"{what} has '{name}' twice.", at=self._at(key), fix="Take one out.")
            found[name] = value
        return found

    def _text(self, node: Any) -> str:
        if type(node).__name__ != "ScalarNode":
            raise PlanError("a single word is expected here.", at=self._at(node))
        return str(node.value)

    def _at(self, node: Any) -> At:
        line: int = node.start_mark.line
        return At(self.file, line + 1, self.lines[line].strip() if line < len(self.lines) else "")
