"""The weights of a transformers model that are not trained, as ``freeze=`` names them."""

from __future__ import annotations

from typing import Any

from ...workers.model_options import Build
from ...workers.weights.freeze_patterns import frozen_names


def freeze(model: Any, build: Build) -> None:
    """Take the gradient from the weights that ``build.freeze`` names. A tied weight is named by either of its names.

    Raises ModelError for a pattern that names no weight of this model, or where none is left to train.
    """
    if not build.freeze:
        return
    named = dict(model.named_parameters(remove_duplicate=False))
    embedding = model.get_input_embeddings()
    inside = {id(weight) for weight in embedding.parameters()}
    embeddings = [name for name, weight in named.items() if id(weight) in inside]
    frozen = {id(named[name]) for name in frozen_names(build.freeze, list(named), embeddings, type(model).__name__)}
    for weight in named.values():
        if id(weight) in frozen:
            weight.requires_grad_(False)
