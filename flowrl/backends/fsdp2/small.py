"""A small model of the kind of a large one: the split over ranks is tried on it where the large one is never whole."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...workers.model_options import Build
from ..hf import adapters
from ..hf.gradients_off import freeze

#: The size of an attention head, columns of the middle layers for each rank of ``tp``, and an odd vocabulary.
_HEAD, _COLUMNS, _VOCABULARY = 8, 8, 61
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


def small_like(model: Any, build: Build, dtype: torch.dtype, *, tp: int) -> Any | None:
    """A model of the same class, configuration and layers, with small matrices and random weights in ``dtype``.

    No weight or bias is zero or one, so that each matters. It has the names, the dims, the buffers and the ties of
    ``model``, whose weights may be on the meta device, and ``build.lora``. None where it would not, or does not run.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = type(model)(_shrunk(model.config, tp)).to(dtype).eval()
            if build.lora is not None:
                adapters.add(made, replace(build.lora, path=None), build.seed)
            freeze(made, build)
            _draw(made)
        if not build.trainable:
            made.requires_grad_(False)
        with torch.no_grad():
            made(input_ids=torch.arange(6)[None] * 7 + 3, use_cache=False)
    except _FAILURES:
        return None  # its sizes hang together in another way
    return made if _names(made) == _names(model) else None


def take_out(model: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Put weights on the meta device, tied ones as one; gives what they were, under their names without adapters."""
    held = dict(model.named_parameters())
    bare = {id(held[n]): torch.nn.Parameter(held[n].detach().to("meta"), held[n].requires_grad) for n in names}
    for module in model.modules():
        for last, weight in module._parameters.items():
            if id(weight) in bare:
                module._parameters[last] = bare[id(weight)]
    return {adapters.base_name(n): w.detach() for n, w in held.items() if id(w) in bare}


def _shrunk(config: Any, tp: int) -> Any:
    """The configuration with small sizes that ``tp`` divides where it divides the large ones."""
    made = deepcopy(config)
    text = made.get_text_config(decoder=True)
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    few = max(2, tp) if groups % max(2, tp) == 0 else groups
    many = few if heads == groups else 2 * few if heads % (2 * groups) == 0 else heads // groups * few
    sizes = {
        "num_attention_heads": many,
        "num_key_value_heads": few,
        "head_dim": _HEAD,
        "hidden_size": many * _HEAD,
        "intermediate_size": _COLUMNS * tp,
        "moe_intermediate_size": _COLUMNS,  # tp does not split experts
        "vocab_size": _VOCABULARY,
    }
    for name, size in sizes.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, size)
    if getattr(text, "pad_token_id", None) is not None:
        text.pad_token_id = min(text.pad_token_id, 2)
    return made


def _draw(model: Any) -> None:
    """Weights that keep the size of hidden states, and noise on what is a vector."""
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, dtype=weight.dtype)
            weight.copy_(weight + 0.2 * noise if weight.dim() < 2 else noise * weight.shape[-1] ** -0.5)


def _names(model: Any) -> list[tuple[str, int]]:
    return [(n, t.dim()) for named in (model.named_parameters(), model.named_buffers()) for n, t in named]
