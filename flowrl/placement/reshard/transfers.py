"""Which slice of which weight goes from which device to which, and over what kind of link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..cluster.cluster import Cluster
from ..model.layout import Box, Layout, common, parts, volume
from ..model.weights import Weight
from .overlap import owners


@dataclass(frozen=True)
class Transfer:
    """One slice: ``Transfer(weight, source=3, target=0, box=((0, 128), (0, 4096)))`` goes from device 3 to device 0."""

    weight: Weight
    source: int
    target: int
    box: Box


@dataclass(frozen=True)
class Wants:
    """What each device is to have, and who has it: the source's layout and devices, and boxes by target device.

    ``Wants(src, (0, 1), {0: boxes, 1: boxes})``, the boxes one for each of ``model.stacks``.
    """

    src: Layout
    src_devices: tuple[int, ...]
    targets: dict[int, tuple[Box, ...]]
    cluster: Cluster | None = None

    def transfers(self) -> Iterator[Transfer]:
        """The slices that a target lacks, computed while they are read.

        Each comes from a holder in the same node if there is one, and of those from the one that sent least so far.
        """
        sent: Counter[int] = Counter()
        for number, stack in enumerate(self.src.model.stacks):
            known: dict[Box, list[tuple[list[int], Box]]] = {}
            for device, boxes in self.targets.items():
                wanted = boxes[number]
                if wanted not in known:
                    both = ((holders, common(wanted, box)) for box, holders in self._holders[number].items())
                    known[wanted] = [(holders, box) for holders, box in both if box]
                for holders, box in known[wanted]:
                    if device in holders:
                        continue
                    source = min(self._close(holders, device), key=lambda d: (sent[d], d))
                    sent[source] += volume(box)
                    yield from (Transfer(w, source, device, part) for w, part in parts(stack, box))

    def from_own_node(self, cluster: Cluster) -> int:
        """Bytes that targets lack and a device of their own node has."""
        shard_at = {d: self.src.shard_of(rank) for rank, d in enumerate(self.src_devices)}
        near: dict[int, set[int]] = {}
        for device, shard in shard_at.items():
            near.setdefault(cluster.node(device), set()).add(shard)
        known: dict[tuple[tuple[Box, ...], int], int] = {}
        found = 0
        for device, wanted in self.targets.items():
            node = cluster.node(device)
            if (wanted, node) not in known:
                known[wanted, node] = self._held(wanted, near.get(node, set()))
            found += known[wanted, node] - (self._held(wanted, {shard_at[device]}) if device in shard_at else 0)
        return found

    def _held(self, wanted: Sequence[Box], shards: set[int]) -> int:
        """Bytes of what is wanted that are in these shards of the source, each byte once."""
        found = 0
        for number, box in enumerate(wanted):
            found += sum(volume(common(box, held)) for held in {self.src.shards[s][number] for s in shards})
        return found * self.src.model.dtype_bytes

    @cached_property
    def _holders(self) -> list[dict[Box, list[int]]]:
        """By stack: the parts of the source, which have nothing in common, and the devices that hold each."""
        by_shard: dict[int, list[int]] = {}
        for rank, device in enumerate(self.src_devices):
            by_shard.setdefault(self.src.shard_of(rank), []).append(device)
        return [
            {box: [d for s in shards for d in by_shard[s]] for box, shards in owners(self.src, n).items()}
            for n in range(len(self.src.model.stacks))
        ]

    def _close(self, holders: Sequence[int], device: int) -> Sequence[int]:
        """The holders in the same node, or all of them."""
        if self.cluster is None:
            return holders
        node = self.cluster.node(device)
        return [d for d in holders if self.cluster.node(d) == node] or holders
