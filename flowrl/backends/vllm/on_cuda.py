"""What vLLM does on a CUDA device: parameters are written where they lie, and graphs of its steps go on with them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

#: Memory of other processes that is read from, by where it begins: whether it is locked for copies to the device.
_LOCKED: dict[int, bool] = {}


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
    begin = memory.data_ptr()
    if begin in _LOCKED:
        return
    _LOCKED[begin] = int(_runtime().cudaHostRegister(begin, memory.nbytes, 0)) == 0
    if not _LOCKED[begin]:
        with suppress(RuntimeError):  # CUDA tells the next call of what has failed: this one hears it
            torch.zeros(1, device="cuda")


def _runtime() -> Any:
    """Return CUDA's own calls, of which torch has these."""
    return torch.cuda.cudart()


def _unlock() -> None:
    """Let memory go again: what is locked would stay with numbers of before when its pages are given back."""
    for begin, is_locked in _LOCKED.items():
        if is_locked:
            _runtime().cudaHostUnregister(begin)
    _LOCKED.clear()


def sleep(worker: Any, parameters: Mapping[str, Tensor]) -> int:
    """Free weights, keys and values. Returns the bytes."""
    _unlock()
    runner = worker.model_runner
    held = [*runner.kv_caches, *runner.get_model().parameters()]
    freed = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in held)}
    with suppress(AssertionError):  # it looks at the whole device, of which others may take memory meanwhile
        worker.sleep(level=2)  # weights are not kept: the next ones come by a publish
    torch.cuda.empty_cache()
    return sum(freed.values())


def wake(worker: Any) -> None:
    """Have memory again where :func:`sleep` has freed it, at the same addresses."""
    worker.wake_up()


def packed_experts(layer: Any, some: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return weights of some experts of a layer as its kernel has them: as they are."""
    return some
