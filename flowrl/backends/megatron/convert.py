"""Which part of which weight of a Hugging Face checkpoint lies in which rows of megatron-core's parameters.

Every parameter of a stage is a few ranges of rows, each of them a box of a checkpoint's weight:

- ``linear_qkv`` has for each head of keys the queries that belong to it, the keys, the values; ``tp`` cuts its rows,
  also inside of a head where there are more ranks than heads;
- ``linear_fc1`` of a rank is its part of gate, then its part of up;
- of embedding and head the rows behind the vocabulary are padding, which is in no box;
- layers of a stage count from 0; an expert is one entry of the stack that the checkpoint has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...workers.weights.weight_boxes import Shard
from .parallel import Parallel
from .plain import Plain

EMBEDDING = "model.embed_tokens.weight"
_ENDS = {
    "decoder.final_layernorm.weight": "model.norm.weight",
    "score.weight": "score.weight",
}
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_ROWS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")


@dataclass(frozen=True)
class Part:
    """Rows of a parameter as a box: ``Part((0, 16), "model.layers.1.self_attn.k_proj.weight", (32, 64), (16, 0))``.

    ``shape`` is that of the whole weight, ``offset`` where the box begins in it. A weight that has a dim more than the
    parameter is a stack, of which the box is one entry. ``copied``: ranks along ``tp`` hold the same. ``tied``: the
    numbers are those of another parameter.
    """

    rows: tuple[int, int]
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    copied: bool = False
    tied: bool = False

    def shard(self, parameter: Tensor, *, main: bool, prefix: str = "") -> Shard:
        """The box as a view on the parameter, or on a tensor of its shape."""
        view = parameter[self.rows[0] : self.rows[1]]
        view = view[None] if len(self.shape) > view.dim() else view
        return Shard(prefix + self.name, self.shape, self.offset, view, main)

    def pieces(self, flat: Tensor, begin: int, width: int, *, main: bool, prefix: str = "") -> Iterator[Shard]:
        """The boxes of those of its numbers that ``flat`` holds: the parameter's from number ``begin`` on.

        ``width`` numbers are a row. They are a part of a row, whole rows and a part of a row, as far as there are such.
        """
        low, high = max(begin, self.rows[0] * width), min(begin + len(flat), self.rows[1] * width)
        while low < high:
            row, column = divmod(low, width)
            whole = (high - low) // width if column == 0 else 0
            length = whole * width if whole else min(high - low, width - column)
            view = flat[low - begin : low - begin + length]
            yield self._piece(view, row - self.rows[0], column, whole or 1, main=main, prefix=prefix)
            low += length

    def _piece(self, view: Tensor, row: int, column: int, rows: int, *, main: bool, prefix: str) -> Shard:
        if len(self.shape) == 1:
            offset = (self.offset[0] + row,)
            return Shard(prefix + self.name, self.shape, offset, view, main)
        shift = [0] * (len(self.shape) - 2) + [row, column]
        offset = tuple(o + s for o, s in zip(self.offset, shift, strict=True))
        boxed = view.view(*[1] * (len(self.shape) - 2), rows, -1)
        return Shard(prefix + self.name, self.shape, offset, boxed, main)


@dataclass(frozen=True)
class Converter:
    """The parameters of a stage in the coordinates of a checkpoint."""

    plain: Plain
    parallel: Parallel
    first: int  # the number of the stage's first layer

    def parts(self, name: str, parameter: Tensor) -> list[Part]:
        """What a parameter of the stage holds."""
        if name == "embedding.word_embeddings.weight":
            return self._vocabulary(EMBEDDING, tied=False)
        if name == "output_layer.weight":
            return self._vocabulary(EMBEDDING if self.plain.tied else "lm_head.weight", tied=self.plain.tied)
        if name in _ENDS:
            return [self._whole(_ENDS[name])]
        found = _LAYER.fullmatch(name)
        assert found, f"no weight of a checkpoint is known for '{name}'"
        return self._layer(f"model.layers.{self.first + int(found[1])}.", found[2], parameter)

    def _layer(self, at: str, name: str, parameter: Tensor) -> list[Part]:
        tp = self.parallel["tp"]
        if name in _NORMS:
            return [self._whole(at + _NORMS[name])]
        if name in _ROWS:
            return [self._box((0, parameter.shape[0]), at + _ROWS[name], (0, tp * parameter.shape[1]))]
        if name.startswith("self_attention.linear_qkv."):
            return list(self._qkv(at + "self_attn.", name.rpartition(".")[2], parameter))
        if name == "mlp.linear_fc1.weight":
            half = parameter.shape[0] // 2
            names = ("gate_proj", "up_proj")
            return [
                self._box((i * half, (i + 1) * half), f"{at}mlp.{n}.weight", (tp * half, 0))
                for i, n in enumerate(names)
            ]
        found = _EXPERT.fullmatch(name)
        assert found, f"no weight of a checkpoint is known for '{name}'"
        return self._expert(at + "mlp.experts.", int(found[1]), found[2] == "1", parameter)

    def _expert(self, at: str, local: int, opens: bool, parameter: Tensor) -> list[Part]:
        """One expert of this rank: ``linear_fc1`` where it ``opens``, else ``linear_fc2``."""
        tp, rows = self.parallel["tp"], parameter.shape[0]
        number = self.parallel["ep"] * (self.plain.experts or 0) // self.parallel.mesh["ep"] + local
        if not opens:
            return [self._box((0, rows), at + "down_proj", (number, 0, tp * parameter.shape[1]))]
        name, half = at + "gate_up_proj", rows // 2
        inner = self.plain.shapes[name][1] // 2
        return [self._box((i * half, (i + 1) * half), name, (number, i * inner + tp * half, 0)) for i in range(2)]

    def _qkv(self, at: str, kind: str, parameter: Tensor) -> Iterator[Part]:
        """The queries, keys and values in this rank's rows of the fused weight or bias."""
        config, dim, rows = self.plain.config, self.plain.head_dim, parameter.shape[0]
        groups = config.num_key_value_heads
        queries = config.num_attention_heads // groups * dim
        begin = self.parallel["tp"] * rows
        for group in range(groups):
            start = group * (queries + 2 * dim)
            for name, length in (("q_proj", queries), ("k_proj", dim), ("v_proj", dim)):
                low, high = max(start, begin), min(start + length, begin + rows)
                if low < high:
                    offset = (group * length + low - start, *[0] * (parameter.dim() - 1))
                    yield self._box((low - begin, high - begin), f"{at}{name}.{kind}", offset)
                start += length

    def _vocabulary(self, name: str, *, tied: bool) -> list[Part]:
        """The rows of an embedding or a head that are no padding."""
        vocab, width = self.plain.shapes[name]
        each = -(-vocab // self.parallel.mesh["tp"])
        begin = self.parallel["tp"] * each
        rows = max(0, min(each, vocab - begin))
        return [Part((0, rows), name, (vocab, width), (begin, 0), tied=tied)] if rows else []

    def _whole(self, name: str) -> Part:
        shape = self.plain.shapes[name]
        return Part((0, shape[0]), name, shape, (0,) * len(shape), copied=True)

    def _box(self, rows: tuple[int, int], name: str, offset: tuple[int, ...]) -> Part:
        return Part(rows, name, self.plain.shapes[name], offset)

    def main(self, part: Part, *, expert: bool, shared: bool = False) -> bool:
        """Whether a part counts here: on the first of the ranks that hold the same. ``shared``: cut along data axes."""
        at = self.parallel
        axes = ("dp", "cp") if expert else ("dp", "cp", "ep")
        first = shared or not any(at[axis] for axis in axes)
        return first and not part.tied and not (part.copied and at["tp"])


def is_expert(name: str) -> bool:
    """Whether a parameter is one of an expert, of which ``ep`` has a part each."""
    return ".experts." in name


def fill(stage: Any, converter: Converter, read: Callable[[Shard], None]) -> None:
    """Give a stage its weights, each box filled by ``read``, and zeros where its vocabulary is padding."""
    for name, parameter in stage.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            parameter.data.zero_()
        for part in converter.parts(name, parameter):
            read(part.shard(parameter.data, main=True))
