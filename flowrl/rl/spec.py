"""What a loss is to the rest of flowrl: a name, what it reads, and where its mathematics lies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ProgramError, near
from ..graph.op import Spec

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum")


@dataclass
class LossInputs:
    """What a loss is handed, packed along the response tokens of some rows.

    ``predicted`` [total] with gradient: log-probabilities, or values for a loss on values. ``entropy`` [total] where
    the loss asks for it. ``mask`` bool [total], ``fields``: [total] for fields by token, [rows] for fields by row.
    ``lengths`` i64[rows], ``row`` i64[total]: the row of each token.
    """

    predicted: Tensor
    mask: Tensor
    fields: Mapping[str, Tensor]
    lengths: Tensor
    row: Tensor
    entropy: Tensor | None = None
    by_row: frozenset[str] = frozenset()  # names of the fields that have one entry per row

    def __getitem__(self, name: str) -> Tensor:
        """A field by token; a field by row is spread over its tokens."""
        value = self.fields[name]
        return value[self.row] if name in self.by_row else value


@dataclass(frozen=True, repr=False)
class Loss(Spec):
    """A loss per token, given to ``update``: ``rl.ppo_clip(clip=0.2, kl=1e-3)``.

    ``on`` says of what it is a function: ``logprobs`` of an actor, ``values`` of a critic. ``corrects_stale``: it
    weighs rows by the ratio to the policy that sampled them, so rows may be older than the weights.
    ``zero_advantage_is_zero``: a row whose advantages are all zero adds nothing to its gradient.
    """

    math: str | Callable[..., Any] = ""
    aggregate: str = "token-mean"
    on: str = "logprobs"
    needs_entropy: bool = False
    corrects_stale: bool = False
    zero_advantage_is_zero: bool = False

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES:
            meant = near(self.aggregate, AGGREGATES) or AGGREGATES[0]
            raise ProgramError(
                f"{self.name}: aggregate='{self.aggregate}' is none of {', '.join(AGGREGATES)}.",
                fix=f"Write aggregate='{meant}'.",
            )

    def function(self) -> Callable[..., Any]:
        """The mathematics, imported when first asked for."""
        if callable(self.math):
            return self.math
        module, _, name = self.math.partition(":")
        return getattr(import_module(module), name)

    def compute(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss per token [total], and what it reports, per token too."""
        result = self.function()(inputs, **self.parameters)
        return result if isinstance(result, tuple) else (result, {})


def loss(
    *,
    reads: str = "",
    aggregate: str = "token-mean",
    on: str = "logprobs",
    needs_entropy: bool = False,
    corrects_stale: bool = False,
    zero_advantage_is_zero: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Loss]]:
    """Make a loss of your own: a function ``fn(x: LossInputs, **parameters)`` that gives the loss per token.

    The decorated name takes the parameters and gives a :class:`Loss`::

        @rl.loss(reads="advantages, response_mask")
        def reinforce(x, *, scale=1.0):
            return -scale * x["advantages"] * x.predicted

        metrics = actor.update(batch, loss=reinforce(scale=0.5))
    """

    def make(fn: Callable[..., Any]) -> Callable[..., Loss]:
        parameters = inspect.signature(fn)

        def build(**given: Any) -> Loss:
            bound = parameters.bind(None, **given)
            bound.apply_defaults()
            values = dict(list(bound.arguments.items())[1:])
            return Loss(
                name=fn.__name__,
                reads=reads,
                parameters=values,
                math=fn,
                aggregate=aggregate,
                on=on,
                needs_entropy=needs_entropy,
                corrects_stale=corrects_stale,
                zero_advantage_is_zero=zero_advantage_is_zero,
            )

        build.__name__ = fn.__name__
        build.__doc__ = fn.__doc__
        return build

    return make


__all__ = ["AGGREGATES", "Loss", "LossInputs", "loss"]
