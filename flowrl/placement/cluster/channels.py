"""How long messages and collectives take on a way between devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Channel:
    """A way between devices: ``Channel(bandwidth=50e9, latency=5e-6)``, bytes per second in one direction, seconds.

    Collectives are rings (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002): each rank sends its part on to
    the next, ``ranks - 1`` times.
    """

    bandwidth: float
    latency: float

    def send(self, size: float) -> float:
        """Return seconds of one message; none for no bytes."""
        return self.latency + size / self.bandwidth if size > 0 else 0.0

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds until every rank has ``size`` bytes, of which it had one part. A reduce-scatter takes as long."""
        return (ranks - 1) * self.send(size / ranks)

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return seconds until every rank has the sum of ``size`` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(size, ranks)

    def all_to_all(self, size: float, ranks: int) -> float:
        """Return seconds until every rank has sent one part of its ``size`` bytes to each other rank."""
        return (ranks - 1) * self.send(size / ranks)
