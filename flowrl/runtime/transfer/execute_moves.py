"""A planned move of weights, done: every process of the wire calls :func:`execute` with the same moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import RunError
from ...workers.headway import make_headway
from ...workers.weights.weight_boxes import Shard
from .carrier import Carrier, Load, by_name
from .message_order import Message, fingerprint, messages_of
from .plan_moves import Moves
from .staging import Staging
from .wire import Sending, Wire

#: Messages of one process that are on the way at a time. Only a few of them can be staged: see Staging.
WINDOW = 64
BUCKET = 8 << 20


@dataclass(frozen=True)
class Moved:
    """What one process did, in bytes: ``Moved(received=1024, sent=0, local=2048, peak_staging=512)``.

    ``local``: copied inside the process. ``peak_staging``: the most memory that messages took beside the weights.
    """

    received: int = 0
    sent: int = 0
    local: int = 0
    peak_staging: int = 0


@torch.no_grad()
def execute(
    moves: Moves,
    *,
    me: int,
    source: Sequence[Shard] = (),
    target: Sequence[Shard] = (),
    wire: Wire | None = None,
    bucket_bytes: int = BUCKET,
) -> Moved:
    """Write into the shards of ``target`` what the moves bring to this process, and send what others take from it.

    ``me`` is the number of this process in the moves and on the wire; without a wire all its moves are local. Numbers
    travel in the target's dtype. ``source`` and ``target`` share no memory, but for a box that is the same in both.
    What comes to several processes of a node comes to one of them, and from it to the others: last of all.
    When it returns, what this process is to have is there, and the shards of ``source`` may be written again.

    Raises RunError naming source, target and the first weight for a process that is gone, does not come within
    ``wire.timeout`` seconds or has other moves. The wire is then closed, and ``target`` may be written in part.
    """
    size, shares = (wire.size, wire.shares) if wire else (1, None)
    messages = messages_of(moves, me, size=size, most=bucket_bytes, shares=shares)
    staging = wire.staging if wire else Staging(torch.device("cpu"))
    staging.fit(max((m.size for m in messages if not (shares and shares(m.source, m.target))), default=0))
    if wire:
        wire.slots.staging.fit(max((m.size for m in messages if wire.shares(me, m.target)), default=0))
    carrier = Carrier(me, by_name(source), by_name(target), staging)
    if wire is None:
        _copy(moves, me, carrier)
        if messages:
            raise RunError(f"process {me} has {len(messages)} messages to exchange and no wire.", fix="Give wire=.")
    else:
        with _closing(wire):
            greetings = _greet(messages, wire)
            _copy(moves, me, carrier)
            _agree(greetings, wire)
            _exchange([m for m in messages if not m.relayed], carrier, wire)
            relay = Carrier(me, by_name(target), by_name(target), staging)  # what has come is passed on from there
            _exchange([m for m in messages if m.relayed], relay, wire)
    return Moved(
        received=sum(m.size for m in messages if m.target == me),
        sent=sum(m.size for m in messages if m.source == me),
        local=moves.local.get(me, 0),
        peak_staging=staging.bytes + (wire.slots.staging.bytes if wire else 0),
    )


def _copy(moves: Moves, me: int, carrier: Carrier) -> None:
    """What stays in this process."""
    for move in moves.moves:
        if move.local and move.target == me:
            carrier.copy(move.name, move.box)


def _greet(messages: Sequence[Message], wire: Wire) -> list[tuple[Message, int, Sending]]:
    """Tell every target what it will be sent, and begin to hear the same from every source: (first, print, word)."""
    pairs: dict[tuple[int, int], list[Message]] = {}
    for message in messages:
        pairs.setdefault((message.source, message.target), []).append(message)
    found: list[tuple[Message, int, Sending]] = []
    for (source, target), both in pairs.items():
        print_, sends = fingerprint(both), source == wire.me
        word = torch.tensor([print_ if sends else 0], dtype=torch.int64)
        sending = wire.send(word, target, host=True) if sends else wire.receive(word, source, host=True)
        found.append((both[0], print_, sending))
    return found


def _agree(greetings: Sequence[tuple[Message, int, Sending]], wire: Wire) -> None:
    """Everybody is there and has planned the same; messages of other sizes than expected would end the process."""
    for first, _, sending in greetings:  # all of them before any is judged: who leaves would not be heard
        _through(first, sending, wire)
    for first, print_, sending in greetings:
        if int(sending.tensor[0]) != print_:
            raise RunError(
                f"process {first.source} and process {first.target} have planned other moves from the one to the "
                f"other; the first weight of process {wire.me} is {first.pieces[0].name}.",
                fix="Plan in all processes from the same holdings, with the same bucket_bytes.",
            )


def _exchange(messages: Sequence[Message], carrier: Carrier, wire: Wire) -> None:
    """Send and receive in the order that all processes keep, some messages at a time."""
    flying: deque[tuple[Message, Load | None, Sending]] = deque()

    def land() -> None:
        message, load, sending = flying.popleft()
        _through(message, sending, wire)
        make_headway()
        if load is None:
            _read(message, sending.tensor, carrier, wire)
            return
        if message.target == wire.me:
            carrier.unload(load)
        carrier.release(load)

    for message in messages:
        if len(flying) == WINDOW:
            land()
        while (begun := _begin(message, carrier, wire)) is None:
            land()
        flying.append((message, *begun))
    while flying:
        land()


def _begin(message: Message, carrier: Carrier, wire: Wire) -> tuple[Load | None, Sending] | None:
    """Send or receive a message, without a load where it is to be read from its source. None: there is no buffer."""
    sends, shared = message.source == wire.me, wire.shares(message.source, message.target)
    if shared and not sends:
        return None, wire.borrow(message.source)
    if shared:
        load = carrier.pack(message, wire.slots.staging)
        with _sharing(message):
            return load and (load, wire.lend(load.bytes, message.target))
    load = carrier.load(message) if sends else carrier.room(message)
    return load and (load, wire.send(load.bytes, message.target) if sends else wire.receive(load.bytes, message.source))


def _read(message: Message, note: Tensor, carrier: Carrier, wire: Wire) -> None:
    """Read a message where its source has put it together, and say so."""
    with _sharing(message):
        slot = wire.slots.open(message.source, note)
    carrier.unload(Load(message, slot[: message.size], slot))
    _through(message, wire.give_back(message.source), wire)


@contextmanager
def _sharing(message: Message) -> Iterator[None]:
    """Says of which message the memory could not be told or opened."""
    try:
        yield
    except (RunError, RuntimeError, OSError) as error:
        why = error.what.rstrip(".") if isinstance(error, RunError) else str(error).splitlines()[0]
        raise RunError(
            f"{message.pieces[0].name}, and what goes with it, did not get from process {message.source} to process "
            f"{message.target}, which cannot read its memory: {why}.",
            fix=f"See what became of process {message.source}.",
        ) from error


def _through(message: Message, sending: Sending, wire: Wire) -> None:
    """Wait for a message."""
    try:
        sending.wait(wire.timeout)
    except RuntimeError as error:
        late = "timed out" in str(error).lower()
        peer = message.source if message.target == wire.me else message.target
        why = f"not in {wire.timeout:g} s" if late else wire.broken or f"process {peer} is gone, or has given up"
        raise RunError(
            f"{message.pieces[0].name}, and what goes with it, did not get from process {message.source} to process "
            f"{message.target}: {why}.",
            fix=f"See what became of process {peer}" + (", or give the wire a longer timeout." if late else "."),
        ) from error


@contextmanager
def _closing(wire: Wire) -> Iterator[None]:
    """Closes the wire where a move fails, so that the others do not wait for this process."""
    try:
        yield
    except BaseException as error:
        wire.close(f"a move over it failed ({str(error).splitlines()[0] if str(error) else type(error).__name__})")
        raise
