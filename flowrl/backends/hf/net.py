"""A loaded model as the engine uses it: hidden states, head, and what its attention allows, tried at opening."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import ModelError
from ...workers.headway import make_headway
from .logits import Head

FULL, WINDOWED = "full_attention", "sliding_attention"

Found = TypeVar("Found")


class Refused(Exception):
    """A model does not run with what it was given. Raised in trials alone."""


class Net:
    """A decoder-only model: ``net.hidden(ids)``, ``net.head``.

    ``reach`` is how many tokens may attend to each other in full: None is any number, 0 says that this is not known
    or not so. ``own_cache``: generation may use the engine's own cache (up to ``reach``); ``cached``: it may use
    transformers' cache; ``grouped``: rows of a prompt may share one sequence.

    ``like`` is a net of a smaller model of the same kind, of which all is taken that would be found out by passes
    through this one, whose weights are not there yet.
    """

    #: Whether all weights are there outside of :meth:`run` too.
    generates = True

    def __init__(
        self, model: Any, kind: str, device: torch.device, compute: torch.dtype, *, like: Net | None = None
    ) -> None:
        self.model, self.kind, self.device, self.compute = model, kind, device, compute
        self.config = model.config.get_text_config(decoder=True)
        self.weights_dtype: torch.dtype = next(model.parameters()).dtype
        self.reach = attention_reach(self.config)
        self.output: torch.nn.Linear = model.get_output_embeddings() if kind == "lm" else model.score
        self.body = self._find_body() if like is None else self._body_like(like)
        self.own_cache = self.grouped = self.reach != 0
        self.recomputed: list[Any] = []
        self.cached = True
        self.tries = False  # whether this is a trial
        if like is not None:
            self.own_cache, self.grouped, self.cached = like.own_cache, like.grouped, like.cached

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self, compute: Callable[[], Found]) -> Found:
        """What ``compute`` gives. All that reads weights in a forward pass is inside of one, so that they are there."""
        return compute()

    def before_pass(self, *, last: bool) -> None:
        """A forward and a backward pass follow, the ``last`` of an optimizer step or one before it."""

    def reset(self) -> None:
        """Be ready for other passes after one has failed."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Passes without gradient."""
        with torch.no_grad():
            yield

    def mixed(self) -> AbstractContextManager[Any]:
        """Autocast, where the weights are wider than the computation."""
        if self.weights_dtype == self.compute:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)

    def exact(self) -> AbstractContextManager[Any]:
        """No autocast inside, for what is computed in the dtypes that it names."""
        if self.weights_dtype == self.compute:
            return nullcontext()
        return torch.autocast(self.device.type, enabled=False)

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Last hidden states [rows, tokens, hidden] of ``ids`` [rows, tokens].

        ``mask`` is what is added to the attention's scores, [rows, 1, tokens, keys]; None is causal.
        """
        make_headway()
        given: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
        if positions is not None:
            given["position_ids"] = positions
        if mask is not None:
            given["attention_mask"] = mask
        if cache is not None:
            given[self._cache_name] = cache
        try:
            return self.body(**given).last_hidden_state
        except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, IndexError) as error:
            if self.tries:
                raise Refused from error
            raise

    @property
    def head(self) -> Head:
        """The output layer with its present weights."""
        return replace(self._shape, weight=self.output.weight, bias=self.output.bias)

    def values(self, hidden: Tensor) -> Tensor:
        """The scalar head's number for each hidden state: [..., hidden] to [...], in float32 at least."""
        wide = torch.promote_types(self.weights_dtype, torch.float32)
        bias = self.output.bias
        found = torch.nn.functional.linear(
            hidden.to(wide), self.output.weight.to(wide), None if bias is None else bias.to(wide)
        )
        return found.squeeze(-1)

    @cached_property
    def _cache_name(self) -> str:
        """What the model calls its cache."""
        names = inspect.signature(self.body.forward).parameters
        return "cache_params" if "cache_params" in names and "past_key_values" not in names else "past_key_values"

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, layers that shall be computed again in the backward pass are; they alone are in training mode then.

        transformers recomputes in no other mode, and would have dropout and no cache if all were in it for good.
        """
        for layer in self.recomputed:
            layer.training = True
        try:
            yield
        finally:
            for layer in self.recomputed:
                layer.training = False

    def recompute_layers(self) -> None:
        """Keep no activations inside layers from now on. ModelError where the model cannot do so."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        try:
            if hasattr(self.model, "activation_checkpointing_enable"):
                self.model.activation_checkpointing_enable()
            else:
                self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            raise ModelError(str(error), fix="Leave gradient_checkpointing off for this model.") from error
        self.recomputed = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]

    @cached_property
    def filler(self) -> int:
        """An id to fill with that is not the padding id, of which some models warn. What it is never matters."""
        return 1 if getattr(self.config, "pad_token_id", None) == 0 else 0

    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values for each token of a row."""
        heads, size = _heads(self.config)
        heads = getattr(self.config, "num_key_value_heads", None) or heads
        return 2 * self.config.num_hidden_layers * heads * size * self.compute.itemsize

    @cached_property
    def flops(self) -> tuple[float, float]:
        """Of a forward pass: floating-point operations for each token, and for each pair of tokens that attend."""
        config, body = self.config, self.body
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        count = 0.0
        for name, weight in body.named_parameters():
            if weight.dim() > 1 and weight is not self.model.get_input_embeddings().weight:
                share = config.num_experts_per_tok / experts if experts and ".experts." in name else 1.0
                count += weight.numel() * share
        heads, size = _heads(config)
        return 2 * count, 4.0 * config.num_hidden_layers * heads * size

    @property
    def positions(self) -> int | None:
        """How many tokens a sequence may have, where the configuration says so; not above :attr:`rotary_reach`."""
        said = (getattr(self.config, "max_position_embeddings", None), self.rotary_reach)
        found = [most for most in said if isinstance(most, int) and most > 0]
        return min(found) if found else None

    @cached_property
    def rotary_reach(self) -> int | None:
        """Up to how many tokens its rotary embeddings do not depend on the other rows of a pass; None is any number."""
        return rotary_reach(self.config)

    # -- finding out what it is -------------------------------------------------------------------------------------

    def _find_body(self) -> Any:
        """The part that gives hidden states; for a language model the head is held against the model's own logits."""
        self._shape = Head(self.output.weight)
        if self.kind == "scalar":
            return self.model.base_model
        if type(self.output) is not torch.nn.Linear:
            raise ModelError(
                f"The head of {type(self.model).__name__} is a {type(self.output).__name__}, not a linear layer.",
                fix="Use another model, or leave the head out of the adapters' targets.",
            )
        config, tried = self.config, []
        self._shape = Head(
            self.output.weight,
            scale=_logit_scale(config),
            softcap=getattr(config, "final_logit_softcapping", None),
            compute=self.compute,
        )
        ids = (torch.arange(6, device=self.device)[None] * 7 + 3) % self.output.weight.shape[0]
        with torch.no_grad():
            try:
                with self.mixed():
                    whole = self.model(input_ids=ids, use_cache=False).logits[0].double()
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
                raise ModelError(
                    f"A first forward pass of {type(self.model).__name__} fails: {str(error).splitlines()[0][:200]}",
                    fix="Look at the configuration: its sizes may not fit each other.",
                ) from error
            for body in dict.fromkeys((self.model.base_model, self.model.get_decoder())):
                with self.mixed():
                    found = body(input_ids=ids, use_cache=False).last_hidden_state[0]
                if found.shape[-1] != self.output.weight.shape[1]:
                    continue
                tried.append(_distance(self.head.logits(found).double(), whole))
                if tried[-1] < tolerance(self.compute):
                    return body
        worst = f"by {min(tried):.1e} of their size" if tried else "in their shape"
        raise ModelError(
            f"The logits of {type(self.model).__name__} differ {worst} from what its head gives: "
            "it changes them in a way that is not known here.",
            fix="Use a model whose logits are its linear head's, scaled or soft-capped by its configuration.",
        )

    def _body_like(self, like: Net) -> Any:
        self._shape = replace(like._shape, weight=self.output.weight, compute=self.compute)
        return self.model.base_model if like.body is like.model.base_model else self.model.get_decoder()

    def probe(self, *, generates: bool = True) -> None:
        """Try what the configuration promises on a few tokens; what gives other numbers is switched off."""
        from .generation.decode import try_plain, try_slotted
        from .micro_batches import try_shared

        if generates:
            self.own_cache = self.reach != 0 and _agrees(try_slotted, self)
            self.cached = True
            if not self.own_cache or self.reach is not None:
                self.cached = _agrees(try_plain, self)
        self.grouped = self.reach != 0 and _agrees(try_shared, self)

    def is_same(self, found: Tensor, wanted: Tensor) -> bool:
        """Whether two ways to compute the same gave that, save rounding."""
        return _distance(found.double(), wanted.double()) < tolerance(self.compute)


def _agrees(trial: Callable[[Net], tuple[Tensor, Tensor]], net: Net) -> bool:
    """Whether both ways of a trial give the same. False where the model refuses one; what fails here is our mistake."""
    net.tries = True
    try:
        with torch.no_grad(), net.mixed():
            found, wanted = trial(net)
    except Refused:
        return False  # the plain way is left
    finally:
        net.tries = False
    return net.is_same(found, wanted)


def tolerance(dtype: torch.dtype) -> float:
    """How far two ways to compute the same may lie apart, as a share of the numbers' size."""
    return 5e-2 if dtype == torch.bfloat16 else 1e-4


def _distance(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


def _heads(config: Any) -> tuple[int, int]:
    """Attention heads and their size; for a model without attention its hidden size counts as one head."""
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "head_dim", None)
    return heads, size if isinstance(size, int) else config.hidden_size // heads


def _logit_scale(config: Any) -> float:
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        return float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:  # Granite
        return 1.0 / float(config.logits_scaling)
    return 1.0


def rotary_reach(config: Any) -> int | None:
    """How many tokens the longest row of a pass may have before its length changes the rotary embeddings of all.

    ``longrope`` has other frequencies behind the length of its pretraining, ``dynamic`` behind the model's positions.
    """
    said = getattr(config, "rope_parameters", None) or {}
    found: list[int] = []
    for kind in (said, *(each for each in said.values() if isinstance(each, Mapping))):  # all, or each kind of layers
        name = kind.get("rope_type") or ""
        if name == "longrope":
            found.append(kind["original_max_position_embeddings"])
        elif "dynamic" in name:
            found.append(config.max_position_embeddings)
    return min(found) if found else None


def attention_reach(config: Any) -> int | None:
    """How many tokens attend to each other in full: None for any number, a window's size, 0 for other attention."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None) or [WINDOWED if window else "chunked" if chunk else FULL]
    if not set(kinds) <= {FULL, WINDOWED} or (WINDOWED in kinds and not isinstance(window, int)):
        return 0
    if getattr(config, "num_attention_heads", None) is None:
        return 0
    return window if WINDOWED in kinds else None
