"""What vLLM does on a CPU: weights are packed as its kernels want them, or computed with where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def engine_options(*, compiled: bool) -> dict[str, Any]:
    """Return what vLLM is told of itself here alone."""
    return {"enforce_eager": not compiled}


def prepare(*, packed: bool) -> None:
    """Have glibc keep what is freed where weights are packed: each publish packs some of the same sizes, and fresh
    memory is dear."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if packed and change is not None:
        change(_M_MMAP_MAX, 0)
        change(_M_TRIM_THRESHOLD, -1)


def hold(memory: Tensor) -> None:
    """Do nothing: weights are read where they lie."""


@torch.no_grad()
def load(worker: Any, parameters: Mapping[str, Tensor], packed: bool) -> set[str]:
    """Load whole parameters by vLLM's names. Returns the names of those that got nothing."""
    from vllm.config import set_current_vllm_config

    runner = worker.model_runner
    model = runner.get_model()
    mine = dict(model.named_parameters())
    experts = {id(layer): layer for layer in model.modules() if hasattr(layer, "w13_weight")}
    with set_current_vllm_config(runner.vllm_config):
        for name, given in parameters.items():
            (_write if packed or given.dim() != 2 else _lay)(model, name, mine.pop(name), given)
        for layer in experts.values():
            _pack_experts(layer)
        if packed:
            _pack_heads(model)
    return set(mine)


def _write(model: Any, name: str, mine: Tensor, given: Tensor) -> None:
    """Write one parameter. What a layer has packed for the CPU, and then emptied, it packs again."""
    path, _, last = name.rpartition(".")
    layer = model.get_submodule(path)
    if hasattr(layer, "w13_weight"):  # of experts, which are packed in place of those as they are given
        setattr(layer, last, torch.nn.Parameter(given.to(mine.dtype, copy=True), requires_grad=False))
        return
    if mine.shape == given.shape:
        mine.data.copy_(given)
        return
    assert not mine.numel(), f"vLLM has {name} as {list(mine.shape)}, and not as {list(given.shape)}"
    setattr(layer, last, torch.nn.Parameter(given.to(mine.dtype), requires_grad=False))
    _pack(layer)


def _lay(model: Any, name: str, mine: Tensor, given: Tensor) -> None:
    """Have a layer, and an output head that is tied to it, compute with a matrix where it lies."""
    weight = torch.nn.Parameter(given.to(mine.dtype), requires_grad=False)
    path, _, last = name.rpartition(".")
    layer = model.get_submodule(path)
    for one in {layer, *(module for module in model.modules() if getattr(module, last, None) is mine)}:
        setattr(one, last, weight)
        one.cpu_linear = _multiply


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias`` by oneDNN, which in fp32 torch's own linear layer does not use."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def _pack(layer: Any) -> None:
    layer.cpu_linear = None  # what was packed leaves its memory to what is
    layer.quant_method.process_weights_after_loading(layer)


def _pack_experts(layer: Any) -> None:
    layer.quant_method.moe_kernel = None  # with one that is there, they would be taken as they are, and not packed
    layer.quant_method.process_weights_after_loading(layer)


def _pack_heads(model: Any) -> None:
    """Pack the weights of output heads for the CPU again: they keep those of before, tied to an embedding or not."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            _pack(module)


def sleep(worker: Any, parameters: Mapping[str, Tensor]) -> int:
    """Free keys and values, and weights that are copies of ``parameters``. Returns the bytes."""
    runner = worker.model_runner
    model = runner.get_model()
    held = [*runner.kv_caches, *model.parameters()]
    storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in held) if s.resizable()}
    worker.emptied = [(storage, storage.nbytes()) for storage in storages.values()]
    packed = {n: parameters[n] for n, mine in model.named_parameters() if n in parameters and not mine.numel()}
    for storage, _ in worker.emptied:
        storage.resize_(0)
    for layer in model.modules():
        if getattr(layer, "cpu_linear", None) is not None:
            layer.cpu_linear = None  # and what was packed for it: load_weights packs again
        if hasattr(layer, "w13_weight"):
            layer.quant_method.moe_kernel = None
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    return sum(size for _, size in worker.emptied) + sum(given.nbytes for given in packed.values())


def wake(worker: Any) -> None:
    """Have memory again where :func:`sleep` has freed it."""
    for storage, size in worker.emptied:
        storage.resize_(size)
    worker.emptied = []


def packed_experts(layer: Any, some: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return weights of some experts of a layer as its kernel has them."""
    alone: Any = torch.nn.Module()  # what the packing looks at of a layer
    alone.moe_config, alone.activation = layer.moe_config, layer.activation
    for last, given in some.items():
        alone.register_parameter(last, torch.nn.Parameter(given, requires_grad=False))
    layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(alone)
    return {last: getattr(alone, last).data for last in some}
