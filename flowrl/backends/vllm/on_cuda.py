"""What vLLM does on a CUDA device: parameters are written where they lie, and graphs of its steps go on with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: Memory of other processes that is locked for copies to the device: its bytes, by where they begin.
_LOCKED: dict[int, int] = {}


def engine_options(*, compiled: bool) -> dict[str, Any]:
    """Return what vLLM is told of itself here alone.

    Its memory is that of its weights, and of keys and values as the plan says: no share of the device, which others may
    use. Without compiling, a decode step is still one graph of the model's own kernels.
    """
    graphs = {} if compiled else {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return {"gpu_memory_utilization": 0.01, "enable_sleep_mode": True, "moe_backend": "triton", **graphs}


def prepare(*, packed: bool) -> None:
    """Do nothing: weights are not packed here."""


@torch.no_grad()
def load(worker: Any, parameters: Mapping[str, Tensor], packed: bool) -> set[str]:
    """Load whole parameters by vLLM's names. Returns the names of those that got nothing."""
    mine = dict(worker.model_runner.get_model().named_parameters())
    for name, given in parameters.items():
        there = mine.pop(name)
        assert there.shape == given.shape, f"vLLM has {name} as {list(there.shape)}, and not as {list(given.shape)}"
        there.copy_(given, non_blocking=True)
    torch.cuda.synchronize()
    return set(mine)


def hold(memory: Tensor) -> None:
    """Lock the memory of another process that weights are read from, which lasts as long as this one.

    Copies from there are faster. Memory that is given back while it is locked breaks other copies.
    """
    begin, size = memory.data_ptr(), memory.nbytes
    if begin not in _LOCKED and int(_runtime().cudaHostRegister(begin, size, 0)) == 0:
        _LOCKED[begin] = size


def _runtime() -> Any:
    """Return CUDA's own calls, of which torch has these."""
    return torch.cuda.cudart()


def _unlock() -> None:
    """Let memory go again: what is locked would stay with numbers of before when its pages are given back."""
    for begin in _LOCKED:
        _runtime().cudaHostUnregister(begin)
    _LOCKED.clear()


def sleep(worker: Any, parameters: Mapping[str, Tensor]) -> int:
    """Free weights, keys and values. Returns the bytes."""
    _unlock()
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    worker.sleep(level=2)  # weights are not kept: the next ones come by a publish
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    return after - before


def wake(worker: Any) -> None:
    """Have memory again where :func:`sleep` has freed it, at the same addresses."""
    worker.wake_up()


def packed_experts(layer: Any, some: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return weights of some experts of a layer as its kernel has them: as they are."""
    return some
