"""Which ranks a worker is on: which part of the rows each has, and which of them have a whole copy together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class RankParts:
    """The ranks of a worker, and in ``shares`` for each of them the part of the rows that it has.

    Ranks with the same part compute together and have the same result. ``size``: how many ranks have a whole copy of
    the model together.

    >>> parts = RankParts((4, 5, 6, 7), (0, 0, 1, 1), size=2)
    >>> parts.count, parts.keepers, parts.team_of(5), parts.copies
    (2, (4, 6), (4, 5), ((4, 5), (6, 7)))
    >>> parts.without({4, 5})
    RankParts(ranks=(6, 7), shares=(0, 0), size=2)
    """

    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    size: int = 1

    @cached_property
    def count(self) -> int:
        """In how many parts the rows are."""
        return max(self.shares) + 1

    @cached_property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that have each part of the rows."""
        mine = list(zip(self.ranks, self.shares, strict=True))
        return tuple(tuple(rank for rank, share in mine if share == part) for part in range(self.count))

    @cached_property
    def keepers(self) -> tuple[int, ...]:
        """The ranks whose results count: the first of each team."""
        return tuple(team[0] for team in self.teams)

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each whole copy: all, each, or those of each replica."""
        return (self.ranks,) if self.size == len(self.ranks) else self.teams

    @cached_property
    def _team_of(self) -> Mapping[int, tuple[int, ...]]:
        return {rank: team for team in self.teams for rank in team}

    def team_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same part of the rows as one of them: they compute together."""
        return self._team_of.get(rank, (rank,))

    def copy_with(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have a whole copy together with one of them, and are lost with it."""
        return next((copy for copy in self.copies if rank in copy), (rank,))

    def beside(self) -> dict[int, tuple[int, ...]]:
        """Return, by the first rank of each team, the others that split the model with it; none of whole models."""
        return {team[0]: team[1:] for team in self.teams if len(team) > 1}

    def on(self, ranks: Sequence[int]) -> RankParts:
        """Return the same on these ranks alone: some of its own, and others that have come, which compute together if
        its own do."""
        known = dict(zip(self.ranks, self.shares, strict=True))
        shares = [known.get(rank, -1 if self.size > 1 else -1 - rank) for rank in ranks]
        number = {share: n for n, share in enumerate(dict.fromkeys(shares))}
        return replace(self, ranks=tuple(ranks), shares=tuple(number[share] for share in shares))

    def without(self, gone: Collection[int]) -> RankParts:
        """Return the same without some of its ranks."""
        return self.on([rank for rank in self.ranks if rank not in gone])
