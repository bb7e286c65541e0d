"""The gap between the engine that samples and the trainer: of which tokens an update measures it, and what it finds."""

from __future__ import annotations

import math

import pytest
import torch
from ten_letters import MODEL, fresh, trained_rows

import flowrl as fl
from flowrl import rl
from flowrl.backends.gap import bound_of
from flowrl.graph.ops.signature import CallShape
from flowrl.workers.gap import EXPECTED, MEASURES, compared_fields

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {*MEASURES, "gap_bound"}


@pytest.fixture(scope="module")
def rows():
    return trained_rows(fresh(), rows=12)


def moved(rows, by):
    """The rows as an engine would hand them over that computes ``by`` (a tensor) beside what it should."""
    logprobs = rows.rollout_logprobs
    other = logprobs.with_values(logprobs.values + by).marked(logprobs.marks)
    return rows.drop("rollout_logprobs").with_columns({"rollout_logprobs": other})


def gap(metrics):
    return {name: value for name, value in metrics.items() if name.startswith("gap_")}


def test_fresh_rows_have_a_gap_of_rounding(rows):
    found = gap(fresh().update(rows, loss=rl.ppo_clip()))
    assert found.keys() == NAMES
    assert found["gap_tokens"] == int(rows.response_mask.values.sum())
    assert 0 < found["gap_mean"] < found["gap_max"] < 1e-4
    assert found["gap_beyond"] == 0 and found["gap_bound"] == bound_of(torch.float32)


def test_its_figures_are_those_of_the_differences(rows):
    by = torch.linspace(-0.3, 0.4, len(rows.rollout_logprobs.values))
    found = gap(fresh().update(moved(rows, by), loss=rl.ppo_clip()))
    assert found["gap_mean"] == pytest.approx(float(by.abs().mean()), abs=1e-5)
    assert found["gap_max"] == pytest.approx(0.4, abs=1e-5)
    # samples of the engine: E[exp(d) - 1 - d], d = log p of the trainer - log p of the engine
    assert found["gap_k3"] == pytest.approx(float((torch.expm1(-by) + by).mean()), abs=1e-5)
    assert found["gap_beyond"] == pytest.approx(float((by.abs() > 1e-3).float().mean()))


def test_a_loss_that_reads_only_the_trainers_has_it_too(rows):
    actor = fresh()
    found = actor.update(actor.logprobs(rows), loss=rl.ppo_clip(anchor="old"))
    assert found["gap_max"] < 1e-4 and found["gap_tokens"] > 0


def test_micro_batches_do_not_change_it(rows):
    by = torch.linspace(-0.3, 0.4, len(rows.rollout_logprobs.values))
    whole, parts = (gap(fresh().update(moved(rows, by), loss=rl.ppo_clip(), micro_tokens=n)) for n in (None, 40))
    assert parts == pytest.approx(whole, abs=1e-5)


def test_later_steps_of_an_update_train_other_weights_and_are_left_out(rows):
    first = gap(fresh().update(rows, loss=rl.ppo_clip(), minibatch=7, epochs=2))
    whole = gap(fresh().update(rows, loss=rl.ppo_clip()))
    assert 0 < first["gap_tokens"] < whole["gap_tokens"] and first["gap_max"] < 1e-4


def test_rows_of_an_older_version_are_not_compared(rows):
    actor = fresh()
    actor.update(rows, loss=rl.ppo_clip())
    found = gap(actor.update(rows, loss=rl.ppo_clip()))
    assert found["gap_tokens"] == 0 and math.isnan(found["gap_mean"])
    older = rows.versions.with_values(rows.versions.values - (torch.arange(len(rows.versions.values)) % 2).int())
    some = fresh().update(rows.drop("versions").with_columns({"versions": older}), loss=rl.ppo_clip())
    assert some.gap_tokens == int((older.values == 0).sum()) and some.gap_max < 1e-4


def test_tokens_that_nobody_sampled_are_not_compared(rows):
    mask = rows.response_mask
    inside = mask.with_values(torch.arange(len(mask.values)) % 3 > 0)
    found = fresh().update(rows.drop("response_mask").with_columns({"response_mask": inside}), loss=rl.ppo_clip())
    assert found.gap_tokens == int(inside.values.sum())


def test_rows_of_others_and_other_temperatures_have_no_gap(rows):
    other = fl.open(fl.Actor(**_settings()), name="other")
    assert not gap(other.update(rows, loss=rl.ppo_clip(), foreign=True))
    assert not gap(fresh().update(rows, loss=rl.sft()))
    assert not gap(fresh().update(rows.drop("versions"), loss=rl.ppo_clip()))
    have = frozenset({"rollout_logprobs", "versions", "temperature"})
    assert compared_fields(CallShape({}, {}, have)) == ("rollout_logprobs", "versions")
    assert not compared_fields(CallShape({}, {"temperature": 0.7}, have))
    assert not compared_fields(CallShape({}, {"foreign": True}, have))
    assert not compared_fields(CallShape({}, {"loss": rl.sft()}, have))


def _settings():
    return {"model": MODEL, "lr": 1e-3}


def test_weights_and_all_other_metrics_are_bit_for_bit_those_without_it(rows):
    with_it, without = fresh(), fresh()
    found = with_it.update(rows, loss=rl.ppo_clip(entropy=0.01), minibatch=9, epochs=2)
    plain = without.update(rows.drop("versions"), loss=rl.ppo_clip(entropy=0.01), minibatch=9, epochs=2)
    assert with_it.engine.digest() == without.engine.digest()
    assert {n: v for n, v in found.items() if n not in NAMES} == plain


def test_a_loss_is_not_handed_what_is_expected(rows):
    seen = []

    @rl.loss(reads="advantages, response_mask")
    def spying(x):
        seen.append(set(x.fields))
        return -x["advantages"] * x.predicted

    assert fresh().update(rows, loss=spying()).gap_tokens > 0
    assert EXPECTED not in seen[0]
