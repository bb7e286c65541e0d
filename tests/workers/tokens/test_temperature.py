"""Rows are trained at the temperature that they were sampled at, and say how they ended."""

from __future__ import annotations

import math

import pytest
import torch
from ten_letters import EOS, fresh, prompts, trained_rows

import flowrl as fl
from flowrl import rl
from flowrl.errors import DataError, ProgramError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def actor():
    return fresh()


def advantaged(made):
    signs = torch.tensor([1.0 if i % 3 else -0.5 for i in range(len(made))])
    spread = signs.repeat_interleave(made.response_mask.lengths)
    return made.with_columns({"advantages": made.response_mask.with_values(spread)})


def by_hand(actor, rows, temperatures):
    """Log-probabilities and entropy of every response token, by the model's own forward pass and plain autograd."""
    model, found, spread = actor.engine.net.model, [], []
    for tokens, mask, heat in zip(rows.tokens, rows.response_mask, temperatures, strict=True):
        first = len(tokens) - len(mask)
        every = (model(tokens.long()[None]).logits[0, first - 1 : -1] / heat).log_softmax(-1)
        found.append(every.gather(-1, tokens[first:, None].long()).squeeze(-1))
        spread.append(-(every.exp() * every).sum(-1))
    return torch.cat(found), torch.cat(spread)


# -- temperature ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.8, "top_k": 4}, {"greedy": True}]
)
def test_the_ratio_of_fresh_rows_is_one_at_any_temperature(how):
    actor = fresh(temperature=1.4)
    rows = advantaged(actor.generate(prompts(12), n=4, **how))
    metrics = actor.update(rows, loss=rl.ppo_clip())
    assert metrics.ratio == pytest.approx(1, abs=1e-5)
    assert metrics.approx_kl == pytest.approx(0, abs=1e-9)
    assert metrics.clip_fraction == 0


def test_rows_carry_the_temperature_that_each_was_sampled_at(actor):
    assert actor.generate(prompts(2), temperature=0.6).temperature.to_list() == pytest.approx([0.6] * 2)
    assert actor.generate(prompts(2), temperature=0.6, greedy=True).temperature.to_list() == [1.0, 1.0]
    assert fresh(temperature=1.4).generate(prompts(1), n=2).temperature.to_list() == pytest.approx([1.4] * 2)


def test_rows_of_several_temperatures_are_read_each_at_its_own(actor):
    cold, hot = (actor.generate(prompts(4), n=2, temperature=t) for t in (0.5, 1.8))
    hot = fl.Batch([(k[0] + 4, *k[1:]) for k in hot.keys], dict(hot.columns))
    rows = cold.concat(hot)
    wanted, _ = by_hand(actor, rows, [0.5] * 8 + [1.8] * 8)
    torch.testing.assert_close(rows.rollout_logprobs.values, wanted.detach(), atol=1e-4, rtol=0)
    torch.testing.assert_close(actor.logprobs(rows).old_logprobs.values, wanted.detach(), atol=1e-4, rtol=0)
    ref = fl.open(fl.Reference(of=actor))
    torch.testing.assert_close(ref.logprobs(rows).ref_logprobs.values, wanted.detach(), atol=1e-4, rtol=0)
    full = ref.distribution(rows).ref_distribution.values
    own = full.gather(-1, rows.response_ids.values.long()[:, None]).squeeze(-1)
    torch.testing.assert_close(own, wanted.detach(), atol=1e-4, rtol=0)


def test_a_temperature_of_the_call_takes_the_place_of_the_rows_own(actor):
    rows = actor.generate(prompts(3), n=2, temperature=0.6)
    ref = fl.open(fl.Reference(of=actor))
    for temperature in (1.0, 2.0):
        wanted = by_hand(actor, rows, [temperature] * len(rows))[0].detach()
        for made in (
            actor.logprobs(rows, temperature=temperature).old_logprobs,
            ref.logprobs(rows, temperature=temperature).ref_logprobs,
        ):
            torch.testing.assert_close(made.values, wanted, atol=1e-4, rtol=0)
    with pytest.raises(ProgramError, match="temperature=0 is not a number above 0"):
        ref.logprobs(rows, temperature=0)


def test_rows_that_nobody_sampled_are_read_at_temperature_one(actor):
    rows = actor.generate(prompts(3), temperature=0.6).drop("temperature")
    wanted = by_hand(actor, rows, [1.0] * 3)[0].detach()
    torch.testing.assert_close(actor.logprobs(rows).old_logprobs.values, wanted, atol=1e-4, rtol=0)


def test_loss_entropy_and_gradient_are_those_of_the_tempered_policy():
    """A gradient step of plain gradient descent, by hand."""
    actor = fresh(grad_clip=None)
    rows = advantaged(actor.generate(prompts(5), n=2, temperature=0.6))
    named = actor.engine.trainer.named
    predicted, entropy = by_hand(actor, rows, [0.6] * len(rows))
    wanted_entropy = float(entropy.detach().mean())
    ratio = (predicted - rows.rollout_logprobs.values).exp()
    loss = (-ratio * rows.advantages.values).mean() - 0.1 * entropy.mean()
    slopes = torch.autograd.grad(loss, list(named.values()))
    metrics = actor.update(rows, loss=rl.ppo_clip(entropy=0.1))
    assert metrics.loss == pytest.approx(float(loss.detach()), abs=1e-5)
    assert metrics.entropy == pytest.approx(wanted_entropy, abs=1e-5)
    assert metrics.grad_norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in slopes)), rel=1e-4)


def test_a_temperature_of_the_data_is_said_to_be_no_temperature(actor):
    rows = actor.generate(prompts(2)).drop("temperature")
    with pytest.raises(DataError, match="'temperature' is any here, and the model reads one f32 per row"):
        actor.logprobs(rows.with_columns({"temperature": fl.Column.of(["warm", "cold"])}))
    with pytest.raises(DataError, match=r"Row \(1, 0\) has the temperature 0"):
        actor.logprobs(rows.with_columns({"temperature": fl.Column.of([1.0, 0.0])}))


# -- how rows ended ------------------------------------------------------------------------------------------------


def test_a_row_says_whether_a_stop_ended_it(actor):
    rows = actor.generate(prompts(20), n=4, max_tokens=6)
    stopped = [r[-1] == EOS for r in rows.response_ids.to_list()]
    assert True in stopped and False in stopped
    assert rows.finished.to_list() == stopped
    assert rows.finish_reason.to_list() == ["stop" if s else "length" for s in stopped]


def test_an_update_reports_the_share_of_rows_that_were_cut_off():
    actor = fresh()
    rows = trained_rows(actor, rows=12)
    share = 1 - sum(rows.finished.to_list()) / len(rows)
    assert 0 < share < 1
    assert actor.update(rows, loss=rl.ppo_clip(), minibatch=7).truncated == pytest.approx(share)
    assert "truncated" not in actor.update(rows.drop("finished"), loss=rl.ppo_clip())


def test_a_loss_of_the_finished_rows_is_the_loss_of_a_batch_of_them():
    """Overlong filtering: rows that were cut off count in neither the loss nor its denominator."""
    rows = trained_rows(fresh(), rows=12)
    kept = rows.filter(rows.finished)
    assert 0 < len(kept) < len(rows)
    found, wanted = fresh(), fresh()
    said = found.update(rows, loss=rl.where("finished", rl.ppo_clip(entropy=0.01)))
    told = wanted.update(kept, loss=rl.ppo_clip(entropy=0.01))
    for name in ("loss", "grad_norm", "entropy", "tokens"):
        assert said[name] == pytest.approx(told[name], rel=1e-5, abs=1e-6), name
    a, b = (w.engine.plain_weights() for w in (found, wanted))
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-6


def test_a_loss_of_no_row_leaves_the_weights_alone():
    rows = trained_rows(fresh(), rows=3).drop("finished")
    none = rows.with_columns({"kept": fl.Column.of([False] * len(rows))})
    actor, before = fresh(), fresh().engine.digest()
    actor.update(none, loss=rl.where("kept", rl.sft()), lr=0.0)
    assert actor.engine.digest() == before


def test_a_loss_says_of_which_rows_it_is():
    assert repr(rl.where("finished", rl.sft())) == "sft(where finished)"
