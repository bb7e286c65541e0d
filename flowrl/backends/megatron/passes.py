"""Forward and backward passes through the stages of a pipeline, a micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...workers.headway import make_headway
from .parallel import Parallel


@dataclass(frozen=True)
class Feed:
    """A pass as this rank is fed: ``ids`` [sequences, tokens], of sequences of ``width`` tokens.

    ``compute`` is called on the last stage, once the hidden states [sequences, width, hidden] are there.
    """

    ids: Tensor
    positions: Tensor
    width: int
    compute: Callable[[], Any]


def feed(ids: Tensor, compute: Callable[[], Any], parallel: Parallel, device: torch.device, *, filler: int) -> Feed:
    """A pass over padded sequences [sequences, tokens].

    They are padded further where ranks split them. With ``cp`` a rank has two of ``2 cp`` equal parts of each sequence,
    one from the front and one from the back: causal attention is as much work for each.
    """
    cp, width = parallel.mesh["cp"], ids.shape[1]
    even = parallel.mesh["tp"] * (2 * cp if cp > 1 else 1)
    wide = -(-width // even) * even
    ids = torch.nn.functional.pad(ids.cpu(), (0, wide - width), value=filler)
    positions = torch.arange(wide).expand(len(ids), -1)
    if cp > 1:
        ids, positions = (_mine(t, parallel["cp"], cp) for t in (ids, positions))
    return Feed(ids.to(device), positions.to(device), width, compute)


def _mine(tokens: Tensor, place: int, cp: int) -> Tensor:
    """The parts of [sequences, tokens] that a rank has."""
    parts = tokens.chunk(2 * cp, 1)
    return torch.cat([parts[place], parts[2 * cp - 1 - place]], 1)


def whole(hidden: Tensor, fed: Feed, config: Any, parallel: Parallel) -> Tensor:
    """Hidden states [sequences, width, hidden] from this rank's part [tokens, sequences, hidden] of a last stage's."""
    if config.sequence_parallel:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    hidden = hidden.transpose(0, 1)
    if parallel.mesh["cp"] > 1:
        hidden = _Sequences.apply(hidden, parallel.group("cp"))  # type: ignore[assignment]
    return hidden[:, : fed.width]


class _Sequences(torch.autograd.Function):
    """Sequences [sequences, tokens, hidden] from the parts of all ranks along ``cp``; gradients of all ranks add up."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.cp = group, group.size()
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ctx.cp)]
        torch.distributed.all_gather(parts, part.contiguous(), group=group)
        halves = [p.chunk(2, 1) for p in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return _mine(total, ctx.group.rank(), ctx.cp), None


def run(
    module: Any, config: Any, feeds: Sequence[Feed], last: Callable[[Tensor, Feed], tuple[Tensor, Any]], *, train: bool
) -> list[Any]:
    """Push all feeds through the pipeline; every stage calls it with as many.

    ``last`` is called on the last stage with its hidden states; it gives a loss, whose gradients add up if ``train``,
    and something to keep. Gives what was kept, in the order of feeds; nothing on other stages.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(feeds: Any, model: Any) -> tuple[Tensor, Any]:
        make_headway()
        fed = next(feeds)
        hidden = model(input_ids=fed.ids, position_ids=fed.positions, attention_mask=_unseen(fed, config))
        return hidden, lambda found, non_loss_data=False: _kept(*last(found, fed), alone=non_loss_data)

    module.train(train)
    with torch.set_grad_enabled(train):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(feeds),
            model=[module],
            num_microbatches=len(feeds),
            seq_length=max(fed.ids.shape[1] for fed in feeds) * config.context_parallel_size,
            micro_batch_size=max(len(fed.ids) for fed in feeds),
            forward_only=not train,
            collect_non_loss_data=not train,
        )


def _kept(loss: Tensor, kept: Any, *, alone: bool) -> Any:
    """In the form that the schedule wants: a loss that is divided by no count of tokens."""
    return kept if alone else (loss, torch.zeros((), dtype=torch.int, device=loss.device), kept)


def _unseen(fed: Feed, config: Any) -> Tensor | None:
    """Which tokens a token does not see, [1, 1, tokens, tokens]; None where attention is causal by itself."""
    if config.apply_rope_fusion:  # Transformer Engine's attention
        return None
    width = fed.ids.shape[1]
    return torch.ones(width, width, dtype=torch.bool, device=fed.ids.device).triu(1)[None, None]
