"""Groups of gloo in which every process has shown that it knows the secret of the meeting.

gloo takes whoever connects first for the process that it waits for. So those that have met hold the connections against
a secret before anything else is sent, and connect anew where somebody else has come in between.
"""

from __future__ import annotations

import hmac
import itertools
import os
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .rendezvous import arrived

_dist: Any = dist
_Gloo: Any = dist.ProcessGroupGloo
_TAG = 77  # of the messages that show the secret
_PATIENCE = 3.0  # seconds in which a peer has to show it at the first attempt, twice as many at each further one


def known_gloo(store: Any, me: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group of ``size`` processes, all of which can read ``store``.

    Raises RuntimeError where they do not come in time, or strangers have come in between at every attempt.
    """
    if size == 1:
        return _group(store, me, size, timeout)
    if me == 0:
        store.set("secret", secrets.token_hex(32))
    until = time.monotonic() + timeout.total_seconds()
    for turn in itertools.count():
        group = _connected(store, turn, me, size, timeout)
        if _agreed(store, turn, me, size, group is not None, until):
            return group
        del group
        if time.monotonic() > until:
            break
    raise RuntimeError("strangers have come in between at every attempt to connect the ranks")


def know_groups() -> None:
    """Have ``torch.distributed`` make all gloo groups of this process in that way."""
    from torch.distributed import distributed_c10d

    distributed_c10d.ProcessGroupGloo = Known  # type: ignore[misc, assignment]


class _Made(type):
    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return known_gloo(store, rank, size, timeout)

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, _Gloo)


class Known(metaclass=_Made):
    """Stands where PyTorch has its class of gloo groups: ``Known(store, 0, 4, timedelta(60))`` is one of these."""


def _group(store: Any, me: int, size: int, timeout: timedelta) -> Any:
    options = _Gloo._Options()
    options._timeout, options._devices = timeout, _devices()
    options._threads = 2 * len(options._devices)
    return _Gloo(store, me, size, options)


def _devices() -> list[Any]:
    """Sockets that listen: on the interfaces of GLOO_SOCKET_IFNAME, or on that which the name of this host has."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [_Gloo.create_default_device()]
    return [_Gloo.create_device(interface=name) for name in names.split(",")]


def _connected(store: Any, turn: int, me: int, size: int, timeout: timedelta) -> Any:
    """A group, or None where a peer has not shown the secret."""
    try:
        group = _group(_dist.PrefixStore(f"turn/{turn}", store), me, size, timeout)
    except RuntimeError:
        if turn:  # nobody came, as it was the first time
            return None
        raise
    secret, peers = store.get("secret"), [rank for rank in range(size) if rank != me]
    shown = {peer: torch.zeros(32, dtype=torch.uint8) for peer in peers}
    patience = timedelta(seconds=min(_PATIENCE * 2**turn, timeout.total_seconds()))
    with suppress(RuntimeError):  # late, or hung up
        sent = [group.send([_token(secret, turn, me, peer)], peer, _TAG) for peer in peers]
        heard = [group.recv([shown[peer]], peer, _TAG) for peer in peers]
        for work in (*heard, *sent):
            work.wait(patience)
        if all(hmac.compare_digest(_bytes(shown[p]), _bytes(_token(secret, turn, p, me))) for p in peers):
            return group
    return None


def _agreed(store: Any, turn: int, me: int, size: int, fine: bool, until: float) -> bool:
    """Whether all processes found all others to be who they should be."""
    names = [f"known/{turn}/{rank}" for rank in range(size)]
    store.set(names[me], "yes" if fine else "no")
    if not arrived(store, names, until - time.monotonic()):
        raise RuntimeError("not all ranks have said whether they know each other")
    return all(store.get(name) == b"yes" for name in names)


def _token(secret: bytes, turn: int, source: int, target: int) -> torch.Tensor:
    made = hmac.digest(secret, f"{turn} {source} {target}".encode(), "sha256")
    return torch.frombuffer(bytearray(made), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
