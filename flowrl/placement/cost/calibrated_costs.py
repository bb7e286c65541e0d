"""Costs of the ops of a run, call by call, which say how far off they are: as a record, as a report, and as a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ...errors import At, PlanError, did_you_mean, shown
from ..cluster.mesh import Mesh
from .continuous_batch import Engine
from .engine_curve import PARTS, EngineCurve
from .given_costs import Entry, check_names, inside_one_pool, read_entries
from .work import Work

SWAPS = ("offload", "onload")  # how lines of workers that take turns in a memory end
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
            return curve.seconds(work.load.rows, lengths, replicas_of(work.mesh, work.processes))
        return fit.base * work.share + fit.per_token * work.load.tokens

    def engine(self, work: Work) -> Engine | None:
        """Return the engine of a generate as the run had it, for rows of such lengths; None where it is not known."""
        curve, lengths = self.curves.get(work.title), work.load.lengths
        if curve is None or lengths is None:
            return None
        return curve.engine(lengths, replicas_of(work.mesh, work.processes))

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


def placed(backend: str, mesh: Mesh) -> str:
    """Return in words where an op runs: its backend, then ``mesh fsdp=8`` or ``one device``."""
    return f"{backend}, mesh {mesh}" if mesh.size > 1 else f"{backend}, one device"


def replicas_of(mesh: Mesh, processes: int) -> int:
    """Among how many replicas the rows of a call are divided."""
    return mesh.data if mesh.size > 1 else max(1, processes)


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
