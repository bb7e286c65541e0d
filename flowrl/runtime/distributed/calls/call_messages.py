"""What each rank is told of a call: its rows of every value, and only the fields that are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....batch import Key
from ....errors import FlowError
from ....graph.ops.op import Op
from ....graph.ops.signature import Signature
from ....graph.stand_ins.argument_trees import rebuild
from ....graph.stand_ins.values import is_handle
from ....graph.tracing.call_errors import misread, missing_field, written_twice
from ...values.call import Call
from ...values.remote_batch import RemoteBatch, RemoteValue, bytes_of
from ...values.rows_to_fetch import Fetch, fetch
from ..balance_rows import balanced, longest_first
from ..protocol import Named, RankCall, Serving
from ..rank_client import RankClient
from ..worker_group import WorkerGroup
from .bring_rows import home_of

#: The keys of the rows that each rank has of a call; None for all.
Shares = Mapping[int, tuple[Key, ...] | None]


def rank_calls(
    client: RankClient,
    call: Call,
    group: WorkerGroup | None,
    arguments: Mapping[str, Any],
    main: RemoteBatch | None,
    *,
    rank: int | None = None,
    before: Shares | None = None,
) -> tuple[dict[int, RankCall], Shares]:
    """Return what every rank that takes part is told, and the keys of its rows; ``main`` is the first batch, by whose
    rows work is divided.

    ``rank``: the one that gets all of them, with those that compute with it. ``before``: who had which rows when a call
    that touches the world was sent the last time; it goes on with them. Raises what is wrong with the fields of the
    arguments.
    """
    reads = read_fields(call, group, arguments)
    if group is None:
        shares: Shares = {home_of(client, arguments): None}
    elif rank is not None and main is not None:
        shares = dict.fromkeys(group.parts.team_of(rank), main.keys)
    else:
        spread = call.op.cost == "generate" and main is not None and group.parts.count > 1 and not group.spec.collective
        expected = client.expected.sizes(call, main, arguments.get("n", 1)) if spread and main is not None else None
        shares = shares_of(group, call.op, arguments, main, expected)
        goes_on = call.op.external and not group.spec.collective and None not in shares.values()
        if goes_on and before is not None and main is not None:
            shares = _taken_over(client, before, main)
    return {r: _rank_call(client, call, group, arguments, reads, main, r, keys) for r, keys in shares.items()}, shares


def _taken_over(client: RankClient, before: Shares, main: RemoteBatch) -> Shares:
    """Return who has which rows from here on: each its own, which it may be at, and those of ranks that are gone for
    good and for which it stands in."""
    has = {key: client.stand_in(rank) for rank, keys in before.items() for key in keys or main.keys}
    found: dict[int, list[Key]] = {rank: [] for rank in dict.fromkeys(has.values())}
    for key in main.keys:
        found[has[key]].append(key)
    return {rank: tuple(keys) for rank, keys in found.items()}


def shares_of(
    group: WorkerGroup,
    op: Op,
    arguments: Mapping[str, Any],
    main: RemoteBatch | None,
    expected: Sequence[int] | None = None,
) -> dict[int, tuple[Key, ...] | None]:
    """Return for each rank that takes part in a call the keys of its rows; None for all.

    ``expected``: what rows are expected to take, in tokens. Then each rank has those of the longest prompts first.
    """
    blueprint, parts = group.blueprint, group.parts
    pieces = op.in_pieces(blueprint.arguments, arguments)
    if group.spec.collective:
        kept = op.updates not in (None, "weights") and blueprint.cls.keeps  # the same on all ranks
        if main is None or kept or not (pieces or op.cost in ("forward", "generate", "train")):
            return dict.fromkeys(parts.ranks)
        split = _split(main, parts.count, together=getattr(arguments.get("loss"), "groups", False))
        return {rank: split[share] for rank, share in zip(parts.ranks, parts.shares, strict=True)}
    if main is not None and pieces and parts.count > 1 and not group.stateful:
        split = _split(main, parts.count, together=True, expected=expected)
        some = {rank: split[share] for rank, share in zip(parts.ranks, parts.shares, strict=True) if split[share]}
        return dict(some) or {parts.ranks[0]: None}
    if op.updates and group.is_model:
        return dict.fromkeys(parts.ranks)
    return {parts.ranks[0]: None}


def _share_of(
    group: WorkerGroup, other: RemoteBatch, rank: int, main: RemoteBatch, keys: tuple[Key, ...] | None
) -> tuple[Key, ...] | None:
    """Return a rank's rows of a second batch of a call: those of its prompts, or in a team a part of its own.

    Prompts that the first batch does not have go to the first rank.
    """
    if keys is None or set(other.keys) == set(main.keys):
        return keys
    if not group.spec.collective:
        mine, all_ = {k[0] for k in keys}, {k[0] for k in main.keys}
        first = rank == group.ranks[0]
        return tuple(k for k in other.keys if k[0] in mine or (first and k[0] not in all_))
    return _split(other, group.parts.count, together=False)[group.parts.shares[group.ranks.index(rank)]]


def _split(
    rows: RemoteBatch, count: int, *, together: bool, expected: Sequence[int] | None = None
) -> list[tuple[Key, ...]]:
    """Return the rows of each part, balanced by tokens. Rows of a prompt stay ``together`` where there are enough."""
    groups, sizes = rows.groups(), rows.sizes() if expected is None else expected
    units = groups if together or len(groups) >= 4 * count else None
    parts = balanced(sizes, count, units)
    if expected is not None:
        parts = [longest_first(rows.keys, part, sizes) for part in parts]
    return [tuple(rows.keys[i] for i in part) for part in parts]


def read_fields(call: Call, group: WorkerGroup | None, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that each batch is read for, by parameter; all of one that is not among them.

    Raises FieldError, with the line of the call, where fields lack or would be written twice, and what their marks
    forbid: before a rank begins, as its fellows would wait for one that fails alone.
    """
    op, into = call.op, call.into
    main = arguments.get(op.batch_parameter)
    have = frozenset(main.fields) if isinstance(main, RemoteBatch) else frozenset[str]()
    signature = op.signature(group.blueprint.arguments if group else {}, arguments, have)
    if isinstance(main, RemoteBatch) and op.returns == "batch" and op.inherits:
        twice = [n for n in (into.get(n, n) for n in signature.adds) if n in have]
        if twice:
            raise written_twice(call.title, twice, call.at)
    for parameter, fields in signature.reads.items():
        value = arguments.get(parameter)
        lacking = next((n for n in fields if n not in value), None) if isinstance(value, RemoteBatch) else None
        if isinstance(value, RemoteBatch) and lacking is not None:
            raise missing_field(call.title, lacking, value.fields, call.at, ())
    for error in _find_misread(op, call, group, arguments, signature):
        error.at = error.at or call.at
        raise error
    reads: dict[str, Any] = {p: tuple(f) for p, f in signature.reads.items()}
    named = tuple(a for a in arguments.values() if isinstance(a, str))  # the field of a group's mean
    if op.owner == "batch" and (named or op.name == "filter"):
        reads = {op.batch_parameter: named}
    return reads


def _find_misread(
    op: Op, call: Call, group: WorkerGroup | None, arguments: Mapping[str, Any], signature: Signature
) -> list[FlowError]:
    """Return what the marks of rows forbid."""
    if op.reads is None:
        return []
    reads = {
        param: {name: value.columns[name].marks for name in signature.reads.get(param, ())}
        for param, value in arguments.items()
        if isinstance(value, RemoteBatch)
    }
    return misread(op, call.title, group.name if group is not None else "", arguments, reads)


def _rank_call(
    client: RankClient,
    call: Call,
    group: WorkerGroup | None,
    arguments: Mapping[str, Any],
    reads: Mapping[str, Any],
    main: RemoteBatch | None,
    rank: int,
    keys: tuple[Key, ...] | None,
) -> RankCall:
    """Return what one rank is told; ``keys`` are those of its rows, None for all."""
    policies: dict[str, Serving] = {}

    def as_sent(item: Any, names: Any = None) -> Any:
        if isinstance(item, WorkerGroup):
            if call.op.external:  # it is called there, row by row; other ops look at its weights
                beside = item.parts.beside()
                item.serves_rows |= bool(beside)
                policies[item.name] = Serving(item.name, item.parts.keepers, item.read_version(), call.joins, beside)
            return Named(item.name)
        if not isinstance(item, RemoteValue):
            return Named(item.name) if is_handle(item) else item
        mine = keys if keys is not None and main is not None and item.keys == main.keys else None
        if mine is None and main is not None and group is not None and isinstance(item, RemoteBatch):
            mine = _share_of(group, item, rank, main, keys)
        wanted = fetch(item, mine, names if isinstance(item, RemoteBatch) else None)
        client.traffic.add(drawn=_count_inline(wanted))
        return wanted

    sent = {
        name: as_sent(value, reads.get(name)) if isinstance(value, RemoteValue) else rebuild(value, as_sent)
        for name, value in arguments.items()
    }
    keeps = group is None or (rank == group.ranks[0] if keys is None else rank in group.parts.keepers)
    return RankCall(
        call.title,
        call.op.name if group is not None else call.op,
        group.key if group is not None else None,
        sent,
        call.info,
        into=dict(call.into),
        keep=client.new_id() if keeps else 0,
        weights=(group.version, group.dirty) if group is not None else (0, False),
        journal=call.place if call.op.external else None,
        journal_since=client.journal_since if call.op.external else {},
        epoch=client.epoch,
        frees=client.take_dropped(rank),
        policies=policies,
    )


def _count_inline(wanted: Fetch) -> int:
    """Return the bytes of the driver's own rows that travel with a call."""
    return sum(
        bytes_of(t.batch[n]) for part in wanted.parts for t in part.takes if t.batch is not None for n in t.names
    )
