"""Rows cut into chunks by prompt, for calls that are run chunk by chunk, and put together again."""

from __future__ import annotations

import threading
from typing import Any

from ...batch import Batch, Column
from ...column import concat
from .call import Call, Part, maker
from .remote_batch import RemoteBatch, RemoteColumn, join_sources

NOTHING = object()  # the part of a chunk that no prompt fell into


class Cutter:
    """Which chunk each prompt belongs to, the same one for everything in a step: prompts in order, evenly. Any thread
    may cut.

    >>> cutter = Cutter(2)
    >>> cutter.assign(0, [7, 8, 9]); cutter.of(0, 9)
    1
    """

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self._piece: dict[int, dict[int, int]] = {}  # step, uid
        self._lock = threading.Lock()

    def assign(self, step: int, uids: list[int]) -> None:
        """Give prompts that are new to a step their chunks."""
        with self._lock:
            known = self._piece.setdefault(step, {})
            fresh = [uid for uid in uids if uid not in known]
            for place, uid in enumerate(fresh):
                known[uid] = place * self.chunks // len(fresh)

    def of(self, step: int, uid: int) -> int:
        """Return the chunk of a prompt."""
        return self._piece[step][uid]

    def forget(self, before: int) -> None:
        """Let go of steps that are over."""
        with self._lock:
            for step in [s for s in self._piece if s < before]:
                del self._piece[step]

    def cut(self, step: int, batch: Batch | RemoteBatch) -> list[Any]:
        """Return a batch in chunks; those without a row are NOTHING, unless the batch has none at all."""
        groups = batch.groups()
        if not groups:
            return [batch, *[NOTHING] * (self.chunks - 1)]
        self.assign(step, [batch.keys[rows[0]][0] for rows in groups])
        rows: list[list[int]] = [[] for _ in range(self.chunks)]
        for group in groups:
            rows[self.of(step, batch.keys[group[0]][0])] += group
        return [batch.take(sorted(some)) if some else NOTHING for some in rows]


def can_cut(ref: Any) -> bool:
    """Whether a value comes in chunks, or is a batch that can be cut into some."""
    call = maker(ref)
    if call.parts is not None:
        return True
    if call.done:
        return isinstance(call.result, (Batch, RemoteBatch))
    return call.op.returns == "batch"


def chunk_of(ref: Any, chunk: int, cutter: Cutter, step: int) -> Any:
    """Return one chunk of a value."""
    if isinstance(ref, Part):
        whole = chunk_of(ref.of, chunk, cutter, step)
        return whole if whole is NOTHING else whole[ref.name]
    call: Call = ref
    if call.parts is None:
        if not isinstance(call.result, (Batch, RemoteBatch)):
            return call.result
        call.parts = cutter.cut(step, call.result)
    return call.parts[chunk]


def join_chunks(parts: list[Any]) -> Any:
    """Return what the chunks make: a batch, or a column."""
    made = [p for p in parts if p is not NOTHING]
    if len(made) == 1:
        return made[0]
    if all(isinstance(p, Batch) for p in made):
        return Batch.concat(*made)
    if all(isinstance(p, RemoteBatch) for p in made):
        return RemoteBatch.concat(made)
    if all(isinstance(p, RemoteColumn) for p in made):
        return RemoteColumn(tuple(k for p in made for k in p.keys), join_sources([p.source for p in made]))
    assert all(isinstance(p, Column) for p in made), "calls that are run in chunks give batches or fields"
    return concat("a field", made, {})
