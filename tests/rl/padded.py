"""Random rows as other libraries have them, padded [rows, longest], and what our losses make of them."""

from __future__ import annotations

import pytest
import torch

from flowrl import rl
from flowrl.rl.math.losses import token_weights

LONGEST = 7


class Rows:
    """Random rows, padded [rows, longest]; turns of observations in the middle. ``empty``: rows without a token."""

    def __init__(self, seed, rows=6, *, empty=False, spread=0.4):
        draw = torch.Generator().manual_seed(seed)

        def numbers(*shape):
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.lengths = torch.randint(1, LONGEST + 1, (rows,), generator=draw)
        tools = torch.rand(rows, LONGEST, generator=draw) < 0.75
        tools[:, 0] = True
        if empty:
            self.lengths[0] = 0
            tools[1] = False  # all of it are observations
        self.there = torch.arange(LONGEST) < self.lengths[:, None]
        self.sampled = self.there & tools
        self.p = -numbers(rows, LONGEST).abs() - 0.05
        self.old, self.rollout, self.ref = (self.p + spread * numbers(rows, LONGEST) for _ in range(3))
        self.entropy = numbers(rows, LONGEST).abs()
        self.advantages = numbers(rows)

    def packed(self, padded):
        return padded[self.there]

    def inputs(self):
        advantages = self.advantages if self.advantages.dim() == 2 else self.advantages[:, None].expand(-1, LONGEST)
        fields = {
            "rollout_logprobs": self.rollout,
            "old_logprobs": self.old,
            "ref_logprobs": self.ref,
            "advantages": advantages,
        }
        return rl.LossInputs(
            self.packed(self.p).requires_grad_(),
            self.packed(self.sampled),
            {name: self.packed(field) for name, field in fields.items()},
            self.lengths,
            torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths),
            self.packed(self.entropy).requires_grad_(),
        )


def ours(loss, rows, fields=None):
    """Loss, gradient [total] and the reports' means over sampled tokens, as an update has them.

    ``fields``: more of them [rows, longest], by name.
    """
    x = rows.inputs()
    x.fields |= {name: rows.packed(field) for name, field in (fields or {}).items()}
    if not loss.needs_entropy:
        x.entropy = None
    x.fields = {name: field for name, field in x.fields.items() if name in loss.reads}
    losses, reports = loss.compute(x)
    weights = token_weights(x.mask, x.row, len(rows.lengths), loss.aggregate, loss.norm)
    total = (losses * weights).sum()
    total.backward()
    sampled = {name: float(told[x.mask].mean()) for name, told in reports.items()}
    return float(total.detach()), x.predicted.grad, sampled


def same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-6, abs=1e-9)
    assert torch.allclose(found[1], wanted[1], rtol=1e-6, atol=1e-9)
