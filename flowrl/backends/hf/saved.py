"""The weights of a saved model, box by box from its safetensors files: a process reads what it keeps, and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...placement.reshard.boxes import Box, shared, split, volume
from ...workers.weights.weight_boxes import Shard

#: Dtypes of files whose numbers are weights as they are; others are scaled or packed.
PLAIN = ("F64", "F32", "BF16", "F16")
#: Numbers that are read at a time.
_MOST = 1 << 26


@dataclass(frozen=True)
class Piece:
    """A tensor of a file as a box of a weight: ``Piece("layers.0.experts.3.w1.weight", ((3, 4), (0, 64), (0, 32)))``.

    A weight that has a dim more than the tensor is a stack, of which the tensor is one entry.
    """

    key: str
    box: Box


class Saved:
    """Weights in files, under the names of the model: ``match(model, files, conversions).fill(shard)``.

    ``taken`` are the bytes that were read so far, as they are in the files.
    """

    def __init__(self, slices: Mapping[str, Any], pieces: dict[str, list[Piece]]) -> None:
        self._slices, self.pieces = slices, pieces
        self.taken = 0

    def fill(self, shard: Shard) -> None:
        """Fill a box of a weight in place, in the dtype that it has there."""
        lacking = shard.tensor.numel()
        for piece in self.pieces[shard.name] if lacking else ():
            both = shared(piece.box, shard.box)
            for box in () if both is None else split(both, _MOST):
                part = self._read(piece, box)
                with torch.no_grad():
                    shard.view(box).copy_(part)
                lacking -= part.numel()
        assert not lacking, f"the pieces of {shard.name} are all of it"

    def same(self, one: str, other: str) -> bool:
        """Whether two weights have the same numbers; False where they are not a tensor each."""
        (a, *more), (b, *others) = self.pieces[one], self.pieces[other]
        if more or others or a.box != b.box:
            return False
        return all(torch.equal(self._read(a, box), self._read(b, box)) for box in split(a.box, _MOST))

    def _read(self, piece: Piece, box: Box) -> Tensor:
        file = self._slices[piece.key]
        at = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(box, piece.box, strict=True))
        at = at[len(at) - len(file.get_shape()) :]
        part = file[at] if at else file[...]
        self.taken += part.numel() * part.itemsize
        return part.reshape([b - a for a, b in box])


def match(model: Any, files: Sequence[str], conversions: Sequence[Any]) -> Saved | None:
    """The weights of a transformers model in its files, after the ``conversions`` that transformers has for its names.

    ``model`` has no weights yet. Gives None for files of which this is not known, number by number: those of another
    format, packed dtypes, two tensors for one weight, or conversions other than experts put on a stack. Weights of the
    model that no file has are not in what is given.
    """
    from safetensors import safe_open

    try:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return None  # another transformers, whose names for this are not known

    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return None
    opened = [safe_open(file, "pt") for file in files]
    slices = {key: file.get_slice(key) for file in opened for key in file.keys()}  # noqa: SIM118
    state, prefix = model.state_dict(), model.base_model_prefix
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    found: dict[str, dict[str | None, list[str]]] = {}
    for key in sorted(slices, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name in state:
            found.setdefault(name, {}).setdefault(pattern, []).append(key)
    pieces: dict[str, list[Piece]] = {}
    for name, keys in found.items():
        made = _pieces(keys, converters, slices)
        if made is None or not _covers(made, tuple(state[name].shape)):
            return None
        pieces[name] = made
    used = [piece.key for made in pieces.values() for piece in made]
    return Saved(slices, pieces) if all(slices[key].get_dtype() in PLAIN for key in used) else None


def _pieces(
    keys: Mapping[str | None, list[str]], converters: Sequence[Any], slices: Mapping[str, Any]
) -> list[Piece] | None:
    """The pieces of a weight, from the tensors whose names were matched by each pattern. None where it is not known."""
    if set(keys) == {None}:
        (tensors,) = keys.values()
        return [Piece(tensors[0], tuple((0, n) for n in slices[tensors[0]].get_shape()))] if len(tensors) == 1 else None
    matched = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    how = matched.get(next(iter(keys)))
    if how is None or not _stacks(how) or any(matched.get(pattern) is not how for pattern in keys):
        return None
    made, row = [], 0
    for tensors in (keys[pattern] for pattern in how.source_patterns if pattern in keys):
        shapes = {tuple(slices[key].get_shape()) for key in tensors}
        if len(shapes) > 1 or len(shape := shapes.pop()) != 2:
            return None
        for entry, key in enumerate(tensors):
            made.append(Piece(key, ((entry, entry + 1), (row, row + shape[0]), (0, shape[1]))))
        row += shape[0]
    return made


def _stacks(converter: Any) -> bool:
    """Whether a conversion puts matrices on a stack, those of several names one below the other in each entry."""
    steps = [(type(step).__name__, step.dim) for step in converter.operations if hasattr(step, "dim")]
    whole = len(steps) == len(converter.operations) and len(converter.target_patterns) == 1
    one = len(converter.source_patterns) == 1 and steps == [("MergeModulelist", 0)]
    return whole and (one or steps == [("MergeModulelist", 0), ("Concatenate", 1)])


def _covers(pieces: Sequence[Piece], shape: tuple[int, ...]) -> bool:
    """Whether pieces, which have nothing in common, are all of a weight of this shape."""
    whole = tuple((0, n) for n in shape)
    if any(len(p.box) != len(shape) or (p.box and shared(p.box, whole) != p.box) for p in pieces):
        return False
    return sum(volume(piece.box) for piece in pieces) == prod(shape)


def leave_unread(model: Any, files: Sequence[str], conversions: Sequence[Any], fresh: str) -> Saved | None:
    """Where the weights of a model without any are, as :func:`match` says, tied ones under both names.

    Buffers that are in the files are read. None where a weight is lacking that is not ``fresh``. Notes in the model
    that its weights are not to be drawn, and how it is saved again as it is in the files.
    """
    tried = deepcopy(list(conversions))  # they note whether they matched
    saved = match(model, files, tried)
    if saved is None:
        return None
    for pair in model.all_tied_weights_keys.items():
        there = [name for name in pair if name in saved.pieces]
        if len(there) == 2 and not saved.same(*there):
            return None
        for name in pair if there else ():
            saved.pieces[name] = saved.pieces[there[-1]]
    if set(model.state_dict()) - set(saved.pieces) - {fresh}:
        return None
    for name, buffer in list(model.named_buffers()):
        if name in saved.pieces:
            made = torch.empty_like(buffer, device="cpu")
            saved.fill(Shard(name, tuple(made.shape), (0,) * made.dim(), made))
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, made)
    for name in saved.pieces:
        model.get_parameter_or_buffer(name)._is_hf_initialized = True  # what transformers asks before it draws
    model._weight_conversions = [c for c in tried if c.was_used()]
    return saved


def reader(there: Mapping[str, Tensor], saved: Saved | None) -> Callable[[Shard], None]:
    """What fills a box of a weight: from the whole weights that are there by name, else from the files."""

    def read(shard: Shard) -> None:
        if shard.name in there:
            with torch.no_grad():
                shard.tensor.copy_(there[shard.name].detach()[tuple(slice(a, b) for a, b in shard.box)])
            return
        assert saved is not None, f"{shard.name} is there, or in a file"
        saved.fill(shard)

    return read
