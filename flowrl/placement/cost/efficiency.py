"""How much of a peak is reached: what is assumed, what is fitted to published steps, what a file says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from ...errors import PlanError, did_you_mean, shown
from .given_costs import Entry, read_entries

_SOURCES = {
    "train": "assumed; Narayanan et al. 2021 (arXiv:2104.04473) report 44 to 52 % of peak in pre-training",
    "forward": "assumed, a little above training: no optimizer, no backward pass",
    "prefill": "assumed; Pope et al. 2022 (arXiv:2211.05102) report 76 % for large batches",
    "decode": "assumed, as prefill: it decides only where many rows decode at once",
    "memory": "assumed",
    "link": "assumed",
    "network": "assumed",
    "host": "assumed",
    "overlap": "assumed: FSDP and gradient traffic runs beside the computation",
    "recomputation": "assumed: activations are recomputed where a driver says nothing of it",
    "experts": "assumed: products of experts are as fast as those of dense layers",
    "step_s": "assumed: scheduling and sampling of one decoded token",
    "slot_s": "assumed: none beside step_s",
    "call_s": "assumed: none beside what tokens take",
    "publish_s": "assumed: none beside what bytes take",
    "row_s": "assumed: one row of a reward or environment without a given time, on one process",
}
#: Figures that may be above 1 or are 0 where nothing is added.
_SECONDS = ("step_s", "slot_s", "call_s", "publish_s", "row_s")


@dataclass(frozen=True)
class Efficiency:
    """How much of a peak is reached: ``Efficiency(train=0.4)``; ``sources`` says where each figure is from.

    Factors of peak operations (``train``, ``forward``, ``prefill``, ``decode``), of bandwidths (``memory``, ``link``,
    ``network``, ``host``), the part of the computation that traffic of weights and gradients can hide behind
    (``overlap``), of what dense products reach the part that those of experts do (``experts``), how much there is of
    the recomputation that is assumed where a driver says nothing (``recomputation``), and seconds that nothing else
    accounts for: ``step_s`` per decoded token, ``slot_s`` for each row in it, ``call_s`` of a forward pass and of an
    optimizer step, ``publish_s`` of a publish, ``row_s`` per external row. ``name`` is how a report calls them, nothing
    for those that are assumed; ``error``: by what part seconds were off, where that was measured.
    """

    train: float = 0.40
    forward: float = 0.45
    prefill: float = 0.50
    decode: float = 0.50
    memory: float = 0.70
    link: float = 0.70
    network: float = 0.70
    host: float = 0.70
    overlap: float = 0.50
    experts: float = 1.0
    recomputation: float = 1.0
    step_s: float = 1e-3
    slot_s: float = 0.0
    row_s: float = 1e-2
    call_s: float = 0.0
    publish_s: float = 0.0
    error: float | None = None
    sources: Mapping[str, str] = field(default_factory=lambda: _SOURCES, compare=False)
    name: str = ""

    @staticmethod
    def ideal() -> Efficiency:
        """Return figures with every peak reached, nothing hidden, nothing added: the bare formulas."""
        return Efficiency(1, 1, 1, 1, 1, 1, 1, 1, overlap=0, experts=1, step_s=0, slot_s=0, row_s=0, sources={})

    @staticmethod
    def published() -> Efficiency:
        """Return the figures that ``docs/make_published.py --fit`` finds; the others are those that are assumed."""
        return Efficiency(**_PUBLISHED, sources=_SOURCES | dict.fromkeys(_PUBLISHED, _FITTED), name="published")

    @staticmethod
    def load(path: str | Path) -> Efficiency:
        """Read a file: ``{train: 0.36, experts: 0.4}``. What it leaves out is as assumed; ``published`` is no file.

        Raises PlanError with file and line for another name, or a number that is no part of a whole.
        """
        if str(path) == "published":
            return Efficiency.published()
        entries = read_entries(path)
        found = {entry.name: _figure(entry) for entry in entries}
        given = shown(str(path))
        sources = _SOURCES | dict.fromkeys((name for name in found if name != "error"), given)
        return Efficiency(**found, sources=sources, name=given)

    def save(self, path: str | Path) -> None:
        """Write a file for ``--efficiency``: the figures that are not those assumed. Raises PlanError."""
        assumed = Efficiency()
        found = {name: getattr(self, name) for name in _FIGURES if getattr(self, name) != getattr(assumed, name)}
        lines = [f"{name}: {value:.6g}\n" for name, value in found.items() if value is not None]
        try:
            Path(path).write_text(f"# parts of a peak and seconds, fitted to {self.name}\n" + "".join(lines))
        except OSError as error:
            what = f"the efficiencies cannot be written to {shown(str(path))}: {error.strerror}."
            raise PlanError(what, fix="Name a file in a folder that is there.") from None


_FIGURES = tuple(f.name for f in fields(Efficiency) if f.name not in ("sources", "name"))


def _figure(entry: Entry) -> float:
    if entry.name not in _FIGURES:
        fix = did_you_mean(entry.name, _FIGURES, "Take it out.")
        raise PlanError(f"there is no efficiency '{entry.name}'.", at=entry.at, have=_FIGURES, fix=fix)
    if entry.name in (*_SECONDS, "error"):
        return entry.seconds("it")
    try:
        number = float(entry.text)
    except ValueError:
        number = math.nan
    least = 0 if entry.name in ("overlap", "recomputation") else 1e-6
    if not least <= number <= 1:
        fix = f"Write the part of the peak that is reached, above 0 and at most 1: {entry.name}: 0.4."
        raise PlanError(f"'{entry.name}': '{entry.text}' is no part of a peak.", at=entry.at, fix=fix)
    return number


#: The one set of constants of docs/published.md. ``python docs/make_published.py --fit`` searched for the four smallest
#: squares of log(predicted / published) over four of its rows, which the page names; no other row was looked at.
#: ``forward`` was kept at 9/8 of ``train``, as in what is assumed.
_PUBLISHED: Mapping[str, float] = {
    "train": 0.34,
    "forward": 0.3825,
    "experts": 0.15,
    "step_s": 0.0031,
    "slot_s": 1e-4,
}
_FITTED = "fitted to four published steps (docs/published.md)"
