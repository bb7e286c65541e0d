"""What a run took, call by call, turned into costs that say how far off they are.

A run folder has ``timeline.jsonl``, a line for each call:
``{"node": "actor.generate", "step": 3, "pool": "main", "start": 12.01, "end": 12.35, "rows": 128, "tokens": 9211}``.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ...errors import At, PlanError, did_you_mean, shown
from ..cluster.mesh import Mesh
from .continuous_batch import Engine
from .engine_curve import PARTS, EngineCurve, SampledCall, fit_curve
from .given_costs import Entry, check_names, inside_one_pool, read_entries
from .work import Work

#: Steps at the beginning of a program that are left out: caches fill, kernels compile.
WARMUP = 2
SWAPS = ("offload", "onload")  # how lines of workers that take turns in a memory end
_LIBRARIES = ("rl", "batch", "data", "user")  # of calls that are nowhere in a plan
_ENTRIES = ("calibrated", "step", "ops", "engines", "places")
_CURVE = (*PARTS, "replicas", "error", "predicted", "measured", "calls")
_FIT = ("base", "per_token", "error", "predicted", "measured", "calls", "row_tokens")


@dataclass(frozen=True)
class Call:
    """One op of one step as it was measured, its chunks together: ``Call("actor.generate", 3, 0.34, 9211)``."""

    title: str
    step: int
    seconds: float
    tokens: float = 0.0
    rows: float = 0.0


@dataclass(frozen=True)
class Fit:
    """``seconds = base + per_token * tokens`` of one op: ``Fit(0.1, 2e-5, error=0.03, calls=28)``.

    ``error``: the median of |predicted - measured| / measured over calls that the fit had not seen; None where there
    were none. ``predicted``, ``measured``: medians over the same calls. ``row_tokens``: of a row, on average; 0 where
    the run does not say.
    """

    base: float
    per_token: float = 0.0
    error: float | None = None
    predicted: float = 0.0
    measured: float = 0.0
    calls: int = 0
    row_tokens: float = 0.0

    def seconds(self, tokens: float) -> float:
        return self.base + self.per_token * tokens

    @staticmethod
    def of(calls: Sequence[Call]) -> Fit:
        """Return the median where the sizes vary by less than 1 %, else least squares with figures of at least 0.

        It is per token alone unless a base is worth it (Schwarz 1978): sizes that vary by a tenth say little of it, and
        other plans have calls of half or twice the size.
        """
        xs, ys = [c.tokens for c in calls], [c.seconds for c in calls]
        n, mean_x, mean_y = len(calls), sum(xs) / len(calls), sum(ys) / len(calls)
        rows = sum(c.rows for c in calls)
        long = sum(xs) / rows if rows else 0.0
        constant = Fit(median(ys), calls=n, row_tokens=long)
        if n < 3 or max(xs) - min(xs) <= max(0.01 * mean_x, 1e-6):  # a token at least is counted in ones
            return constant
        spread = sum((x - mean_x) ** 2 for x in xs)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
        if slope <= 0:
            return constant
        both = Fit(mean_y - slope * mean_x, slope, calls=n, row_tokens=long)
        alone = sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs)
        per_token = Fit(0.0, alone, calls=n, row_tokens=long)

        def rest(fit: Fit) -> float:
            return sum((y - fit.seconds(x)) ** 2 for x, y in zip(xs, ys, strict=True))

        return both if both.base > 0 and rest(both) < rest(per_token) * n ** (-1 / n) else per_token


@dataclass(frozen=True)
class Calibrated:
    """Costs of the ops of a run: ``Calibrated("runs/grpo", {"actor.generate": Fit(0.1, 2e-5)}, Fit(0, error=0.04))``.

    ``step``: all ops of a step together, one after another, whose error is that of these costs. Ops that the run did
    not have cost 0, and so does a publish inside one pool. They hold for the machine, plan and model of the run.
    ``places``: where each op was measured, as :func:`placed` says it. ``curves``: how fast the engine of an op that
    samples was, by batch and length, where the calls of the run tell. ``calls``: those that the fits are of, by title;
    a file has none.
    """

    run: str
    fits: Mapping[str, Fit]
    step: Fit
    at: Mapping[str, At] = field(default_factory=dict[str, At])
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    curves: Mapping[str, EngineCurve] = field(default_factory=dict[str, EngineCurve])
    calls: Mapping[str, Sequence[Call]] = field(default_factory=dict[str, Sequence[Call]])

    @property
    def error(self) -> float | None:
        """The relative error of a step's predicted seconds, on steps that were held out; None if there were none."""
        return self.step.error

    @property
    def source(self) -> str:
        said = "unknown" if self.error is None else f"{100 * self.error:.1f} %"
        return f"calibrated: {self.run} (error {said})"

    def seconds(self, work: Work) -> float:
        """Of a chunk its share: overheads of a call are counted once for the whole op. Rows whose lengths were said
        take the time of the engine's curve, where there is one."""
        fit = self.fits.get(work.node) or self.fits.get(work.title)
        if fit is None or inside_one_pool(work):
            return 0.0
        curve, lengths = self.curves.get(work.title), work.load.lengths
        if curve is not None and lengths is not None:
            return curve.seconds(work.load.rows, lengths, _replicas(work.mesh, work.processes))
        return fit.base * work.share + fit.per_token * work.load.tokens

    def engine(self, work: Work) -> Engine | None:
        """Return the engine of a generate as the run had it, for rows of such lengths; None where it is not known."""
        curve, lengths = self.curves.get(work.title), work.load.lengths
        if curve is None or lengths is None:
            return None
        return curve.engine(lengths, _replicas(work.mesh, work.processes))

    def check_names(self, names: Iterable[str]) -> None:
        """Raise PlanError for an op of the run that is none of ``names``: titles and node ids of the program."""
        check_names(self.fits, names, self.at)

    def report(self) -> str:
        """Return a table: what was predicted for calls that the fit had not seen, what they took, and the error."""
        rows = [("op", "calls", "predicted s", "measured s", "error")]
        for name, fit in (*sorted(self.fits.items()), ("step (sum of its ops)", self.step)):
            error = "-" if fit.error is None else f"{100 * fit.error:.1f} %"
            rows.append((name, str(fit.calls), f"{fit.predicted:.4g}", f"{fit.measured:.4g}", error))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        padded = ([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5))] for row in rows)
        return "\n".join("  ".join(cells) for cells in padded) + "".join(map(_in_words, sorted(self.curves.items())))

    def to_json(self) -> dict[str, Any]:
        """The same as a record: ``{"calibrated": RUN, "step": {...}, "ops": {title: {"base", "per_token", ...}}}``."""
        ops = {name: _figures(fit) for name, fit in sorted(self.fits.items())}
        record = {"calibrated": self.run, "step": _figures(self.step), "ops": ops}
        if self.curves:
            record |= {"engines": {name: _curve_figures(curve) for name, curve in sorted(self.curves.items())}}
        return {**record, "places": dict(self.places)} if self.places else record

    def save(self, path: str | Path) -> None:
        """Write a file for ``--costs``. Raises PlanError where it cannot be written."""
        import yaml

        text = yaml.safe_dump(self.to_json(), sort_keys=False, default_flow_style=None, width=120)
        try:
            Path(path).write_text("# seconds of a call = base + per_token * tokens\n" + text, encoding="utf-8")
        except OSError as error:
            what = f"the costs cannot be written to {shown(str(path))}: {error.strerror}."
            raise PlanError(what, fix="Name a file in a folder that is there.") from None

    @staticmethod
    def load(path: str | Path) -> Calibrated:
        """Read what :meth:`save` wrote. Raises PlanError with file and line."""
        found = {entry.name: entry for entry in read_entries(path)}
        for name, entry in found.items():
            if name not in _ENTRIES:
                raise _unknown(entry, "calibrated costs have", _ENTRIES)
        for name in ("calibrated", "step", "ops"):
            if name not in found:
                fix = "Write it again with flowrl calibrate RUN."
                raise PlanError(f"calibrated costs need '{name}'.", at=At(str(path), 0), have=found, fix=fix)
        ops = found["ops"].entries()
        fits = {op.name: _fit(op) for op in ops}
        places = {op.name: op.text for op in found["places"].entries()} if "places" in found else {}
        curves = {op.name: _curve(op) for op in found["engines"].entries()} if "engines" in found else {}
        at = {op.name: op.at for op in ops}
        return Calibrated(found["calibrated"].text, fits, _fit(found["step"]), at, places, curves)


def calibrate(run: str | Path, *, program: str | None = None) -> Calibrated:
    """Return costs of a run, from its ``timeline.jsonl``.

    The first two steps are left out as warm-up. The error is that of a fit to the first half of the others, told on
    the second half; the costs themselves are fitted to both. ``program``: the one to take where the run had several;
    without it the one with most ops, and of several the one that took longest. Raises PlanError for a run that has no
    calls, or lines that are none.
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


def placed(backend: str, mesh: Mesh) -> str:
    """Return in words where an op runs: its backend, then ``mesh fsdp=8`` or ``one device``."""
    return f"{backend}, mesh {mesh}" if mesh.size > 1 else f"{backend}, one device"


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
        replicas[title] = _replicas(place.mesh, plan.pools[place.pool].processes)
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
    """The curves of engines, from calls and chunks that no other one of their pool ran beside."""
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
    fitted = {title: fit_curve(mine, replicas.get(title, 1)) for title, mine in calls.items()}
    return {title: curve for title, curve in fitted.items() if curve is not None}


def _replicas(mesh: Mesh, processes: int) -> int:
    """Among how many replicas the rows of a call are divided."""
    return mesh.data if mesh.size > 1 else max(1, processes)


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        raise PlanError(
            f"{shown(str(path.parent))} is no folder of a run: it has no {path.name}.",
            fix="Name the folder that flowrl run --out DIR wrote.",
        )
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not text.endswith("\n"):
            return  # cut off by a crash
        try:
            line = json.loads(text)
            usable = isinstance(line["node"], str) and isinstance(line["step"], int) and line["end"] >= line["start"]
        except (ValueError, KeyError, TypeError):
            usable, line = False, {}
        if not usable:
            at = At(str(path), number, text.strip()[:80])
            raise PlanError("a line of the timeline is no call.", at=at, fix="Take it out; nothing else needs it.")
        yield line


def _in_words(named: tuple[str, EngineCurve]) -> str:
    """A paragraph of the report on an engine."""
    name, curve = named
    told = "" if curve.error is None else f"; {100 * curve.error:.1f} % off on calls that were held out"
    parts = {
        "a call": curve.call,
        "a token of a prompt": curve.prompt,
        "a token of all rows": curve.step,
        "each row in it": curve.row,
        "each token that a row has by then": curve.context,
    }
    words = ", ".join(f"{part} {1e6 * seconds:.3g} us" for part, seconds in parts.items() if seconds)
    return f"\n\n{name}, engine: {words} ({curve.calls} calls{told})"


def _curve_figures(curve: EngineCurve) -> dict[str, float | None]:
    """The figures of a curve, to six digits."""
    values = {key: getattr(curve, key) for key in _CURVE}
    return {key: float(f"{v:.6g}") if isinstance(v, float) else v for key, v in values.items()}


def _curve(entry: Entry) -> EngineCurve:
    values: dict[str, Any] = {}
    for figure in entry.entries():
        if figure.name not in _CURVE:
            raise _unknown(figure, f"'{entry.name}' has", _CURVE)
        unknown = figure.name == "error" and figure.text in ("null", "")
        values[figure.name] = None if unknown else figure.seconds("a token")
    whole = {name: int(values.get(name, least)) for name, least in (("calls", 0), ("replicas", 1))}
    return EngineCurve(**{**values, **whole})


def _figures(fit: Fit) -> dict[str, float | None]:
    """The figures of a fit, to six digits."""
    values = {key: getattr(fit, key) for key in _FIT}
    return {key: float(f"{v:.6g}") if isinstance(v, float) else v for key, v in values.items()}


def _fit(entry: Entry) -> Fit:
    values: dict[str, Any] = {}
    for figure in entry.entries():
        if figure.name not in _FIT:
            raise _unknown(figure, f"'{entry.name}' has", _FIT)
        unknown = figure.name == "error" and figure.text in ("null", "")
        values[figure.name] = None if unknown else figure.seconds("a call")
    if "base" not in values:
        raise PlanError(f"'{entry.name}' has no 'base'.", at=entry.at, fix="Write {base: 6.0}, the seconds of a call.")
    values["calls"] = int(values.get("calls", 0))
    return Fit(**values)


def _unknown(entry: Entry, what: str, known: Iterable[str]) -> PlanError:
    fix = did_you_mean(entry.name, known, "Take it out.")
    return PlanError(f"{what} no '{entry.name}'.", at=entry.at, have=known, fix=fix)
