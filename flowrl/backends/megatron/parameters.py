"""The parameters of a stage, and what is trained of them, as boxes in the coordinates of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...workers.weights import weight_boxes as boxes
from ...workers.weights.weight_boxes import Shard
from ..hf.parameters import Parameters, required
from ..messages import dtype_name, gather_json
from ..team import Team
from .convert import Converter, is_expert
from .optimizer import MOMENTS, Optimizer
from .parallel import Parallel


class StageParameters(Parameters):
    """What one rank has of a model: ``StageParameters(stage, converter).shards()``.

    ``optimizer`` is there where it is trained. The pool are all ranks of the mesh.
    """

    def __init__(self, stage: Any, converter: Converter, optimizer: Optimizer | None = None) -> None:
        self.stage, self.converter, self.optimizer = stage, converter, optimizer
        self.parallel: Parallel = converter.parallel
        self.trained = dict(stage.named_parameters()) if optimizer is not None else {}
        self.pool = Team()
        self.pool.data, self.pool.place = self.parallel.mesh.size, torch.distributed.get_rank()

    # -- weights ----------------------------------------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        """Views on all weights; the copy of tied ones that a last stage has does not count."""
        return [shard for name, _ in self.stage.named_parameters() for shard in self._weights(name)]

    def merged(self) -> list[Shard]:
        return self.shards()

    def written(self) -> None:
        with self.parallel.active():
            if self.optimizer is not None:
                self.optimizer.weights_written(trained=False)

    def digest(self) -> str:
        mine = [(n, k, list(s), str(t)) for n, (k, s, t) in boxes.sums(self.shards()).items()]
        return boxes.digest([{n: (k, tuple(s), int(t)) for n, k, s, t in said} for said in gather_json(mine)])

    def whole_state(self) -> dict[str, Tensor]:
        """All weights by name on the first rank of the mesh, on the CPU; none on the others. Every rank calls it."""
        mine = [shard for shard in self.shards() if shard.main]
        said = gather_json([(s.name, list(s.shape), list(s.box), dtype_name(s.tensor)) for s in mine])
        if self.pool.place:
            for shard in mine:
                torch.distributed.send(shard.tensor.contiguous(), 0)
            return {}
        found: dict[str, Tensor] = {}
        device = next(self.stage.parameters()).device
        for rank, listed in enumerate(said):
            for number, (name, shape, box, dtype) in enumerate(listed):
                kind = getattr(torch, dtype)
                sizes = [b - a for a, b in box]
                part = torch.empty(sizes, dtype=kind, device=device) if rank else mine[number].tensor
                if rank:
                    torch.distributed.recv(part, rank)
                whole = found.setdefault(name, torch.empty(shape, dtype=kind))
                whole[tuple(slice(a, b) for a, b in box)].copy_(part)
        return found

    # -- all that is trained ----------------------------------------------------------------------------------------

    def state_shards(self) -> list[Shard]:
        """Trained weights and moments as boxes. Moments are cut along data axes where the optimizer is distributed."""
        return [shard for name, _ in self.stage.named_parameters() for shard in self._state(name)]

    def load_state_shards(self, read: Callable[[Shard], bool], steps: int) -> None:
        """Fill all of them: ``read`` fills a box, or says that it has none, which may be so for moments."""
        optimizer = self.optimizer
        assert optimizer is not None, "it is trained"
        for name, parameter in self.stage.named_parameters():
            for shard in self._trained(name):
                required(shard, read)
            moments = optimizer.moments(parameter)
            complete = all([read(s) for kind, m in moments.items() for s in self._flat(name, kind, m)])
            optimizer.take(parameter, moments if moments and complete else None, steps)
        with self.parallel.active():
            optimizer.weights_written(trained=True)

    def _weights(self, name: str, prefix: str = "") -> Iterator[Shard]:
        parameter = self._parameter(name)
        for part in self.converter.parts(name, parameter):
            main = self.converter.main(part, expert=is_expert(name))
            yield part.shard(parameter.detach(), main=main, prefix=prefix)

    def _trained(self, name: str) -> Iterator[Shard]:
        """The weights as they are trained: those of the model, or wider ones that the optimizer has."""
        optimizer = self.optimizer
        if optimizer is None or not optimizer.low:
            yield from self._weights(name, "weights.")
            return
        held = optimizer.held(self._parameter(name))
        if held is not None:
            yield from self._flat(name, "weights", held.main)

    def _state(self, name: str) -> Iterator[Shard]:
        yield from self._trained(name)
        held = self.optimizer.held(self._parameter(name)) if self.optimizer is not None else None
        for kind in MOMENTS:
            if held is not None and kind in held.state:
                yield from self._flat(name, kind, held.state[kind].view(-1))

    def _flat(self, name: str, kind: str, flat: Tensor) -> Iterator[Shard]:
        """Something that the optimizer has of a parameter, laid out flat."""
        optimizer, parameter = self.optimizer, self._parameter(name)
        held = None if optimizer is None else optimizer.held(parameter)
        if optimizer is None or held is None:
            return
        width = parameter.shape[1] if parameter.dim() > 1 else 1
        for part in self.converter.parts(name, parameter):
            main = self.converter.main(part, expert=is_expert(name), shared=optimizer.distributed)
            yield from part.pieces(flat, held.begin, width, main=main, prefix=f"{kind}.")

    def _parameter(self, name: str) -> Tensor:
        return self.stage.get_parameter(name)
