"""A stage of a model: its run of layers between the embedding and the head, under the names that the model has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError, PlanError
from ...placement.cluster.mesh import Mesh
from ...placement.model.weight_layout import layers_of_stage
from ...workers.headway import make_headway
from ..hf.micro_batches import Micro
from ..hf.net import Net
from ..messages import broadcast_json, dtype_name, empty_like
from ..team import once, rank_on
from .net import ShardedNet, distance

#: What is fed to a pass, and what the last stage computes of it, with the hidden states that ``net.hidden`` gives.
Pass = tuple[Micro, Callable[[], Any]]


@dataclass(frozen=True)
class Pipe:
    """The place of a rank in its pipeline: ``Pipe.of(Mesh.of("pp=2"))``. ``ends`` are its first and its last rank."""

    stage: int
    stages: int
    group: Any
    ends: Any

    @staticmethod
    def of(mesh: Mesh) -> Pipe:
        """Process groups for all pipelines of a mesh. Every rank has to call it."""
        rank = rank_on(mesh)
        return once(("pipe", mesh), lambda: _pipe(mesh, rank))

    @property
    def first(self) -> bool:
        """Whether this rank has the first stage."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it has the last stage."""
        return self.stage == self.stages - 1

    def told(self, item: Any) -> Any:
        """What the last stage says, on all stages: anything that JSON can say."""
        return broadcast_json(item, self._source, self.group)

    def shown(self, found: Sequence[Any], device: torch.device) -> list[Any]:
        """The tensors that the last stage has, or tuples of them, on all stages; None stays None."""
        rows = [row if isinstance(row, tuple) else (row,) for row in found]
        kinds = self.told([[None if t is None else (list(t.shape), dtype_name(t)) for t in row] for row in rows])
        if not self.last:
            rows = [tuple(k and empty_like(k[0], k[1], device) for k in kind) for kind in kinds]
        for tensor in (t for row in rows for t in row if t is not None and t.numel()):
            torch.distributed.broadcast(tensor.contiguous(), self._source, group=self.group)
        return [row[0] if len(row) == 1 else row for row in rows]

    @property
    def _source(self) -> int:
        return torch.distributed.get_process_group_ranks(self.group)[-1]


def _pipe(mesh: Mesh, rank: int) -> Pipe:
    found = None
    for ranks in mesh.groups("pp"):
        group, ends = (torch.distributed.new_group(list(r)) for r in (ranks, (ranks[0], ranks[-1])))
        if rank in ranks:
            found = Pipe(ranks.index(rank), len(ranks), group, ends)
    assert found is not None, "every rank is in a pipeline"
    return found


class Elsewhere(torch.nn.Module):
    """A layer, or the last norm, that another stage has: hidden states go on as they are."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class Absent(torch.nn.Module):
    """An embedding or a head that another stage has. Its ``weight`` has a shape, and no numbers."""

    bias = None

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")


class StageNet(ShardedNet):
    """A net of one stage: made of all stages, then :meth:`keep` leaves the stage, and :meth:`shard` its part of it.

    ``given`` are the hidden states of the stage before, while a pass is computed. ``tied``: the head of the last stage
    is the embedding of the first one, so both have it.
    """

    pipe: Pipe
    given: Tensor | None = None
    tied = False

    def keep(self, pipe: Pipe) -> None:
        """Leave what this stage has. ModelError for a model of another make, PlanError for one with too few layers."""
        layers, embedding = _layers(self), self.model.get_input_embeddings()
        if pipe.stages > len(layers):
            raise PlanError(
                f"{type(self.model).__name__} has {len(layers)} layers, too few for pp={pipe.stages}.",
                fix=f"Write pp={len(layers)} or less.",
            )
        self.tied, _ = self._is_tied(), self.flops  # while all of it is there
        begin, end = layers_of_stage(len(layers), pipe.stages, pipe.stage)
        for number in range(len(layers)):
            if not begin <= number < end:
                layers[number] = Elsewhere()
        if not (pipe.first or (pipe.last and self.tied)):
            _replace(self.model, embedding, Absent(embedding.weight))
        if not pipe.last:
            head: Any = Absent(self.output.weight)
            _replace(self.model, self.output, head)
            self.output, self.body.norm = head, Elsewhere()
        self.pipe = pipe

    def hidden(
        self, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        if self.given is None:
            return super().hidden(ids, positions, mask, cache)
        make_headway()
        rows, width = ids.shape
        how = {"position_ids": positions, "attention_mask": mask, "use_cache": False}
        return self.body(inputs_embeds=self.given[:rows, :width], **how).last_hidden_state

    def twin(self) -> str | None:
        """The name of the weight of which the other end of the pipeline has a copy, where there is one."""
        if not self.tied or not (self.pipe.first or self.pipe.last):
            return None
        weight = self.model.get_input_embeddings().weight
        return next(n for n, p in self.model.named_parameters() if p is weight)

    def through(self, passes: Sequence[Pass], *, train: bool) -> list[Any]:
        """What the passes give on the last stage, in their order; nothing on the others. See :mod:`.passes`."""
        from .passes import through  # half a second of imports

        return through(self, passes, train=train)

    def _apart(self, before: Tensor) -> float:
        none = torch.zeros(0, dtype=torch.int64)
        micro = Micro(self._few(), None, None, none, none)

        def compute() -> float:
            with self.mixed():
                return distance(self.hidden(micro.ids).double().cpu(), before)

        with self.reading():
            return self.pipe.told(self.through([(micro, compute)], train=False))[0]


def _layers(net: Net) -> torch.nn.ModuleList:
    """The layers of a model that is an embedding, layers, a norm and a head, one behind the other."""
    body, embedding = net.body, net.model.get_input_embeddings()
    layers, norm, first = (getattr(body, name, None) for name in ("layers", "norm", "embed_tokens"))
    if isinstance(layers, torch.nn.ModuleList) and isinstance(norm, torch.nn.Module) and first is embedding:
        parts = [embedding, layers, norm, net.output]
        if {id(p) for part in parts for p in part.parameters()} == {id(p) for p in net.model.parameters()}:
            return layers
    raise ModelError(
        f"{type(net.model).__name__} is no embedding, layers and a norm one behind the other, as stages need it.",
        fix="Use fsdp instead of pp, or a model such as Llama, Qwen2, Qwen3 or Mistral.",
    )


def _replace(model: Any, old: Any, new: Any) -> None:
    """Put another module where one is."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child is old:
                setattr(module, name, new)
