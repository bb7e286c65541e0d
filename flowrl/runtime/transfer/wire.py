"""Messages between a fixed set of processes, apart from the process groups in which they train."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import RunError
from .rendezvous import arrived, meet
from .slots import NOTE, Slots
from .staging import Staging
from .verified_groups import known_gloo

T = TypeVar("T")

_torch: Any = dist  # it has the stores without exporting them
#: The tags of words that say that a slot was read, and of one that is never sent; everything else has tag 0.
_READ, _NEVER = 1, 2
#: Seconds in which processes that have met connect to each other.
_HELLO = 60.0
_LOOK = 0.2  # seconds after which who waits looks whether it is still to


class Wire:
    """Point-to-point messages: ``Wire(me=0, size=4, meeting=new_meeting(folder), timeout=60)`` in each process.

    All come to the file of the ``meeting`` within ``timeout`` seconds, and afterwards no message takes longer than
    that. Raises RunError naming who did not come, or once ``wanted`` says no, which is asked all the time.
    :meth:`close` from any thread ends whatever waits.

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
        meeting: str,
        timeout: float = 300.0,
        device: str = "cpu",
        shared: bool = True,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self.me, self.size, self.timeout, self.broken, self._wanted = me, size, timeout, "", wanted
        self._under_way: WeakSet[Sending] = WeakSet()
        self._noting = threading.Lock()  # what is under way: it is gone through by whoever closes the wire
        self.store: Any = None
        self._gloo: Any = None
        self._nccl: Any = None
        self._where = _device(device)
        self.slots, self.staging = Slots(self._where), Staging(torch.device("cpu"))
        try:
            with _reached(f"process {me} did not reach the meeting at {meeting}", timeout):
                self.store = meet(meeting, size)
            #: Where each process is, the same for two that share a device.
            self.places = self._meet("place", _place(self._where))
            self._reads = self._who_reads(shared)
            self._open_groups(min(timeout, _HELLO))  # all of them are there
        except BaseException:
            self.close("it was not opened to the end")
            raise

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
        read = self._begin("recv", torch.zeros(1, dtype=torch.uint8), to, host=True, tag=_READ)
        read.before = self.send(self.slots.tell(slot, to), to, host=True)
        return read

    def borrow(self, source: int) -> Sending:
        """Begin to hear which slot of a process to read: a note for ``slots.open``."""
        return self.receive(torch.zeros(NOTE, dtype=torch.uint8), source, host=True)

    def give_back(self, to: int) -> Sending:
        """Tell a process that its slot was read and may be written again."""
        self.slots.settle()
        return self._begin("send", torch.ones(1, dtype=torch.uint8), to, host=True, tag=_READ)

    def close(self, why: str = "it was closed") -> None:
        """End it, from any thread. What is on the way is given up, here and at the other ends, and so is every wait."""
        self.broken = self.broken or why
        gloo, nccl, self._gloo, self._nccl, self.store = self._gloo, self._nccl, None, None, None
        with self._noting:
            under_way = list(self._under_way)
        for sending in under_way:
            sending.give_up()
        if gloo is not None:
            _hang_up(gloo, self.me, self.size)
        if nccl is not None:
            with suppress(RuntimeError):
                nccl.abort()
        self.staging.drop()
        self.slots.drop()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, verb: str, tensor: Tensor, peer: int, host: bool, tag: int = 0) -> Sending:
        if self.broken:
            raise RunError(f"this wire of process {self.me} is of no more use: {self.broken}.", fix="Open another one.")
        gloo, nccl = self._gloo, self._nccl
        direct = nccl is not None and not host
        try:
            work: Any = getattr(nccl if direct else gloo, verb)([tensor], peer, tag)
        except RuntimeError as error:  # the other end is gone already: said by who waits for this message
            work = error.with_traceback(None)
        except AttributeError:  # closed by another thread since we looked
            work = RuntimeError(self.broken)
        sending = Sending(work, tensor, polled=direct)
        with self._noting:
            self._under_way.add(sending)
        if self.broken:
            sending.give_up()
        return sending

    # -- how they come together -------------------------------------------------------------------------------------

    def _meet(self, what: str, said: str) -> list[str]:
        """Say something to all, and hear the same of the others."""
        names = [f"{what}/{rank}" for rank in range(self.size)]
        with _at_meeting():
            self.store.set(names[self.me], said)
            for seconds in self._tries():
                if arrived(self.store, names, seconds):
                    break
            missing = [str(rank) for rank, name in enumerate(names) if not self.store.check([name])]
        if missing:
            raise RunError(
                f"of {self.size} processes that are to move weights, {', '.join(missing)} did not come in "
                f"{self.timeout:g} s.",
                fix="See what became of them, or give a longer timeout.",
            )
        with _at_meeting():
            return [self.store.get(name).decode() for name in names]

    def _tries(self) -> Iterator[float]:
        """Seconds to try something for, again and again until the time is up. Raises RunError if nobody wants it."""
        until = time.monotonic() + self.timeout
        while (left := until - time.monotonic()) > 0:
            self._check_wanted()
            yield min(1.0, left)

    def _check_wanted(self) -> None:
        if self.broken or not self._wanted():
            raise RunError(f"process {self.me} was told that the others will not come.")

    def _who_reads(self, shared: bool) -> list[set[int]]:
        """For each process whose slots it can read: those beside it have tried it."""
        if len(set(self.places)) == self.size:
            return [set() for _ in self.places]
        beside = [r for r, place in enumerate(self.places) if r != self.me and place == self.places[self.me] and shared]
        lent = self.slots.offer(beside) if beside else None
        lends = [json.loads(one) for one in self._meet("lends", json.dumps({} if lent is None else lent[1]))]
        reads = [source for source in beside if self.slots.reads(lends[source].get(str(self.me)))]
        return [set(json.loads(one)) for one in self._meet("reads", json.dumps(reads))]

    def _open_groups(self, seconds: float) -> None:
        """Connect to all others: by gloo, and by NCCL where each has a device of its own."""
        me, size, store, soon = self.me, self.size, self.store, timedelta(seconds=seconds)
        with _reached(f"process {me} did not reach the other {size - 1}", seconds):
            self._gloo = self._patiently(lambda: known_gloo(_torch.PrefixStore("gloo", store), me, size, soon))
        own = size > 1 and len(set(self.places)) == size and all(p.startswith("cuda ") for p in self.places)
        if own:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self.timeout)
            self._nccl = dist.ProcessGroupNCCL(_torch.PrefixStore("nccl", store), me, size, options)
        on_device = self._where.type == "cuda"
        self.staging = Staging(self._where if own else torch.device("cpu"), pinned=on_device and not own)

    def _patiently(self, make: Callable[[], T]) -> T:
        """What ``make`` gives, which cannot be told to end: it is left to a thread where nobody wants it any more."""
        found: list[T] = []
        failed: list[RuntimeError] = []

        def work() -> None:
            try:
                found.append(make())
            except RuntimeError as error:
                failed.append(error.with_traceback(None))

        thread = threading.Thread(target=work, name="flowrl-wire", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK)
            self._check_wanted()
        if failed:
            raise failed[0]
        return found.pop()


class Sending:
    """A message on the way. It keeps the tensor alive until it is through."""

    def __init__(self, work: Any, tensor: Tensor, *, polled: bool) -> None:
        self._work, self.tensor, self._polled = work, tensor, polled
        self.before: Sending | None = None  # one that is through earlier, and has to be kept until then

    def wait(self, seconds: float) -> None:
        """Until it is through. Raises RuntimeError if that takes longer, the other end is gone, or it is given up."""
        work = self._work
        if isinstance(work, RuntimeError):
            raise work
        if self._polled:  # NCCL's own wait is one of the stream alone, and has no end
            until = time.monotonic() + seconds
            while not work.is_completed():
                if time.monotonic() > until:
                    raise RuntimeError(f"Timed out after {seconds:g} s")
                if self._work is not work:
                    raise RuntimeError("given up")
                time.sleep(0.0002)
        work.wait(timedelta(seconds=seconds))  # gloo's ends when its group hangs up

    def give_up(self) -> None:
        """Forget it, whether it is through or not. Who waits for it does not wait on."""
        self._work = RuntimeError("given up")


def _hang_up(group: Any, me: int, size: int) -> None:
    """End whatever waits in a gloo group, here and at its other ends.

    It has no word for that; but when one message is late it ends all others and closes every connection, at once.
    """
    for peer in range(size):
        if peer != me:
            with suppress(RuntimeError):  # it is late, or its connection is closed already
                group.recv([torch.zeros(1)], peer, _NEVER).wait(timedelta(milliseconds=1))


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


@contextmanager
def _at_meeting() -> Iterator[None]:
    """Turns what the store raises inside into a RunError."""
    try:
        yield
    except RuntimeError as error:
        raise RunError("the file in which those that move weights meet cannot be read or written any more.") from error


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
