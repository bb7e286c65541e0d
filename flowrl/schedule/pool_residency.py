"""What is in the memory of each pool, and what has to leave for what is needed next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .events import Memory

Moves = tuple[tuple[str, str], ...]  # (pool, resident)


class Residency:
    """Residents by pool, the one used longest ago first.

    A resident stays until another needs its room; the scheduler never moves what fits. A worker that never leaves may
    need the room too, for what it works with: its turn is asked for with a name that has no size.

    >>> held = Residency({"gpu": Memory(80.0, {"train": 60.0, "generate": 30.0, "ref": 15.0})})
    >>> held.need(("gpu",), ("train",)), held.need(("gpu",), ("ref",))
    (((), (('gpu', 'train'),)), ((), (('gpu', 'ref'),)))
    >>> held.need(("gpu",), ("generate",))
    ((('gpu', 'train'),), (('gpu', 'generate'),))
    """

    def __init__(self, memory: Mapping[str, Memory]) -> None:
        self._memory = memory
        self._held: dict[str, list[str]] = {pool: [] for pool in memory}

    def need(self, pools: Sequence[str], residents: Sequence[str]) -> tuple[Moves, Moves]:
        """Bring residents in. Returns what leaves and what comes, in this order."""
        leave: list[tuple[str, str]] = []
        come: list[tuple[str, str]] = []
        for pool in pools:
            if pool not in self._memory:
                continue
            memory, held = self._memory[pool], self._held[pool]
            wanted = [r for r in residents if r in memory.sizes]
            room = memory.capacity - sum(memory.sizes[r] for r in {*held, *wanted})
            for old in [r for r in held if r not in wanted]:
                if room >= 0:
                    break
                held.remove(old)
                leave.append((pool, old))
                room += memory.sizes[old]
            for resident in wanted:
                if resident in held:
                    held.remove(resident)
                else:
                    come.append((pool, resident))
                held.append(resident)
        return tuple(leave), tuple(come)

    def bytes(self, pool: str) -> float:
        """Bytes per device that the residents of a pool take now."""
        return sum(self._memory[pool].sizes[r] for r in self._held[pool]) if pool in self._memory else 0.0
