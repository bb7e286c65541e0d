"""Calibrate costs by a run: its calls are read, and fitted, and each fit is tried on calls that it has not seen.

A run folder has ``timeline.jsonl``, a line for each call:
``{"node": "actor.generate", "step": 3, "pool": "main", "start": 12.01, "end": 12.35, "rows": 128, "tokens": 9211}``.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ...errors import At, PlanError, UsageError, did_you_mean, shown
from .calibrated_costs import SWAPS, Calibrated, Call, Fit, placed, replicas_of
from .engine_curve import EngineCurve, SampledCall, SampledPasses, fit_curve

#: Steps at the beginning of a program that are left out: caches fill, kernels compile.
WARMUP = 2
_LIBRARIES = ("rl", "batch", "data", "user")  # of calls that are nowhere in a plan


def calibrate(run: str | Path, *, program: str | None = None) -> Calibrated:
    """Return costs of a run, from its ``timeline.jsonl``.

    The first two steps are left out as warm-up. The error is that of a fit to the first half of the others, told on
    the second half; the costs themselves are fitted to both. ``program``: the one to take where the run had several;
    without it the one with most ops, and of several the one that took longest. Raises PlanError for a run that has no
    calls, or lines that are none; UsageError for a folder that is no run.
    """
    lines = _lines_of(run, program)
    calls = _calls(lines)
    steps = sorted({c.step for c in calls})
    steps = steps[min(WARMUP, max(0, len(steps) - 2)) :]
    half = len(steps) // 2
    seen, held_out = set(steps[:half]), set(steps[half:])
    titles = dict.fromkeys(c.title for c in calls if c.step >= steps[0])
    fits: dict[str, Fit] = {}
    warm: dict[str, Sequence[Call]] = {}
    guesses: dict[int, list[tuple[float, float]]] = {}
    for title in titles:
        mine = [c for c in calls if c.title == title and c.step >= steps[0]]
        first = [c for c in mine if c.step in seen]
        guess = Fit.of(first) if first else None
        pairs = [(guess.seconds(c.tokens), c.seconds) for c in mine if c.step in held_out] if guess else []
        fits[title], warm[title] = _with_error(Fit.of(mine), pairs), mine
        for call in (c for c in mine if c.step in held_out):
            guesses.setdefault(call.step, []).append((guess.seconds(call.tokens) if guess else 0.0, call.seconds))
    sums = [(sum(p for p, _ in pairs), sum(m for _, m in pairs)) for pairs in guesses.values()] if half else []
    step = _with_error(Fit(0.0, calls=len(steps)), sums)
    places, replicas = _places(Path(run), titles)
    curves = _curves(lines, steps, replicas)
    return Calibrated(shown(str(run)), fits, step, places=places, curves=curves, calls=warm)


def _places(run: Path, titles: Iterable[str]) -> tuple[dict[str, str], dict[str, int]]:
    """Where the ops of a run were, by its plan, and among how many replicas; empty for a run that does not say it."""
    from ..plan.plan_file import read

    record = run / "run.json"
    said = json.loads(record.read_text(encoding="utf-8")).get("plan") if record.exists() else None
    if not said:
        return {}, {}
    plan, found, replicas = read(json.dumps(said), str(record)), dict[str, str](), dict[str, int]()
    for title in titles:
        worker, _, op = title.partition(".")
        if worker in _LIBRARIES:
            continue
        place = plan.place_of(worker, "generate" if op.partition(".")[0] == "generate" else "train")
        found[title] = placed(place.backend, place.mesh)
        replicas[title] = replicas_of(place.mesh, plan.pools[place.pool].processes)
    return found, replicas


def _with_error(fit: Fit, pairs: Sequence[tuple[float, float]]) -> Fit:
    """The fit with the median error of pairs of predicted and measured seconds."""
    errors = [abs(p - m) / m for p, m in pairs if m > 0]
    if not errors:
        return fit
    predicted, measured = median(p for p, _ in pairs), median(m for _, m in pairs)
    return replace(fit, error=median(errors), predicted=predicted, measured=measured)


def _lines_of(run: str | Path, program: str | None) -> list[dict[str, Any]]:
    """The lines of one program."""
    path = Path(run) / "timeline.jsonl"
    lines = list(_lines(path))
    seconds: dict[str, dict[str, float]] = {}
    for line in lines:
        of_program = seconds.setdefault(str(line.get("program", "")), {})
        of_program[line["node"]] = of_program.get(line["node"], 0.0) + line["end"] - line["start"]
    if program is not None and program not in seconds:
        fix = did_you_mean(program, seconds)
        raise PlanError(f"the run {shown(str(run))} has no program '{program}'.", have=seconds, fix=fix)
    if not seconds:
        raise PlanError(f"the run {shown(str(run))} has no calls to calibrate with.", fix="Let it make a step or more.")
    if program is None:
        program = max(seconds, key=lambda name: (len(seconds[name]), sum(seconds[name].values())))
    return [line for line in lines if str(line.get("program", "")) == program]


def _calls(lines: Iterable[Mapping[str, Any]]) -> list[Call]:
    """The calls, the chunks of a node in a step as one."""
    found: dict[tuple[int, str, float], Call] = {}
    for line in lines:
        again = line["start"] if _is_swap(line["node"]) else 0.0  # a worker may leave and come back several times
        key = (line["step"], line["node"], again)
        was = found.get(key, Call(line["node"].partition("#")[0], line["step"], 0.0))
        took, tokens = was.seconds + line["end"] - line["start"], was.tokens + (line.get("tokens") or 0)
        found[key] = Call(was.title, was.step, took, tokens, was.rows + (line.get("rows") or 0))
    return list(found.values())


def _is_swap(title: str) -> bool:
    """Whether it is a worker that leaves the memory of its pool, or comes back: ``actor.train.offload``."""
    return title.rpartition(".")[2] in SWAPS


def _curves(
    lines: Sequence[Mapping[str, Any]], steps: Iterable[int], replicas: Mapping[str, int]
) -> dict[str, EngineCurve]:
    """The curves of engines: from their passes, and from calls that no other one of their pool ran beside."""
    wanted = set(steps)
    by_pool: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if line.get("longest"):
            by_pool.setdefault(str(line.get("pool")), []).append(line)
    calls: dict[str, list[SampledCall]] = {}
    for mine in by_pool.values():
        ends = sorted(float(line["end"]) for line in mine)
        starts = sorted(float(line["start"]) for line in mine)
        for line in mine:
            # Alone: as many have ended by its start as have begun before it, and none begins before its end.
            before = bisect_right(ends, line["start"])
            alone = bisect_left(starts, line["end"]) == before + 1
            if alone and line["step"] in wanted:
                sizes = (line["prompt"], line["longest"], line["tokens"] - line["prompt"], line["context"])
                call = SampledCall(line["step"], line["end"] - line["start"], *sizes)
                calls.setdefault(line["node"].partition("#")[0], []).append(call)
    passes: dict[str, list[SampledPasses]] = {}
    for line in lines:
        if line["step"] in wanted:
            told = [SampledPasses(line["step"], *each) for each in line.get("passes", ())]
            passes.setdefault(line["node"].partition("#")[0], []).extend(told)
    fitted = {title: fit_curve(mine, replicas.get(title, 1), passes[title]) for title, mine in calls.items()}
    return {title: curve for title, curve in fitted.items() if curve is not None}


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        raise UsageError(
            f"{shown(str(path.parent))} is no folder of a run: it has no {path.name}.",
            fix="Name the folder that flowrl run --out DIR wrote.",
        )
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not text.endswith("\n"):
            return  # cut off by a crash
        try:
            line = json.loads(text)
            usable = isinstance(line["node"], str) and isinstance(line["step"], int) and line["end"] >= line["start"]
            passes = line.get("passes", ())
            whole = (count > 0 and min(rows, context, seconds) >= 0 for count, rows, context, seconds in passes)
            usable = usable and all(whole)
        except (ValueError, KeyError, TypeError):
            usable, line = False, {}
        if not usable:
            at = At(str(path), number, text.strip()[:80])
            raise PlanError("a line of the timeline is no call.", at=at, fix="Take it out; nothing else needs it.")
        yield line
