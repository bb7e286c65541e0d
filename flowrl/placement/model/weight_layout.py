"""Which part of every weight each rank of a mesh holds.

A part is a :data:`Box`, a range along each dim. Layers in a row with equal weights count as one weight with the layer
as its first dim, so a box of a :class:`~flowrl.placement.model.model_weights.Stack` starts with the range of layers.

- ``pp`` splits the layers into runs, the first ones a layer longer where they do not divide. The embedding is on the
  first stage, the last norm and the head on the last one; a tied head puts a copy of the embedding there.
- ``tp`` splits by kind: columns along dim 0, rows along dim 1, the vocabulary along dim 0 in parts that are rounded up,
  keys and values by head. Ranks share a head where there are fewer heads than ranks.
- ``ep`` splits experts, along the first dim of their stack. ``folded_ep`` does so over the ranks of ``dp``, ``cp`` and
  ``tp``, which then have whole ones.
- ``fsdp`` splits dim 0 of what these leave, whatever the kind, as FSDP2 does: like ``torch.chunk``, parts are rounded
  up and the last ones smaller or empty. Experts, one tensor per layer, are split between experts.
- ``dp`` and ``cp`` hold copies, and so does ``ep`` of what is no expert.

Backends differ in how they round the vocabulary, in which stages have one layer more, and in who has which part of an
expert: :class:`~flowrl.placement.backends.LayoutRules`.

Engines lay q, k, v and gate, up into one tensor each. A rank's part of that is its part of each of them, one behind the
other, so for ``tp`` it is the same set of numbers; :mod:`flowrl.placement.model.rank_parameters` says where each lies.
Only ``fsdp`` of the tensor as a whole cuts elsewhere: ``fused``. The cut still leaves one range of each, so a box is
enough there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ...errors import PlanError
from ..backends import LayoutRules
from ..cluster.mesh import Mesh
from .model_shape import ModelShape
from .model_weights import TP_DIM, Stack, Weight

#: A range along each dim, first and behind the last; ``()`` is nothing.
Box = tuple[tuple[int, int], ...]
#: Nothing added to the vocabulary, longer stages first, experts split by ``tp`` too.
PLAIN = LayoutRules()


@dataclass(frozen=True)
class Layout:
    """The weights of a model on a mesh.

    >>> layout = Layout(ModelShape.uniform(layers=4, columns=8), Mesh.of("pp=2,tp=4"))
    >>> layout.shards[layout.shard_of(6)]  # the last two layers, columns 4 and 5, all of the width
    (((2, 4), (4, 6), (0, 1)),)

    Ranks that hold the same have the same entry of ``shards``, one box for each of ``model.stacks``. Raises PlanError
    where a size does not divide. ``fused``: ``fsdp`` splits q, k, v and gate, up as one tensor. ``rules``: those of the
    backend that lays it out.
    """

    model: ModelShape
    mesh: Mesh
    fused: bool = False
    rules: LayoutRules = PLAIN

    def __post_init__(self) -> None:
        check_layout(self.model, self.mesh)

    @property
    def axes(self) -> dict[str, int]:
        """The axes along which ranks hold different parts, outermost first."""
        axes = ("pp", "fsdp", "ep", "tp") if self.model.experts else ("pp", "fsdp", "tp")
        if self.model.experts and self.mesh.folded > 1:
            axes = ("pp", "dp", "cp", "tp")
        return {a: self.mesh[a] for a in axes}

    @property
    def copies(self) -> int:
        """How many ranks hold each part."""
        return self.mesh.size // prod(self.axes.values())

    def shard_of(self, rank: int) -> int:
        """Return which of ``shards`` a rank holds."""
        at, index = self.mesh.coordinates(rank), 0
        for axis, size in self.axes.items():
            index = index * size + at.get(axis, 0)
        return index

    @cached_property
    def shards(self) -> tuple[tuple[Box, ...], ...]:
        """What the ranks hold: for each of ``model.stacks`` a box."""
        mesh = Mesh(self.axes)
        return tuple(tuple(self._boxes(mesh.coordinates(i))) for i in range(mesh.size))

    def sizes(self) -> list[int]:
        """Return bytes of each of ``shards``."""
        return [sum(volume(b) for b in boxes) * self.model.dtype_bytes for boxes in self.shards]

    def holds(self, rank: int) -> Iterator[tuple[Weight, Box]]:
        """Yield each weight of which a rank holds something, with a range along each dim of the weight."""
        for stack, box in zip(self.model.stacks, self.shards[self.shard_of(rank)], strict=True):
            yield from parts(stack, box)

    def _boxes(self, at: dict[str, int]) -> Iterator[Box]:
        """What is at these coordinates, stack by stack."""
        stacks = self.model.stacks
        split = [split_weight(s.weight, self.mesh, at, self.rules) for s in stacks]
        n, k = self.mesh["fsdp"], at.get("fsdp", 0)
        for i, stack in enumerate(stacks):
            together = [i]
            if self.fused and stack.weight.fused:
                same = (stack.weight.fused, stack.first, stack.layers)
                together = [j for j, s in enumerate(stacks) if (s.weight.fused, s.first, s.layers) == same]
            before = sum(_length(split[j]) for j in together if j < i)
            first, last = chunk(sum(_length(split[j]) for j in together), n, k)
            (low, high), *rest = split[i]
            row = (min(high, max(low, low + first - before)), min(high, max(low, low + last - before)))
            yield solid((self.layers(stack, at.get("pp", 0)), row, *rest))

    def layers(self, stack: Stack, stage: int) -> tuple[int, int]:
        """Return the layers of a stack that a stage has, counted from the stack's first."""
        stages = self.mesh["pp"]
        if stack.weight.layer is None:
            ends = {stages - 1} if stack.weight.last else {0, stages - 1} if self.model.tied else {0}
            return (0, 1) if stage in ends else (0, 0)
        low, high = layers_of_stage(self.model.layers, stages, stage, self.rules.longer)
        return max(low - stack.first, 0), min(high - stack.first, stack.layers)


def parts(stack: Stack, box: Box) -> Iterator[tuple[Weight, Box]]:
    """Yield the weights behind a box of a stack, each with the range along each of its own dims."""
    if box:
        for layer in range(*box[0]):
            yield stack.at(layer), box[1:]


def chunk(length: int, pieces: int, index: int) -> tuple[int, int]:
    """Return the range of one of ``torch.chunk``'s pieces: rounded up, the last ones smaller or empty.

    >>> [chunk(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = -(-length // pieces)
    return min(length, index * size), min(length, (index + 1) * size)


def volume(box: Box) -> int:
    """Return how many numbers are in a box."""
    return prod(b - a for a, b in box) if box else 0


def solid(box: Box) -> Box:
    """Return the box itself, or ``()`` if there is nothing in it."""
    return box if all(a < b for a, b in box) else ()


def layers_of_stage(layers: int, stages: int, stage: int, longer: str = "first") -> tuple[int, int]:
    """Return the layers of a pipeline stage, first and behind the last. Where needed, some have one more.

    >>> [layers_of_stage(6, 4, stage) for stage in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 6)]
    >>> [layers_of_stage(6, 4, stage, "inner") for stage in range(4)]
    [(0, 1), (1, 3), (3, 5), (5, 6)]

    ``longer``: see :class:`~flowrl.placement.backends.LayoutRules`.
    """
    each, more = divmod(layers, stages)
    begin = {"first": 0, "inner": stages - 1 - more, "last": stages - more}[longer]
    first = stage * each + min(max(stage - begin, 0), more)
    return first, first + each + (begin <= stage < begin + more)


def vocab_rows(weight: Weight, mesh: Mesh, rules: LayoutRules) -> int:
    """Return how many rows of a vocabulary each rank along ``tp`` has, those included that are added."""
    rows = -(-weight.shape[0] // rules.vocab_multiple) * rules.vocab_multiple
    return -(-rows // mesh["tp"])


def split_weight(weight: Weight, mesh: Mesh, at: dict[str, int], rules: LayoutRules = PLAIN) -> list[tuple[int, int]]:
    """Return what ``ep`` and ``tp`` leave of a weight, as a range along each dim."""
    ranges = [(0, n) for n in weight.shape]
    dim, tp, rank = TP_DIM[weight.kind], mesh["tp"], at.get("tp", 0)
    if weight.kind == "vocab":
        rows = vocab_rows(weight, mesh, rules)
        ranges[0] = (min(weight.shape[0], rank * rows), min(weight.shape[0], (rank + 1) * rows))
        return ranges
    if weight.kind.startswith("expert"):
        if mesh.folded > 1:
            place = (at.get("dp", 0) * mesh["cp"] + at.get("cp", 0)) * tp + rank
            ranges[0] = chunk(weight.shape[0], mesh.folded, place % mesh.folded)
            return ranges
        if rules.whole_experts and mesh["ep"] > 1:
            ranges[0] = layers_of_stage(weight.shape[0], mesh["ep"] * tp, at.get("ep", 0) * tp + rank)
            return ranges
        ranges[0] = chunk(weight.shape[0], mesh["ep"], at.get("ep", 0))
    if dim is not None:
        units = weight.shape[dim] // weight.unit
        if weight.kind == "kv" and units < tp:  # ranks next to each other share a head
            rank, tp = rank * units // tp, units
        first, last = chunk(units, tp, rank)
        ranges[dim] = (first * weight.unit, last * weight.unit)
    return ranges


def _length(ranges: list[tuple[int, int]]) -> int:
    """How many rows are left along dim 0."""
    return ranges[0][1] - ranges[0][0]


def check_layout(model: ModelShape, mesh: Mesh, rules: LayoutRules = PLAIN) -> None:
    """Raise PlanError where a model does not divide along the axes of a mesh.

    Allowed: layers that do not divide by pp, rows that do not by fsdp, and a vocabulary that does not by tp, unless
    the ``rules`` add rows to it, which then have to.
    """
    tp, kv = mesh["tp"], model.kv_heads
    inner = "columns" if not model.heads else "intermediate columns"
    for what, count, axis in (
        ("attention heads", model.heads, "tp"),
        (inner, model.intermediate if len(model.dense_layers) or not model.experts else 0, "tp"),
        ("columns of an expert", model.expert_intermediate if mesh.folded == 1 else 0, "tp"),
        ("columns of the shared expert", model.shared_intermediate, "tp"),
        ("experts", model.experts, "ep"),
    ):
        if count % mesh[axis]:
            fits = [str(n) for n in range(1, min(count, 1024) + 1) if count % n == 0]
            best = min(fits, key=lambda n: (abs(int(n) - mesh[axis]), -int(n)))
            raise PlanError(
                f"{model.name} has {count} {what}, which {axis}={mesh[axis]} does not divide.",
                fix=f"Write {axis}={best}.",
            )
    if mesh.folded > 1 and model.experts % mesh.folded:
        fits = [n for n in range(1, min(model.experts, mesh.folded) + 1) if model.experts % n == 0]
        raise PlanError(
            f"{model.name} has {model.experts} experts, which folded_ep={mesh.folded} does not divide.",
            fix=f"Write folded_ep={fits[-1]}.",
        )
    if kv and kv % tp and tp % kv:
        raise PlanError(
            f"{model.name} has {kv} heads of keys and values, which tp={tp} neither divides nor is divided by.",
            fix=f"Write a tp that divides {kv}, or a multiple of {kv}: ranks then share a head.",
        )
    rows = -(-model.vocab // rules.vocab_multiple) * rules.vocab_multiple
    if rules.vocab_multiple > 1 and rows % tp:
        raise PlanError(
            f"the vocabulary of {model.name} is rounded up to {rows} rows, which tp={tp} does not divide.",
            fix="Write a tp that is a power of 2.",
        )
    if mesh["pp"] > model.layers:
        raise PlanError(
            f"{model.name} has {model.layers} layers, too few for pp={mesh['pp']}.",
            fix=f"Write pp={model.layers} or less.",
        )
