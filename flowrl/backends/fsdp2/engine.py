"""Open a transformers model on a mesh of ranks: ``pp`` stages, ``dp`` copies of each, cut by ``tp``, then ``fsdp``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ...errors import ModelError, PlanError
from ...placement.mesh import Mesh
from ...workers.records import Build
from ...workers.weights import Shard
from ..hf.engine import HFEngine, prepare_model, split_weights
from ..hf.engine import open_engine as open_whole
from ..hf.load import load_tokenizer, pick_device, pick_dtypes
from ..team import Ranks, Team, once, open_team, rank_on
from . import split
from .net import ShardedNet
from .parameters import ShardedParameters
from .pipeline import StageReader, StageTrainer
from .stage import Pipe, StageNet

AXES = ("pp", "dp", "fsdp", "tp")


def open_engine(build: Build) -> HFEngine:
    """Load the model of ``build`` and keep this rank's part of it. Every rank of the mesh has to call it.

    ``torch.distributed`` is initialized before, for the ranks of the mesh alone, in its order; where it is not, and the
    mesh is one process, this is the engine ``hf``. Each rank loads the whole model into the memory of its host first.
    Raises PlanError for axes that are none of :data:`AXES`, ModelError for a model that ``tp`` or ``pp`` does not
    divide, or does not know.
    """
    layout = Mesh(build.axes)
    _check(build, layout)
    if layout.size == 1 and not torch.distributed.is_initialized():
        return open_whole(build)
    rank = rank_on(layout)
    device = pick_device(build.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    dtype, compute = pick_dtypes(build, device)
    tokenizer = load_tokenizer(build.model)
    cpu = torch.device("cpu")
    kind = StageNet if layout["pp"] > 1 else ShardedNet
    net = kind(prepare_model(build, tokenizer, cpu, dtype), build.head, cpu, compute)
    net.probe(generates=False)
    dims: dict[str, int] = {}
    if layout["tp"] > 1:
        dims = split.split_dims(net.model, build.head)
        split.check_sizes(net.config, layout["tp"])
    if isinstance(net, StageNet):
        net.keep(Pipe.of(layout))
    if build.gradient_checkpointing:
        net.recompute_layers()
    mesh = _device_mesh(layout, device)
    net.shard(mesh, device, offload=build.offload)
    pool, team = Ranks(layout.size, rank, None), open_team(build.axes)
    if not isinstance(net, StageNet):
        return HFEngine(build, tokenizer, net, ShardedParameters(net, mesh, dims, pool), team)
    twin = net.twin()
    parameters = ShardedParameters(net, mesh, dims, pool, twin=None if twin is None else (twin, net.pipe.ends))
    return StageEngine(build, tokenizer, net, parameters, team)


class StageEngine(HFEngine):
    """A stage of a model: ``open_engine(Build(Model("Qwen/Qwen3-0.6B"), optim=Optim(lr=1e-5), axes={"pp": 2}))``.

    Ranks of a pipeline make the same calls with the same rows, and have the same results.
    """

    def __init__(self, build: Build, tokenizer: Any, net: StageNet, parameters: ShardedParameters, team: Team) -> None:
        super().__init__(replace(build, optim=None), tokenizer, net, parameters, team)
        self.build = build
        self.reader = StageReader(net, team, self._micro_tokens(training=False))
        if build.optim is not None:
            self.trainer = StageTrainer(net, parameters, build.optim, team)

    def _whole(self, shards: list[Shard]) -> dict[str, Tensor]:
        raise split_weights(self.build)


def _check(build: Build, layout: Mesh) -> None:
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ModelError(
            f"The backend fsdp2 needs torch 2.13 or later; here is {torch.__version__}.", fix="Install a newer torch."
        )
    others = [a for a in layout.axes if a not in AXES]
    if others:
        raise PlanError(
            f"The backend fsdp2 has no axis {others[0]} in its mesh {layout}.",
            have=AXES,
            fix=f"Name the backend megatron, which has {others[0]}, or write another axis.",
        )
    for axis in ("pp", "tp"):
        if build.lora is not None and layout[axis] > 1:
            raise ModelError(
                f"'{build.model.title}' has adapters, which the backend fsdp2 does not split by {axis}={layout[axis]}.",
                fix=f"Write fsdp instead of {axis}, or train without lora=.",
            )


def _device_mesh(layout: Mesh, device: torch.device) -> Any:
    """The mesh ``pp, dp, fsdp, tp`` of all ranks, axes of size 1 included."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = tuple(layout[a] for a in AXES)
    return once((device.type, sizes), lambda: init_device_mesh(device.type, sizes, mesh_dim_names=AXES))
