"""What a loss is to the rest of flowrl: a name, what it reads, and where its mathematics lies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ..errors import FieldError, ProgramError, near
from ..graph.ops.allowed import number, problem
from ..graph.ops.check_arguments import rule_of
from ..graph.ops.field_types import TypeTextError, parse_fields
from ..graph.ops.function_spec import Spec
from ..graph.script.fields_read_in_source import fields_read
from ..graph.script.site import defined_at
from ..graph.stand_ins.values import Value
from .take_rows import take_rows

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)
#: Of losses per row: a mean over the rows that have one, or their sum.
ROW_AGGREGATES = ("row-mean", "row-sum")
_NORM = number(above=0, fix="Give norm= the longest response that may be sampled, in tokens.")
PREDICTIONS = ("logprobs", "values", "scores")


@dataclass
class LossInputs:
    """What a loss is handed, packed along the response tokens of some rows.

    ``predicted`` [total] with gradient: log-probabilities, values for a loss on values; [rows] for one on scores.
    ``entropy`` [total] and ``distribution`` [total, vocab], log-probabilities of all tokens, where the loss asks for
    them, with gradient. ``mask`` bool [total], ``fields``: [total] for fields by token,
    [rows] for fields by row. ``lengths`` i64[rows], ``row`` i64[total]: the row of each token. ``group`` i64[rows]:
    rows of one prompt have the same number, from 0. ``version``: of the weights before this update.

    >>> import torch
    >>> x = rl.LossInputs(
    ...     predicted=torch.tensor([-1.0, -2.0, -3.0]),
    ...     mask=torch.tensor([True, True, True]),
    ...     fields={"advantages": torch.tensor([1.0, 1.0, -1.0])},
    ...     lengths=torch.tensor([2, 1]),
    ...     row=torch.tensor([0, 0, 1]),
    ... )
    >>> x.row_sum(x.predicted).tolist(), x.row_count().tolist()
    ([-3.0, -3.0], [2, 1])
    """

    predicted: Tensor
    mask: Tensor
    fields: Mapping[str, Tensor]
    lengths: Tensor
    row: Tensor
    entropy: Tensor | None = None
    by_row: frozenset[str] = frozenset()  # names of the fields that have one entry per row
    group: Tensor | None = None
    distribution: Tensor | None = None
    version: int = 0

    def __getitem__(self, name: str) -> Tensor:
        """A field by token; a field by row is spread over its tokens."""
        if name not in self.fields:
            raise FieldError(
                f"the loss reads x['{name}'], which its reads= does not name.",
                have=self.fields,
                fix=f"Add {name} to its reads=.",
            )
        value = self.fields[name]
        return value[self.row] if name in self.by_row else value

    def spread(self, rows: Tensor) -> Tensor:
        """What each row has, [rows], for each of its tokens: [total], with gradient."""
        return take_rows(rows, self.row)

    def row_sum(self, tokens: Tensor) -> Tensor:
        """The sum of [total] over the masked tokens of each row: [rows], with gradient."""
        held = tokens.masked_fill(~self.mask, 0)
        return held.new_zeros(len(self.lengths)).index_add_(0, self.row, held)

    def row_count(self) -> Tensor:
        """How many masked tokens each row has: i64[rows]."""
        return self.mask.new_zeros(len(self.lengths), dtype=self.row.dtype).index_add_(0, self.row, self.mask.long())

    def row_mean(self, tokens: Tensor) -> Tensor:
        """The mean of [total] over the masked tokens of each row, [rows]; 0 where it has none."""
        return self.row_sum(tokens) / self.row_count().clamp(min=1)


@dataclass(frozen=True, repr=False)
class Loss(Spec):
    """A loss per token or per row, given to ``update``: ``rl.ppo_clip(clip=0.2, kl=1e-3)``.

    ``on`` says of what it is a function: ``logprobs`` of an actor, ``values`` of a critic, ``scores`` of a reward
    model. ``per`` is ``token`` or ``row``; ``aggregate`` makes one number of either. ``norm`` is the tokens that
    ``seq-mean-token-sum-norm`` divides by. ``groups``: it compares rows of one prompt, which are therefore never put
    into different mini-batches. ``corrects_stale``: it weighs rows by the ratio to the policy that sampled them, or
    does not ask who did, so rows may be older than the weights. ``foreign``: it does not ask who sampled, so another
    worker may have. ``zero_advantage_is_zero``: a row whose advantages are all zero adds nothing to its gradient.
    ``reports``: the names of what it reports, where they are known; they are metrics of the update, also of one that
    trains no row. ``where``: a field bool[]; rows where it is false count as rows without a sampled token
    (:func:`where`).

    >>> loss = rl.ppo_clip(kl=1e-3)
    >>> loss.on, loss.per, loss.aggregate, loss.corrects_stale
    ('logprobs', 'token', 'token-mean', True)
    """

    math: str | Callable[..., Any] = ""
    aggregate: str = "token-mean"
    on: str = "logprobs"
    per: str = "token"
    norm: float | None = None
    groups: bool = False
    needs_entropy: bool = False
    needs_distribution: bool = False
    corrects_stale: bool = False
    foreign: bool = False
    zero_advantage_is_zero: bool = False
    reports: tuple[str, ...] = ()
    where: str = ""

    def __post_init__(self) -> None:
        self._check_word("on", PREDICTIONS)
        self._check_word("per", ("token", "row"))
        self._check_word("aggregate", AGGREGATES if self.per == "token" else ROW_AGGREGATES)
        if self.norm is not None and not _NORM.accepts(self.norm):
            raise ProgramError(f"{self.name}: {problem('norm', self.norm, _NORM)}", fix=_NORM.mend("norm", self.norm))
        if self.aggregate == "seq-mean-token-sum-norm" and self.norm is None:
            raise ProgramError(
                f"{self.name}: aggregate='{self.aggregate}' divides by a number of tokens, and there is none.",
                fix="Give norm=, the longest response that may be sampled.",
            )

    def __repr__(self) -> str:
        """``gspo(ppo(low=0.0003, high=0.0004), ratio=geometric, seq-mean-token-mean)``: what is not 0, off or plain."""
        said = [_said(name, value) for name, value in self.parameters.items()]
        usual = self.aggregate in ("token-mean", "row-mean")
        words = (
            [word for word in said if word]
            + ([] if usual else [self.aggregate])
            + ([f"norm={self.norm:g}"] if self.norm else [])
            + ([f"where {self.where}"] if self.where else [])
        )
        return f"{self.name}({', '.join(words)})"

    def _check_word(self, name: str, words: tuple[str, ...]) -> None:
        said = getattr(self, name)
        if said not in words:
            raise ProgramError(
                f"{self.name}: {name}={said!r} is none of {', '.join(words)}.",
                fix=f"Write {name}='{near(str(said), words) or words[0]}'.",
            )

    @property
    def of_policy(self) -> bool:
        """Whether it trains a policy by advantages; updates measure more of such losses."""
        return self.on == "logprobs" and "advantages" in parse_fields(self.reads)

    @property
    def by_prompt(self) -> bool:
        """Whether rows of one prompt belong into one mini-batch: it compares them, or takes a mean over them."""
        return self.groups or self.aggregate == "prompt-mean"

    def function(self) -> Callable[..., Any]:
        """The mathematics, imported when first asked for."""
        if callable(self.math):
            return self.math
        module, _, name = self.math.partition(":")
        return getattr(import_module(module), name)

    def compute(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss per token [total], or per row [rows], and what it reports: [total] or [rows] each.

        Raises ProgramError for a loss of another shape, and for one without a gradient where ``predicted`` has one.
        """
        result = self.function()(inputs, **self.parameters)
        loss, reported = result if isinstance(result, tuple) else (result, {})
        expected = len(inputs.lengths) if self.per == "row" else len(inputs.row)
        shape = tuple(getattr(loss, "shape", ())) if hasattr(loss, "shape") else None
        if shape != (expected,):
            what = f"shape {list(shape)}" if shape is not None else type(loss).__name__
            unit = "row" if self.per == "row" else "response token"
            raise ProgramError(
                f"loss {self.name} gave {what}, not one number per {unit}, [{expected}].",
                at=None if isinstance(self.math, str) else defined_at(self.math),
                fix="Return it before any .mean() or .sum(): aggregate= makes one number of it."
                if self.per == "row"
                else 'Return it before any .mean() or .sum(): aggregate= makes one number of it; or declare per="row".',
            )
        if inputs.predicted.requires_grad and not loss.requires_grad and _gradients_are_on():
            raise ProgramError(
                f"loss {self.name} does not depend on x.predicted, so nothing would be learned.",
                at=None if isinstance(self.math, str) else defined_at(self.math),
                fix="Compute it from x.predicted, without .detach() and outside of torch.no_grad().",
            )
        return loss, reported


def _gradients_are_on() -> bool:
    import torch

    return torch.is_grad_enabled()


def _check_reads(fn: Callable[..., Any], reads: str) -> None:
    """Refuse a loss that looks up a field that it does not declare: an update hands it no other."""
    try:
        declared = parse_fields(reads)
    except TypeTextError as error:
        raise ProgramError(f"loss {fn.__name__}: {error}.", at=defined_at(fn), fix=error.fix) from None
    first = next(iter(inspect.signature(fn).parameters), "")
    for name, at in fields_read(fn, first, inside=("fields",)).items():
        if name not in declared:
            raise FieldError(
                f"loss {fn.__name__} reads '{name}', which its reads= does not name.",
                at=at,
                have=declared,
                fix=f'Write reads="{", ".join([reads, name] if reads else [name])}".',
            )


#: Values of parameters that need no mention: what is plain.
_PLAIN = {"ratio": "token", "anchor": "rollout", "kl_kind": "k3"}


def _said(name: str, value: Any) -> str:
    """A parameter in the words of a loss; empty for one that is 0, off or plain."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, cast("Sequence[Any]", value)))
    if isinstance(value, (int, float, str, type(None))):
        return "" if not value or _PLAIN.get(name) == value else f"{name}={value}"
    if isinstance(value, Value):
        return f"{name}={getattr(value.ref, 'text', '') or '...'}"  # as it is computed, in a trace
    return str(value) if is_dataclass(value) else f"{name}=..."


def loss(
    *,
    reads: str = "",
    aggregate: str | None = None,
    on: str = "logprobs",
    per: str = "token",
    norm: float | None = None,
    groups: bool = False,
    needs_entropy: bool = False,
    needs_distribution: bool = False,
    corrects_stale: bool = False,
    foreign: bool = False,
    zero_advantage_is_zero: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Loss]]:
    """Make a loss of your own: a function ``fn(x: LossInputs, **parameters)`` that gives the loss per token or row.

    The rest is as :class:`Loss` has it; ``aggregate=None`` is a mean over tokens, or over rows.

    The decorated name takes the parameters and returns a :class:`Loss`, for ``actor.update(batch, loss=weighted())``.

    >>> @rl.loss(reads="advantages, response_mask")
    ... def weighted(x, *, scale=1.0):
    ...     return -scale * x["advantages"] * x.predicted
    >>> weighted(scale=0.5)
    weighted(scale=0.5)
    >>> weighted().reads
    'advantages, response_mask'
    """

    def make(fn: Callable[..., Any]) -> Callable[..., Loss]:
        parameters = inspect.signature(fn)
        _check_reads(fn, reads)

        def build(**given: Any) -> Loss:
            bound = parameters.bind(None, **given)
            bound.apply_defaults()
            values = dict(list(bound.arguments.items())[1:])
            rules = {n: rule for n in values if (rule := rule_of(fn, n)) is not None and values[n] is not None}
            return Loss(
                name=fn.__name__,
                allowed=rules,
                reads=reads,
                parameters=values,
                math=fn,
                aggregate=aggregate or f"{per}-mean",
                on=on,
                per=per,
                norm=norm,
                groups=groups,
                needs_entropy=needs_entropy,
                needs_distribution=needs_distribution,
                corrects_stale=corrects_stale,
                foreign=foreign,
                zero_advantage_is_zero=zero_advantage_is_zero,
            )

        build.__name__ = fn.__name__
        build.__doc__ = fn.__doc__
        return build

    return make


def where(field: str, loss: Loss) -> Loss:
    """The same loss of those rows where a bool field is true: ``rl.where("finished", rl.ppo_clip())``.

    The others count as rows without a sampled token, in the denominator too. With ``finished`` it is the overlong
    filtering of DAPO (arXiv:2503.14476, section 3.4): a response that was cut off is neither rewarded nor punished.

    Args:
        field: a field bool[] of the batch.
        loss: any loss of tokens or rows. One that compares the rows of a pair raises for a pair that loses one.

    >>> rl.where("finished", rl.ppo_clip()).reads
    'rollout_logprobs, advantages, response_mask, finished: bool[]'
    """
    return replace(loss, where=field, reads=f"{loss.reads}, {field}: bool[]" if loss.reads else f"{field}: bool[]")
