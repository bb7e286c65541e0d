"""Which parameters a rank of a backend has, and which box of which weight lies where in each of them.

An engine lays several weights of a checkpoint into one parameter: queries, keys and values, gate and up, and those of
all experts of a layer. Each part of such a parameter is a box of one weight, so that what moves boxes of weights writes
straight into it. Rows that are added to a vocabulary are in no part; an engine has zeros there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .model_weights import Weight
from .weight_layout import Box, Layout, solid, split_weight, vocab_rows


@dataclass(frozen=True)
class Part:
    """A box of a weight, and the box of the parameter where it lies.

    ``Part("model.layers.0.self_attn.k_proj.weight", (1024, 4096), ((0, 128), (0, 4096)), ((512, 640), (0, 4096)))``;
    ``shape`` is that of the whole weight.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    at: Box


@dataclass(frozen=True)
class Parameter:
    """``Parameter("model.layers.0.self_attn.qkv_proj.weight", (768, 4096), parts)``: what one rank has of it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def parameters_of(layout: Layout, rank: int) -> Iterator[Parameter]:
    """Yield the parameters of a rank, under the names that its backend gives them, stack by stack.

    >>> from ..backends import Fused, LayoutRules; from ..cluster.mesh import Mesh; from .model_shape import shape_named
    >>> rules = LayoutRules(fused=(Fused("qkv_proj", ("q_proj", "k_proj", "v_proj")),))
    >>> layout = Layout(shape_named("qwen3-8b"), Mesh.of("tp=8"), rules=rules)
    >>> qkv = next(p for p in parameters_of(layout, rank=1) if "qkv_proj" in p.name)
    >>> qkv.shape, [(part.box[0], part.at[0]) for part in qkv.parts]
    ((768, 4096), [((512, 1024), (0, 512)), ((128, 256), (512, 640)), ((128, 256), (640, 768))])

    The parts are together the boxes that the layout gives the rank. A tied head is the embedding, and not listed.
    """
    assert layout.mesh["fsdp"] == 1, "a parameter that fsdp splits is no engine's"
    at = layout.mesh.coordinates(rank)
    found: dict[str, list[tuple[int, int, Weight]]] = {}
    for stack in layout.model.stacks:
        for layer in range(*layout.layers(stack, at.get("pp", 0))):
            weight = stack.at(layer)
            name, place, dim = _parameter(weight.name, layout)
            found.setdefault(name, []).append((place, dim, weight))
    for name, weights in found.items():
        yield _lay(name, [(dim, w) for _, dim, w in sorted(weights, key=lambda w: w[0])], layout, at)


def _parameter(name: str, layout: Layout) -> tuple[str, int, int]:
    """The parameter that a weight is a part of, its place in it, and the dim along which parts follow each other."""
    for fused in layout.rules.fused:
        for place, of in enumerate(fused.of):
            if f".{of}." in f".{name}.":
                return f".{name}.".replace(f".{of}.", f".{fused.name}.").strip("."), place, fused.dim
    return name, 0, 0


def _lay(name: str, weights: list[tuple[int, Weight]], layout: Layout, at: dict[str, int]) -> Parameter:
    """Lay the rank's part of each weight behind that of the one before."""
    shape: list[int] = []
    parts: list[Part] = []
    for dim, weight in weights:
        box = tuple(split_weight(weight, layout.mesh, at, layout.rules))
        sizes = [b - a for a, b in box]
        begin = shape[dim] if shape else 0
        where = tuple((begin, begin + n) if i == dim else (0, n) for i, n in enumerate(sizes))
        if weight.kind == "vocab":
            sizes[0] = vocab_rows(weight, layout.mesh, layout.rules)
        shape = [begin + n if i == dim else n for i, n in enumerate(sizes)]
        if solid(box):
            parts.append(Part(weight.name, weight.shape, box, where))
    return Parameter(name, tuple(shape), tuple(parts))
