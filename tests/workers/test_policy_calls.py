"""Weights that are published while sessions ask: each token has the version that drew it, in the midst of a turn too."""

from __future__ import annotations

import pytest
import torch
from letters import build_tokenizer, model_of

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.marks import values
from flowrl.runtime.values.remote_batch import oldest_of
from flowrl.workers.gap import EXPECTED, with_expected

LONG, SHORT = 30, 3


class Publishes(fl.Env):
    """Two turns; the first action of episode 0 has other weights be published, while the row of the others runs."""

    turns = 2

    def __init__(self, publish):
        self.publish = publish

    def reset(self, row, seed):
        return (row["number"], 0), "a"

    def step(self, state, action):
        number, turn = state
        if (number, turn) == (0, 0):
            self.publish()
        return (number, turn + 1), "b", 1.0, turn == 1


def rows():
    ids = fl.Column.of([[2], [3]], dim="prompt", dtype="i32")
    number = fl.Column.of([0, 1], dtype="any")
    return fl.Batch([(0,), (1,)], {"prompt_ids": ids, "number": number}).with_call(CallInfo(seed=3, op="game.rollout"))


@pytest.mark.parametrize("how", ["interrupt", "continue"])
def test_a_turn_that_a_publish_interrupts_has_tokens_of_both_weights(how):
    short = rows().expand(1).row_seeds().tolist()[0]
    engine = fl.testing.FakeEngine(
        vocab=8, stop=(), tokenizer=build_tokenizer(), lengths=lambda seed: SHORT if seed == short else LONG
    )
    tables = [engine.table.clone(), -engine.table]
    stream = engine.stream
    stream.follows = True

    def publish():
        stream.kept_cache = how == "continue"
        stream.publish(lambda: engine.table.copy_(tables[1]), 1, how)

    actor = fl.open(fl.Actor(model_of(), max_tokens=LONG), name="actor", engine=engine)
    found = fl.open(Publishes(publish), name="game").rollout(rows(), policy=actor)
    columns = [found[name].to_list() for name in ("tokens", "turn_ids", "versions", "rollout_logprobs")]
    spans = []
    for tokens, turns, versions, logprobs in zip(*columns, strict=True):
        before = tokens[len(tokens) - len(turns) - 1 : -1]
        for last, token, turn, version, logprob in zip(
            before, tokens[-len(turns) :], turns, versions, logprobs, strict=True
        ):
            if turn >= 0:
                assert logprob == pytest.approx(float(tables[version][last].log_softmax(-1)[token]), abs=1e-5)
        spans.append([(turn, version) for turn, version in zip(turns, versions, strict=True) if turn >= 0])
    assert spans[0] == [(0, 0)] * SHORT + [(1, 1)] * SHORT
    assert spans[1] == [(0, 0)] * SHORT + [(0, 1)] * (LONG - SHORT) + [(1, 1)] * LONG, "in the midst of its first turn"
    assert oldest_of(found) == [0, 0] and oldest_of(found.take([0]).with_columns({})) == [0]
    assert values(found["versions"].marks, "cache") == ({"kept"} if how == "continue" else set())
    compared = ~with_expected(found, worker="actor", version=1, temperature=None)[EXPECTED].values.isnan()
    per_row = [int(part.sum()) for part in compared.split(found.response_ids.lengths.tolist())]
    assert per_row == [SHORT, LONG if how == "continue" else 2 * LONG - SHORT], "those that began with the new weights"


def test_tokens_that_were_observed_make_no_row_old():
    def column(name, row, dtype):
        return {name: fl.Column.of([row, row[:1]], dim="response", dtype=dtype)}

    found = {**column("versions", [0, 7, 6, 0], "i32"), **column("response_mask", [False, True, True, False], "bool")}
    assert oldest_of(fl.Batch.of(2, **found)) == [6, None]
    assert oldest_of(fl.Batch.of(2, **column("versions", [5, 7], "i32"))) == [5, 5]


def test_versions_are_those_of_the_policy_where_no_publish_comes_in_between():
    """An engine that is not told of versions counts from 0."""
    engine = fl.testing.FakeEngine(vocab=8, tokenizer=build_tokenizer())
    actor = fl.open(fl.Actor(model_of(), max_tokens=4), name="actor", engine=engine)
    actor.mark_published(3)
    found = fl.open(Publishes(lambda: None), name="game").rollout(rows(), policy=actor)
    assert set(found.versions.values[found.response_mask.values].tolist()) == {3}
    assert torch.equal(found.versions.values == 3, found.response_mask.values)
