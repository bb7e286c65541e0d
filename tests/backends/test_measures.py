"""What every policy update measures is what a slow look at the whole batch finds, whatever the micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from ten_letters import fresh, trained_rows

import flowrl as fl
from flowrl import rl
from flowrl.backends.measures import repeated_grams
from flowrl.graph.tracing.reported_metrics import OF_POLICY

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def rows():
    """Generations that an older policy has sampled, of which two prompts have no signal."""
    made = trained_rows(fresh(), rows=6, n=4)
    by = torch.linspace(-0.6, 0.9, len(made.rollout_logprobs.values))
    still = torch.tensor([key[0] in (1, 4) or key == (2, 3) for key in made.keys])
    lengths = made.response_mask.lengths
    advantages = made.advantages.values.masked_fill(still.repeat_interleave(lengths), 0)
    mask = torch.arange(len(advantages)) % 5 != 2  # some tokens were not sampled
    columns = {
        "rollout_logprobs": made.rollout_logprobs.with_values(made.rollout_logprobs.values + by),
        "advantages": made.response_mask.with_values(advantages),
        "response_mask": made.response_mask.with_values(mask),
    }
    return made.drop(*columns).with_columns(columns)


def oracle(rows, *, low=0.2, high=0.2, computed=None):
    """The measures, token by token in plain Python; ``computed`` says which rows the update computes."""
    actor = fresh()
    read = actor.entropies(actor.logprobs(rows.drop("old_logprobs") if "old_logprobs" in rows else rows))
    tokens = []
    for i in range(len(rows)):
        if computed is not None and not computed[i]:
            continue
        parts = [rows.response_mask[i], read.old_logprobs[i], rows.rollout_logprobs[i], read.entropies[i]]
        for inside, now, before, entropy, a in zip(*(p.tolist() for p in (*parts, rows.advantages[i])), strict=True):
            if inside:
                tokens.append((math.exp(now - before), before - now, entropy, a))
    n = len(tokens)
    ratios = [ratio for ratio, *_ in tokens]
    return {
        "entropy": sum(entropy for *_, entropy, _ in tokens) / n,
        "rollout_kl": sum(math.exp(-d) - 1 + d for _, d, *_ in tokens) / n,
        "ratio_max": max(ratios),
        "ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
        "clip_low": sum(r < 1 - low and a < 0 for r, *_, a in tokens) / n,
        "clip_high": sum(r > 1 + high and a > 0 for r, *_, a in tokens) / n,
        "silent_groups": 2 / 6,
        "repetition": repeated(rows),
    }


def repeated(rows):
    again = count = 0
    for i in range(len(rows)):
        mask = rows.response_mask[i].tolist()
        ids = [
            t for t, inside in zip(rows.tokens[i].tolist()[-len(mask) :] if mask else [], mask, strict=True) if inside
        ]
        seen = set()
        for k in range(len(ids) - 3):
            gram = tuple(ids[k : k + 4])
            count, again = count + 1, again + (gram in seen)
            seen.add(gram)
    return again / count if count else 0.0


def measures(metrics):
    return {name: metrics[name] for name in OF_POLICY}


@pytest.mark.parametrize("micro_tokens", [None, 40])
def test_they_are_those_of_the_whole_batch(rows, micro_tokens):
    loss = rl.ppo_clip(kl=0.0, entropy=1e-9)  # every row is computed: the bonus trains those without an advantage too
    found = measures(fresh().update(rows, loss=loss, micro_tokens=micro_tokens))
    assert found == pytest.approx(oracle(rows), abs=1e-5)
    assert 0 < found["clip_low"] < 1 and 0 < found["clip_high"] < 1 and 0 < found["ess"] < 1


def test_without_a_bonus_they_are_of_the_rows_that_are_computed(rows):
    spoken = [bool((rows.advantages[i][rows.response_mask[i]] != 0).any()) for i in range(len(rows))]
    found = measures(fresh().update(rows, loss=rl.ppo_clip()))
    assert found == pytest.approx(oracle(rows, computed=spoken), abs=1e-5)


def test_several_steps_of_an_update_count_together(rows):
    found = fresh().update(rows, loss=rl.ppo_clip(), minibatch=5, epochs=2)
    assert found["steps"] > 2 and 0 < found["ess"] <= 1 and found["ratio_max"] >= found["ratio"]
    assert found["clip_low"] + found["clip_high"] == pytest.approx(found["clip_fraction"])


def test_the_ratio_to_the_trainer_before_is_apart_from_the_kl_to_the_engine(rows):
    actor = fresh()
    found = actor.update(actor.logprobs(rows), loss=rl.ppo_clip(anchor="old"))
    assert found["ratio_max"] == pytest.approx(1, abs=1e-5) and found["ess"] == pytest.approx(1, abs=1e-5)
    assert found["rollout_kl"] > 0.01 and found["approx_kl"] == pytest.approx(0, abs=1e-5)


def test_a_loss_that_does_not_ask_for_the_entropy_is_not_handed_it(rows):
    @rl.loss(reads="advantages, response_mask, rollout_logprobs")
    def own(x):
        assert x.entropy is None
        return -x["advantages"] * x.predicted

    found = fresh().update(rows, loss=own())
    wanted = {name: value for name, value in oracle(rows).items() if not name.startswith("clip")}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-5), "ratios are to the engine"
    assert not {"clip_low", "clip_high"} & set(found)


def test_an_update_without_advantages_measures_rows_that_were_sampled(rows):
    found = fresh().update(rows, loss=rl.sft())
    wanted = oracle(rows)
    assert set(OF_POLICY) & set(found) == {"entropy", "repetition"}
    assert [found[name] for name in ("entropy", "repetition")] == pytest.approx(
        [wanted[name] for name in ("entropy", "repetition")], abs=1e-5
    )


def test_an_update_of_rows_that_nobody_sampled_measures_none_of_them(rows):
    given = rows.drop(*(name for name in rows.fields if name not in ("tokens", "response_mask")))
    assert not set(OF_POLICY) & set(fresh().update(given, loss=rl.sft()))


def test_an_update_without_a_signal_has_no_numbers(rows):
    zero = rows.advantages.with_values(torch.zeros_like(rows.advantages.values))
    found = fresh().update(rows.drop("advantages").with_columns({"advantages": zero}), loss=rl.ppo_clip())
    assert found["silent_groups"] == 1.0 and found["repetition"] == pytest.approx(repeated(rows))
    assert all(math.isnan(found[name]) for name in set(OF_POLICY) - {"silent_groups", "repetition"})


LEVELS = {"token": lambda row: row, "sequence": lambda row: [sum(row)] * len(row)}
LEVELS["geometric"] = lambda row: [sum(row) / len(row)] * len(row)


def before_bounds(rows, logprobs, level, how, low, high):
    """What the ratio of a correction is before its bounds, row by row in plain Python."""
    every, beyond, beyond_rows, count = [], 0, 0, 0
    for i in range(len(rows)):
        parts = (rows.response_mask[i], logprobs[i], rows.rollout_logprobs[i])
        moved = [now - then for inside, now, then in zip(*(p.tolist() for p in parts), strict=True) if inside]
        if not moved:
            continue
        ratios = [math.exp(d) for d in LEVELS[level](moved)]
        outside = [w < low or w > high for w in ratios]
        outside = [any(outside)] * len(outside) if how == "veto" else outside
        every += ratios
        beyond, beyond_rows, count = beyond + sum(outside), beyond_rows + any(outside), count + 1
    return {
        "ratio": sum(every) / len(every),
        "ratio_max": max(every),
        "ess": sum(every) ** 2 / (len(every) * sum(w * w for w in every)),
        "beyond": beyond / len(every),
        "beyond_rows": beyond_rows / count,
    }


CORRECTIONS = {
    "truncate": ("token", 0.0, 1.1),
    "clip": ("geometric", 0.9, 1.1),
    "mask": ("sequence", 0.5, 2.0),
    "reject": ("token", 0.8, 1.2),
    "veto": ("token", 0.6, math.inf),
    "weigh": ("token", 0.0, math.inf),
}


@pytest.mark.parametrize("micro_tokens", [None, 40])
@pytest.mark.parametrize("how", CORRECTIONS)
def test_the_ratio_of_a_correction_is_told_before_its_bounds(rows, how, micro_tokens):
    level, low, high = CORRECTIONS[how]
    actor = fresh()
    given = actor.logprobs(rows)
    bounds = {"low": low or None, "high": None if high == math.inf else high}
    loss = rl.ppo_clip(anchor="old", correction=rl.correct(level, how, **bounds), entropy=1e-9)
    found = actor.update(given, loss=loss, micro_tokens=micro_tokens)
    wanted = before_bounds(rows, given.old_logprobs, level, how, low, high)
    assert {name: found[f"correction_{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert how == "weigh" or 0 < wanted["beyond"] < 1


def test_each_ratio_of_several_corrections_has_numbers_of_its_own(rows):
    actor = fresh()
    given = actor.logprobs(rows)
    parts = [rl.reject("k3", limit=0.5), rl.correct(high=1.1), rl.correct("sequence", "mask", low=0.5, high=2.0)]
    loss = rl.ppo_clip(anchor="old", correction=parts, entropy=1e-9)
    found = actor.update(given, loss=loss)
    for name, said in (("correction", ("token", "truncate", 0, 1.1)), ("correction2", ("sequence", "mask", 0.5, 2.0))):
        wanted = before_bounds(rows, given.old_logprobs, *said)
        assert {n: found[f"{name}_{n}"] for n in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert {name for name in found if name.startswith("correction")} == {n for n in loss.reports if n[:4] == "corr"}


def test_a_correction_without_a_ratio_tells_of_none(rows):
    actor = fresh()
    loss = rl.ppo_clip(anchor="old", correction=rl.reject("k3", limit=0.5))
    found = actor.update(actor.logprobs(rows), loss=loss)
    assert "weight" in found and not any(name.startswith("correction") for name in found)


def test_without_a_signal_a_correction_has_no_numbers(rows):
    zero = rows.advantages.with_values(torch.zeros_like(rows.advantages.values))
    actor = fresh()
    given = actor.logprobs(rows.drop("advantages").with_columns({"advantages": zero}))
    found = actor.update(given, loss=rl.ppo_clip(anchor="old", correction=rl.correct(high=1.1)))
    ratios = [name for name in found if name.startswith("correction")]
    assert len(ratios) == 5 and all(math.isnan(found[name]) for name in ratios)


@pytest.mark.parametrize("seed", range(5))
def test_repetition_is_counted_as_a_set_of_each_response_counts_it(seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 30, (9,), generator=draw)
    prompts = torch.randint(1, 4, (9,), generator=draw)
    ids = [torch.randint(0, 3, (int(p + n),), generator=draw).tolist() for p, n in zip(prompts, lengths, strict=True)]
    masks = [(torch.rand(int(n), generator=draw) > 0.2).tolist() for n in lengths]
    batch = fl.Batch.of(
        9,
        tokens=fl.Column.of(ids, dim="token", dtype="i32"),
        response_mask=fl.Column.of(masks, dim="response", dtype="bool"),
    )
    again, count = repeated_grams(batch)
    assert (again / count if count else 0.0) == repeated(batch)
