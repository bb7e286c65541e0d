"""Changes of a net for one computation, taken back after it: other weights, another dtype, another attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..net import Net


@contextmanager
def weights_in_place(net: Net, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the net computes with these weights; those that are not named stay."""
    held = {name: weight for name, weight in net.model.named_parameters() if name in weights}
    before = {name: weight.data for name, weight in held.items()}
    try:
        for name, weight in held.items():
            weight.data = weights[name].to(weight.device, weight.dtype)
        yield
    finally:
        for name, weight in held.items():
            weight.data = before[name]


@contextmanager
def attributes(targets: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, objects have these values: ``(object, name, value)`` each."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for thing, name, value in targets:
            before.append((thing, name, getattr(thing, name)))
            setattr(thing, name, value)
        yield
    finally:
        for thing, name, value in reversed(before):
            setattr(thing, name, value)


@contextmanager
def computing_in(net: Net, dtype: torch.dtype) -> Iterator[None]:
    """Inside, weights and computation have another dtype, as in an engine that was opened with it."""
    held = list(net.model.parameters())
    before = [weight.data for weight in held]
    shape = getattr(net, "_shape")  # noqa: B009 - the head's scale and dtype
    with ExitStack() as stack:
        stack.enter_context(
            attributes([(net, "compute", dtype), (net, "weights_dtype", dtype), (net, "_shape", _recast(shape, dtype))])
        )
        try:
            for weight in held:
                weight.data = weight.data.to(dtype)
            yield
        finally:
            for weight, data in zip(held, before, strict=True):
                weight.data = data


def _recast(head: Any, dtype: torch.dtype) -> Any:
    from dataclasses import replace

    return replace(head, compute=dtype)


def rounded(net: Net, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights as they are after a trip through another dtype."""
    return {name: weight.data.to(dtype).to(weight.dtype) for name, weight in net.model.named_parameters()}
