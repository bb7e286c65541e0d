"""Devices arranged along named axes, as a plan says it: ``{fsdp: 4, tp: 2}``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from ...errors import PlanError, did_you_mean

#: Outermost first: ranks that differ in ``tp`` alone are neighbours, those that differ in ``pp`` are furthest apart.
AXES = ("pp", "dp", "fsdp", "cp", "ep", "tp")
#: Axes that rows are split over. ``cp`` splits the tokens of a row, ``tp`` and ``pp`` see every row.
DATA_AXES = ("dp", "fsdp", "ep")
#: What a mesh may say beside its axes: into how many parts the experts are split over the ranks that those have.
FOLDED = "folded_ep"


@dataclass(frozen=True)
class Mesh:
    """Sizes by axis, axes of size 1 left out, in the order of :data:`AXES` whatever order they were written in.

    >>> mesh = fl.Mesh({"tp": 2, "fsdp": 4, "pp": 1})
    >>> str(mesh), mesh.size, mesh["tp"], mesh["pp"], mesh.data
    ('fsdp=4,tp=2', 8, 2, 1, 4)
    >>> mesh.coordinates(5)
    {'fsdp': 2, 'tp': 1}

    ``folded_ep`` is no axis and takes no devices: it splits experts, whole ones, over the ranks that ``dp``, ``cp`` and
    ``tp`` have in a stage, neighbours first (folding: Liu et al. 2025, arXiv:2504.14960). :attr:`experts` is the mesh
    that experts then have.

    >>> mesh = fl.Mesh({"pp": 2, "dp": 4, "tp": 4, "folded_ep": 8})
    >>> str(mesh), mesh.size, str(mesh.experts)
    ('pp=2,dp=4,tp=4,folded_ep=8', 32, 'pp=2,dp=2,ep=8')

    Raises PlanError for an axis that is none of :data:`AXES`, a size below 1, or experts that do not fold.
    """

    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    folded: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            if axis not in (*AXES, FOLDED):
                have = (*AXES, FOLDED)
                raise PlanError(f"a mesh has no axis '{axis}'.", have=have, fix=did_you_mean(axis, have))
            if size < 1:
                raise PlanError(f"axis {axis}={size}: a mesh has at least one device along each axis.")
        kept = {a: self.axes[a] for a in AXES if self.axes.get(a, 1) > 1}
        object.__setattr__(self, "folded", self.axes.get(FOLDED, 1))
        object.__setattr__(self, "axes", kept)
        if self.folded > 1:
            self._check_folds()

    def _check_folds(self) -> None:
        ranks = self["dp"] * self["cp"] * self["tp"]
        if wrong := next((axis for axis in ("ep", "fsdp") if self[axis] > 1), ""):
            what = f"a mesh has {FOLDED}={self.folded} or {wrong}={self[wrong]}, not both."
            raise PlanError(what, fix=f"Write dp in place of {wrong}.")
        if ranks % self.folded:
            what = f"{FOLDED}={self.folded} does not divide the {ranks} ranks that dp, cp and tp have in a stage."
            raise PlanError(what, fix=f"Write a divisor of {ranks}.")

    @staticmethod
    def of(text: str) -> Mesh:
        """Read ``tp=8,pp=4,dp=4``; ``1`` is a single device. Raises PlanError with the near miss."""
        axes: dict[str, int] = {}
        if text.strip() == "1":
            return Mesh()
        for part in filter(None, (p.strip() for p in text.split(","))):
            axis, sep, size = part.partition("=")
            if not sep or not size.strip().isdigit():
                raise PlanError(f"'{part}' is no axis of a mesh.", fix="Write axes with sizes: tp=8,pp=4,dp=4.")
            if axis.strip() in axes:
                raise PlanError(f"axis '{axis.strip()}' is there twice in '{text}'.")
            axes[axis.strip()] = int(size)
        return Mesh(axes)

    @cached_property
    def size(self) -> int:
        """How many devices it takes."""
        return prod(self.axes.values())

    @property
    def data(self) -> int:
        """Into how many parts rows are split."""
        return self["dp"] * self["fsdp"] * self["ep"]

    @cached_property
    def experts(self) -> Mesh:
        """The mesh that experts have: on the same devices in the same order, with whole experts, where they fold."""
        if self.folded == 1:
            return self
        copies = self["dp"] * self["cp"] * self["tp"] // self.folded
        return Mesh({"pp": self["pp"], "dp": copies, "ep": self.folded})

    @cached_property
    def said(self) -> Mapping[str, int]:
        """Axes, and ``folded_ep`` where experts fold: what a plan says."""
        return {**self.axes, **({FOLDED: self.folded} if self.folded > 1 else {})}

    def __getitem__(self, axis: str) -> int:
        return self.axes.get(axis, 1)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((*self.axes.items(), self.folded))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank stands along each axis."""
        found: dict[str, int] = {}
        for axis in reversed(list(self.axes)):
            rank, found[axis] = divmod(rank, self.axes[axis])
        return {a: found[a] for a in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at these coordinates; axes left out count as 0."""
        rank = 0
        for axis, size in self.axes.items():
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Ranks that differ along ``axes`` alone: ``Mesh({"dp": 2, "tp": 2}).groups("tp")`` gives (0, 1), (2, 3)."""
        seen: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            at = self.coordinates(rank)
            seen.setdefault(tuple(n for a, n in at.items() if a not in axes), []).append(rank)
        for ranks in seen.values():
            yield tuple(ranks)

    def __str__(self) -> str:
        return ",".join(f"{a}={n}" for a, n in self.said.items()) or "1"
