"""A transformers model as an engine has it: with the ids of its tokenizer, its adapters, and what is frozen frozen."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ModelError
from ...workers.model_options import Build
from . import adapters
from .generation.fused import fuse
from .gradients_off import freeze
from .load import load_model, load_unread
from .net import Net
from .saved import Saved


def open_net(model: Any, build: Build, device: torch.device, compute: torch.dtype) -> Net:
    """The net of a model that is there, tried."""
    net = Net(model, build.head, device, compute)
    fuse(net)
    net.probe()
    if build.gradient_checkpointing:
        net.recompute_layers()
    return net


def prepare_model(build: Build, tokenizer: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of ``build`` with its adapters, as it is trained."""
    return prepared(load_model(build, device, dtype), build, tokenizer)


def prepare_unread(build: Build, tokenizer: Any, dtype: torch.dtype) -> tuple[Any, Saved | None]:
    """The same on the CPU, its weights unread where they can be read by boxes; see :func:`load_unread`."""
    model, saved = load_unread(build, dtype)
    return prepared(model, build, tokenizer), saved


def prepared(model: Any, build: Build, tokenizer: Any) -> Any:
    """A model without adapters, made into that of ``build``."""
    _check_vocabulary(model, tokenizer)
    _adopt_ids(model, tokenizer, build)
    if build.lora is not None:
        adapters.add(model, build.lora, build.seed)
    freeze(model, build)
    if not build.trainable:
        model.requires_grad_(False)
    return model


def _check_vocabulary(model: Any, tokenizer: Any) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer is not None and len(tokenizer) > rows:
        raise ModelError(
            f"The tokenizer has {len(tokenizer)} tokens; the model embeds {rows}.",
            fix="Use the model's own tokenizer, or a configuration with a larger vocab_size.",
        )


def _adopt_ids(model: Any, tokenizer: Any, build: Build) -> None:
    """A model made from a configuration ends and pads where its tokenizer does, unless the configuration says."""
    said = build.model.config
    if said is None or tokenizer is None:
        return
    settings = getattr(model, "generation_config", None)
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        if name not in said:
            for place in (model.config, settings):
                if place is not None:
                    setattr(place, name, getattr(tokenizer, name, None))
