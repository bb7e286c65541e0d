"""A plan as a YAML file: read with the line of every mistake, and written so that it reads the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NoReturn, cast

from ... import shipped
from ...errors import At, PlanError, UsageError, did_you_mean, near_file
from ...yaml_values import compose_value
from ..backends import BACKENDS, REFERENCE
from ..cluster.byte_sizes import read_size
from ..cluster.cluster import Cluster, Nodes
from ..cluster.mesh import AXES, FOLDED, Mesh
from .plan import Pipeline, Place, Plan, Pool
from .rules import USES, check_backend, check_inside, check_offload, check_option, check_pool_name, no_cluster

_TOP = ("cluster", "pools", "place", "pipeline")
_NODES = (
    "device",
    "nodes",
    "devices_per_node",
    "network",
    "oversubscription",
    "nodes_per_switch",
    "rails",
    "cores_per_node",
    "host_memory",
)
_POOL = ("devices", "processes", "device", "least")
_PLACE = ("pool", "mesh", "backend", "offload")
_ENGINE = ("pool", "mesh", "engine")
_OTHER_USE = {"backend": "engine", "engine": "backend"}  # the word for the same in a place to train, to generate
_PIPELINE = ("staleness", "order", "window", "publish", "chunks", "deadline", "copies", "restart", "hang")
_RANGE = re.compile(r"^(\d+)(?:\s*-\s*(\d+))?$")
_PLAIN = re.compile(r"^[A-Za-z_][A-Za-z0-9_.-]*$")


_CHANGE = "--set "  # what errors call a change, before its words


def load(path: str | Path, changes: Sequence[str] = ()) -> Plan:
    """Read a plan file, or the shipped plan of that name where no file has it.

    ``changes``: values for what the file says, such as ``pipeline.staleness=1``, the last ones win. Raises PlanError
    with file, line and the nearest right word; UsageError where there is no file.
    """
    if not str(path):
        raise UsageError("The plan has an empty name.", fix="Name a YAML file or a shipped plan, or give none.")
    path = Path(path)
    if not path.exists():
        path = shipped.find_plan(str(path)) or _no_plan(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"the plan {path} cannot be read: {error}.", fix="Name a YAML file.") from None
    return read(text, str(path), changes)


def _no_plan(path: Path) -> NoReturn:
    """Raise UsageError for a path that is no file, with the files and the shipped plans that it may mean."""
    is_name = not path.suffix and len(path.parts) == 1
    names = shipped.plan_names() if is_name else []
    meant = near_file(path, "*.y*ml", names)
    what = f"there is no plan {path}, and no shipped plan {path}." if is_name else f"there is no plan {path}."
    fix = f"Did you mean {meant}?" if meant else "Name a YAML file" + (", or one of these." if is_name else ".")
    raise UsageError(what, have=names or None, fix=fix)


def read(text: str, file: str = "<plan>", changes: Sequence[str] = ()) -> Plan:
    """Read the text of a plan, with ``changes`` to it; ``file`` is what errors call it. Raises PlanError.

    >>> read("pipeline: {staleness: 4, chunks: 2}", changes=["pipeline.staleness=1"]).pipeline.staleness
    1
    """
    import yaml

    try:
        root = cast("Any", yaml).compose(text)  # nodes, which know their lines, have no types
    except yaml.YAMLError as error:
        raise _no_yaml(error, text, file) from None
    except RecursionError:
        raise PlanError("the plan is nested too deeply.", at=At(file, 0), fix="A plan has four levels.") from None
    for change in changes:
        root = _changed(root, change)
    return _Reader(file, text.splitlines()).plan(root)


def _changed(root: Any, change: str) -> Any:
    """Return the nodes of a plan with another value at a path: ``place.actor.train.mesh={fsdp: 8}``.

    Raises UsageError for what is no path and value, PlanError where a value would lie within one that has no parts.
    """
    import yaml

    path, equals, text = change.partition("=")
    names = [name.strip() for name in path.split(".")]
    if not equals or not all(names):
        raise UsageError(f"{_CHANGE}{change} is no PATH=VALUE.", fix="Write --set pipeline.staleness=1.")
    title = f"{_CHANGE}{change}"  # errors name it
    if names[0] not in _TOP:
        argument = f"For an argument of a worker write --arg {change}." if len(names) == 2 else None
        fix = " ".join(filter(None, [did_you_mean(names[0], _TOP), argument])) or None
        raise PlanError(f"a plan has no '{names[0]}'.", at=At(title, 0), have=_TOP, fix=fix)
    value = compose_value(text, title, PlanError)
    mark = value.start_mark

    def put(node: Any, place: int) -> Any:
        """Return the node at the first ``place`` names with the value below it."""
        if place == len(names):
            return value
        if node is None or str(node.tag).endswith(":null"):
            node = yaml.MappingNode("tag:yaml.org,2002:map", [], mark, mark)
        if _kind(node) != "MappingNode":
            above = ".".join(names[:place]) or "the plan"
            what = f"{above} has no {names[place]}: it is {node.value if _kind(node) == 'ScalarNode' else 'a list'}."
            raise PlanError(what, at=At(title, 0), fix=f"Give it whole: --set {above}=VALUE.")
        for number, (key, inner) in enumerate(node.value):
            if str(key.value) == names[place]:
                node.value[number] = (key, put(inner, place + 1))
                return node
        key = yaml.ScalarNode("tag:yaml.org,2002:str", names[place], mark, mark)
        node.value.append((key, put(None, place + 1)))
        return node

    return put(root, 0)


def _no_yaml(error: Exception, text: str, file: str) -> PlanError:
    mark = getattr(error, "problem_mark", None)
    said = str(getattr(error, "problem", None) or str(error).splitlines()[0])
    if said.startswith("but "):
        said = f"{getattr(error, 'context', '')}, {said}"
    lines, line = text.splitlines(), mark.line + 1 if mark else 0
    shown = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    fix = "Indent with spaces." if "'\\t'" in said else None
    return PlanError(f"the plan is no YAML: {said}.", at=At(file, line, shown), fix=fix)


class _Reader:
    """Walks YAML nodes, which know their lines."""

    def __init__(self, file: str, lines: list[str]) -> None:
        self.file, self.lines = file, lines

    def plan(self, root: Any) -> Plan:
        top = self._mapping(root, _TOP, "a plan") if root is not None else {}
        cluster = self._cluster(top["cluster"]) if "cluster" in top else None
        pools: dict[str, Pool] | None = None
        if "pools" in top:
            pools = {n: self._pool(n, v, cluster) for n, v in self._mapping(top["pools"], None, "pools").items()}
            if not pools:
                raise self._error(top["pools"], "a plan needs a pool.", "Write main: {device: auto}.")
        known = Plan(pools, cluster=cluster)  # the rules that pools have among each other
        workers = self._mapping(top["place"], None, "place") if "place" in top else {}
        place = {w: self._worker(w, v, known) for w, v in workers.items()}
        pipeline = self._pipeline(top["pipeline"]) if "pipeline" in top else Pipeline()
        return Plan(pools, place, cluster, pipeline, self.file)

    # -- cluster and pools

    def _cluster(self, node: Any) -> Cluster:
        if _kind(node) == "ScalarNode":
            return self._said(node, lambda: Cluster.of(self._text(node, "a cluster")))
        parts = node.value if _kind(node) == "SequenceNode" else [node]
        if not parts:
            raise self._error(node, "a cluster has nodes.", "Write {device: h100-80, nodes: 1, devices_per_node: 8}.")
        return Cluster(tuple(self._nodes(p) for p in parts))

    def _nodes(self, node: Any) -> Nodes:
        entries = self._mapping(node, _NODES, "cluster")
        if "device" not in entries:
            raise self._error(node, "cluster says no device.", "Add device: h100-80.")
        device = self._text(entries["device"], "a device")
        count, devices = (self._whole(entries[k], k, 1) if k in entries else 1 for k in _NODES[1:3])
        network = self._gigabits(entries["network"]) if "network" in entries else None
        less = self._value(entries["oversubscription"]) if "oversubscription" in entries else 1.0
        if not isinstance(less, int | float):
            what = f"oversubscription is a number from 1 up, not {less}."
            raise self._error(entries["oversubscription"], what, "Write oversubscription: 2, or leave it out.")
        switch = self._whole(entries["nodes_per_switch"], "nodes_per_switch", 1) if "nodes_per_switch" in entries else 0
        rails = self._flag(entries["rails"], "rails") if "rails" in entries else False
        cores = self._whole(entries["cores_per_node"], "cores_per_node", 1) if "cores_per_node" in entries else 0
        host = self._size(entries["host_memory"]) if "host_memory" in entries else None
        at = entries.get("oversubscription", entries.get("host_memory", entries["device"]))
        return self._said(at, lambda: Nodes(device, count, devices, network, less, switch, rails, cores, host))

    def _size(self, node: Any) -> float:
        text = self._text(node, "host_memory")
        return self._said(node, lambda: read_size(text))

    def _flag(self, node: Any, what: str) -> bool:
        value = str(node.value)
        if value not in ("true", "false"):
            raise self._error(node, f"{what} is true or false, not {value}.", f"Write {what}: true, or leave it out.")
        return value == "true"

    def _gigabits(self, node: Any) -> float:
        value = self._value(node)
        if not isinstance(value, int | float) or not 0 < value < inf:
            what = f"network is Gb/s of a node, a number above 0, not {node.value}."
            raise self._error(node, what, "Write network: 3200, or leave it out.")
        return value

    def _pool(self, name: str, node: Any, cluster: Cluster | None) -> Pool:
        entries = self._mapping(node, _POOL, f"pool '{name}'")
        at = self._at(node) if not entries else self._at(next(iter(entries.values())))
        least = self._whole(entries.pop("least"), "least", 1) if "least" in entries else 0
        if len(entries) > 1:
            first, second = list(entries)[:2]
            raise self._error(entries[second], f"pool '{name}' has both {first} and {second}.", "Take one out.")
        devices = self._devices(name, entries["devices"], cluster) if "devices" in entries else ()
        processes = self._whole(entries["processes"], "processes", 1) if "processes" in entries else 0
        device = self._text(entries["device"], "a device") if "device" in entries else "auto"
        return Pool(name, devices, processes, "" if devices or processes else device or "nothing", at, least)

    def _devices(self, pool: str, node: Any, cluster: Cluster | None) -> tuple[int, ...]:
        """``0-7``, ``0,2,4-6``, ``all``, or a list of them."""
        if cluster is None:
            raise no_cluster(pool, self._at(node))
        sequence = _kind(node) == "SequenceNode"
        text = ",".join(self._text(n, "devices") for n in node.value) if sequence else self._text(node, "devices")
        if text.strip() == "all":
            return tuple(range(cluster.size))
        found: list[int] = []
        for part in text.split(","):
            said = _RANGE.match(part.strip())
            first, last = (int(said[1]), int(said[2] or said[1])) if said else (1, 0)
            if first > last:
                fix = 'Write numbers from 0 and ranges: devices: "0-7", "0,2,4-6", or all.'
                raise self._error(node, f"pool '{pool}': '{part.strip()}' are no devices.", fix)
            check_inside(pool, last, cluster, self._at(node))
            found += range(first, last + 1)
        return tuple(found)

    # -- places

    def _worker(self, worker: str, node: Any, known: Plan) -> dict[str, Place]:
        entries = self._mapping(node, (*_PLACE, "engine", *USES), f"the place of '{worker}'")
        uses = [u for u in USES if u in entries]
        if not uses:
            if "engine" in entries:
                what = f"the place of '{worker}' has an engine for no use."
                raise self._error(entries["engine"], what, "Write generate: {pool: ..., engine: ...}.")
            return {"train": self._place(worker, "train", entries, node, known)}
        other = next((k for k in entries if k not in USES), None)
        if other:
            what = f"the place of '{worker}' has both {uses[0]} and {other}."
            raise self._error(entries[other], what, f"Write {other} below {uses[0]}.")
        found: dict[str, Place] = {}
        for use in uses:
            known_keys = self._engine_keys(entries[use]) if use == "generate" else _PLACE
            inner = self._mapping(entries[use], known_keys, f"{worker}.{use}")
            title = f"{worker}.{use}" if len(uses) > 1 else worker
            found[use] = self._place(title, use, inner, entries[use], known)
        return found

    def _place(self, title: str, use: str, entries: Mapping[str, Any], node: Any, known: Plan) -> Place:
        word = "engine" if use == "generate" else "backend"
        pool = self._text(entries["pool"], "a pool") if "pool" in entries else next(iter(known.pools))
        check_pool_name(title, pool, known.pools, self._at(entries.get("pool", node)))
        backend = self._text(entries[word], f"a {word}") if word in entries else REFERENCE
        check_backend(title, use, backend, self._at(entries.get(word, node)))
        mesh = self._mesh(title, entries["mesh"], pool, known) if "mesh" in entries else Mesh()
        said = self._text(entries["offload"], "offload") if "offload" in entries else "false"
        if said not in ("true", "false"):
            what = f"{title}: offload is true or false, not {said}."
            raise self._error(entries["offload"], what, "Write offload: true.")
        offload = said == "true"
        check_offload(title, backend, offload, self._at(entries.get("offload", node)))
        options: dict[str, Any] = {}
        for name in (n for n in entries if n not in (*_PLACE, "engine")):
            options[name] = self._option(entries[name])
            check_option(title, backend, name, options[name], self._at(entries[name]))
        return Place(pool, mesh, backend, self._at(node), offload, options)

    def _engine_keys(self, node: Any) -> tuple[str, ...]:
        """What may be said of a place to generate: more where it names an engine that has options."""
        pairs: list[tuple[Any, Any]] = node.value if _kind(node) == "MappingNode" else []
        named = (str(value.value) for key, value in pairs if str(key.value) == "engine")
        engine = BACKENDS.get(next(named, REFERENCE))
        return (*_ENGINE, *(option.name for option in engine.options)) if engine is not None else _ENGINE

    def _option(self, node: Any) -> Any:
        """A number, true or false where the file says one, else the word."""
        return {"true": True, "false": False}.get(str(node.value), self._value(node))

    def _mesh(self, title: str, node: Any, pool: str, known: Plan) -> Mesh:
        entries = self._mapping(node, (*AXES, FOLDED), f"{title}: a mesh")
        axes = {a: self._whole(n, a, 1) for a, n in entries.items()}
        known.check_mesh(title, {a: n for a, n in axes.items() if a != FOLDED}, pool, self._at(node))
        return self._said(node, lambda: Mesh(axes))

    # -- pipeline

    def _pipeline(self, node: Any) -> Pipeline:
        entries = self._mapping(node, _PIPELINE, "pipeline")
        at = {k: self._at(n) for k, n in entries.items()}
        said: dict[str, Any] = {k: self._value(n) for k, n in entries.items()}
        return Pipeline(**said, at=at)

    # -- nodes

    def _mapping(self, node: Any, known: tuple[str, ...] | None, what: str) -> dict[str, Any]:
        if str(node.tag).endswith(":null"):  # "place:" with nothing behind it
            return {}
        if _kind(node) != "MappingNode":
            raise self._error(node, f"{what} is a mapping of names.", "Write key: value lines, or {key: value}.")
        found: dict[str, Any] = {}
        for key, value in node.value:
            name = self._text(key, "a name")
            if known is not None and name not in known:
                other = _OTHER_USE.get(name)
                swapped = f"Write {other}: {value.value}." if other in known and _kind(value) == "ScalarNode" else None
                fix = swapped or did_you_mean(name, known, "Take it out.")
                raise PlanError(f"{what} has no '{name}'.", at=self._at(key), have=known, fix=fix)
            if name in found:
                raise self._error(key, f"{what} has '{name}' twice.", "Take one out.")
            found[name] = value
        return found

    def _text(self, node: Any, what: str) -> str:
        if _kind(node) != "ScalarNode":
            raise self._error(node, f"{what} is a single word.")
        return str(node.value)

    def _value(self, node: Any) -> int | float | str:
        """A number where the file says one, else the word."""
        text = self._text(node, "a setting")
        for number in (int, float):
            try:
                return number(text)
            except ValueError:
                pass
        return text

    def _whole(self, node: Any, what: str, least: int) -> int:
        value = self._value(node)
        if not isinstance(value, int) or value < least:
            fix = f"Write {what}: {least}, or more."
            raise self._error(node, f"{what} is a whole number from {least} up, not {node.value}.", fix)
        return value

    def _said(self, node: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives; its error with the line of the node."""
        try:
            return make()
        except PlanError as error:
            raise PlanError(error.what, at=self._at(node), have=error.have, fix=error.fix) from None

    def _error(self, node: Any, what: str, fix: str | None = None) -> PlanError:
        """Return what is wrong with a node, with its line."""
        return PlanError(what, at=self._at(node), fix=fix)

    def _at(self, node: Any) -> At:
        mark = node.start_mark
        if str(mark.name).startswith(_CHANGE):
            return At(mark.name, 0)
        line: int = mark.line
        return At(self.file, line + 1, self.lines[line].strip() if line < len(self.lines) else "")


def _kind(node: Any) -> str:
    return type(node).__name__


def written(plan: Plan) -> str:
    """Return the text of a plan file that reads as this plan."""
    said = plan.to_json()
    lines: list[str] = []
    if "cluster" in said:
        groups = [_flow(g) for g in said["cluster"]]
        lines.append(f"cluster: {groups[0] if len(groups) == 1 else '[' + ', '.join(groups) + ']'}")
    lines += ["pools:", *_aligned({n: _flow(p) for n, p in said["pools"].items()}, "  ")]
    if said["place"]:
        lines.append("place:")
        for worker, by_use in plan.place.items():
            if list(by_use) == ["train"]:
                lines += _aligned({worker: _flow(_short(by_use["train"].to_json()))}, "  ")
            else:
                lines.append(f"  {_word(worker)}:")
                lines += _aligned({u: _flow(p.to_json(u)) for u, p in by_use.items()}, "    ")
    if plan.pipeline != Pipeline():
        lines.append(f"pipeline: {_flow(said['pipeline'])}")
    return "\n".join(lines) + "\n"


def _short(place: Mapping[str, Any]) -> dict[str, Any]:
    """A place without the backend that it has anyway."""
    return {k: v for k, v in place.items() if (k, v) != ("backend", REFERENCE)}


def _aligned(entries: Mapping[str, str], indent: str) -> Iterable[str]:
    width = max((len(_word(n)) for n in entries), default=0) + 1
    return [f"{indent}{_word(n) + ':':<{width}} {text}" for n, text in entries.items()]


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value)
        return "{" + ", ".join(f"{_word(k)}: {_flow(v)}" for k, v in entries.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        import yaml

        return str(yaml.safe_dump(value)).split()[0]  # 1.0e-05, which YAML reads as a number, not 1e-05
    return _word(value) if isinstance(value, str) else str(value)


def _word(text: str) -> str:
    """A word as YAML reads it back: quoted where it is not plainly one."""
    import yaml

    if _PLAIN.match(text) and yaml.safe_load(text) == text:
        return text
    return str(cast("Any", yaml).safe_dump(text, default_style='"', allow_unicode=True, width=inf)).rstrip("\n")
