"""Presets of grpo that are choices of parts alone: their advantage and their loss, against slow loops over tokens."""

from __future__ import annotations

import math
from statistics import mean, stdev

import pytest
import torch

import flowrl as fl
from flowrl import rl
from flowrl.rl.math.losses import token_weights

pytestmark = pytest.mark.usefixtures("drivers_path")
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]  # two prompts with four rows each
LENGTHS = [2, 1, 3, 2, 1, 4, 2, 2]
TOKENS = [(i, t) for i, n in enumerate(LENGTHS) for t in range(n)]
GROUPS = [REWARDS[:4], REWARDS[4:]]


class Trainer:
    """An actor that knows the log-probabilities of these rows."""

    def logprobs(self, batch):
        return batch.with_columns({"old_logprobs": numbers("old")})


def draw(name):
    """Log-probabilities of each token: the policy's, the trainer's before the update, or the engine's."""
    generator = torch.Generator().manual_seed(3)
    base = -0.2 - torch.rand(len(TOKENS), generator=generator, dtype=torch.float64)
    old = base + 0.3 * torch.randn(len(TOKENS), generator=generator, dtype=torch.float64)
    near = 0.004 * torch.randn(len(TOKENS), generator=generator, dtype=torch.float64)
    rollout = (old + 1.2 * torch.randn(len(TOKENS), generator=generator, dtype=torch.float64)).clamp(max=-0.02)
    return {"base": base, "old": old, "near": old + near, "rollout": rollout}[name]


def rows(values):
    return [[float(values[at]) for at, (i, _) in enumerate(TOKENS) if i == row] for row in range(len(LENGTHS))]


def numbers(name):
    return fl.Column.of(rows(draw(name)), "response")


@pytest.fixture
def variant():
    from presets.grpo import variants

    return variants(Trainer(), None).__getitem__  # type: ignore[arg-type]


@pytest.fixture
def scored():
    return fl.Batch.of(
        [(i // 4, i % 4) for i in range(8)],
        rewards=REWARDS,
        response_mask=fl.Column.of([[True] * n for n in LENGTHS], "response"),
        rollout_logprobs=numbers("rollout"),
    )


def value(loss, batch, now="base"):
    """The number that an update would minimise, with the policy's log-probabilities ``now``."""
    row = torch.tensor([i for i, _ in TOKENS])
    x = rl.LossInputs(
        predicted=draw(now).requires_grad_(),
        mask=torch.ones(len(TOKENS), dtype=torch.bool),
        fields={
            "advantages": batch.advantages.values.double(),
            "old_logprobs": draw("old"),
            "rollout_logprobs": draw("rollout"),
        },
        lengths=torch.tensor(LENGTHS),
        row=row,
    )
    losses, _ = loss.compute(x)
    return (losses.detach() * token_weights(x.mask, row, len(LENGTHS), loss.aggregate, loss.norm)).sum().item()


def clipped(w, advantage, low=0.2, high=0.2):
    return -min(w * advantage, min(max(w, 1 - low), 1 + high) * advantage)


def grouped(x):
    """``x(reward, rewards of its prompt)`` of each row."""
    return [x(reward, group) for group in GROUPS for reward in group]


ADVANTAGES = {
    "maxrl": lambda r, group: (r - mean(group)) / (mean(group) + 1e-4),
    "lite_ppo": lambda r, group: (r - mean(group)) / (stdev(REWARDS) + 1e-4),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_that_is_a_choice_of_words(variant, scored, name):
    batch = variant(name)["advantages"](scored)
    assert batch.advantages.row_mean().to_list() == pytest.approx(grouped(ADVANTAGES[name]), abs=1e-6)


def test_maxrl_says_nothing_of_a_prompt_that_was_never_solved(variant, scored):
    unsolved = scored.drop("rewards").with_columns({"rewards": fl.Column.of([0.0] * 4 + REWARDS[4:])})
    batch = variant("maxrl")["advantages"](unsolved)
    assert batch.advantages.row_mean().to_list()[:4] == [0.0] * 4


def test_otb_weighs_each_token_by_what_moved_the_policy_so_far(variant, scored):
    """``A_t = r - sum_i r_i W_it / sum_i W_it``, ``W_t = sum_{j<=t} (1 - p_j)``, over rows that have a t-th token."""
    found = variant("otb")["advantages"](scored).advantages.to_list()
    moved = [[1 - math.exp(x) for x in row] for row in rows(draw("rollout"))]
    for i, t in TOKENS:
        among = [j for j in range(8) if j // 4 == i // 4 and LENGTHS[j] > t]
        weights = [sum(moved[j][: t + 1]) for j in among]
        baseline = sum(REWARDS[j] * w for j, w in zip(among, weights, strict=True)) / sum(weights)
        assert found[i][t] == pytest.approx(REWARDS[i] - baseline, abs=1e-5)


def test_luspo_is_gspo_with_each_row_as_heavy_as_it_is_long(variant, scored):
    preset, old, now, rollout = variant("luspo"), *(rows(draw(n)) for n in ("old", "near", "rollout"))
    batch = preset["advantages"](scored)
    advantages = batch.advantages.row_mean().to_list()
    losses, wide = [], 0
    for i, n in enumerate(LENGTHS):
        s = math.exp(sum(a - b for a, b in zip(now[i], old[i], strict=True)) / n)
        wide += not 1 - 2e-3 < s < 1 + 2.5e-3
        weights = [min(math.exp(a - b), 2.0) for a, b in zip(old[i], rollout[i], strict=True)]  # of the engine's gap
        losses.append(sum(weights) * clipped(s, advantages[i], 2e-3, 2.5e-3))
    assert 0 < wide < 8
    assert value(preset["loss"](kl=0.0), batch, "near") == pytest.approx(mean(losses), rel=1e-5)


def test_icepop_leaves_out_tokens_that_engine_and_trainer_see_otherwise(variant, scored):
    preset, old, now, rollout = variant("icepop"), draw("old"), draw("base"), draw("rollout")
    batch = preset["advantages"](scored)
    advantages, losses, out = batch.advantages.values.tolist(), [], 0
    for at, advantage in enumerate(advantages):
        w = math.exp(old[at] - rollout[at])
        out += not 0.5 <= w <= 5
        losses.append((w if 0.5 <= w <= 5 else 0.0) * clipped(math.exp(now[at] - old[at]), advantage))
    assert 0 < out < len(TOKENS)
    assert value(preset["loss"](kl=0.0), batch) == pytest.approx(mean(losses), rel=1e-5)


def test_mis_leaves_out_whole_rows(variant, scored):
    preset, old, now, rollout = variant("mis"), *(rows(draw(n)) for n in ("old", "base", "rollout"))
    batch = preset["advantages"](scored)
    advantages, losses, out = batch.advantages.row_mean().to_list(), [], 0
    for i in range(8):
        w = math.exp(sum(old[i]) - sum(rollout[i]))
        out += w > 2
        losses += [
            (w if w <= 2 else 0.0) * clipped(math.exp(a - b), advantages[i])
            for a, b in zip(now[i], old[i], strict=True)
        ]
    assert 0 < out < 8
    assert value(preset["loss"](kl=0.0), batch) == pytest.approx(mean(losses), rel=1e-5)


@pytest.mark.parametrize("name", ["luspo", "icepop", "mis", "maxrl", "lite_ppo", "otb"])
def test_rows_may_be_older_than_the_weights(variant, name):
    preset = variant(name)
    assert preset["kl"] == 0.0 and preset.get("loss", rl.ppo_clip)(kl=0.0).corrects_stale
