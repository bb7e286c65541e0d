"""What the ranks of a process group tell each other besides tensors: JSON in tensors of bytes, never a pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def broadcast_json(item: Any, source: int, group: Any = None) -> Any:
    """Return on every rank of the group what the rank ``source`` gives; the others give anything.

    Tuples arrive as lists, on ``source`` too. Floats arrive bit for bit.
    """
    mine = torch.distributed.get_rank() == source
    text = _bytes(item) if mine else torch.zeros(0, dtype=torch.uint8)
    length = torch.tensor([len(text)])
    torch.distributed.broadcast(length, source, group=group)
    text = text if mine else torch.zeros(int(length), dtype=torch.uint8)
    torch.distributed.broadcast(text, source, group=group)
    return _item(text)


def gather_json(item: Any, group: Any = None) -> list[Any]:
    """Return on every rank what each of the group gives, in the order of their places in it. Tuples become lists."""
    text, size = _bytes(item), torch.distributed.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    torch.distributed.all_gather(lengths, torch.tensor([len(text)]), group=group)
    longest = max(int(n) for n in lengths)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    torch.distributed.all_gather(texts, torch.cat([text, text.new_zeros(longest - len(text))]), group=group)
    return [_item(t[: int(n)]) for t, n in zip(texts, lengths, strict=True)]


def _bytes(item: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)


def _item(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a dtype for :func:`empty_like`: ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def empty_like(shape: Sequence[int], dtype: str, device: torch.device) -> Tensor:
    """Return an empty tensor of a shape and a dtype that another rank has told."""
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
