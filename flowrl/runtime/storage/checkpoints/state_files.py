"""The state of a worker on disk: safetensors with the boxes of what is in them, so that any layout can read it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....errors import ResumeError
from ....workers.weights.weight_boxes import Box, Shard
from ..disk import Checksum, write_file, write_tensors

if TYPE_CHECKING:
    from torch import Tensor


def write_shards(folder: Path, name: str, part: int, shards: Iterable[Shard]) -> dict[str, Checksum]:
    """Write the main ones of a rank's shards to ``NAME.PART.safetensors`` and their boxes to ``NAME.PART.boxes``.

    Returns the checksums of the files. ``NAME.0.boxes`` is, in the order of the tensors,
    ``[{"name": "weights.lm_head.weight", "shape": [64, 32], "offset": [0, 0]}, ...]``.
    """
    boxes: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if not shard.main or not shard.tensor.numel():
            continue
        tensors[str(len(boxes))] = shard.tensor
        boxes.append({"name": shard.name, "shape": list(shard.shape), "offset": list(shard.offset)})
    said = folder / f"{name}.{part}.boxes"
    found = {said.name: write_file(said, [json.dumps(boxes).encode()])}
    if tensors:
        numbers = folder / f"{name}.{part}.safetensors"
        found[numbers.name] = write_tensors(numbers, tensors)
    return found


def files_of(folder: Path, name: str) -> list[Path]:
    """The files of a worker."""
    return sorted(p for p in (folder / f"{name}.json", *folder.glob(f"{name}.[0-9]*")) if p.exists())


class StateFiles:
    """The state of one worker as it was written, by however many ranks. Use it in a ``with``."""

    def __init__(self, folder: Path, name: str) -> None:
        from safetensors import safe_open

        self.folder, self.name = folder, name
        self._open = ExitStack()
        self._parts: dict[str, list[tuple[Box, tuple[int, ...], Any, str]]] = {}
        for said in sorted(folder.glob(f"{name}.[0-9]*.boxes")):
            entries = json.loads(said.read_text())
            if not entries:
                continue
            file = self._open.enter_context(safe_open(said.with_suffix(".safetensors"), "pt"))
            for number, entry in enumerate(entries):
                lengths = file.get_slice(str(number)).get_shape()
                box = tuple((o, o + n) for o, n in zip(entry["offset"], lengths, strict=True))
                self._parts.setdefault(entry["name"], []).append((box, tuple(entry["shape"]), file, str(number)))

    def __enter__(self) -> StateFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def names(self) -> list[str]:
        """What is there."""
        return sorted(self._parts)

    def whole(self, name: str) -> Tensor:
        """One tensor, put together."""
        import torch

        parts = self._parts[name]
        _, shape, file, key = parts[0]
        if len(parts) == 1 and all(a == 0 for a, _ in parts[0][0]):
            return file.get_tensor(key)
        made = torch.empty(shape, dtype=file.get_tensor(key).dtype)
        self.fill(Shard(name, shape, (0,) * len(shape), made))
        return made

    def fill(self, shard: Shard) -> bool:
        """Fill a shard in place from all parts that have something of it; False where there is no such tensor.

        Raises ResumeError for another shape, or where a part is lacking.
        """
        import torch

        if shard.name not in self._parts:
            return False
        missing = shard.tensor.numel()
        for box, shape, file, key in self._parts[shard.name]:
            if shape != tuple(shard.shape):
                raise ResumeError(
                    f"the checkpoint's '{shard.name}' has the shape {list(shape)}, the model's {list(shard.shape)}.",
                    fix="Resume with the model that the run was started with.",
                )
            both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, shard.box, strict=True))
            if any(a >= b for a, b in both):
                continue
            at = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(both, box, strict=True))
            part = file.get_slice(key)[at] if at else file.get_tensor(key)
            with torch.no_grad():
                shard.view(both).copy_(part)
            missing -= part.numel()
        if missing:
            raise ResumeError(f"the checkpoint {self.folder} lacks a part of '{shard.name}'.")
        return True


def write_record(folder: Path, name: str, text: str) -> dict[str, Checksum]:
    """Write what of a worker's state is no tensor, as JSON, to ``NAME.json``; returns its checksum."""
    path = folder / f"{name}.json"
    return {path.name: write_file(path, [text.encode()])}


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """What :func:`write_record` wrote. Raises ResumeError where the checkpoint has no such worker."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise ResumeError(
            f"checkpoint {folder} holds no worker '{name}'.", fix="Resume with the script the run was started with."
        )
    return json.loads(path.read_text())
