"""How old the weights were that prompt groups were sampled with as they are trained on, of a run on a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .events import Call, Take


class TrainedLags:
    """Is told of calls as the program makes them. ``versions``: of each generate, those of its chunks as they began."""

    def __init__(self, versions: Mapping[int, Sequence[int]]) -> None:
        self._versions = versions
        self._calls: dict[int, Call] = {}
        self._sources: dict[int, frozenset[int]] = {}  # the generates whose rows came into a call
        self._groups: dict[int, Mapping[int, int]] = {}  # where the rows of a generate came from, where exchanged
        self._trained: list[tuple[str, int, frozenset[int]]] = []  # worker, its version, the generates of the rows

    def issue(self, call: Call, version: int) -> None:
        """The program makes a call; ``version`` is that of the worker that it updates, if it does."""
        self._calls[call.id] = call
        sources = frozenset[int]().union(*(self._sources.get(i, frozenset()) for i in call.inputs))
        mine = sources | {call.id} if call.serves else sources
        self._sources[call.id] = mine if call.rows else frozenset()
        if call.updates is not None:
            self._trained.append((call.updates, version, sources))

    def take(self, command: Take) -> None:
        """A generate is given groups, also those of others."""
        self._groups[command.id] = Counter(generate for generate, _ in command.groups)

    def count(self) -> Mapping[int, int]:
        """Return how many prompt groups were trained on so many publishes after they were sampled."""
        lags: Counter[int] = Counter()
        for worker, version, sources in self._trained:
            for id in sources:
                if worker not in self._calls[id].serves or not self._calls[id].relaxed:
                    continue
                for generate, groups in self._groups.get(id, {id: max(self._calls[id].groups, 1)}).items():
                    chunks = self._versions.get(generate, [])
                    for number, seen in enumerate(chunks):
                        first, behind = (-(-groups * n // len(chunks)) for n in (number, number + 1))
                        if behind > first:  # the groups of this chunk, as a run cuts them
                            lags[version - seen] += behind - first
        return dict(sorted(lags.items()))
