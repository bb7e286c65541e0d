"""Rows that lie on ranks, as the driver asks for them: brought here, or written into a checkpoint where they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....batch import Batch, Column
from ...storage.checkpoints.snapshot import Captured
from ...values.remote_batch import DRIVER, RemoteValue, bytes_of, remote_values
from ...values.rows_to_fetch import fetch
from ..rank_client import RankClient
from ..recovery import remake_rows


def bring_rows(client: RankClient, value: RemoteValue) -> Batch | Column:
    """Return rows of a value, for a reader of the run; counted as records."""
    _, rows = client.retry(lambda: _ask_home(client, "bring", value, what="rows for a record"))
    columns = [rows] if isinstance(rows, Column) else rows.columns.values()
    client.traffic.add(records=sum(bytes_of(c) for c in columns))
    return rows


def capture_rows(client: RankClient, value: RemoteValue, file: Path) -> tuple[Mapping[str, Any], Captured]:
    """Have a rank gather rows, and begin to write them to a file. Returns what of them is no tensor."""
    what, id, epoch = "rows of a checkpoint", client.new_id(), client.epoch
    rank, meta = client.retry(lambda: _ask_home(client, "capture_rows", value, id, str(file), what=what))
    return meta, client.write_captured(id, [rank], epoch, what)


def home_of(client: RankClient, arguments: Mapping[str, Any]) -> int:
    """Return the rank where a call of a library runs: one that has some of its rows, in turns where the driver has."""
    for value in remote_values(dict(arguments)):
        at = next((s.rank for source in value.sources for s in source.stored if s.rank != DRIVER), None)
        if at is not None:
            return at
    return client.next_rank()


def _ask_home(client: RankClient, method: str, value: RemoteValue, *args: Any, what: str) -> tuple[int, Any]:
    """Have a rank that has some of the rows do something with all of them. Returns which one, and what it says."""
    rank, wanted = home_of(client, {"value": value}), fetch(value)
    with client.order:
        remake_rows(client, [wanted])
        epoch, sent = client.epoch, client.send(method, {rank: (wanted, *args)})
    with client.blaming_restarts(epoch, f"{what} needed ranks that were started again meanwhile."):
        return rank, client.wait(sent, what)[rank]
