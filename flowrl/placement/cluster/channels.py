"""How long messages and collectives take on a way between devices."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Channel:
    """A way between devices: ``Channel(bandwidth=50e9, latency=5e-6)``, bytes per second in one direction, seconds.

    A group that crosses nodes has ``near`` members in each of them; ``near_latency`` is that of a hop inside a node,
    ``share`` the bytes per second that one member alone can send to other nodes, where several send through
    ``bandwidth`` together.

    Messages of many bytes go round a ring (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002): each rank sends
    its part on to the next, ``ranks - 1`` times. Sums of few bytes go up and down a tree (Sanders et al. 2009,
    doi:10.1016/j.parco.2009.09.001), which has fewer hops between nodes; the faster of the two is taken.
    """

    bandwidth: float
    latency: float
    near: int = 1
    near_latency: float = 0.0
    share: float = 0.0

    def send(self, size: float) -> float:
        """Return seconds of one message; none for no bytes."""
        return self.latency + size / self.bandwidth if size > 0 else 0.0

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds until every rank has ``size`` bytes, of which it had one part. A reduce-scatter takes as long."""
        if size <= 0 or ranks < 2:
            return 0.0
        nodes = self._nodes(ranks)
        hops = (nodes - 1) * self.latency + (ranks - nodes) * self.near_latency
        return hops + (ranks - 1) * size / ranks / self.bandwidth

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return seconds until every rank has the sum of ``size`` bytes, by a ring or by a tree."""
        if size <= 0 or ranks < 2:
            return 0.0
        return min(2 * self.all_gather(size, ranks), self.tree(size, ranks))

    def tree(self, size: float, ranks: int) -> float:
        """Return seconds of a sum along two trees at once, each of half the bytes: up, then down.

        Members of a node are a chain; between n nodes there are log2(n) hops, rounded up.
        """
        nodes = self._nodes(ranks)
        hops = (nodes - 1).bit_length() * self.latency + (ceil(ranks / nodes) - 1) * self.near_latency
        return 2 * (hops + size / self.bandwidth)

    def all_to_all(self, size: float, ranks: int) -> float:
        """Return seconds until every rank has sent one part of its ``size`` bytes to each other rank.

        Each member sends to other nodes through its own share of the network.
        """
        if size <= 0 or ranks < 2:
            return 0.0
        nodes, alone = self._nodes(ranks), self.share or self.bandwidth
        hops = (nodes - 1) * self.latency + (ranks - nodes) * self.near_latency
        away = ranks - ceil(ranks / nodes)
        inside = (ranks - 1 - away) * size / ranks / self.bandwidth
        return hops + away * size / ranks / alone + inside

    def _nodes(self, ranks: int) -> int:
        """In how many nodes a group has members; each is one of its own where nothing is said."""
        return ceil(ranks / max(1, self.near))
