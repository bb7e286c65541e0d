"""The workers of a flow as placement sees them: the sizes of their models, and what is done with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors import FlowError, ModelError
from ..graph.stand_ins.values import is_handle
from ..graph.tracing.trace_records import HandleLike, Traced
from ..placement.cost.work import Role
from ..placement.model.model_shape import ModelShape, shape_named
from ..placement.plan.plan import Plan
from ..workers.model_options import Lora, Model, dtypes
from ..workers.weights.freeze_patterns import frozen_names
from .scheme_of_program import sampled_workers, trained_workers

#: The name of the input embedding in the shapes of models.
EMBEDDING = "model.embed_tokens.weight"
#: Bytes of a number.
BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


def roles_of(handles: Sequence[HandleLike], traced: Traced, plan: Plan) -> dict[str, Role]:
    """Every worker by name. Raises ModelError, with the line of the worker, for a model of unknown size."""
    trained, sampled = trained_workers(traced), sampled_workers(traced)
    return {h.name: _role(h, h.name in trained, h.name in sampled, plan) for h in handles}


def dtypes_of(handle: HandleLike, plan: Plan) -> tuple[str, str]:
    """The dtypes of a worker's weights and of its computation, on the device that the plan gives it.

    A device that is not said (``auto``) is taken for a GPU.
    """
    trained = handle.cls.is_trained(handle.arguments)
    return dtypes(_dtype(handle), trained=trained, cuda=plan.device(handle.name) != "cpu")


def _dtype(handle: HandleLike) -> str:
    """The dtype that was asked for, of the worker or of the one whose model it has."""
    dtype: str = handle.arguments.get("dtype", "auto")
    of: Any = handle.arguments.get("of")
    return _dtype(of) if dtype == "auto" and is_handle(of) else dtype


def _role(handle: HandleLike, trains: bool, generates: bool, plan: Plan) -> Role:
    try:
        model = _shape(handle)
        if model is not None:
            model = replace(model, dtype_bytes=BYTES[dtypes_of(handle, plan)[1]])
    except FlowError as error:
        error.at = error.at or handle.at
        raise
    lora = handle.arguments.get("lora")
    scalar = any(hasattr(handle.cls, name) for name in ("values", "score")) and model is not None
    return Role(
        handle.name,
        model,
        trains=trains,
        generates=generates,
        head="scalar" if scalar else "lm",
        lora=_adapters(model, lora) if isinstance(lora, Lora) and model is not None else 0,
        frozen=_frozen(handle, model),
        checkpointing=_checkpointing(handle),
    )


def _checkpointing(handle: HandleLike) -> bool | None:
    """Whether its driver asks for activations to be recomputed; None where it says nothing."""
    if "gradient_checkpointing" not in handle.arguments:
        return True
    said: bool | None = handle.kwargs.get("gradient_checkpointing")
    return said


def _shape(handle: HandleLike) -> ModelShape | None:
    of: Any = handle.arguments.get("of")
    if is_handle(of):
        return _shape(of)
    said = handle.arguments.get("model")
    if said is None:
        return None
    model = Model.of(said)
    if model.config is not None:
        return ModelShape.from_config(model.config, model.title)
    assert model.name is not None, "a model is named or configured"
    return shape_named(model.name)


def _frozen(handle: HandleLike, model: ModelShape | None) -> float:
    """The part of the parameters that is not trained. A name that this model is not known to have counts for none."""
    if model is None or not handle.cls.is_trained(handle.arguments):
        return 1.0
    patterns: Any = handle.arguments.get("freeze", ())
    sizes = {w.name: w.elements for w in model.weights()}
    frozen: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        with suppress(ModelError):
            frozen |= frozen_names([pattern], list(sizes), [EMBEDDING], model.name)
    return sum(sizes[name] for name in frozen) / model.parameters


def _adapters(model: ModelShape, lora: Lora) -> int:
    """Parameters of low-rank adapters: r (rows + columns) of the weight of each linear layer that gets one."""
    layered = (w for w in model.weights() if w.layer is not None and len(w.shape) == 2)
    chosen = (w for w in layered if _adapted(w.name.removesuffix(".weight"), lora.targets))
    return sum(lora.r * (w.shape[0] + w.shape[1]) for w in chosen)


def _adapted(layer: str, targets: str | Sequence[str]) -> bool:
    """Whether a layer gets an adapter: peft takes a text as a pattern, and a list as the ends of names."""
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, layer) is not None
    return any(layer == target or layer.endswith(f".{target}") for target in targets)
