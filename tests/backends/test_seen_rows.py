"""An update keeps what it finds of the tokens of recorded rows: what a read before it finds, and of no other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ten_letters import fresh, trained_rows

import flowrl as fl
from flowrl import rl
from flowrl.backends.seen_rows import SeenRows
from flowrl.batch import CallInfo

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = (1, 4)


@pytest.fixture(scope="module")
def rows():
    """Generations of six prompts, of which one has no signal; some tokens were not sampled."""
    made = trained_rows(fresh(), rows=6, n=4)
    mask = torch.arange(len(made.response_mask.values)) % 5 != 2
    still = torch.tensor([key[0] == 2 for key in made.keys]).repeat_interleave(made.response_mask.lengths)
    columns = {
        "response_mask": made.response_mask.with_values(mask),
        "advantages": made.advantages.with_values(made.advantages.values.masked_fill(still, 0)),
    }
    return made.drop(*columns).with_columns(columns)


def recorded(rows, prompts=RECORDED):
    return rows.with_call(replace(rows.call or CallInfo(seed=3), recorded=tuple(prompts)))


def oracle(rows, prompts=RECORDED):
    """Of each row of the prompts what an actor reads before it is trained."""
    actor = fresh()
    read = actor.entropies(actor.logprobs(rows.drop("old_logprobs") if "old_logprobs" in rows else rows))
    found = []
    for i in sorted(range(len(rows)), key=lambda i: rows.keys[i]):
        if rows.keys[i][0] in prompts:
            mask = rows.response_mask[i].tolist()
            numbers = {"trained_logprobs": read.old_logprobs[i].tolist(), "entropies": read.entropies[i].tolist()}
            kept = {n: [v if inside else None for v, inside in zip(c, mask, strict=True)] for n, c in numbers.items()}
            found.append({"key": list(rows.keys[i]), **kept})
    return found


def agree(found, wanted):
    assert [said["key"] for said in found] == [said["key"] for said in wanted]
    for said, other in zip(found, wanted, strict=True):
        assert said.keys() == other.keys()
        for name in said:
            assert [v is None for v in said[name]] == [v is None for v in other[name]]
            for a, b in zip(said[name], other[name], strict=True):
                assert a is None or a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize("micro_tokens", [None, 40])
@pytest.mark.parametrize("loss", [rl.ppo_clip(), rl.ppo_clip(entropy=0.01)], ids=["plain", "bonus"])
def test_they_are_what_a_read_before_finds(rows, loss, micro_tokens):
    found = fresh().update(recorded(rows), loss=loss, micro_tokens=micro_tokens)
    wanted = oracle(rows)
    assert len(wanted) == 8 and any(None in said["entropies"] for said in wanted)
    agree(found.rows_seen, wanted)


def test_of_several_epochs_the_first_counts(rows):
    agree(fresh().update(recorded(rows), loss=rl.ppo_clip(), epochs=3).rows_seen, oracle(rows))


def test_of_several_steps_the_first_counts(rows):
    every = tuple(range(6))
    found = fresh().update(recorded(rows, every), loss=rl.ppo_clip(entropy=1e-9), minibatch=9)
    wanted = {tuple(said["key"]): said for said in oracle(rows, every)}
    assert found["steps"] == 3 and 5 < len(found.rows_seen) <= 9, "the rows of its first step"
    agree(found.rows_seen, [wanted[tuple(said["key"])] for said in found.rows_seen])


def test_rows_that_are_not_computed_have_none(rows):
    assert fresh().update(recorded(rows, (2,)), loss=rl.ppo_clip()).rows_seen == []
    assert len(fresh().update(recorded(rows, (2,)), loss=rl.ppo_clip(entropy=1e-9)).rows_seen) == 4


def test_without_recorded_prompts_nothing_is_kept(rows):
    for given in (rows, recorded(rows, ()), recorded(rows, (77,))):
        assert not fresh().update(given, loss=rl.ppo_clip()).rows_seen


def test_a_loss_that_measures_no_entropy_has_log_probabilities_alone(rows):
    given = recorded(rows.select("tokens", "response_mask"))
    found = fresh().update(given, loss=rl.sft()).rows_seen
    agree(found, [{n: v for n, v in said.items() if n != "entropies"} for said in oracle(rows)])


def test_at_another_temperature_they_are_not_kept(rows):
    given = recorded(rows.select("tokens", "response_mask"))
    assert not fresh().update(given, loss=rl.sft(), temperature=0.5).rows_seen
    assert fresh().update(given, loss=rl.sft()).rows_seen


def test_weights_and_metrics_are_those_without(rows):
    plain, watched = fresh(), fresh()
    for _ in range(2):
        before = plain.update(recorded(rows, ()), loss=rl.ppo_clip(), minibatch=9)
        after = watched.update(recorded(rows, range(6)), loss=rl.ppo_clip(), minibatch=9)
        assert dict(after) == dict(before) and after.rows_seen and not before.rows_seen
    assert plain.digest() == watched.digest()


def test_rows_without_tokens_are_nowhere_in_the_way():
    mask = fl.Column.of([[], [True, False], [], [True]], dim="response", dtype="bool")
    batch = fl.Batch.of([(0, 0), (0, 1), (1, 0), (1, 1)], response_mask=mask)
    seen = SeenRows(batch, (0, 1))
    seen.add(torch.tensor([2]), torch.tensor([-0.25]), None)
    seen.add(torch.tensor([], dtype=torch.int64), torch.tensor([]), None)
    seen.add(torch.tensor([0, 1]), torch.tensor([-1.5, -2.5]), None)
    seen.close()
    seen.add(torch.tensor([0]), torch.tensor([-9.0]), None)
    assert seen.to_json() == [
        {"key": [0, 1], "trained_logprobs": [-1.5, None]},
        {"key": [1, 1], "trained_logprobs": [-0.25]},
    ]
