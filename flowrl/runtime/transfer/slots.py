"""Memory in which messages are put together where their target can read it: that of one host, or of one CUDA device."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Sequence
from mmap import PAGESIZE
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from .staging import Staging

#: What another process needs to open a slot: numbers and short texts.
Told = list[Any]
#: Bytes in which a slot is told: every message that does it has as many.
NOTE = 1024
#: Of linux/falloc.h.
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class Slots:
    """``Slots(torch.device("cpu"))``: buffers of this process that others read, and those of others here.

    A slot is told with the first message that a reader finds in it, and known by its number from then on. In use are
    the last ones made, at most ``most``; they stay from move to move.
    """

    def __init__(self, device: torch.device, *, most: int = 4) -> None:
        self._most = most
        self._memory = CudaMemory(device) if device.type == "cuda" else HostMemory()
        #: Gives the buffers of this process.
        self.staging = Staging(device, most=most, make=self._make)
        self._numbers: dict[int, int] = {}  # by address
        self._made = 0
        self._told: set[tuple[int, int]] = set()
        self._opened: dict[tuple[int, int], Tensor] = {}

    def offer(self, readers: Sequence[int]) -> tuple[Tensor, dict[int, Told]] | None:
        """A first slot of 8 bytes, to be kept until the readers have tried it, and what each of them has to know.

        None where memory cannot be shared.
        """
        try:
            buffer = self._memory.make(8)
            return buffer, {reader: self._memory.tell(buffer) for reader in readers}
        except (RuntimeError, OSError):
            return None

    def reads(self, told: Told | None) -> bool:
        """Whether the first slot of another process can be opened."""
        try:
            return told is not None and self._memory.open(told).numel() == 8
        except (RuntimeError, OSError):
            return False

    def tell(self, buffer: Tensor, reader: int) -> Tensor:
        """A note by which a process finds a buffer of ``staging``: its number, and the first time where it is."""
        number = self._numbers[buffer.data_ptr()]
        told = None if (number, reader) in self._told else self._memory.tell(buffer)
        self._told.add((number, reader))
        note = json.dumps([number, told]).encode()
        assert len(note) <= NOTE, f"a slot takes {len(note)} bytes to tell"
        return torch.frombuffer(bytearray(note.ljust(NOTE)), dtype=torch.uint8)

    def open(self, source: int, note: Tensor) -> Tensor:
        """The bytes of a slot of another process. Raises OSError or RuntimeError if they cannot be reached."""
        number, told = json.loads(note.numpy().tobytes())
        if told is not None:
            self._opened.pop((source, number - self._most), None)  # it made place for this one
            self._opened[source, number] = self._memory.open(told)
        return self._opened[source, number]

    def settle(self) -> None:
        """Wait until what was written to slots, or read from them, is through on the device."""
        self._memory.settle()

    def drop(self) -> None:
        """Let go of all slots, of this process and of others."""
        self._opened.clear()
        self.staging.drop()

    def _make(self, size: int) -> Tensor:
        buffer = self._memory.make(size)
        self._numbers[buffer.data_ptr()] = self._made
        self._made += 1
        return buffer


class HostMemory:
    """Host memory without a name in the file system: gone with the processes that have it open, however they end."""

    def __init__(self) -> None:
        self._told: dict[int, Told] = {}  # by address

    def make(self, size: int) -> Tensor:
        """Bytes that other processes can open. Raises OSError where there is nothing of the kind."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a name that another process can open")
        name = secrets.token_hex(8)
        file = os.memfd_create(name)
        try:
            os.ftruncate(file, size)
            buffer = _mapped(file, size)
        except BaseException:
            os.close(file)
            raise
        finalize(buffer, os.close, file)
        self._told[buffer.data_ptr()] = [os.getpid(), file, name, size]
        return buffer

    def tell(self, buffer: Tensor) -> Told:
        """What another process needs to open it."""
        return self._told[buffer.data_ptr()]

    def open(self, told: Told) -> Tensor:
        """The bytes of another process."""
        process, there, name, size = told
        path = f"/proc/{process}/fd/{there}"
        _check(path, name)
        file = os.open(path, os.O_RDWR)
        try:
            _check(f"/proc/self/fd/{file}", name)
            return _mapped(file, size)
        finally:
            os.close(file)

    def empty(self, buffer: Tensor) -> None:
        """Give the pages of a buffer back to the system: it reads as zeros until somebody writes it again.

        Raises OSError where the system cannot.
        """
        _, file, _, size = self._told[buffer.data_ptr()]
        libc = ctypes.CDLL(None, use_errno=True)
        pages = -(-size // PAGESIZE) * PAGESIZE  # of a part of a page nothing would be given back
        if libc.fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(pages)):
            raise OSError(ctypes.get_errno(), "memory of other processes too cannot be given back")

    def settle(self) -> None:
        """Nothing is under way when a call is back."""


class CudaMemory:
    """Memory of one CUDA device, by CUDA IPC. PyTorch keeps it for as long as a process has it open."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self, size: int) -> Tensor:
        """Bytes that other processes of the device can open."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def tell(self, buffer: Tensor) -> Told:
        """What one other process needs to open it, once. Raises RuntimeError where the allocator cannot share."""
        storage: Any = buffer.untyped_storage()
        return [part.hex() if isinstance(part, bytes) else part for part in storage._share_cuda_()]

    def open(self, told: Told) -> Tensor:
        """The bytes of another process."""
        _, memory, size, offset, counter, place, event, wait = told  # its number of the device may not be ours
        parts = bytes.fromhex(memory), size, offset, bytes.fromhex(counter), place, bytes.fromhex(event), wait
        storages: Any = torch.UntypedStorage
        storage = storages._new_shared_cuda(self._device.index, *parts)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def settle(self) -> None:
        """Wait for the copies that this process has begun."""
        torch.cuda.current_stream(self._device).synchronize()


def _check(path: str, name: str) -> None:
    """In another container a process may have the same number, and later another file the same."""
    if not os.readlink(path).startswith(f"/memfd:{name}"):
        raise OSError(f"{path} is another file than was told")


def _mapped(file: int, size: int) -> Tensor:
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
