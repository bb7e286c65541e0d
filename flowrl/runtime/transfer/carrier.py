"""The shards of one process, read and written box by box, and the memory in which its messages are put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import RunError
from ...placement.reshard.boxes import Box, shared, shown
from ...workers.weights.weight_boxes import Shard
from .message_order import Message
from .staging import Staging

Shards = Mapping[str, Sequence[Shard]]


@dataclass(frozen=True)
class Load:
    """The bytes of one message. ``buffer``: what they are staged in; None where they are the weight's own memory.

    ``staging``: where the buffer is to be given back.
    """

    message: Message
    bytes: Tensor
    buffer: Tensor | None = None
    staging: Staging | None = None

    def parts(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Each piece with a view on its numbers."""
        for piece in self.message.pieces:
            numbers = self.bytes[piece.first : piece.last].view(getattr(torch, piece.dtype))
            yield piece.name, piece.box, numbers.view([b - a for a, b in piece.box])


class Carrier:
    """Both sides of one process: ``Carrier(me, source, target, staging)``, the shards by weight."""

    def __init__(self, me: int, source: Shards, target: Shards, staging: Staging) -> None:
        self._me, self._source, self._target, self._staging = me, source, target, staging

    def copy(self, name: str, box: Box) -> None:
        """From the source of this process to its target."""
        self._write(name, box, self._read(name, box))

    def load(self, message: Message) -> Load | None:
        """The bytes of a message to be sent; None while there is no buffer for them."""
        if len(message.pieces) == 1:
            piece = message.pieces[0]
            run = self._run(self._read(piece.name, piece.box), piece.dtype)
            if run is not None:
                return Load(message, run)
        return self.pack(message, self._staging)

    def pack(self, message: Message, staging: Staging) -> Load | None:
        """Put a message together in a buffer of ``staging``; None while there is none."""
        load = _stage(message, staging)
        for name, box, numbers in load.parts() if load else ():
            numbers.copy_(self._read(name, box))
        return load

    def room(self, message: Message) -> Load | None:
        """Where the bytes of a message are to be received; None while there is no buffer for them."""
        if len(message.pieces) == 1:
            piece = message.pieces[0]
            into = [s for s in self._target.get(piece.name, ()) if shared(piece.box, s.box) is not None]
            if len(into) == 1 and shared(piece.box, into[0].box) == piece.box:
                run = self._run(into[0].view(piece.box).detach(), piece.dtype)
                if run is not None:
                    return Load(message, run)
        return _stage(message, self._staging)

    def unload(self, load: Load) -> None:
        """Write what was received where it belongs."""
        if load.buffer is not None:
            for name, box, numbers in load.parts():
                self._write(name, box, numbers)

    def release(self, load: Load) -> None:
        """Take back the buffer of a message that is through."""
        if load.buffer is not None and load.staging is not None:
            load.staging.give(load.buffer)

    def _read(self, name: str, box: Box) -> Tensor:
        for shard in self._source.get(name, ()):
            if shared(box, shard.box) == box:
                return shard.view(box).detach()
        raise RunError(
            f"process {self._me} is to take {name}[{shown(box)}] from shards that do not have it.",
            have=[f"[{shown(s.box)}]" for s in self._source.get(name, ())],
            fix="Plan again: these are not the shards that were planned with.",
        )

    def _write(self, name: str, box: Box, numbers: Tensor) -> None:
        """Into every shard of the target that has some of the box."""
        whole = Shard(name, (), tuple(a for a, _ in box), numbers)
        for shard in self._target.get(name, ()):
            both = shared(box, shard.box)
            if both is not None:
                shard.view(both).detach().copy_(whole.view(both))

    def _run(self, view: Tensor, dtype: str) -> Tensor | None:
        """The bytes of a weight as they are, if they can be sent or received so."""
        if view.is_contiguous() and view.dtype == getattr(torch, dtype) and view.device == self._staging.device:
            return view.as_strided((view.numel(),), (1,)).view(torch.uint8)  # reshape may copy where a dim is 1
        return None


def _stage(message: Message, staging: Staging) -> Load | None:
    buffer = staging.take()
    return None if buffer is None else Load(message, buffer[: message.size], buffer, staging)


def by_name(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    """The shards of one process, those of one weight together."""
    found: dict[str, list[Shard]] = {}
    for shard in shards:
        found.setdefault(shard.name, []).append(shard)
    return found
