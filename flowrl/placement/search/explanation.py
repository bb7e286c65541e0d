"""A found placement in plain words: what it is, what it waits for, what binds it, and how sure that is."""

from __future__ import annotations

from typing import Any

from .find_placement import Found
from .step_time import Placed

_TRUSTED = 64  # devices up to which the order of a roofline agrees with HybridFlow's measurements

_BINDING = {
    "memory": "memory: with more of it on each device the same pools would take {gain} less",
    "node size": "node size: if pools could be of any size the same pools would take {gain} less",
    "divisibility": "divisibility: if heads, layers and rows could be split by any number the same pools would take"
    " {gain} less",
    "none": "none: only more or faster devices would help these pools",
}


def explain(found: Found) -> str:
    """Return the whole story, a line or two for each question. Ends without a line break."""
    lines = [
        f"{_seconds(found.step_seconds)} per step on {found.problem.cluster}, {_lag(found.best)}.",
        f"Costs: {_costs(found)}.",
        *_pools(found.best),
        _bottleneck(found.best),
        f"Binding constraint: {_BINDING[found.binding].format(gain=f'{found.gain:.1%}')}.",
        *_runner_up(found),
        *_beyond(found),
        *_bound(found),
        *_settings(found),
        f"Looked at {found.evaluated} allocations; {found.pruned} branches were left, as nothing in them could win.",
    ]
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.3g} s"


def _lag(placed: Placed) -> str:
    return f"staleness {placed.staleness}" + (", steps overlap" if placed.staleness else ", one step after another")


def _costs(found: Found) -> str:
    if found.source == "roofline":
        return f"roofline, not calibrated, taken as right to ±{found.error:.0%} (assumed)"
    if found.source.startswith("roofline"):
        return f"{found.source}, right to ±{found.error:.0%}"
    stated = found.source.startswith("calibrated") or not found.error
    said = found.source if stated else f"{found.source}, right to ±{found.error:.0%}"
    return f"{said}, the same for every mesh and number of devices: the search cannot tell these apart"


def _pools(placed: Placed) -> list[str]:
    lines: list[str] = []
    for pool in placed.pools:
        where = (
            f"{len(pool.devices)} x {pool.device}, {_range(pool.devices)}"
            if pool.device
            else f"{pool.processes} process{'' if pool.processes == 1 else 'es'} of the host"
        )
        lines.append(f"  pool {pool.name} ({where}), busy {placed.busy_parts[pool.name]:.0%} of the time:")
        for name, way in pool.members.items():
            away = ", leaves the device between its turns" if name in pool.moved else ""
            lines.append(f"    {name}{': ' if way else ''}{way}{away}")
    for sent in placed.sent:
        lines.append(f"  {sent.title} to pool {sent.pool}: {_seconds(sent.seconds)}")
    return lines


def _range(devices: tuple[int, ...]) -> str:
    return f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]}-{devices[-1]}"


def _bottleneck(placed: Placed) -> str:
    found = placed.bottleneck
    if not found.title:
        return "Bottleneck: none, nothing takes time."
    what = "of the busiest pool's time" if placed.staleness else "of what a step waits for"
    return f"Bottleneck: {found.title} in pool {found.pool}, {_seconds(found.seconds)}, {found.share:.0%} {what}."


def shape(placed: Placed) -> str:
    """Return ``{actor.train, actor.generate} on 8 | {ref.train} on 8``."""
    sets = [f"{{{', '.join(p.members)}}} on {len(p.devices)} {p.device}" for p in placed.pools if p.device]
    return " | ".join(sets)


def _runner_up(found: Found) -> list[str]:
    if found.runner_up is None or found.margin is None:
        return ["Runner-up: none, no other way to share pools fits."]
    other = found.runner_up
    said = "".join(f", {setting}" for setting in other.settings)
    lines = [
        f"Runner-up: {shape(other)}, {_lag(other)}{said}: {_seconds(other.step_seconds)}, {found.margin:.1%} longer."
    ]
    slow = other.bottleneck
    if slow.title:
        lines.append(
            f"It waits longest for {slow.title} in pool {slow.pool}: {_seconds(slow.seconds)}, {slow.share:.0%}."
        )
    if found.tie:
        lines.append(
            f"A tie: the margin of {found.margin:.1%} is inside the error of the costs (±{found.error:.0%}). Either may"
            " be faster:"
        )
        lines += [f"  1. {shape(found.best)}", f"  2. {shape(other)}"]
        if found.source == "roofline":
            lines.append("  Measure both, or calibrate the costs with a run of this machine.")
    else:
        lines.append(f"The margin is outside the error of the costs (±{found.error:.0%}).")
    if found.changes:
        said = [f"{c.title} cost {_times(c.factor)}" for c in found.changes[:3]]
        lines.append(f"The runner-up would be as fast if {', or '.join(said)}.")
    else:
        lines.append("No change of a single op's cost, up to 32 times, would make the runner-up as fast.")
    return lines


def _bound(found: Found) -> list[str]:
    if found.bound is None or found.gap is None:
        return []
    if found.gap < 0.0005:
        return ["No placement of those that the search knows is faster by these costs: it meets the bound."]
    bound = f"no placement can take less than {_seconds(found.bound)} by these costs"
    return [f"Bound: {bound}; what was found is at most {found.gap:.1%} longer than the best."]


def _settings(found: Found) -> list[str]:
    if not found.tried:
        return []
    kept = ", ".join(found.best.settings)
    said = f"these make the step shorter: {kept}" if kept else "none makes the step shorter"
    tried = "chunks, publishes, caches, offload"
    return [f"Simulated {found.tried} other settings of the fastest placements ({tried}); {said}."]


def _beyond(found: Found) -> list[str]:
    if found.source != "roofline" or found.problem.cluster.size <= _TRUSTED:
        return []
    return [
        f"Beyond {_TRUSTED} devices measurements have contradicted a roofline: it makes sharing one pool look too good"
        " (HybridFlow, arXiv 2409.19256, section 8.3). Calibrate before you rely on this."
    ]


def _times(factor: float) -> str:
    if abs(factor - 1) < 0.01:
        return f"less than 1 % {'more' if factor >= 1 else 'less'}"
    return f"{factor:.3g} times as much"


def _slowest(placed: Placed) -> dict[str, Any]:
    op = placed.bottleneck
    return {"node": op.title, "pool": op.pool, "seconds": op.seconds, "share": op.share}


def to_json(found: Found) -> dict[str, Any]:
    """Return the same as a record.

    ``{"step_s", "staleness", "shape", "cost_source", "error", "busy": {pool: part of the time}, "bottleneck": {"node",
    "pool", "seconds", "share"}, "settings", "tried", "binding", "gain", "runner_up": {"shape", "step_s", "staleness",
    "margin", "bottleneck", "changes": {title: factor}, "plan"} or None, "tie", "bound", "gap", "evaluated", "pruned",
    "plan"}``; plans as ``Plan.to_json`` writes them. ``changes`` of a runner-up: as many times as much would the op of
    that title have to cost for it to be as fast.
    """
    best, other = found.best, found.runner_up
    return {
        "step_s": found.step_seconds,
        "staleness": best.staleness,
        "shape": shape(best),
        "cost_source": found.source,
        "error": found.error,
        "busy": dict(best.busy_parts),
        "bottleneck": _slowest(best),
        "settings": list(best.settings),
        "tried": found.tried,
        "binding": found.binding,
        "gain": found.gain,
        "runner_up": other
        and {
            "shape": shape(other),
            "step_s": other.step_seconds,
            "staleness": other.staleness,
            "margin": found.margin,
            "bottleneck": _slowest(other),
            "changes": {c.title: c.factor for c in found.changes},
            "plan": other.plan.to_json(),
        },
        "tie": found.tie,
        "bound": found.bound,
        "gap": found.gap,
        "evaluated": found.evaluated,
        "pruned": found.pruned,
        "plan": found.plan.to_json(),
    }
