"""The workers of a flow as placement sees them: the sizes of their models, and what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ..errors import At, FlowError, ModelError
from ..graph.terms import Traced
from ..graph.values import is_handle
from ..placement.model import ModelShape, shape_named
from ..placement.work import Role
from ..workers.base import Worker
from ..workers.freeze import frozen_names
from ..workers.records import Lora, Model
from .scheme import sampled_workers, trained_workers

#: The name of the input embedding in the shapes of models.
EMBEDDING = "model.embed_tokens.weight"


class HandleLike(Protocol):
    """A worker as the flow declares it."""

    @property
    def name(self) -> str: ...
    @property
    def cls(self) -> type[Worker]: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...
    @property
    def at(self) -> At: ...


def roles_of(handles: Sequence[HandleLike], traced: Traced) -> dict[str, Role]:
    """Every worker by name. Raises ModelError, with the line of the worker, for a model of unknown size."""
    trained, sampled = trained_workers(traced), sampled_workers(traced)
    return {h.name: _role(h, h.name in trained, h.name in sampled) for h in handles}


def _role(handle: HandleLike, trains: bool, generates: bool) -> Role:
    try:
        model = _shape(handle)
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
        checkpointing=bool(handle.arguments.get("gradient_checkpointing", True)),
    )


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
    said: Any = handle.arguments.get("freeze", ())
    sizes = {w.name: w.elements for w in model.weights()}
    frozen: set[str] = set()
    for pattern in (said,) if isinstance(said, str) else said:
        with suppress(ModelError):
            frozen |= frozen_names([pattern], list(sizes), [EMBEDDING], model.name)
    return sum(sizes[name] for name in frozen) / model.parameters


def _adapters(model: ModelShape, lora: Lora) -> int:
    """Parameters of low-rank adapters on every linear layer: r (rows + columns) of each weight."""
    layered = (w for w in model.weights() if w.layer is not None and len(w.shape) == 2)
    return sum(lora.r * (w.shape[0] + w.shape[1]) for w in layered)
