"""One update: rows into mini-batches, each one optimizer step whose gradient does not depend on its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch
from ...errors import NotFinite
from ...graph.ops.update_metrics import Metrics
from ...rl.loss_spec import Loss
from ...rl.supervised import sft
from ...workers.model_options import Optim
from ...workers.weights.weight_boxes import Shard
from ..gap import EXPECTED, add_sums, bound_of, gap_of, is_measure
from ..measures import is_measured, measured_names, measures_of
from ..seen_rows import of_all_ranks, recorded_of
from ..team import Team
from .finite import not_finite
from .micro_batches import Micro
from .net import Net
from .parameters import Parameters, required
from .update_passes import Data


@dataclass(frozen=True)
class Report:
    """What one optimizer step was. ``sums`` are those of what the loss reports, over trained tokens or over rows, and
    of the gap (:mod:`flowrl.backends.gap`).

    They are of this rank's rows; the rest is of the rows of all ranks.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    by_row: frozenset[str]  # of these names: what is reported once per row
    tokens: int
    rows: int
    norm: Tensor | float = 0.0
    lr: float = 0.0
    pretraining: Tensor | None = None  # the loss of the rows that were trained along with these, weighted


class Trainer:
    """AdamW over the trained weights of a net. ``steps`` counts optimizer steps; the learning rate follows it.

    Every rank of ``team`` has rows of its own and weights, or parts of them, of its own; all of them make the same
    calls, and a step is that of one process with all rows.
    """

    def __init__(self, net: Net, parameters: Parameters, optim: Optim, team: Team | None = None) -> None:
        self.net, self.parameters, self.optim, self.team, self.steps = net, parameters, optim, team or Team(), 0
        self._batch: Batch | None = None  # of the update that goes on
        self.named = parameters.trained
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
    ) -> Metrics:
        """Train on all rows ``epochs`` times. See :meth:`flowrl.backends.hf.engine.HFEngine.update`."""
        self._batch = batch
        data = Data(self.net, batch, loss, version, self.team)
        more = None if pretraining is None else Data(self.net, pretraining, sft(), team=self.team)
        reports = []
        for epoch in range(epochs):
            steps = data.table.mini_batches(minibatch, minibatch_tokens, epoch)
            if more is not None and not steps:
                steps = [torch.arange(0)]  # one step on the other rows alone
            for number, chosen in enumerate(steps):
                extra = [] if more is None else [(more, more.table.share(number, len(steps)), pretraining_weight)]
                reports.append(self.step([(data, chosen, 1.0), *extra], micro_tokens, lr))
                data.close_first_step()
        bound = bound_of(self.net.compute) if EXPECTED in batch else None
        found = summary(reports, (*loss.reports, *measured_names(loss, batch)), self.team, bound)
        metrics = Metrics(found | data.table.measures())
        if recorded_of(data.table.call):
            metrics.rows_seen = of_all_ranks(self.told(data.seen.to_json()), self.team)
        return metrics

    def fall_asleep(self) -> int:
        """Free what there is between steps beside weights and moments; return the bytes. Here gradients are not."""
        return 0

    def awake(self) -> int:
        """Take it back; return the bytes."""
        return 0

    def told(self, item: Any) -> Any:
        """What is found where the loss is computed, on all ranks that share the passes."""
        return item

    def restart(self) -> None:
        """Forget the moments, and start the schedule again."""
        self.steps = 0
        self.adamw.state.clear()

    def step(self, parts: Sequence[tuple[Data, Tensor, float]], micro_tokens: int, lr: float | None = None) -> Report:
        """One optimizer step on the sum of parts: rows of some table, and the weight of their loss.

        The rate is the schedule's unless ``lr`` is given. What is reported is of the first part; a second one's loss
        is ``pretraining_loss``.
        """
        lr = learning_rate(self.optim, self.steps) if lr is None else lr
        report, *others = self._passes(parts, micro_tokens)
        for other in others:
            report = replace(report, loss=report.loss + other.loss, pretraining=other.loss)
        self.parameters.settle()
        norm = self.parameters.clip(self.optim.grad_clip)
        if not bool(torch.isfinite(norm + report.loss)):
            self.parameters.clear()
            raise self.not_finite(float(report.loss), float(norm))
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.parameters.clear()
        self.stepped()
        return replace(report, norm=norm, lr=lr)

    def stepped(self) -> None:
        """Note an optimizer step. Its loss and gradient were finite, and so were the weights that it began with."""
        call = None if self._batch is None else self._batch.call
        during = "" if call is None else f" in {call.op} of step {call.step}"
        self.parameters.since = f"since optimizer step {self.steps}{during}"
        self.steps += 1

    def not_finite(self, loss: float, norm: float) -> NotFinite:
        """The error of a step that was not taken. On one rank it names what is there alone."""
        what = f"optimizer step {self.steps}: the loss is {loss}, the gradient's norm {norm}"
        return not_finite(what, self.parameters, self._batch)

    def gradient(self, data: Data, chosen: Tensor, micro_tokens: int, factor: float = 1.0) -> Report:
        """Add up the gradient of the loss over the rows ``chosen``: the sum of weight times loss, per token or row."""
        [report] = self._passes([(data, chosen, factor)], micro_tokens)
        self.parameters.settle()
        return report

    def _passes(self, parts: Sequence[tuple[Data, Tensor, float]], micro_tokens: int) -> list[Report]:
        """Forward and backward passes over rows, as many on every rank of the team; a report for each part."""
        passes = [data.passes(chosen, micro_tokens) for data, chosen, _ in parts]
        counts = [self.team.most(len(p)) for p in passes]
        reports, left = [], sum(counts)
        for (data, chosen, factor), mine, count in zip(parts, passes, counts, strict=True):
            weights = data.weights(chosen) * factor
            total = torch.zeros((), dtype=torch.float64, device=self.net.device)
            sums: dict[str, Tensor] = {}
            by_row: frozenset[str] = frozenset()
            for item in [*mine, *[None] * (count - len(mine))]:
                left -= 1
                value, told, of_rows = self._pass(partial(_forward, data, item, weights), last=not left)
                total += value.detach()
                by_row |= of_rows
                add_sums(sums, told)
            trained = data.table.trained(chosen)
            tokens = int(data.table.counts[trained].sum())
            reports.append(Report(self.team.sum(total), sums, by_row, tokens, len(trained)))
        return reports

    def _pass(self, forward: Callable[[], Passed], *, last: bool) -> Passed:
        """Add the gradient of one pass. Where it fails, nothing of the step is left."""
        self.net.before_pass(last=last)
        try:
            found = self.net.run(forward)
            found[0].backward()
        except BaseException:
            self.net.reset()
            self.parameters.clear()
            raise
        return found

    # -- state ------------------------------------------------------------------------------------------------------

    def state_shards(self) -> tuple[list[Shard], dict[str, Any]]:
        """Trained weights and both moments, as ``weights.``, ``exp_avg.`` and ``exp_avg_sq.``; the count of steps."""
        place = self.parameters.shard
        shards = [place(n, p.detach(), prefix="weights.") for n, p in self.named.items()]
        for name, weight in self.named.items():
            moments = self.adamw.state.get(weight, {})
            shards += [place(name, moments[kind], prefix=f"{kind}.") for kind in _MOMENTS if kind in moments]
        return shards, {"steps": self.steps}

    def load_state_shards(self, read: Callable[[Shard], bool], meta: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_shards` gave, on whichever ranks; ``read`` fills a box, or has none for it."""
        self.steps = int(meta["steps"])
        self.parameters.since = "since the checkpoint that they were read from"
        with torch.no_grad():
            for name, weight in self.named.items():
                required(self.parameters.shard(name, weight.detach(), prefix="weights."), read)
                self.adamw.state.pop(weight, None)
                moments = {kind: torch.zeros_like(weight) for kind in _MOMENTS}
                if all([read(self.parameters.shard(name, m, prefix=f"{k}.")) for k, m in moments.items()]):
                    step = torch.tensor(float(self.steps), dtype=torch.float32, device=weight.device)
                    self.adamw.state[weight] = {"step": step, **moments}
        self.parameters.written()


_MOMENTS = ("exp_avg", "exp_avg_sq")


#: The loss of one pass, the sums of what it reports, and the names of what it reports per row.
Passed = tuple[Tensor, dict[str, Tensor], frozenset[str]]


def _forward(data: Data, item: Micro | Tensor | None, weights: Tensor) -> Passed:
    """One pass over rows of this rank, or over none."""
    if item is None:
        return data.nothing(), {}, frozenset()
    inputs, at = data.inputs(item)
    losses, reports = data.loss.compute(inputs)
    value = (losses * weights[at].to(losses.dtype)).sum()
    rows = len(inputs.lengths)
    by_row = {n for n, column in reports.items() if data.loss.per == "row" and len(column) == rows}
    told = {n: c.detach() if n in by_row else c.detach() * inputs.mask for n, c in reports.items()}
    sums = {n: c.sum(dtype=torch.float64) for n, c in told.items()}
    data.note_seen(inputs, item)
    sums |= data.gap(inputs.predicted, item) | data.measured(inputs, reports)
    return value, sums, frozenset(by_row)


def learning_rate(optim: Optim, step: int) -> float:
    """The rate of step number ``step`` (the first is 0): a linear rise over ``warmup`` steps, then the schedule."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.schedule == "constant" or not optim.total:
        return optim.lr
    share = min(1.0, (step - optim.warmup) / max(1, optim.total - optim.warmup))
    left = 1 - share if optim.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return optim.lr * (optim.min_lr + (1 - optim.min_lr) * left)


def summary(
    reports: list[Report], names: Sequence[str] = (), team: Team | None = None, bound: float | None = None
) -> dict[str, float]:
    """The metrics of a call: what losses report per token or per row, the others per step; the same on every rank.

    ``names`` are there in any case: as no number, where no row was computed. ``bound`` is that of the gap, where the
    rows of this rank say what is expected of their tokens.
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
    told = {n: 0.0 for r in reports for n in r.sums if not is_measure(n) and not is_measured(n)}
    for report in reports:
        for name in told.keys() & report.sums:
            told[name] += float(report.sums[name])
    gap = {name: float(v) for r in reports for name, v in r.sums.items() if is_measure(name)}
    measured: dict[str, float] = {}
    for report in reports:
        add_sums(measured, {name: float(v) for name, v in report.sums.items() if is_measured(name)})
    said = (team or Team()).gather([told, sorted({n for r in reports for n in r.by_row}), measured, gap, bound])
    by_row = {name for _, listed, *_ in said for name in listed}
    for name in dict.fromkeys(name for totals, *_ in said for name in totals):
        total = sum(totals[name] for totals, *_ in said if name in totals)
        found[name] = total / max(1, rows if name in by_row else tokens)
    if bounds := [bound for *_, bound in said if bound is not None]:
        found |= gap_of([gap for *_, gap, _ in said], bounds[0])
    found |= measures_of([measured for _, _, measured, *_ in said], tokens, rows)
    found = {**dict.fromkeys(names, math.nan), **found}
    counts = {"tokens": tokens, "rows": rows, "steps": steps}
    return found | {name: float(count) for name, count in counts.items()}
