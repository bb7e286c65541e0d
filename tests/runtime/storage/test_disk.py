"""Files of a run are what safetensors reads, their checksums tell them from others, and a full disk is said in a line."""

from __future__ import annotations

import errno
import zlib

import pytest
import torch
from safetensors.torch import load_file

from flowrl.runtime.storage.disk import DTYPES, Checksum, checksum, write_file, write_tensors

ODD = {
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "column": torch.arange(12.0).reshape(3, 4)[:, 1],
    "turned": torch.arange(6, dtype=torch.int64).reshape(2, 3).T,
    "truths": torch.tensor([True, False]),
    "grads": torch.ones(3, requires_grad=True),
}


def test_tensors_of_every_dtype_come_back(tmp_path):
    tensors = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in DTYPES} | ODD
    said = write_tensors(tmp_path / "t", tensors)
    assert said == checksum(tmp_path / "t")
    found = load_file(tmp_path / "t")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert (
            found[name]
            .contiguous()
            .flatten()
            .view(torch.uint8)
            .equal(tensor.detach().contiguous().flatten().view(torch.uint8))
        )


def test_writing_leaves_a_tensor_as_it_was(tmp_path):
    """Weights that make way for others give their storage back."""
    tensor = torch.ones(8)
    write_tensors(tmp_path / "t", {"a": tensor})
    tensor.untyped_storage().resize_(0)


def test_a_checksum_is_that_of_the_contents(tmp_path):
    said = write_file(tmp_path / "f", [b"some", b"", memoryview(b" words")])
    assert said == Checksum(10, f"{zlib.crc32(b'some words'):08x}") == checksum(tmp_path / "f")
    for at in range(10):
        raw = bytearray(b"some words")
        raw[at] ^= 1 << (at % 8)
        (tmp_path / "f").write_bytes(raw)
        assert checksum(tmp_path / "f") != said


def test_the_error_of_a_full_disk_has_its_numbers_and_travels(tmp_path):
    import pickle

    from flowrl.errors import DiskError

    error = DiskError(
        tmp_path / "a", errno.ENOSPC, "No space left on device", bytes=12, more="12 bytes to write, 3 kB free"
    )
    again = pickle.loads(pickle.dumps(error))  # noqa: TID251
    assert (
        again.report()
        == error.report()
        == (
            f"DiskError: {tmp_path}/a could not be written: No space left on device (12 bytes to write, 3 kB free).\n"
            "  fix  Make room, then go on with --resume."
        )
    )


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
def test_other_errors_of_a_disk_ask_for_no_room(tmp_path, number):
    from flowrl.errors import DiskError

    assert DiskError(tmp_path, number, "x").fix == "Have the disk take files again, then go on with --resume."


def test_a_disk_that_takes_nothing_and_says_nothing_is_an_error(tmp_path, monkeypatch):
    """A system call that took no byte would be repeated for ever."""
    from flowrl.errors import DiskError

    monkeypatch.setattr("os.write", lambda handle, data: 0)
    with pytest.raises(DiskError, match="Input/output error"):
        write_file(tmp_path / "f", [b"some words"])
