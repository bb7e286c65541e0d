"""What makes a plan valid, rule by rule, for plans of a file and plans made in Python alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from math import inf, prod
from typing import Any, Protocol

from ...errors import At, PlanError, did_you_mean
from ...valid_names import FIX, name_problem
from ..backends import ORDERS, PUBLISH, backend, listed, names_of
from ..cluster.cluster import Cluster
from ..cluster.mesh import Mesh

USES = ("train", "generate")

MOST_STALENESS, MOST_CHUNKS, MOST_COPIES = 1000, 10_000, 2
_COST = {
    "staleness": "each step in flight keeps its rows",
    "chunks": "each chunk is a call of its own",
    "copies": "rows are kept on one rank more",
}
_DEVICE = re.compile(r"^(auto|cpu|cuda(:\d+)?)$")


class SizedPool(Protocol):
    """A pool, as far as rules of places look at it."""

    @property
    def name(self) -> str: ...
    @property
    def least(self) -> int: ...


def numbers(devices: Iterable[int]) -> str:
    """Return devices as a plan writes them: ``(0, 1, 2, 5)`` is ``0-2,5``."""
    runs: list[list[int]] = []
    for d in devices:
        if runs and runs[-1][1] == d - 1:
            runs[-1][1] = d
        else:
            runs.append([d, d])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def check_source(pool: str, devices: Collection[int], processes: int, device: str, at: At | None) -> None:
    """Raise PlanError unless a pool has a name for files, and either devices, processes or a device of this process."""
    if (wrong := name_problem(pool, number=True)) is not None:
        raise PlanError(f"the name of pool {pool!a:.80} {wrong}.", at=at, fix=f"{FIX} train.")
    given = [n for n, v in (("devices", devices), ("processes", processes), ("device", device)) if v]
    if len(given) > 1:
        raise PlanError(f"pool '{pool}' has both {given[0]} and {given[1]}.", at=at, fix="Take one out.")
    if device and not _DEVICE.match(device):
        raise PlanError(f"pool '{pool}': '{device}' is no device.", at=at, fix="Write auto, cpu, cuda, or cuda:1.")
    if processes < 0:
        raise PlanError(f"pool '{pool}': {processes} processes are none.", at=at, fix="Write processes: 4.")


def check_least(pool: str, least: object, ranks: int, at: At | None) -> None:
    """Raise PlanError for a pool that is to go on with more ranks than it has, or has none that may be missing."""
    if isinstance(least, bool) or not isinstance(least, int) or least < 0:
        what = f"pool '{pool}': least is a whole number from 1 up, not {least}."
        raise PlanError(what, at=at, fix="Write least: 1, or take it out.")
    if least and not ranks:
        what = f"pool '{pool}' has a least number of ranks, and is a queue of one process."
        raise PlanError(what, at=at, fix="Take least out, or give the pool devices or processes.")
    if least > ranks:
        what = f"pool '{pool}': {least} ranks at least, but it has {ranks}."
        raise PlanError(what, at=at, fix=f"Write a number from 1 to {ranks}, or give it more.")


def check_replicas(worker: str, name: str, mesh: Mesh, pool: SizedPool, at: At | None) -> None:
    """Raise PlanError for a worker that needs all ranks of its pool, where the pool may have fewer, and for one that
    would have a part of an engine."""
    row, team = backend(name), mesh.size // mesh["dp"]
    if not pool.least or not row.collective:
        return
    if row.trains or (team > 1 and mesh["dp"] == 1):
        fix = "Take least out, or place it in a pool of its own."
        what = f"'{worker}' needs all ranks of pool '{pool.name}', and least: {pool.least} lets some be missing."
        raise PlanError(what, at=at, fix=fix)
    if pool.least % team:
        what = f"{team} ranks split an engine of '{worker}', and least: {pool.least} of its pool is no multiple."
        raise PlanError(what, at=at, fix=f"Write least: {-(-pool.least // team) * team}, or take it out.")


def check_alike(worker: str, mesh: Mesh, other: tuple[str, Mesh], pool: SizedPool, at: At | None) -> None:
    """Raise PlanError for two engines that are split otherwise, where some ranks of their pool may be missing."""
    if pool.least and mesh != other[1]:
        both = f"'{worker}' ({mesh}) and '{other[0]}' ({other[1]})"
        what = f"ranks of pool '{pool.name}' split {both}, and least: {pool.least} lets some be missing."
        raise PlanError(what, at=at, fix="Give both the same mesh, or take least out.")


def check_devices(pool: str, devices: Collection[int], cluster: Cluster | None, at: At | None) -> None:
    """Raise PlanError unless the devices of a pool are in the cluster, each once."""
    if not devices:
        return
    if cluster is None:
        raise no_cluster(pool, at)
    if len(set(devices)) < len(devices):
        twice = next(d for i, d in enumerate(devices) if d in tuple(devices)[:i])
        raise PlanError(f"pool '{pool}' has device {twice} twice.", at=at, fix="Take one out.")
    for d in (min(devices), max(devices)):
        check_inside(pool, d, cluster, at)


def no_cluster(pool: str, at: At | None) -> PlanError:
    """Return the error of a pool with devices in a plan without a cluster."""
    fix = "Add cluster: {device: h100-80, nodes: 1, devices_per_node: 8}, or cluster: auto."
    return PlanError(f"pool '{pool}' has devices, but the plan has no cluster.", at=at, fix=fix)


def check_inside(pool: str, device: int, cluster: Cluster, at: At | None) -> None:
    """Raise PlanError unless a device number is one of the cluster."""
    if not 0 <= device < cluster.size:
        what = f"pool '{pool}': there is no device {device} in {cluster}, which has {cluster.size}."
        raise PlanError(what, at=at, fix=f"Write numbers from 0 to {cluster.size - 1}, or add nodes.")


def check_disjoint(pools: Mapping[str, tuple[tuple[int, ...], At | None]]) -> None:
    """Raise PlanError for a device in two pools: what shares devices takes turns, and turns are taken in a pool."""
    owner: dict[int, str] = {}
    for name, (devices, at) in pools.items():
        shared = [d for d in devices if d in owner]
        if shared:
            other = owner[shared[0]]
            both = [d for d in shared if owner[d] == other]
            raise PlanError(
                f"pools '{other}' and '{name}' share device{'s' if len(both) > 1 else ''} {numbers(both)}.",
                at=at,
                fix="Give each device to one pool; workers that share devices are placed in the same pool.",
            )
        owner.update(dict.fromkeys(devices, name))


def check_uses(worker: str, use: str, at: At | None) -> None:
    """Raise PlanError for a use that is not to train or to generate."""
    if use not in USES:
        raise PlanError(f"the place of '{worker}' has no '{use}'.", at=at, have=USES, fix=did_you_mean(use, USES))


def check_pool_name(worker: str, pool: str, pools: Iterable[str], at: At | None) -> None:
    """Raise PlanError for a pool that the plan does not have."""
    known = list(pools)
    if pool not in known:
        what = f"'{worker}' is placed in pool '{pool}', which the plan does not have."
        raise PlanError(what, at=at, have=known, fix=did_you_mean(pool, known))


def check_backend(worker: str, use: str, name: str, at: At | None) -> None:
    """Raise PlanError for a place to train without a backend that trains, or one to generate without an engine."""
    known = names_of(use)
    if name not in known:
        word, fix = "engine" if use == "generate" else "backend", did_you_mean(name, known)
        if name in names_of("generate"):
            fix = f"An engine generates: write generate: {{engine: {name}}}."
        elif name in names_of("train"):
            fix = f"A backend trains: write train: {{backend: {name}}}."
        raise PlanError(f"'{worker}': there is no {word} '{name}'.", at=at, have=known, fix=fix)


def check_offload(worker: str, name: str, offload: bool, at: At | None) -> None:
    """Raise PlanError where a backend is to keep weights and optimizer in host memory, and does not."""
    if offload and not backend(name).offload:
        fix = f"Write backend: {listed('train', offload=True)}, or take offload out."
        raise PlanError(f"'{worker}': {name} does not offload.", at=at, fix=fix)


def check_option(worker: str, name: str, option: str, value: object, at: At | None) -> None:
    """Raise PlanError for what an engine does not take beside it, or not with this value."""
    known = {o.name: o for o in backend(name).options}
    if option not in known:
        fix = did_you_mean(option, known, "Take it out.")
        raise PlanError(f"'{worker}': {name} has no option '{option}'.", at=at, have=known or None, fix=fix)
    found = known[option]
    if not found.takes(value):
        said = str(value).lower() if isinstance(value, bool) else value
        what = f"'{worker}': {option} is {found.form}, not {said}: {found.what}."
        raise PlanError(what, at=at, fix=f"Write {option}: {found.example}.")


def refuse_mesh(
    title: str,
    axes: Mapping[str, int],
    pool: str,
    devices: tuple[int, ...],
    processes: int,
    free: Collection[int],
    at: At | None,
) -> None:
    """Raise PlanError for a mesh that does not take all devices of its pool. ``free``: those that it could have."""
    size, have = prod(axes.values()), len(devices) or 1
    folds = axes.get("ep", 1) > 1 and size // axes["ep"] == have
    mesh = " x ".join(f"{a}={n}" for a, n in axes.items())
    if processes:
        raise PlanError(
            f"{title}: mesh {mesh} needs devices, but pool '{pool}' has processes.",
            at=at,
            fix="Take the mesh out, or name a pool with devices.",
        )
    if size < have and have % size == 0:
        said = f"Write dp: {have // size * axes['dp']}" if "dp" in axes else f"Add dp: {have // size}"
        raise PlanError(
            f"{title}: mesh {mesh} takes {size} device{'s' if size > 1 else ''}, but pool '{pool}' has {have}.",
            at=at,
            fix=f"{said}: the rest holds replicas.",
        )
    room = tuple(range(devices[0], devices[0] + size)) if devices else ()
    more = f", or give '{pool}' the devices {numbers(room)}" if room and set(room) <= set(free) else ""
    raise PlanError(
        f"{title}: mesh {mesh} needs {size} devices, but pool '{pool}' has {have}.",
        at=at,
        fix=f"Change an axis size{more}" + (f", or write folded_ep: {axes['ep']} in place of ep." if folds else "."),
    )


def check_pipeline(said: Mapping[str, Any], at: Mapping[str, At], window_default: float) -> None:
    """Raise PlanError for a wrong value of a pipeline, and for a window without its order."""
    _whole("staleness", said["staleness"], 0, MOST_STALENESS, at)
    _whole("chunks", said["chunks"], 1, MOST_CHUNKS, at)
    _whole("copies", said.get("copies", 1), 1, MOST_COPIES, at)
    _one_of("order", said["order"], ORDERS, at)
    _one_of("publish", said["publish"], PUBLISH, at)
    deadline = said.get("deadline", 0)
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 <= deadline < inf:
        raise PlanError(
            f"pipeline: deadline is a number of seconds, not {deadline}.",
            at=at.get("deadline"),
            fix="Write deadline: 600, or take it out to wait for ever.",
        )
    restart = said["restart"]
    if isinstance(restart, bool) or not isinstance(restart, int | float) or not 0 <= restart < inf:
        raise PlanError(
            f"pipeline: restart is a number of seconds, not {restart}.",
            at=at.get("restart"),
            fix="Write restart: 120, or 0 to go on without a lost replica at once.",
        )
    hang = said["hang"]
    if isinstance(hang, bool) or not isinstance(hang, int | float) or not 0 <= hang < inf:
        raise PlanError(
            f"pipeline: hang is a number of seconds, not {hang}.",
            at=at.get("hang"),
            fix="Write hang: 1800, or 0 to wait for ever.",
        )
    window = said.get("window", window_default)
    if isinstance(window, bool) or not isinstance(window, int | float) or not 0 < window <= 1:
        raise PlanError(
            f"pipeline: window is a part of the open prompts, not {window}.",
            at=at.get("window"),
            fix="Write a number above 0, up to 1: window: 0.3.",
        )
    if said["order"] != "window" and ("window" in at or window != window_default):
        raise PlanError(
            f"pipeline: a window needs order: window, not {said['order']}.",
            at=at.get("window"),
            fix="Write order: window, or take the window out.",
        )


def _whole(key: str, value: object, least: int, most: int, at: Mapping[str, At]) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(
            f"pipeline: {key} is a whole number from {least} up, not {value}.",
            at=at.get(key),
            fix=f"Write {key}: {least}.",
        )
    if value > most:
        raise PlanError(
            f"pipeline: {key} is {value}, and {_COST[key]}: {most} at most.",
            at=at.get(key),
            fix="Write copies: 2." if key == "copies" else f"Write {key}: 1, and simulate what more of it gains.",
        )


def _one_of(key: str, value: str, known: tuple[str, ...], at: Mapping[str, At]) -> None:
    if value not in known:
        fix = did_you_mean(str(value), known)
        raise PlanError(f"pipeline: there is no {key} '{value}'.", at=at.get(key), have=known, fix=fix)
