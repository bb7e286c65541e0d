"""Log-probabilities and entropy of tokens from hidden states; the logits of all tokens are never held at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .generation.support import Support

#: How many bytes of float32 logits are held at a time.
LOGITS_BYTES = 128 << 20

#: Whether this torch gives float32 results of bfloat16 products.
_WIDE_SUMS = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 8)


@dataclass(frozen=True)
class Head:
    """How hidden states become logits: ``softcap(scale * (h W^T + b))``, in float32 (float64 for a float64 model).

    ``compute`` is the dtype of what is multiplied; sums are float32. Where the vocabulary is split over the ranks of
    ``group``, ``weight`` and ``bias`` are this rank's rows, ``first`` the number of the first of them.
    """

    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None = None  # [vocab]
    scale: float = 1.0
    softcap: float | None = None
    compute: torch.dtype = torch.float32
    group: Any = None
    first: int = 0

    @property
    def wide(self) -> torch.dtype:
        """The dtype of logits and log-probabilities."""
        return torch.promote_types(self.compute, torch.float32)

    def cast(self) -> Head:
        """The same with the weight in the dtype of the product: no copy for each call."""
        return replace(self, weight=self.weight.detach().to(self.compute))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [tokens, vocab] of ``hidden`` [tokens, hidden], without gradient."""
        return self.shape(product(hidden.to(self.compute), self.weight.to(self.compute)))

    def shape(self, raw: Tensor) -> Tensor:
        """Bias, scale and cap, in place where that is possible."""
        if self.bias is not None:
            raw += self.bias
        if self.scale != 1.0:
            raw *= self.scale
        return raw if self.softcap is None else raw.div_(self.softcap).tanh_().mul_(self.softcap)

    def together(self, value: Tensor, *, most: bool = False) -> Tensor:
        """The sum of ``value``, or the largest, over the parts of the vocabulary; in place."""
        if self.group is not None and value.numel():
            how = torch.distributed.ReduceOp.MAX if most else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(value, how, group=self.group)
        return value

    def normalizer(self, logits: Tensor) -> Tensor:
        """``log sum_v exp(logits_v)`` over the whole vocabulary, [tokens]."""
        if self.group is None:
            return torch.logsumexp(logits, -1)
        peak = torch.full_like(logits[:, :1], -torch.inf) if not logits.shape[1] else logits.amax(-1, keepdim=True)
        peak = self.together(peak, most=True)
        return self.together((logits - peak).exp_().sum(-1)).log_() + peak.squeeze(-1)

    def own(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where targets are in this part [tokens, 1], and which of them are (None: all of them)."""
        if self.group is None:
            return targets[:, None], None
        at = targets[:, None] - self.first
        inside = (at >= 0) & (at < self.weight.shape[0])
        return torch.where(inside, at, 0), inside

    def pick(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The logits of the targets, [tokens]."""
        at, inside = self.own(targets)
        if inside is None:
            return logits.gather(-1, at).squeeze(-1)
        if not logits.shape[1]:
            return self.together(logits.new_zeros(len(logits)))
        return self.together(torch.where(inside, logits.gather(-1, at), 0).squeeze(-1))

    def unshape(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Gradient before scale and cap, from that of the logits; in place."""
        if self.softcap is not None:
            grad *= 1 - (logits / self.softcap).square_()
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a b^T`` with sums and result in float32 at least."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b.T
    if a.is_cuda and _WIDE_SUMS:
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return a.float() @ b.float().T


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: Tensor | None = None,
    support: Support | None = None,
    entropy: bool = False,
    entropy_gradient: bool = True,
    budget: int = LOGITS_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(logits / temperature)[target]`` and, if asked, the entropy of that distribution, in nats.

    Args:
        hidden: [tokens, hidden], with or without gradient.
        head: the output layer. Gradients reach its weight and bias where they ask for them.
        targets: i64[tokens].
        temperature: [tokens], above 0, without gradient; None is 1 for all.
        support: of each token, the part of the vocabulary that the distribution is of; None is all of it.
        entropy: also give the entropy; with ``entropy_gradient=False`` as a number to look at, without gradient.
        budget: bytes of logits held at a time. They are computed again in the backward pass.

    Returns f32[tokens] each (f64 for a float64 model); None for the entropy where it is not asked for.
    """
    rows = torch.tensor([head.weight.shape[0]], device=hidden.device)  # ranks of a vocabulary may differ by one
    chunk = max(1, budget // (head.wide.itemsize * int(head.together(rows, most=True))))
    wide, weights = _wide(temperature, head), (head.weight, head.bias)
    found = _Chunked.apply(hidden, *weights, targets, wide, head, chunk, entropy, entropy_gradient, support)
    return found if entropy else (found, None)


def _wide(temperature: Tensor | None, head: Head) -> Tensor | None:
    """Temperatures [tokens, 1] in the dtype of the logits."""
    return None if temperature is None else temperature.to(head.wide)[:, None]


def distributions(hidden: Tensor, head: Head, temperature: Tensor | None = None) -> Tensor:
    """``log softmax(logits / temperature)`` of the whole vocabulary, [tokens, vocab], with gradient; held as a whole.

    ``temperature`` [tokens] is as :func:`token_logprobs` takes it.
    """
    if head.group is not None:
        hidden = _Copied.apply(hidden, head.group)
    logits = product(hidden.to(head.compute), head.weight.to(head.compute))
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    if head.group is not None:
        logits = _Joined.apply(logits, head.group)
    wide = _wide(temperature, head)
    return (logits if wide is None else logits / wide).log_softmax(-1)


class _Chunked(torch.autograd.Function):
    """The logits of ``chunk`` tokens at a time, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        head: Head,
        chunk: int,
        entropy: bool,
        entropy_gradient: bool,
        support: Support | None,
    ) -> Any:
        low, table = hidden.to(head.compute), weight.to(head.compute)
        tokens = hidden.shape[0]
        logprobs = torch.empty(tokens, dtype=head.wide, device=hidden.device)
        total = torch.empty_like(logprobs)
        spread = torch.empty_like(logprobs) if entropy else None
        for a in range(0, tokens, chunk):
            logits = head.shape(product(low[a : a + chunk], table))
            if temperature is not None:
                logits /= temperature[a : a + chunk]
            inside = _inside(support, a, logits, head)
            total[a : a + chunk] = head.normalizer(logits if inside is None else logits.where(inside, -torch.inf))
            logprobs[a : a + chunk] = head.pick(logits, targets[a : a + chunk]) - total[a : a + chunk]
            if spread is not None:
                logits -= total[a : a + chunk, None]
                shares = logits.exp() if inside is None else logits.exp().masked_fill_(~inside, 0)
                spread[a : a + chunk] = head.together(-shares.mul_(logits).sum(-1))
        if spread is not None and not entropy_gradient:
            ctx.mark_non_differentiable(spread)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, total, spread if entropy_gradient else None)
        ctx.head, ctx.chunk, ctx.support = head, chunk, support
        return logprobs if spread is None else (logprobs, spread)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, targets, temperature, total, spread = ctx.saved_tensors
        head, chunk = ctx.head, ctx.chunk
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        low, table = hidden.to(head.compute), weight.to(head.compute)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=total.dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=total.dtype) if need_bias else None
        for a in range(0, hidden.shape[0], chunk):
            part = slice(a, a + chunk)
            logits = head.shape(product(low[part], table))
            if temperature is not None:
                logits /= temperature[part]
            grad = (logits - total[part, None]).exp_()  # the probabilities, to begin with
            inside = _inside(ctx.support, a, logits, head)
            grad = grad if inside is None else grad.masked_fill_(~inside, 0)
            weighed = grads[0][part, None]
            if spread is not None:
                weighed = weighed + grads[1][part, None] * (logits - total[part, None] + spread[part, None])
            grad.mul_(weighed).neg_()
            at, inside = head.own(targets[part])
            hit = grads[0][part, None]
            if grad.shape[1]:
                grad.scatter_add_(-1, at, hit if inside is None else torch.where(inside, hit, 0))
            if temperature is not None:  # of the logits as the head gives them
                grad /= temperature[part]
                logits *= temperature[part]
            grad = head.unshape(grad, logits)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(head.compute)
            if grad_hidden is not None:
                grad_hidden[part] = product(grad, table.T)
            if grad_weight is not None:
                _accumulate(grad_weight, grad, low[part])
        if grad_hidden is not None:
            head.together(grad_hidden)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 7,
        )


def _inside(support: Support | None, first: int, logits: Tensor, head: Head) -> Tensor | None:
    """Which of these logits [tokens, vocab], the first of token ``first``, the distribution is of; None for all."""
    if support is None:
        return None
    return support.inside(slice(first, first + len(logits)), logits.shape[1], head.first)


class _Copied(torch.autograd.Function):
    """Hidden states as they are on every rank; what each rank's part adds to their gradient is summed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class _Joined(torch.autograd.Function):
    """The logits [tokens, vocab] from the parts [tokens, part] of all ranks, on each of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Any) -> Tensor:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(sizes, torch.tensor([logits.shape[1]]), group=group)
        ctx.widths, ctx.place = [int(n) for n in sizes], torch.distributed.get_rank(group)
        wide = logits.new_zeros(logits.shape[0], max(ctx.widths))
        wide[:, : logits.shape[1]] = logits
        parts = [torch.empty_like(wide) for _ in ctx.widths]
        torch.distributed.all_gather(parts, wide, group=group)
        return torch.cat([p[:, :n] for p, n in zip(parts, ctx.widths, strict=True)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].split(ctx.widths, -1)[ctx.place].contiguous(), None


def _accumulate(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """``total += grad^T hidden``, with sums in the dtype of ``total``."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.T, hidden)
    else:
        total += product(grad.T, hidden.T)
