"""The rows of an update as forward passes: which rows together, and what the loss is handed for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...batch import Batch
from ...rl.loss_spec import Loss, LossInputs
from ..gap import EXPECTED, bound_of, gap_sums
from ..measures import token_sums, trains_policy
from ..seen_rows import SeenRows, recorded_of
from ..team import Team
from ..update_rows import Table
from .logits import distributions, token_logprobs
from .micro_batches import Micro, Rows, micro_batches
from .net import Net
from .ragged import padded, ragged_index, starts_of


class Data:
    """This rank's rows as the loss needs them: fields on the device, packed along all response tokens.

    ``table`` has the rows of all ranks of the team; rows there are numbered by key, here by their place in the batch.
    """

    def __init__(self, net: Net, batch: Batch, loss: Loss, version: int = 0, team: Team | None = None) -> None:
        self.net, self.loss, self.version = net, loss, version
        self.of_policy = trains_policy(loss, batch)
        self.table = Table.of(team or Team(), batch, loss)
        self.tokens = batch.tokens
        self.group = batch.group_index()[0]
        self.rows = Rows.of(batch) if loss.on != "scores" else None
        mask = batch.response_mask
        self.lengths, self.mask = mask.lengths, mask.values.cpu()
        self.row = torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)
        names = [
            n for n in batch.fields if n not in ("tokens", "response_mask") and not isinstance(batch[n].values, list)
        ]
        self.by_row = frozenset(n for n in names if batch[n].lengths is None)
        names = [n for n in names if n in self.by_row or batch[n].dim == mask.dim]
        self.fields = {n: batch[n].values.to(net.device) for n in names}
        self.expected = self.fields.pop(EXPECTED, None)  # held against what is predicted; None: nothing is
        self.targets = self.rows.targets.to(net.device) if self.rows is not None else None
        self.temperature = self.rows.temperature_at(net.device) if self.rows is not None else None
        self.support = self.rows.support_at(net.device) if self.rows is not None else None
        self.mask_there = self.mask.to(net.device)
        self.seen = SeenRows(batch, recorded_of(self.table.call) if loss.on == "logprobs" else ())
        self._entropy: Tensor | None = None  # of the tokens of the last pass, where the loss does not ask for it

    def weights(self, chosen: Tensor) -> Tensor:
        """The weight of each response token, or row, of this rank in the loss of the rows ``chosen`` of the table."""
        weights = self.table.weights(chosen)[self.table.mine]
        if self.loss.per == "token":
            weights = weights[self.row] * self.mask
        return weights.to(self.net.device)

    def passes(self, chosen: Tensor, micro_tokens: int) -> list[Micro | Tensor]:
        """The forward passes for those of the rows ``chosen`` of the table that this rank has to compute.

        Each is a micro-batch, or the rows whose scores are computed together.
        """
        trained = self.table.local(self.table.trained(chosen))
        lengths = self.tokens.lengths
        if self.rows is None:
            return list(parts_of(self.group, lengths, trained, micro_tokens, together=self.loss.groups))
        if self.loss.groups:  # one forward pass holds all rows of a prompt
            parts = parts_of(self.group, lengths, trained, micro_tokens, together=True)
            whole = [(p, len(p) * int(lengths[p].max())) for p in parts]
            return [m for p, budget in whole for m in micro_batches(self.net, self.rows, p, budget, "rows")]
        return list(micro_batches(self.net, self.rows, trained, micro_tokens))

    def inputs(self, item: Micro | Tensor) -> tuple[LossInputs, Tensor]:
        """What the loss is handed in one of the passes, and where its results stand in :meth:`weights`."""
        if isinstance(item, Tensor):
            return self._scored(item), item.to(self.net.device)
        there = item.to(self.net.device)
        inputs, here = self._predicted(there, item.at)
        return inputs, here.to(self.net.device) if self.loss.per == "row" else there.at

    def gap(self, predicted: Tensor, item: Micro | Tensor) -> dict[str, Tensor]:
        """The sums of the gap to what is expected of the tokens of one pass; none where nothing is."""
        if self.expected is None or isinstance(item, Tensor) or self.loss.on != "logprobs":
            return {}
        at = item.at.to(self.net.device)
        return gap_sums(predicted, self.expected[at], bound_of(self.net.compute))

    def measured(self, inputs: LossInputs, reports: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums of what every policy update measures over the tokens of the last pass; none of other updates."""
        if not self.of_policy:
            return {}
        entropy = self._entropy if inputs.entropy is None else inputs.entropy.detach()
        return token_sums(inputs, reports, entropy)

    def note_seen(self, inputs: LossInputs, item: Micro | Tensor) -> None:
        """Keep what the last pass has found of the tokens of rows that are written down."""
        if isinstance(item, Micro):
            self.seen.add(item.at, inputs.predicted, self._entropy if inputs.entropy is None else inputs.entropy)

    def close_first_step(self) -> None:
        """What follows is computed with other weights than those that the update began with."""
        self.expected = None
        self.seen.close()

    def padded(self, part: Tensor) -> Tensor:
        """The ids of the rows ``part``, [rows, tokens], padded at their ends."""
        lengths, starts = self.tokens.lengths[part], self.tokens.offsets[:-1][part]
        return padded(self.tokens.values.long(), starts, lengths, int(lengths.max()), self.net.filler)

    def nothing(self) -> Tensor:
        """A pass like the others over no row: 0, with a gradient of 0 for every weight that they reach."""
        micro = Micro.idle(self.net).to(self.net.device)
        with self.net.recomputing():
            hidden = micro.hidden(self.net)
        found = self._heads(hidden, micro.at)
        return sum((f.sum() for f in found if f is not None), start=hidden.sum())

    def _heads(self, hidden: Tensor, at: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of hidden states what the loss is on, and entropy and distribution where it asks for them.

        ``at``: the numbers of the response tokens that they predict.
        """
        if self.loss.on != "logprobs":
            return self.net.values(hidden), None, None
        assert self.targets is not None and self.temperature and self.support, "log-probabilities are of tokens"
        head, targets, temperature = self.net.head, self.targets[at], self.temperature(at)
        distribution = distributions(hidden, head, temperature) if self.loss.needs_distribution else None
        predicted, entropy = token_logprobs(
            hidden,
            head,
            targets,
            temperature=temperature,
            support=self.support(at),
            entropy=self.loss.needs_entropy or self.of_policy,
            entropy_gradient=self.loss.needs_entropy,
        )
        return predicted, entropy, distribution

    def _predicted(self, micro: Micro, at: Tensor) -> tuple[LossInputs, Tensor]:
        """What the loss is handed for one micro-batch, and its rows; ``at`` is ``micro.at`` on the CPU."""
        with self.net.recomputing():
            hidden = micro.hidden(self.net)
        here, row = torch.unique_consecutive(self.row[at], return_inverse=True)
        predicted, entropy, distribution = self._heads(hidden, micro.at)
        if not self.loss.needs_entropy:
            self._entropy, entropy = entropy, None
        return self._inputs(predicted, here, row, micro.at, entropy, distribution), here

    def _scored(self, part: Tensor) -> LossInputs:
        """What a loss on scores is handed for the rows ``part``: the scalar head at the last token of each."""
        lengths = self.tokens.lengths[part]
        with self.net.recomputing(), self.net.mixed():
            hidden = self.net.hidden(self.padded(part).to(self.net.device))
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
