"""What megatron-core takes from CUDA without asking, given by the CPU while it runs; where there is CUDA, nothing.

megatron-core trains on gloo and the CPU save for a few places: literal ``"cuda"`` devices, the number of the current
device, streams, and names of tensor types. They are answered inside of :func:`on_cpu` alone; outside of it, and in
every process that opens no Megatron engine, torch is as it was.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_depth = 0


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, megatron-core finds the CPU where it looks for a CUDA device. Inert with CUDA; it may be nested."""
    global _depth
    if torch.cuda.is_available() or _depth:
        yield
        return
    kept = {name: getattr(torch.cuda, name) for name in _STAND_INS}
    kept_cuda, _depth = torch.Tensor.cuda, 1
    try:
        for name, stand_in in _STAND_INS.items():
            setattr(torch.cuda, name, stand_in)
        torch.Tensor.cuda = _stay  # type: ignore[method-assign]
        with _Devices():
            yield
    finally:
        _depth = 0
        torch.Tensor.cuda = kept_cuda  # type: ignore[method-assign]
        for name, was in kept.items():
            setattr(torch.cuda, name, was)


def import_megatron() -> Any:
    """Import megatron-core, whose small functions are compiled only where there is CUDA. It takes some seconds.

    Raises ModuleNotFoundError where it is not installed.
    """
    name, said = "TORCHDYNAMO_DISABLE", os.environ.get("TORCHDYNAMO_DISABLE")
    if not torch.cuda.is_available():
        os.environ[name] = "1"  # looked at when its functions are decorated
    try:
        with warnings.catch_warnings():  # of libraries that are not installed: slower, not wrong
            warnings.simplefilter("ignore")
            import megatron.core.distributed
            import megatron.core.models.gpt
            import megatron.core.optimizer
            import megatron.core.pipeline_parallel.schedules
            from megatron.core.transformer.moe import moe_utils, token_dispatcher
    finally:
        if said is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = said
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 asks whether it is None, and leaves it undefined
    if not torch.cuda.is_available():
        token_dispatcher.maybe_move_tensor_to_cpu = _stays  # it takes what is no CUDA tensor for something else
    return megatron.core


def _stays(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Sizes on the CPU, in the form in which a CUDA tensor would come."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _Stream:
    """A stream whose work is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


_STREAM = _Stream()
_STAND_INS: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "synchronize": lambda *_: None,
    "Stream": _Stream,
    "current_stream": lambda *_: _STREAM,
    "stream": lambda _: nullcontext(),
}


def _stay(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


class _Devices(TorchFunctionMode):
    """``device="cuda"`` is the CPU; a tensor's type is told as that of CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = _CPU
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found
