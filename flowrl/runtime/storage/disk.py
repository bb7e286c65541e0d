"""Write files of a run so that damage shows later, and say in one line what a disk did not take."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import DiskError
from ...workers.headway import make_headway

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 22
#: The names that safetensors has for the dtypes of torch.
DTYPES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip


class Checksum(NamedTuple):
    """What tells the contents of a file from others: ``Checksum(1264, "9f2c01ab")``, its bytes and their CRC-32.

    A flipped bit, and any damage within 32 bits, always shows; other damage is missed once in four thousand million
    times. It guards against broken disks, not against people.
    """

    bytes: int
    crc: str


def checksum(path: Path) -> Checksum:
    """Read a file. Raises OSError."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return Checksum(size, hexadecimal(crc))


def hexadecimal(crc: int) -> str:
    """A CRC-32 as it is written down."""
    return f"{crc:08x}"


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> Checksum:
    """Write a file and have the disk hold it; its checksum is that of what was in memory. Raises DiskError."""
    size = crc = 0
    with writing(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            for part in parts:
                for start in range(0, len(part), BLOCK):
                    block = part[start : start + BLOCK]
                    size, crc = size + len(block), zlib.crc32(block, crc)
                    write_all(handle, block)
            os.fsync(handle)
        finally:
            os.close(handle)
    return Checksum(size, hexadecimal(crc))


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of some bytes to an open file; the system may take them in parts. Raises OSError."""
    left = memoryview(data)
    while left:
        taken = os.write(handle, left)
        if taken <= 0:  # some network file systems say so where there is no room
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        left = left[taken:]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Checksum:
    """Write tensors as a safetensors file, one after another: a tensor is on the CPU only while it is written."""
    import json

    header: dict[str, Any] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):  # aligned, as readers like
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for name in header:
            make_headway()
            tensor = tensors[name].detach().cpu().contiguous()
            if tensor.nbytes:
                yield _view(tensor)

    with writing(path, bytes=8 + len(text) + end):
        return write_file(path, parts())


def _view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU while it lives; ``numpy()`` would fix the size of its storage."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def replace_file(path: Path, text: str | bytes) -> None:
    """Put a text in the place of a file, at once and for good. Raises DiskError, with the file as it was."""
    part = path.with_name(f"{path.name}.part")
    try:
        write_file(part, [text.encode(errors="backslashreplace") if isinstance(text, str) else text])
        with writing(path):
            part.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Take away whatever is there, as far as that goes."""
    if path.is_dir() and not path.is_symlink():
        with suppress(OSError):
            path.chmod(0o700)  # one that was put aside as nobody could read it
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def writing(path: Path, bytes: int | None = None) -> Iterator[None]:
    """Raise DiskError for what the disk does not take inside the block. ``bytes``: how many there are to write."""
    try:
        yield
    except DiskError as error:
        if bytes is None or error.bytes is not None:
            raise
        raise _disk_error(path, error.number, error.reason, bytes) from None
    except Exception as error:
        number = _number(error)
        if number is None:
            raise
        raise _disk_error(path, number, os.strerror(number), bytes) from None


def _number(error: Exception) -> int | None:
    """The number that the system gave an error of a file, also of one that safetensors has told as a text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return int(found[1]) if found else None


def _disk_error(path: Path, number: int, reason: str, bytes: int | None) -> DiskError:
    free = None
    with suppress(OSError):
        free = shutil.disk_usage(path.parent).free
    more = [f"{size(bytes)} to write"] if bytes is not None else []
    more += [f"{size(free)} free"] if free is not None else []
    return DiskError(path, number, reason, bytes=bytes, more=", ".join(more))


def size(count: float) -> str:
    """Bytes for a reader: ``3.2 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
