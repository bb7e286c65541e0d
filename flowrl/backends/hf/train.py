"""One update: rows into mini-batches, each one optimizer step whose gradient does not depend on its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch
from ...errors import RunError
from ...rl.losses import token_weights
from ...rl.spec import Loss, LossInputs
from ...workers.records import Optim
from .logits import token_logprobs
from .net import Net
from .pack import Micro, Rows, micro_batches


@dataclass(frozen=True)
class Report:
    """What one optimizer step was. ``sums`` are those over its trained tokens of what the loss reports."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    tokens: int
    rows: int
    norm: Tensor | float = 0.0
    lr: float = 0.0


class Trainer:
    """AdamW over the trained weights of a net. ``steps`` counts optimizer steps; the learning rate follows it."""

    def __init__(self, net: Net, optim: Optim) -> None:
        self.net, self.optim, self.steps = net, optim, 0
        self.named = {n: p for n, p in net.model.named_parameters() if p.requires_grad}
        weights = list(self.named.values())
        groups = [{"params": weights}]
        if optim.weight_decay:  # vectors (norms, biases) are not decayed
            groups = [
                {"params": [p for p in weights if p.dim() > 1]},
                {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0},
            ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def update(
        self,
        batch: Batch,
        loss: Loss,
        *,
        minibatch: int | None,
        minibatch_tokens: int | None,
        epochs: int,
        micro_tokens: int,
        lr: float | None = None,
    ) -> dict[str, float]:
        """Train on all rows ``epochs`` times. See :meth:`flowrl.backends.hf.engine.HFEngine.update`."""
        data = _Data(self.net, batch, loss)
        reports = []
        for epoch in range(epochs):
            for chosen in mini_batches(batch, minibatch, minibatch_tokens, epoch):
                reports.append(self.step(data, chosen, micro_tokens, lr))
        return summary(reports)

    def restart(self) -> None:
        """Forget the moments, and start the schedule again."""
        self.steps = 0
        self.adamw.state.clear()

    def step(self, data: _Data, chosen: Tensor, micro_tokens: int, lr: float | None = None) -> Report:
        """One optimizer step on the rows ``chosen``, at the schedule's rate unless ``lr`` is given."""
        lr = learning_rate(self.optim, self.steps) if lr is None else lr
        report = self.gradient(data, chosen, micro_tokens)
        norm = self._clip()
        if not bool(torch.isfinite(norm + report.loss)):
            self.adamw.zero_grad(set_to_none=True)
            raise RunError(
                f"Optimizer step {self.steps}: the loss is {float(report.loss)}, the gradient's norm {float(norm)}; "
                "the weights were left alone.",
                fix="Look for fields that are not finite, or train with a smaller lr or in fp32.",
            )
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.steps += 1
        return replace(report, norm=norm, lr=lr)

    def gradient(self, data: _Data, chosen: Tensor, micro_tokens: int) -> Report:
        """Add up the gradient of the loss over the rows ``chosen``: the sum of weight times loss per token."""
        loss = data.loss
        weights, trained = data.weights(chosen)
        total = torch.zeros((), dtype=torch.float64, device=self.net.device)
        sums: dict[str, Tensor] = {}
        for micro in micro_batches(self.net, data.rows, trained, micro_tokens):
            there = micro.to(self.net.device)
            inputs = data.inputs(there, micro.at)
            per_token, reports = loss.compute(inputs)
            value = (per_token * weights[there.at].to(per_token.dtype)).sum()
            value.backward()
            total += value.detach()
            for name, column in reports.items():
                part = (column.detach() * inputs.mask).sum(dtype=torch.float64)
                sums[name] = sums[name] + part if name in sums else part
        for weight in self.named.values():
            if weight.grad is None:  # no row reached it: its gradient is 0, and its momentum goes on
                weight.grad = torch.zeros_like(weight)
        return Report(total, sums, int(data.counts[trained].sum()), len(trained))

    def _clip(self) -> Tensor:
        """The gradient's norm before clipping; gradients are scaled where it is above the limit."""
        limit = self.optim.grad_clip
        weights = list(self.named.values())
        return torch.nn.utils.clip_grad_norm_(weights, math.inf if limit is None else limit)

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Trained weights, both moments of each, and the count of steps."""
        tensors = {f"weights.{n}": p.detach() for n, p in self.named.items()}
        for name, weight in self.named.items():
            moments = self.adamw.state.get(weight, {})
            for kind in ("exp_avg", "exp_avg_sq"):
                if kind in moments:
                    tensors[f"{kind}.{name}"] = moments[kind]
        return tensors, {"steps": self.steps}

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave, bit for bit."""
        self.steps = int(meta["steps"])
        with torch.no_grad():
            for name, weight in self.named.items():
                weight.copy_(tensors[f"weights.{name}"])
                self.adamw.state.pop(weight, None)
                if f"exp_avg.{name}" in tensors:
                    self.adamw.state[weight] = {
                        "step": torch.tensor(float(self.steps), dtype=torch.float32, device=weight.device),
                        "exp_avg": tensors[f"exp_avg.{name}"].to(weight.device, copy=True),
                        "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(weight.device, copy=True),
                    }


class _Data:
    """A batch as the loss needs it: fields on the device, packed along all response tokens."""

    def __init__(self, net: Net, batch: Batch, loss: Loss) -> None:
        self.net, self.loss, self.rows = net, loss, Rows.of(batch)
        mask = batch.response_mask
        self.lengths, self.mask = mask.lengths, mask.values.cpu()
        count = len(self.lengths)
        self.row = torch.repeat_interleave(torch.arange(count), self.lengths)
        self.counts = torch.bincount(self.row[self.mask], minlength=count)
        names = [
            n for n in batch.fields if n not in ("tokens", "response_mask") and not isinstance(batch[n].values, list)
        ]
        self.by_row = frozenset(n for n in names if batch[n].lengths is None)
        names = [n for n in names if n in self.by_row or batch[n].dim == mask.dim]
        self.fields = {n: batch[n].values.to(net.device) for n in names}
        self.targets = self.rows.targets.to(net.device)
        self.mask_there = self.mask.to(net.device)
        self.silent = self._without_gradient(batch)

    def _without_gradient(self, batch: Batch) -> Tensor:
        """Rows that add nothing to the gradient: without a trained token, or with advantages that are all 0."""
        silent = self.counts == 0
        if self.loss.zero_advantage_is_zero and "advantages" in batch.fields:
            speaks = self.mask & (batch.advantages.values.cpu() != 0)
            silent = torch.bincount(self.row[speaks], minlength=len(silent)) == 0
        return silent

    def weights(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of every response token in the loss of these rows, and which of the rows have to be computed."""
        inside = torch.zeros(len(self.lengths), dtype=torch.bool)
        inside[chosen] = True
        weights = token_weights(self.mask & inside[self.row], self.row, len(self.lengths), self.loss.aggregate)
        return weights.to(self.net.device), chosen[~self.silent[chosen]]

    def inputs(self, micro: Micro, at: Tensor) -> LossInputs:
        """What the loss is handed for one micro-batch; ``at`` is ``micro.at`` on the CPU."""
        with self.net.recomputing():
            hidden = micro.hidden(self.net)
        here, row = torch.unique_consecutive(self.row[at], return_inverse=True)
        numbers, row = here.to(hidden.device), row.to(hidden.device)
        entropy = None
        if self.loss.on == "values":
            predicted = self.net.values(hidden)
        else:
            predicted, entropy = token_logprobs(
                hidden, self.net.head, self.targets[micro.at], entropy=self.loss.needs_entropy
            )
        fields = {n: v[numbers if n in self.by_row else micro.at] for n, v in self.fields.items()}
        return LossInputs(
            predicted=predicted,
            mask=self.mask_there[micro.at],
            fields=fields,
            lengths=self.lengths[here],
            row=row,
            entropy=entropy,
            by_row=self.by_row,
        )


def mini_batches(batch: Batch, rows: int | None, tokens: int | None, epoch: int) -> Iterable[Tensor]:
    """Row numbers of each mini-batch of one epoch: at most ``rows`` rows and about ``tokens`` response tokens each.

    The order is drawn from the seeds of the rows, so it depends on neither the order of the batch nor its other rows.
    With neither limit all rows are one mini-batch, in the order of their keys.
    """
    if rows is None and tokens is None:
        order = sorted(range(len(batch)), key=batch.keys.__getitem__)
        return [torch.tensor(order, dtype=torch.int64)] if order else []
    order = torch.argsort(batch.row_seeds("order", epoch))
    counts = batch.response_mask.lengths[order].tolist()
    ends, taken, held = [0], 0, 0
    for i, count in enumerate(counts):
        if taken and ((rows is not None and taken >= rows) or (tokens is not None and held + count > tokens)):
            ends.append(i)
            taken = held = 0
        taken, held = taken + 1, held + count
    ends.append(len(counts))
    return [order[a:b] for a, b in pairwise(ends) if b > a]


def learning_rate(optim: Optim, step: int) -> float:
    """The rate of step number ``step`` (the first is 0): a linear rise over ``warmup`` steps, then the schedule."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.schedule == "constant" or not optim.total:
        return optim.lr
    share = min(1.0, (step - optim.warmup) / max(1, optim.total - optim.warmup))
    left = 1 - share if optim.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return optim.lr * (optim.min_lr + (1 - optim.min_lr) * left)


def summary(reports: list[Report]) -> dict[str, float]:
    """The metrics of a call: what losses report per token, the others per step."""
    tokens, steps = sum(r.tokens for r in reports), len(reports)
    found = {
        "loss": sum(float(r.loss) for r in reports) / max(1, steps),
        "grad_norm": sum(float(r.norm) for r in reports) / max(1, steps),
        "lr": sum(r.lr for r in reports) / max(1, steps),
    }
    for name in dict.fromkeys(n for r in reports for n in r.sums):
        found[name] = sum(float(r.sums[name]) for r in reports if name in r.sums) / max(1, tokens)
    counts = {"tokens": tokens, "rows": sum(r.rows for r in reports), "steps": steps}
    return found | {name: float(count) for name, count in counts.items()}
