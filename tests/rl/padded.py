"""Random rows as other libraries have them, padded [rows, longest], and what our losses make of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flowrl import rl
from flowrl.batch import Batch, Column
from flowrl.rl.math.losses import token_weights
from flowrl.rl.math.token_selection import selected_by_covariance

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


def select(rows, *, share, low=-math.inf, high=math.inf, largest=True):
    """The tokens that ``rl.select_by_covariance`` would select by the policy's own log-probabilities [rows, longest]."""
    advantages = rows.packed(rows.advantages[:, None].expand(-1, LONGEST))
    drawn = None if largest else torch.arange(len(advantages))
    mask = rows.packed(rows.sampled)
    found = selected_by_covariance(advantages, rows.packed(rows.p), mask, share=share, low=low, high=high, drawn=drawn)
    padded = torch.zeros_like(rows.sampled)
    padded[rows.there] = found
    return padded


KEYS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
ALONE = [*KEYS, (7, 0)]


class Rewarded(Rows):
    """Rows of several prompts, paid at their last sampled token and, with ``by_token``, at the others too."""

    def __init__(self, seed, keys=KEYS, *, by_token=False):
        super().__init__(seed, len(keys))
        draw = torch.Generator().manual_seed(100 + seed)
        self.keys = keys
        self.prompt = np.array([key[0] for key in keys])
        self.rewards = torch.randn(len(keys), generator=draw, dtype=torch.float64).float().double()
        self.values = torch.randn(len(keys), LONGEST, generator=draw, dtype=torch.float64).float().double()
        self.token_rewards = torch.zeros_like(self.p)
        if by_token:
            paid = torch.randn(len(keys), LONGEST, generator=draw, dtype=torch.float64).float().double()
            self.token_rewards = paid * self.sampled
        self._pay()

    def _pay(self):
        places = torch.arange(LONGEST).expand(len(self.keys), -1).masked_fill(~self.sampled, -1)
        self.last = torch.zeros_like(self.sampled)
        self.last[torch.arange(len(self.keys)), places.amax(1)] = True
        self.paid = self.token_rewards + self.rewards[:, None] * self.last

    def observe_nothing(self):
        """Make every token a sampled one; what is paid at a token that was an observation is 0."""
        self.sampled = self.there
        self._pay()

    def batch(self, *names, **more):
        lengths = self.lengths.tolist()

        def column(padded):
            return Column.packed(self.packed(padded), lengths, "response")

        fields = {name: column(getattr(self, name).float()) for name in names}
        return Batch.of(
            self.keys,
            rewards=Column.of(self.rewards.float()),
            response_mask=column(self.sampled),
            **fields,
            **more,
        )

    def agree(self, found, wanted, where=None):
        where = self.sampled if where is None else where
        mine = torch.zeros_like(self.p)
        mine[self.there] = found.values.double()
        assert torch.allclose(mine[where], wanted[where], rtol=1e-5, atol=1e-6)

    def bessel(self):
        """What Bessel's correction over the tokens of the batch makes of a std; our whitening has none."""
        count = int(self.sampled.sum())
        return math.sqrt(count / (count - 1))
