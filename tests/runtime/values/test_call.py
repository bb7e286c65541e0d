"""Calls on their way, and how a program prints what they give."""

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.batch import Batch, Column
from flowrl.graph.ops.batch_ops import OPS
from flowrl.graph.ops.field_types import FieldType
from flowrl.graph.stand_ins.scalars import ScalarValue
from flowrl.graph.stand_ins.values import BatchValue, FieldValue, MetricsValue
from flowrl.graph.tracing.trace_records import TBatch, TField, TMetrics, TNumber
from flowrl.runtime.values.call import Call, Part
from flowrl.runtime.values.remote_batch import RemoteBatch


def call(op, worker):
    return Call(0, op, worker, {}, {}, None, fl.batch.CallInfo())


def printed(cls, ref):
    return repr(cls(None, ref))


def test_what_is_not_there_yet_says_whose_it_is_and_what_waits_for_it():
    scored, updated = call(fl.FunctionReward.score, "reward"), call(fl.Actor.update, "actor")
    waits = "not there yet; .mean() waits for it"
    assert printed(FieldValue, Part(scored, "rewards")) == f"<rewards of reward.score, {waits}>"
    assert printed(BatchValue, call(rl.gae, None)) == (
        "<batch of rl.gae, not there yet; len(batch), or .mean() of a field, waits for it>"
    )
    assert printed(MetricsValue, updated) == (
        "<metrics of actor.update, not there yet; an entry such as metrics.loss waits for it>"
    )
    loss = "<loss of actor.update, not there yet; float(...) waits for it>"
    assert printed(ScalarValue, Part(updated, "loss")) == loss
    assert printed(FieldValue, call(OPS["sub"], None)) == f"<field of batch.sub, {waits}>"


@pytest.mark.parametrize(
    ("result", "batch", "field"),
    [
        (
            Batch.of(2, rewards=[1.0, 0.0]),
            "batch of reward.score: 2 rows with rewards",
            "rewards of reward.score: f32[]",
        ),
        (RemoteBatch(((0,),), {}), "batch of reward.score: 1 row with no field", "rewards of reward.score"),
        (None, "batch of reward.score", "rewards of reward.score"),
    ],
)
def test_what_is_there_says_what_it_is(result, batch, field):
    scored = call(fl.FunctionReward.score, "reward")
    scored.finish(result)
    assert printed(BatchValue, scored) == f"<{batch}>"
    assert printed(FieldValue, Part(scored, "rewards")) == f"<{field}>"


def test_numbers_that_are_there_are_said():
    updated, mean, failed = call(fl.Actor.update, "actor"), call(OPS["mean"], None), call(OPS["mean"], None)
    updated.finish(fl.Metrics(loss=0.5, lr=0.1))
    mean.finish(1.5)
    failed.finish(None, ValueError())
    assert printed(MetricsValue, updated) == "<metrics of actor.update: loss, lr>"
    assert printed(ScalarValue, Part(updated, "loss")) == "<loss of actor.update: 0.5>"
    assert printed(ScalarValue, mean) == "<number of batch.mean: 1.5>"
    assert printed(ScalarValue, failed) == "<number of batch.mean>"


def test_values_of_a_trace_say_what_is_known_of_them():
    field = TField(FieldType("f32"), 0, "rewards")
    assert printed(FieldValue, field) == "<field rewards: f32[]>"
    assert printed(BatchValue, TBatch({"rewards": field}, ("draw", 1))) == "<batch with rewards>"
    assert printed(BatchValue, TBatch({}, ("draw", 1))) == "<batch with no field>"
    assert printed(MetricsValue, TMetrics(0, "actor.update")) == "<metrics of actor.update>"
    assert printed(ScalarValue, TNumber(frozenset(), "rewards.mean()", "c1")) == "<number rewards.mean()>"


def test_the_column_that_was_not_made_is_no_part_of_what_is_said():
    scored = call(fl.FunctionReward.score, "reward")
    scored.finish(Batch.of(1, note=Column.of(["a"], dtype="any")))
    assert printed(FieldValue, Part(scored, "rewards")) == "<rewards of reward.score>"
