"""One update: rows into mini-batches, each one optimizer step whose gradient does not depend on its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch
from ...errors import RunError
from ...rl.math.losses import row_weights, token_weights
from ...rl.spec import Loss, LossInputs
from ...rl.supervised import sft
from ...workers.records import Optim
from .logits import distributions, token_logprobs
from .net import Net
from .pack import Micro, Rows, micro_batches
from .ragged import padded, ragged_index, starts_of


@dataclass(frozen=True)
class Report:
    """What one optimizer step was. ``sums`` are those of what the loss reports, over trained tokens or over rows."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    by_row: frozenset[str]  # of these names: what is reported once per row
    tokens: int
    rows: int
    norm: Tensor | float = 0.0
    lr: float = 0.0
    pretraining: Tensor | None = None  # the loss of the rows that were trained along with these, weighted


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
        version: int = 0,
        pretraining: Batch | None = None,
        pretraining_weight: float = 1.0,
    ) -> dict[str, float]:
        """Train on all rows ``epochs`` times. See :meth:`flowrl.backends.hf.engine.HFEngine.update`."""
        data = _Data(self.net, batch, loss, version)
        more = None if pretraining is None else _Data(self.net, pretraining, sft())
        reports = []
        for epoch in range(epochs):
            steps = list(mini_batches(batch, minibatch, minibatch_tokens, epoch, together=loss.groups))
            if more is not None and not steps:
                steps = [torch.arange(0)]  # one step on the other rows alone
            for number, chosen in enumerate(steps):
                extra = [] if more is None else [(more, more.share(number, len(steps)), pretraining_weight)]
                reports.append(self.step([(data, chosen, 1.0), *extra], micro_tokens, lr))
        return summary(reports, loss.reports)

    def restart(self) -> None:
        """Forget the moments, and start the schedule again."""
        self.steps = 0
        self.adamw.state.clear()

    def step(self, parts: Sequence[tuple[_Data, Tensor, float]], micro_tokens: int, lr: float | None = None) -> Report:
        """One optimizer step on the sum of parts: rows of some data, and the weight of their loss.

        The rate is the schedule's unless ``lr`` is given. What is reported is of the first part; a second one's loss
        is ``pretraining_loss``.
        """
        lr = learning_rate(self.optim, self.steps) if lr is None else lr
        report, *others = [self.gradient(d, rows, micro_tokens, weight) for d, rows, weight in parts]
        for other in others:
            report = replace(report, loss=report.loss + other.loss, pretraining=other.loss)
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

    def gradient(self, data: _Data, chosen: Tensor, micro_tokens: int, factor: float = 1.0) -> Report:
        """Add up the gradient of the loss over the rows ``chosen``: the sum of weight times loss, per token or row."""
        weights, trained = data.weights(chosen)
        weights = weights * factor
        total = torch.zeros((), dtype=torch.float64, device=self.net.device)
        sums: dict[str, Tensor] = {}
        by_row: set[str] = set()
        for inputs, at in data.passes(trained, micro_tokens):
            losses, reports = data.loss.compute(inputs)
            value = (losses * weights[at].to(losses.dtype)).sum()
            value.backward()
            total += value.detach()
            for name, column in reports.items():
                if data.loss.per == "row" and len(column) == len(inputs.lengths):
                    by_row.add(name)
                told = column.detach() if name in by_row else column.detach() * inputs.mask
                part = told.sum(dtype=torch.float64)
                sums[name] = sums[name] + part if name in sums else part
        for weight in self.named.values():
            if weight.grad is None:  # no row reached it: its gradient is 0, and its momentum goes on
                weight.grad = torch.zeros_like(weight)
        return Report(total, sums, frozenset(by_row), int(data.counts[trained].sum()), len(trained))

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

    def __init__(self, net: Net, batch: Batch, loss: Loss, version: int = 0) -> None:
        self.net, self.loss, self.version = net, loss, version
        self.tokens = batch.tokens
        self.group = batch.group_index()[0]
        self.rows = Rows.of(batch) if loss.on != "scores" else None
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
        self.targets = self.rows.targets.to(net.device) if self.rows is not None else None
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
        """The weight of every response token, or row, in the loss of these rows, and which rows have to be computed."""
        loss, count = self.loss, len(self.lengths)
        inside = torch.zeros(count, dtype=torch.bool)
        inside[chosen] = True
        if loss.per == "row":
            weights = row_weights(inside & (self.counts > 0), loss.aggregate)
        else:
            weights = token_weights(self.mask & inside[self.row], self.row, count, loss.aggregate, loss.norm)
        return weights.to(self.net.device), chosen[~self.silent[chosen]]

    def share(self, number: int, of: int) -> Tensor:
        """Part ``number`` of the rows, split into ``of`` parts in the order that they have."""
        count = len(self.lengths)
        return torch.arange(number * count // of, (number + 1) * count // of)

    def passes(self, trained: Tensor, micro_tokens: int) -> Iterator[tuple[LossInputs, Tensor]]:
        """What the loss is handed in each forward pass, and where its results stand in :meth:`weights`."""
        if self.rows is None:
            for part in parts_of(self.group, self.tokens.lengths, trained, micro_tokens, together=self.loss.groups):
                yield self._scored(part), part.to(self.net.device)
            return
        if self.loss.groups:  # one forward pass holds all rows of a prompt
            lengths = self.tokens.lengths
            parts = parts_of(self.group, lengths, trained, micro_tokens, together=True)
            whole = [(p, len(p) * int(lengths[p].max())) for p in parts]
            micros = [m for p, budget in whole for m in micro_batches(self.net, self.rows, p, budget, "rows")]
        else:
            micros = micro_batches(self.net, self.rows, trained, micro_tokens)
        for micro in micros:
            there = micro.to(self.net.device)
            inputs, here = self._predicted(there, micro.at)
            yield inputs, here.to(self.net.device) if self.loss.per == "row" else there.at

    def _predicted(self, micro: Micro, at: Tensor) -> tuple[LossInputs, Tensor]:
        """What the loss is handed for one micro-batch, and its rows; ``at`` is ``micro.at`` on the CPU."""
        with self.net.recomputing():
            hidden = micro.hidden(self.net)
        here, row = torch.unique_consecutive(self.row[at], return_inverse=True)
        entropy = distribution = None
        if self.loss.needs_distribution:
            distribution = distributions(hidden, self.net.head)
        if self.loss.on == "values":
            predicted = self.net.values(hidden)
        else:
            assert self.targets is not None, "log-probabilities are of tokens"
            predicted, entropy = token_logprobs(
                hidden, self.net.head, self.targets[micro.at], entropy=self.loss.needs_entropy
            )
        return self._inputs(predicted, here, row, micro.at, entropy, distribution), here

    def _scored(self, part: Tensor) -> LossInputs:
        """What a loss on scores is handed for the rows ``part``: the scalar head at the last token of each."""
        lengths = self.tokens.lengths[part]
        ids = padded(
            self.tokens.values.long(), self.tokens.offsets[:-1][part], lengths, int(lengths.max()), self.net.filler
        )
        with self.net.recomputing(), self.net.mixed():
            hidden = self.net.hidden(ids.to(self.net.device))
        last = hidden[torch.arange(len(part), device=hidden.device), (lengths - 1).to(hidden.device)]
        at = ragged_index(starts_of(self.lengths)[part], self.lengths[part])
        row = torch.repeat_interleave(torch.arange(len(part)), self.lengths[part])
        return self._inputs(self.net.values(last), part, row, at.to(self.net.device))

    def _inputs(
        self,
        predicted: Tensor,
        here: Tensor,
        row: Tensor,
        at: Tensor,
        entropy: Tensor | None = None,
        distribution: Tensor | None = None,
    ) -> LossInputs:
        """``here``: the rows; ``row``: of each token, the place of its row in them; ``at``: its place in all tokens."""
        device = predicted.device
        numbers = here.to(device)
        return LossInputs(
            predicted=predicted,
            mask=self.mask_there[at],
            fields={n: v[numbers if n in self.by_row else at] for n, v in self.fields.items()},
            lengths=self.lengths[here],
            row=row.to(device),
            entropy=entropy,
            distribution=distribution,
            by_row=self.by_row,
            group=torch.unique(self.group[here], return_inverse=True)[1].to(device),
            version=self.version,
        )


def parts_of(group: Tensor, lengths: Tensor, chosen: Tensor, budget: int, *, together: bool) -> list[Tensor]:
    """The rows ``chosen``, long ones first, in parts of at most ``budget`` tokens when padded to the longest.

    ``group`` and ``lengths`` are i64[all rows]. ``together`` keeps the rows of a group in one part, also where that
    is too large.
    """
    units: dict[int, list[int]] = {}
    for number, row in enumerate(chosen.tolist()):
        units.setdefault(int(group[row]) if together else number, []).append(row)
    longest = {key: max(int(lengths[r]) for r in rows) for key, rows in units.items()}
    parts: list[list[int]] = []
    width = 0
    for key in sorted(units, key=lambda k: -longest[k]):
        if parts and (len(parts[-1]) + len(units[key])) * width <= budget:
            parts[-1] += units[key]
        else:
            parts.append(list(units[key]))
            width = longest[key]
    return [torch.tensor(sorted(part)) for part in parts]


def mini_batches(
    batch: Batch, rows: int | None, tokens: int | None, epoch: int, *, together: bool = False
) -> Iterable[Tensor]:
    """Row numbers of each mini-batch of one epoch: at most ``rows`` rows and about ``tokens`` response tokens each.

    The order is drawn from the seeds of the rows, so it depends on neither the order of the batch nor its other rows.
    With neither limit all rows are one mini-batch, in the order of their keys. ``together``: rows of one prompt are in
    the same mini-batch, in the order of their keys, at the place that the first of them drew.
    """
    by_key = sorted(range(len(batch)), key=batch.keys.__getitem__)
    if rows is None and tokens is None:
        return [torch.tensor(by_key, dtype=torch.int64)] if by_key else []
    drawn = batch.row_seeds("order", epoch).tolist()
    units: dict[Any, list[int]] = {}
    for i in by_key:
        units.setdefault(batch.keys[i][0] if together else i, []).append(i)
    counts = batch.response_mask.lengths.tolist()
    made: list[list[int]] = []
    held = 0
    for unit in sorted(units.values(), key=lambda u: drawn[u[0]]):
        count = sum(counts[i] for i in unit)
        full = made and (
            (rows is not None and len(made[-1]) + len(unit) > rows) or (tokens is not None and held + count > tokens)
        )
        if full or not made:
            made.append([])
            held = 0
        made[-1] += unit
        held += count
    return [torch.tensor(rows, dtype=torch.int64) for rows in made]


def learning_rate(optim: Optim, step: int) -> float:
    """The rate of step number ``step`` (the first is 0): a linear rise over ``warmup`` steps, then the schedule."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.schedule == "constant" or not optim.total:
        return optim.lr
    share = min(1.0, (step - optim.warmup) / max(1, optim.total - optim.warmup))
    left = 1 - share if optim.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return optim.lr * (optim.min_lr + (1 - optim.min_lr) * left)


def summary(reports: list[Report], names: Sequence[str] = ()) -> dict[str, float]:
    """The metrics of a call: what losses report per token or per row, the others per step.

    ``names`` are there in any case: as no number, where no row was computed.
    """
    tokens, rows, steps = sum(r.tokens for r in reports), sum(r.rows for r in reports), len(reports)
    found = {
        "loss": sum(float(r.loss) for r in reports) / max(1, steps),
        "grad_norm": sum(float(r.norm) for r in reports) / max(1, steps),
        "lr": sum(r.lr for r in reports) / max(1, steps),
    }
    with_more = [float(r.pretraining) for r in reports if r.pretraining is not None]
    if with_more:
        found["pretraining_loss"] = sum(with_more) / steps
    for name in dict.fromkeys(n for r in reports for n in r.sums):
        by_row = any(name in r.by_row for r in reports)
        found[name] = sum(float(r.sums[name]) for r in reports if name in r.sums) / max(1, rows if by_row else tokens)
    found = {**dict.fromkeys(names, math.nan), **found}
    counts = {"tokens": tokens, "rows": rows, "steps": steps}
    return found | {name: float(count) for name, count in counts.items()}
