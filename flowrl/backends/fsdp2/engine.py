"""Open a transformers model on a mesh of ranks: ``pp`` stages, ``dp`` copies of each, cut by ``tp``, then ``fsdp``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ...errors import ModelError, PlanError
from ...placement.cluster.mesh import Mesh
from ...workers.model_options import Build
from ...workers.weights.weight_boxes import Shard
from ..hf.adapters import base_name
from ..hf.engine import HFEngine, split_weights
from ..hf.engine import open_engine as open_whole
from ..hf.load import load_tokenizer, pick_device, pick_dtypes
from ..hf.prepare_model import prepare_model, prepare_unread
from ..hf.saved import reader
from ..team import Ranks, Team, once, open_team, rank_on
from . import split
from .net import ShardedNet
from .parameters import ShardedParameters
from .pipeline import StageReader, StageTrainer
from .small import small_like, take_out
from .stage import Pipe, StageNet

AXES = ("pp", "dp", "fsdp", "tp")


def open_engine(build: Build) -> HFEngine:
    """Load the model of ``build`` and keep this rank's part of it. Every rank of the mesh has to call it.

    ``torch.distributed`` is initialized before, for the ranks of the mesh alone, in its order; where it is not, and the
    mesh is one process, this is the engine ``hf``. Of a saved model each rank reads its part alone; one with random
    weights, or whose files are not understood, each has in the memory of its host first, whole.
    Raises PlanError for axes that are none of :data:`AXES`, ModelError for a model that ``tp`` or ``pp`` does not
    divide, or does not know.
    """
    layout = Mesh(build.axes)
    _check(build, layout)
    if layout.size == 1 and not torch.distributed.is_initialized():
        return open_whole(build)
    rank_on(layout)
    device = pick_device(build.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    dtype, compute = pick_dtypes(build, device)
    tokenizer = load_tokenizer(build.model)
    mesh = _device_mesh(layout, device)
    net, parameters = _opened(build, layout, mesh, tokenizer, (dtype, compute), device)
    team = open_team(build.axes)
    if isinstance(net, StageNet):
        return StageEngine(build, tokenizer, net, parameters, team)
    return HFEngine(build, tokenizer, net, parameters, team)


def _opened(
    build: Build, layout: Mesh, mesh: Any, tokenizer: Any, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> tuple[ShardedNet, ShardedParameters]:
    """This rank's part of the model, once it is sure that the parts do what the whole does.

    Where no rank has the whole that is tried on a small model of its kind, whose parts are made and filled likewise.
    """
    cpu, (dtype, compute) = torch.device("cpu"), dtypes
    kind = StageNet if layout["pp"] > 1 else ShardedNet
    model, saved = prepare_unread(build, tokenizer, dtype)
    dims = _split_dims(model, build.head, layout["tp"])
    wide = torch.promote_types(compute, torch.float32)
    small = None if saved is None else small_like(model, build, wide, tp=layout["tp"])
    if saved is not None and small is None:
        model, saved = prepare_model(build, tokenizer, cpu, dtype), None
    tried = kind(model, build.head, cpu, compute) if small is None else kind(small, build.head, cpu, wide)
    tried.probe(generates=False)
    before = tried.tried()
    if saved is None or small is None:
        parameters = _split(tried, build, layout, mesh, dims, device, reader({}, None))
        tried.check(before)
        return tried, parameters
    net = kind(model, build.head, cpu, compute, like=tried)
    numbers = take_out(small, [name for name, weight in model.named_parameters() if weight.is_meta])
    _split(tried, build, layout, mesh, dims, device, reader(numbers, None))
    tried.check(before)
    return net, _split(net, build, layout, mesh, dims, device, reader({}, saved))


def _split_dims(model: Any, head: str, tp: int) -> dict[str, int]:
    """The dims that tensor parallel splits, where there is some."""
    if tp == 1:
        return {}
    dims = split.split_dims(model, head)
    split.check_sizes(model.config.get_text_config(decoder=True), tp)
    return dims


def _split(
    net: ShardedNet,
    build: Build,
    layout: Mesh,
    mesh: Any,
    dims: dict[str, int],
    device: torch.device,
    read: Callable[[Shard], None],
) -> ShardedParameters:
    """Leave this rank its part; ``read`` fills the boxes of weights that were not there."""
    shapes = {name: tuple(weight.shape) for name, weight in net.model.named_parameters()}
    absent = {name for name, weight in net.model.named_parameters() if weight.is_meta}
    twin = None
    if isinstance(net, StageNet):
        net.keep(Pipe.of(layout))
        twin = net.twin()
    if build.gradient_checkpointing:
        net.recompute_layers()
    net.shard(mesh, device, offload=build.offload)
    ends = None if twin is None else (twin, Pipe.of(layout).ends)
    parameters = ShardedParameters(net, mesh, dims, Ranks(layout.size, rank_on(layout), None), twin=ends)
    for shard in parameters.shards():
        if shard.name in absent:
            read(replace(shard, name=base_name(shard.name)))
    _check_boxes(parameters, shapes)
    return parameters


def _check_boxes(parameters: ShardedParameters, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Assert that the boxes that count, those of all ranks together, have as many numbers as each weight."""
    mine = [[shard.name, shard.tensor.numel()] for shard in parameters.shards() if shard.main]
    counted: Counter[str] = Counter()
    for listed in parameters.pool.gather(mine):
        counted.update(dict(listed))
    wrong = [name for name, shape in shapes.items() if counted[name] != prod(shape)]
    assert not wrong, f"the boxes of all ranks are the whole of {wrong[:3]}"


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
    if build.freeze and layout["pp"] > 1:
        raise ModelError(
            f"'{build.model.title}' has frozen weights, which the backend fsdp2 does not have in stages (pp="
            f"{layout['pp']}).",
            fix="Write fsdp instead of pp, or train without freeze=.",
        )


def _device_mesh(layout: Mesh, device: torch.device) -> Any:
    """The mesh ``pp, dp, fsdp, tp`` of all ranks, axes of size 1 included."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = tuple(layout[a] for a in AXES)
    return once((device.type, sizes), lambda: init_device_mesh(device.type, sizes, mesh_dim_names=AXES))
