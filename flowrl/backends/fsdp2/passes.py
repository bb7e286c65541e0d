"""Passes through the stages of a pipeline, by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ...errors import RunError

if TYPE_CHECKING:
    from .stage import Pass, StageNet


def through(net: StageNet, passes: Sequence[Pass], *, train: bool) -> list[Any]:
    """What the passes give on the last stage, in their order; nothing on the others, which call it with as many.

    With ``train`` each gives a tuple that begins with a loss; gradients of all losses add up. Raises on every stage
    where a computation failed on the last one: what was raised there, RunError on the others.
    """
    pipe, count = net.pipe, len(passes)
    part = _Part(net, passes, train=train)
    stage = _Stage(
        part,
        pipe.stage,
        pipe.stages,
        net.device,
        input_args=part.shape(given=True),
        output_args=part.shape(given=False),
        group=pipe.group,
    )
    # Fewer passes than stages: one forward and one backward by turns would leave nothing to wait with.
    kind = Schedule1F1B if train and count >= pipe.stages else ScheduleGPipe
    schedule = kind(stage, count, loss_fn=_itself if train else None, scale_grads=False)
    numbers = torch.arange(count)
    schedule.step(
        *([numbers] if pipe.first else []),
        number=numbers,
        target=numbers.to(net.device) if train and pipe.last else None,
        return_outputs=False,
    )
    failed = pipe.told(None if part.failure is None else f"{type(part.failure).__name__}: {part.failure}")
    if part.failure is not None:
        raise part.failure
    if failed is not None:
        raise RunError(f"The last stage of the pipeline failed: {failed}", fix="Look at what it says on its rank.")
    return part.kept


class _Part(torch.nn.Module):
    """A stage as the schedule calls it: hidden states to hidden states, on the last stage to a loss.

    Passes are computed in their own shapes. What goes from stage to stage is padded to that of the largest, because
    the schedule receives into tensors of one shape.
    """

    def __init__(self, net: StageNet, passes: Sequence[Pass], *, train: bool) -> None:
        super().__init__()
        self.net, self.root, self.passes, self.train_it = net, net.root, passes, train
        self.rows, self.width = (max(micro.ids.shape[dim] for micro, _ in passes) for dim in (0, 1))
        self.kept: list[Any] = []
        self.failure: Exception | None = None

    def shape(self, *, given: bool) -> Tensor:
        """A tensor of the shape that this stage is given, or gives."""
        net = self.net
        if given and net.pipe.first:
            return torch.empty(1, dtype=torch.int64, device="meta")
        if not given and net.pipe.last:
            return torch.empty((), dtype=net.compute, device="meta", requires_grad=self.train_it)
        sizes = (self.rows, self.width, net.config.hidden_size)
        return torch.empty(sizes, dtype=net.compute, device="meta", requires_grad=self.train_it)

    def forward(self, given: Tensor, number: Tensor) -> Tensor:
        net = self.net
        net.given = None if net.pipe.first else given
        try:
            return net.run(lambda: self._last(given, int(number)) if net.pipe.last else self._inner(int(number)))
        finally:
            net.given = None

    def _inner(self, number: int) -> Tensor:
        """The hidden states of a stage that is not the last one."""
        net = self.net
        micro = self.passes[number][0].to(net.device)
        with net.recomputing() if self.train_it else nullcontext(), net.mixed():
            hidden = net.hidden(micro.ids, micro.positions, micro.mask(net.compute)).to(net.compute)
        rows, width = micro.ids.shape
        return torch.nn.functional.pad(hidden, (0, 0, 0, self.width - width, 0, self.rows - rows))

    def _last(self, given: Tensor, number: int) -> Tensor:
        """What is wanted of a pass; where that fails, the other stages still get what they wait for."""
        try:
            found = self.passes[number][1]()
        except Exception as error:
            self.failure = self.failure or error
            return given.sum() * 0
        value = found[0] if self.train_it else given.new_zeros(())
        self.kept.append((value.detach(), *found[1:]) if self.train_it else found)
        return value


class _Stage(PipelineStage):
    """A stage that tells the net which of its backward passes is the last one."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        self.submod.net.before_pass(last=last_backward)  # type: ignore[union-attr]
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


def _itself(loss: Tensor, target: Tensor) -> Tensor:
    return loss
