"""The Megatron engine on one rank of a mesh: log-probabilities, values, scores and updates of a stage of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError, ProgramError
from ...placement.cluster.mesh import Mesh
from ...workers.model_options import Build
from ...workers.weights.weight_boxes import Shard
from ..hf.engine import HFEngine
from ..hf.load import load_tokenizer, pick_device, pick_dtypes
from ..hf.prepare_model import prepare_unread
from ..hf.saved import reader
from ..team import Team, open_team
from .convert import Converter, fill
from .model import build_stage, transformer_config
from .net import StageNet
from .optimizer import Optimizer
from .parallel import Parallel
from .parameters import StageParameters
from .plain import Plain, check_build
from .read import StageReader
from .shim import import_megatron
from .train import StageTrainer

import_megatron()


def open_engine(build: Build) -> MegatronEngine:
    """Load the model of ``build`` and keep this rank's part of it. Every rank of the mesh has to call it.

    The weights are those that the engine ``hf`` has for the same build. Of a saved model each rank reads its part
    alone; one with random weights, or whose files are not understood, each has in the memory of its host first, whole.
    Raises PlanError for a mesh with ``fsdp``, ModelError for adapters, and for a model that is not carried over to
    megatron-core.
    """
    check_build(build)
    parallel, team = Parallel.of(_at_least_one(build.axes)), open_team(build.axes)
    device = pick_device(build.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    dtype, compute = pick_dtypes(build, device)
    tokenizer = load_tokenizer(build.model)
    model, saved = prepare_unread(build, tokenizer, dtype)
    plain = Plain.of(model)
    with parallel.active():
        settings = transformer_config(plain, build, parallel, compute)
        stage = build_stage(plain, build, parallel, settings)
        converter = Converter(plain, parallel, stage.decoder.layers[0].layer_number - 1)
        there = {name: weight for name, weight in model.named_parameters() if not weight.is_meta}
        fill(stage, converter, reader(there, saved))
        stage.requires_grad_(build.trainable)
        optimizer = None if build.optim is None else Optimizer(stage, settings, build.optim, parallel)
    net = StageNet(model.to("meta"), plain, stage, settings, parallel, build.head)
    return MegatronEngine(build, tokenizer, net, StageParameters(stage, converter, optimizer), team)


class MegatronEngine(HFEngine):
    """A stage of a model: ``open_engine(Build(Model("Qwen/Qwen3-0.6B"), optim=Optim(lr=1e-5), axes={"tp": 2}))``.

    Every rank makes the same calls, each with the rows of its place along the data axes, which may be none. It reads
    and trains; it does not generate.
    """

    net: StageNet
    parameters: StageParameters

    def __init__(self, build: Build, tokenizer: Any, net: StageNet, parameters: StageParameters, team: Team) -> None:
        super().__init__(replace(build, optim=None), tokenizer, net, parameters, team)
        self.build = build
        self.reader = StageReader(net, team, self._micro_tokens(training=False))
        if build.optim is not None and parameters.optimizer is not None:
            self.trainer = StageTrainer(net, parameters, parameters.optimizer, build.optim, team)

    # -- weights ----------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """:meth:`state_shards` as copies by name. ModelError where this rank has a part of them only."""
        shards, meta = self.state_shards()
        return self._whole(shards), meta

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take whole tensors by name, each rank its part of them."""

        def read(shard: Shard) -> bool:
            if shard.name in tensors:
                shard.tensor.copy_(tensors[shard.name][tuple(slice(a, b) for a, b in shard.box)])
            return shard.name in tensors

        self.load_state_shards(read, meta)

    def copy_weights_from(self, other: HFEngine) -> None:
        """Take the weights of another engine of the same model on the same mesh."""
        self.blend(other, 0.0)

    def blend(self, other: HFEngine, decay: float) -> float:
        """``w = decay w + (1 - decay) w_other`` for every weight; gives the norm of the change, the same on each rank.

        Raises ModelError where the other one is cut differently, or for an average in half precision.
        """
        if not 0 <= decay <= 1:
            raise ProgramError(f"decay={decay} is no share of the old weights.", fix="Give a number from 0 to 1.")
        if 0 < decay < 1 and self.net.compute == torch.bfloat16:
            raise ModelError(
                f"The weights of '{self.build.model.title}' are bfloat16, in which small steps of an average are lost.",
                fix='Declare the worker that follows with dtype="fp32".',
            )
        moved = torch.zeros((), dtype=torch.float64, device=self.device)
        for mine, given in _pairs(self.shards(), other.shards()):
            step = (given.to(mine.tensor) - mine.tensor) * (1 - decay)
            if decay == 0:
                mine.tensor.copy_(given)
            else:
                mine.tensor.add_(step)
            if mine.main:
                moved += step.double().square().sum()
        self.weights_written()
        torch.distributed.all_reduce(moved)
        return float(moved.sqrt())

    def _whole(self, shards: list[Shard]) -> dict[str, Tensor]:
        """Copies by name, put together from boxes. ModelError where this rank has a part of them only."""
        if self.net.parallel.mesh.size > 1:
            raise ModelError(
                f"The weights of '{self.build.model.title}' are split over ranks, so no rank has them whole.",
                fix="Move them by shards().",
            )
        found: dict[str, Tensor] = {}
        for shard in shards:
            whole = found.setdefault(shard.name, shard.tensor.new_empty(shard.shape))
            whole[tuple(slice(a, b) for a, b in shard.box)].copy_(shard.tensor)
        return found


def _pairs(mine: list[Shard], given: list[Shard]) -> list[tuple[Shard, Tensor]]:
    """Each of this rank's boxes with the same part of the other engine's. ModelError where it has no such part here."""
    there: dict[str, list[Shard]] = {}
    for shard in given:
        there.setdefault(shard.name, []).append(shard)
    found = [(s, next((g for g in there.get(s.name, []) if _covers(g, s)), None)) for s in mine]
    lacking = [s.name for s, g in found if g is None]
    if lacking:
        raise ModelError(
            "The weights of the other engine are cut differently, or of another model.",
            have=lacking[:5],
            fix="Give both workers the same model, and the same mesh.",
        )
    return [(s, g.view(s.box)) for s, g in found if g is not None]


def _covers(whole: Shard, part: Shard) -> bool:
    """Whether the box of one has that of the other inside."""
    pairs = zip(part.box, whole.box, strict=False)
    return whole.shape == part.shape and all(low <= a and b <= high for (a, b), (low, high) in pairs)


def _at_least_one(axes: Mapping[str, int]) -> Mapping[str, int]:
    """The axes of a mesh; a process without a group gets one of itself."""
    if Mesh(axes).size == 1 and not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return axes
