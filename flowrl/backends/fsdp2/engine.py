"""Open a transformers model on a mesh of ranks: ``dp`` copies, each cut by ``fsdp``, after ``tp`` has split layers."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ...errors import ModelError, PlanError
from ...placement.mesh import Mesh
from ...workers.records import Build
from ..hf.engine import HFEngine, prepare_model
from ..hf.engine import open_engine as open_whole
from ..hf.load import load_tokenizer, pick_device, pick_dtypes
from ..team import Ranks, once, open_team, rank_on
from . import split
from .net import ShardedNet
from .parameters import ShardedParameters

AXES = ("dp", "fsdp", "tp")


def open_engine(build: Build) -> HFEngine:
    """Load the model of ``build`` and keep this rank's part of it. Every rank of the mesh has to call it.

    ``torch.distributed`` is initialized before, for the ranks of the mesh alone, in its order; where it is not, and the
    mesh is one process, this is the engine ``hf``. Each rank loads the whole model into the memory of its host first.
    Raises PlanError for axes that are not ``dp``, ``fsdp`` or ``tp``, ModelError for a model that ``tp`` does not
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
    net = ShardedNet(prepare_model(build, tokenizer, cpu, dtype), build.head, cpu, compute)
    net.probe(generates=False)
    dims: dict[str, int] = {}
    if layout["tp"] > 1:
        dims = split.split_dims(net.model, build.head)
        split.check_sizes(net.config, layout["tp"])
    if build.gradient_checkpointing:
        net.recompute_layers()
    mesh = _device_mesh(layout, device)
    net.shard(mesh, device, offload=build.offload)
    parameters = ShardedParameters(net, mesh, dims, Ranks(layout.size, rank, None))
    return HFEngine(build, tokenizer, net, parameters, open_team(build.axes))


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
    if build.lora is not None and layout["tp"] > 1:
        raise ModelError(
            f"'{build.model.title}' has adapters, which the backend fsdp2 does not split by tp={layout['tp']}.",
            fix="Write fsdp instead of tp, or train without lora=.",
        )


def _device_mesh(layout: Mesh, device: torch.device) -> Any:
    """The mesh ``dp, fsdp, tp`` of all ranks, axes of size 1 included."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = tuple(layout[a] for a in AXES)
    return once((device.type, sizes), lambda: init_device_mesh(device.type, sizes, mesh_dim_names=AXES))
