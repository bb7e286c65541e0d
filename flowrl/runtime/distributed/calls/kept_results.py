"""Where the rows lie that a call on ranks has made, and what of it is plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....batch import Batch, Column, Key
from ....graph.stand_ins.argument_trees import find_in
from ...values.call import Call
from ...values.remote_batch import RemoteBatch, RemoteColumn, Source, Stored, bytes_of, remote_values
from ...values.row_digests import RowDigests, keys_to_text
from ...values.rows_to_fetch import Fetch
from ..protocol import RankCall, Reply
from ..rank_client import RankClient


def result_of(
    client: RankClient,
    call: Call,
    rank_calls: Mapping[int, RankCall],
    replies: Mapping[int, Reply],
    arguments: Mapping[str, Any],
    main: RemoteBatch | None,
    moved: Mapping[int, int],
) -> Any:
    """Return what a call gives: a value of the first rank, or keys with the places of the columns.

    ``moved``: the rank that has done the part of another one.
    """
    first = next(iter(replies.values()))
    kept = kept_of(rank_calls, replies)
    if not kept:
        return first.value
    stored = [_to_stored(client, moved.get(r, r), rank_calls[r].keep, reply) for r, reply in kept.items()]
    if first.column:
        values = [v for v in remote_values(dict(arguments)) if len(v.keys) == sum(len(s.keys) for s in stored)]
        listed = tuple(k for s in stored for k in s.keys)
        split = len(stored) > 1 and values  # its rows are those of its batch
        keys = values[0].keys if split else listed
        return RemoteColumn(keys, Source(tuple(stored), ("value",) * len(stored)))
    columns = {n: Source(tuple(stored), (n,) * len(stored)) for n in first.kinds}
    if main is None or call.op.rows == "regroup":
        return RemoteBatch(_in_order(stored, main), columns)
    if call.op.rows == "apart":
        return RemoteBatch(main.keys, columns)
    keys = main.keys if call.op.rows == "same" else _children(main.keys, stored)
    return main.with_sources(columns, keys)


def fill_keys(rank_calls: Mapping[int, RankCall], replies: Mapping[int, Reply]) -> None:
    """Give replies the keys that did not travel with them: those of the first batch of their call."""
    for rank, reply in replies.items():
        if reply.alike:
            reply.keys = next(find_in(dict(rank_calls[rank].arguments), Fetch)).keys


def wrong_rows(asked: Sequence[Key], found: Sequence[Key], *, expand: bool) -> str:
    """Return what is wrong with the rows of an answer; empty where each that was asked for is there once.

    ``expand``: each is there as the rows that were made of it, of all as many.

    >>> wrong_rows([(3,), (4,)], [(3, 0), (3, 1), (4, 0)], expand=True)
    'there are 1 of row 4, and 2 of others'
    """
    if not expand and tuple(asked) == tuple(found):
        return ""
    if len(set(found)) != len(found):
        twice = next(key for i, key in enumerate(found) if key in found[:i])
        return f"row {keys_to_text([twice])} is there twice"
    counts = dict.fromkeys(asked, 0)
    for key in found:
        parent = key[:-1] if expand else key
        if parent not in counts:
            return f"row {keys_to_text([key])} was not asked for"
        counts[parent] += 1
    most = max(counts.values(), default=0)
    fewest = min(counts, key=counts.__getitem__, default=())
    if not counts or counts[fewest] == most:
        return ""
    if not counts[fewest]:
        return f"row {keys_to_text([fewest])} is not there"
    return f"there are {counts[fewest]} of row {keys_to_text([fewest])}, and {most} of others"


def kept_of(rank_calls: Mapping[int, RankCall], replies: Mapping[int, Reply]) -> dict[int, Reply]:
    """Return the replies of ranks that have kept rows."""
    return {rank: r for rank, r in replies.items() if r.keys is not None and rank_calls[rank].keep}


def payload_bytes(value: Any) -> int:
    """Return the bytes of tensors in what a rank sent to the driver: there should be none."""
    if isinstance(value, Column):
        return bytes_of(value)
    if isinstance(value, Batch):
        return sum(bytes_of(c) for c in value.columns.values())
    if isinstance(value, dict):
        return sum(payload_bytes(v) for v in value.values())
    return value.numel() * value.element_size() if hasattr(value, "numel") else 0


def _to_stored(client: RankClient, rank: int, id: int, reply: Reply) -> Stored:
    assert reply.keys is not None, "only rows are kept"
    drop = client.drop if reply.kinds else None
    digests = RowDigests(reply.keys, *reply.digests)
    sizes, more = reply.sizes, {"bytes": reply.bytes, "oldest": reply.oldest, "digests": digests}
    return Stored(rank, id, reply.keys, reply.kinds, sizes, drop, **more)


def _children(parents: Sequence[Key], stored: Sequence[Stored]) -> tuple[Key, ...]:
    """The keys of rows that were made from others, or kept of them: as one rank has ordered them, else as those."""
    if len(stored) == 1:
        return stored[0].keys
    place = {key: i for i, key in enumerate(parents)}
    numbered: list[tuple[int, int, Key]] = []
    for s in stored:
        for i, key in enumerate(s.keys):
            parent = key
            while parent not in place:
                parent = parent[:-1]
            numbered.append((place[parent], i, key))
    return tuple(key for _, _, key in sorted(numbered, key=lambda n: n[:2]))


def _in_order(stored: Sequence[Stored], main: RemoteBatch | None) -> tuple[Key, ...]:
    """Keys of rows made anew: as they came, prompts in the order that they had."""
    keys = [k for s in stored for k in s.keys]
    if main is None or len(stored) == 1:
        return tuple(keys)
    place = {key[0]: i for i, key in reversed(list(enumerate(main.keys)))}
    return tuple(sorted(keys, key=lambda k: place.get(k[0], len(place))))
