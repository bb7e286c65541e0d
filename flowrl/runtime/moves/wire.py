"""Messages between a fixed set of processes, apart from the process groups in which they train."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RunError
from .slots import Slots, at_meeting
from .staging import Staging

_torch: Any = dist  # it has the stores without exporting them
#: The tag of words that say that a slot was read; everything else has tag 0.
_READ = 1
#: Seconds in which processes that have met connect to each other.
_HELLO = 60.0


class Wire:
    """Point-to-point messages: ``Wire(me=0, size=4, host="10.0.0.1", port=29600, timeout=60)`` in each process.

    Process 0 keeps the meeting place at ``host``, ``port``. All come within ``timeout`` seconds, and afterwards no
    message takes longer than that. Raises RunError naming who did not come, or once ``wanted`` says no, which is asked
    every second.

    Processes that share a CUDA device, or without CUDA a host, read each other's messages where they were put together
    (:meth:`lend`), where the system allows it and not without ``shared``. Everything else on CUDA goes through NCCL if
    every process has a device of its own, and all that is left through host memory and gloo.

    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network where there are several.
    """

    def __init__(
        self,
        *,
        me: int,
        size: int,
        port: int,
        host: str = "127.0.0.1",
        timeout: float = 300.0,
        device: str = "cpu",
        shared: bool = True,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self.me, self.size, self.timeout, self.broken, self._wanted = me, size, timeout, "", wanted
        self._under_way: WeakSet[Sending] = WeakSet()
        limit, place = timedelta(seconds=timeout), _device(device)
        with _reached(f"process {me} did not reach process 0 at {host}:{port}", timeout):
            self.store = self._meeting_place(host, port)
        #: Where each process is, the same for two that share a device.
        self.places = self._meet("place", _place(place))
        self.slots, self._reads = self._open_slots(place, shared)
        soon = timedelta(seconds=min(timeout, _HELLO))  # all of them are there
        with _reached(f"process {me} did not reach the other {size - 1}", min(timeout, _HELLO)):
            self._gloo: Any = dist.ProcessGroupGloo(_torch.PrefixStore("gloo", self.store), me, size, soon)
        direct = size > 1 and len(set(self.places)) == size and all(p.startswith("cuda ") for p in self.places)
        self._nccl = self._open_nccl(limit) if direct else None
        self.staging = Staging(place if direct else torch.device("cpu"), pinned=not direct and place.type == "cuda")

    def send(self, tensor: Tensor, to: int, *, host: bool = False) -> Sending:
        """Begin to send a contiguous tensor, on the device of ``staging`` or, with ``host``, in host memory.

        What one process sends to another arrives in the order in which it was sent.
        """
        return self._begin("send", tensor, to, host)

    def receive(self, tensor: Tensor, source: int, *, host: bool = False) -> Sending:
        """Begin to receive into a contiguous tensor of as many bytes as are sent."""
        return self._begin("recv", tensor, source, host)

    def shares(self, source: int, target: int) -> bool:
        """Whether a target reads the messages of a source out of its slots; both ends know it."""
        return source in self._reads[target]

    def lend(self, slot: Tensor, to: int) -> Sending:
        """Have a process read a slot, the begin of a buffer of ``slots.staging``. It is through when that was read."""
        self.slots.settle()
        read = self._begin("recv", torch.zeros(1, dtype=torch.int64), to, host=True, tag=_READ)
        read.before = self.send(torch.tensor([self.slots.tell(slot, to)]), to, host=True)
        return read

    def borrow(self, source: int) -> Sending:
        """Begin to hear which slot of a process to read: its number, for ``slots.open``."""
        return self.receive(torch.zeros(1, dtype=torch.int64), source, host=True)

    def give_back(self, number: Tensor, to: int) -> Sending:
        """Tell a process that its slot was read and may be written again."""
        self.slots.settle()
        return self._begin("send", number, to, host=True, tag=_READ)

    def close(self, why: str = "it was closed") -> None:
        """End it. What is on the way is given up, here and at the other ends."""
        self.broken = self.broken or why
        for sending in list(self._under_way):
            sending.give_up()
        if self._nccl is not None:
            with suppress(RuntimeError):
                self._nccl.abort()
        self._gloo = self._nccl = None  # gloo hangs up when nobody knows the group and its messages any more
        self.staging.drop()
        self.slots.drop()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, verb: str, tensor: Tensor, peer: int, host: bool, tag: int = 0) -> Sending:
        if self.broken:
            raise RunError(f"this wire of process {self.me} is of no more use: {self.broken}.", fix="Open another one.")
        group: Any = self._gloo if host or self._nccl is None else self._nccl
        try:
            work: Any = getattr(group, verb)([tensor], peer, tag)
        except RuntimeError as error:  # the other end is gone already: said by who waits for this message
            work = error
        sending = Sending(work, tensor, polled=group is self._nccl)
        self._under_way.add(sending)
        return sending

    def _meet(self, what: str, said: str) -> list[str]:
        """Say something to all, and hear the same of the others."""
        names = [f"{what}/{rank}" for rank in range(self.size)]
        with at_meeting():
            self.store.set(names[self.me], said)
            for seconds in self._tries():
                with suppress(dist.DistStoreError):  # it took too long
                    self.store.wait(names, timedelta(seconds=seconds))
                    break
            missing = [str(rank) for rank, name in enumerate(names) if not self.store.check([name])]
        if missing:
            raise RunError(
                f"of {self.size} processes that are to move weights, {', '.join(missing)} did not come in "
                f"{self.timeout:g} s.",
                fix="See what became of them, or give a longer timeout.",
            )
        with at_meeting():
            return [self.store.get(name).decode() for name in names]

    def _meeting_place(self, host: str, port: int) -> Any:
        """The store of process 0, as soon as it is there."""
        how: dict[str, Any] = {"is_master": self.me == 0, "wait_for_workers": False}
        failed: RuntimeError | None = None
        for seconds in self._tries():
            try:
                store = _torch.TCPStore(host, port, timeout=timedelta(seconds=seconds), **how)
            except RuntimeError as error:
                failed = error
                if self.me == 0:  # it waits for nobody
                    break
            else:
                store.set_timeout(timedelta(seconds=self.timeout))
                return store
        raise failed or RuntimeError("no time")

    def _tries(self) -> Iterator[float]:
        """Seconds to try something for, again and again until the time is up. Raises RunError if nobody wants it."""
        until = time.monotonic() + self.timeout
        while (left := until - time.monotonic()) > 0:
            if not self._wanted():
                raise RunError(f"process {self.me} was told that the others will not come.")
            yield min(1.0, left)

    def _open_slots(self, device: torch.device, shared: bool) -> tuple[Slots, list[set[int]]]:
        """The slots, and for each process whose it can read."""
        slots = Slots(self.me, self.store, device)
        if len(set(self.places)) == self.size:
            return slots, [set() for _ in self.places]
        beside = [r for r, place in enumerate(self.places) if r != self.me and place == self.places[self.me] and shared]
        lent = slots.offer(beside) if beside else None
        lends = self._meet("lends", "no" if lent is None else "yes")
        reads = [source for source in beside if lends[source] == "yes" and slots.reads(source)]
        return slots, [set(json.loads(one)) for one in self._meet("reads", json.dumps(reads))]

    def _open_nccl(self, limit: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(_torch.PrefixStore("nccl", self.store), self.me, self.size, options)


class Sending:
    """A message on the way. It keeps the tensor alive until it is through."""

    def __init__(self, work: Any, tensor: Tensor, *, polled: bool) -> None:
        self._work, self.tensor, self._polled = work, tensor, polled
        self.before: Sending | None = None  # one that is through earlier, and has to be kept until then

    def wait(self, seconds: float) -> None:
        """Until it is through. Raises RuntimeError if that takes longer, or the other end is gone."""
        if isinstance(self._work, RuntimeError):
            raise self._work
        if self._polled:  # NCCL's own wait is one of the stream alone, and has no end
            until = time.monotonic() + seconds
            while not self._work.is_completed():
                if time.monotonic() > until:
                    raise RuntimeError(f"Timed out after {seconds:g} s")
                time.sleep(0.0002)
        self._work.wait(timedelta(seconds=seconds))

    def give_up(self) -> None:
        """Forget it, whether it is through or not."""
        self._work = RuntimeError("given up")


@contextmanager
def _reached(otherwise: str, timeout: float) -> Iterator[None]:
    """Turns what torch raises inside into a RunError."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            f"{otherwise} in {timeout:g} s.",
            fix="See whether all processes run, and whether a firewall or a wrong network interface is between them.",
        ) from error


def _device(name: str) -> torch.device:
    """With its number, where it has one."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _place(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda {socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    return f"cpu {socket.gethostname()}"
