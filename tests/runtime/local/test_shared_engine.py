"""An engine that calls share: one batch, rows of each call to their call, publishes in between, faults to whose they are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.errors import NotFinite, RunError
from flowrl.runtime.executor import SteppedCall
from flowrl.runtime.local.shared_engine import SharedEngine, StreamedCall
from flowrl.testing import FakeEngine, Sampling
from flowrl.workers.streaming import EngineCall, SampleRequest
from flowrl.workers.user_code.rows_in_progress import Notes


def request(first: int, tokens: int, prompts: int = 2) -> SampleRequest:
    ids = fl.Column.of([[3 + i] for i in range(prompts)], dim="prompt", dtype="i32")
    return SampleRequest(ids, 2, torch.arange(first, first + 2 * prompts), Sampling(max_tokens=tokens))


def finish(shared: SharedEngine, rows) -> None:
    while not rows.are_over:
        shared.step()


def test_calls_are_in_one_batch_and_get_their_own_rows():
    engine = FakeEngine(stop=())
    shared = SharedEngine(engine, 0)
    long, short = shared.submit(request(0, 9)), shared.submit(request(100, 4))
    finish(shared, short)
    assert engine.steps == 4 and len(engine.running()) == 4 and shared.has_results
    finish(shared, long)
    assert engine.steps == 9, "no token was computed twice, and none alone that could be with others"
    alone = FakeEngine(stop=())
    for rows, first, tokens in ((long, 0, 9), (short, 100, 4)):
        whole, made = EngineCall(alone, request(first, tokens)).answer(), shared.take(rows)
        assert made.ids.to_list() == whole.ids.to_list()
        assert made.versions is not None and set(made.versions.values.tolist()) == {0}
    assert not shared.has_results


def test_a_row_that_had_ended_as_its_call_was_given_up_is_nobodys():
    """A server ends rows by itself, and tells of one with the next step: a run that went back ended with a KeyError."""

    class Late(FakeEngine):
        """Its last row ends as it is aborted, and is told with the next step."""

        late = ()

        def abort(self, call, rows=None):
            *gone, last = super().abort(call, rows)
            self.late = (replace(last, reason="length"),)
            return gone

        def step(self):
            late, self.late = self.late, ()
            return [*late, *super().step()]

    engine = Late(stop=())
    shared = SharedEngine(engine, 0)
    shared.submit(request(0, 9))
    shared.step()
    shared.abort()
    rows = shared.submit(request(100, 4))
    finish(shared, rows)
    assert not engine.late and shared.take(rows).ids.lengths.tolist() == [4] * 4


def test_rows_that_find_no_place_keep_a_call_out():
    engine = FakeEngine(stop=(), rows=4)
    shared = SharedEngine(engine, 0)
    first, second = shared.submit(request(0, 3)), shared.submit(request(50, 3))
    shared.step()
    assert not shared.has_waiting(first) and shared.has_waiting(second)
    finish(shared, first)
    shared.step()
    assert not shared.has_waiting(second)


@pytest.mark.parametrize("keep", [False, True])
def test_a_publish_in_the_middle_is_in_the_versions_of_the_tokens(keep):
    engine = FakeEngine(stop=())
    shared = SharedEngine(engine, 7)
    rows = shared.submit(request(0, 5))
    shared.step()
    shared.step()
    other = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).double()
    assert shared.publish(lambda: int(engine.table.copy_(other).nbytes), 8, keep_cache=keep) == other.nbytes
    finish(shared, rows)
    made = shared.take(rows)
    assert made.versions is not None and made.versions.to_list() == [[7, 7, 8, 8, 8]] * 4
    assert made.kept_cache == keep
    ids, logprobs = made.ids.to_list()[0], made.rollout_logprobs.to_list()[0]
    assert logprobs[3] == pytest.approx(float(other[ids[2]].log_softmax(-1)[ids[3]]))


def test_one_call_fails_and_the_others_go_on():
    engine = FakeEngine(stop=())
    shared = SharedEngine(engine, 0)
    good, bad = shared.submit(request(0, 6, prompts=1)), shared.submit(request(9, 6))
    engine.table[4] = torch.nan  # the last token of the second prompt of the second call
    finish(shared, bad)
    with pytest.raises(NotFinite, match="call 2"):
        shared.take(bad)
    engine.table[4] = 0.0
    finish(shared, good)
    assert shared.take(good).ids.lengths.tolist() == [6, 6]


def test_a_publish_that_fails_ends_the_calls():
    engine = FakeEngine(stop=())
    shared = SharedEngine(engine, 0)
    rows = shared.submit(request(0, 6))
    shared.step()

    def fails() -> int:
        raise ValueError("half written")

    with pytest.raises(ValueError, match="half written"):
        shared.publish(fails, 1, keep_cache=False)
    with pytest.raises(RunError, match="engine of this call has failed"):
        finish(shared, rows)


def test_an_op_gives_what_it_gives_as_a_whole_call():
    engine = FakeEngine(stop=(0,), tokenizer=SimpleNamespace())
    actor = fl.open(fl.Actor("none", lr=None, max_tokens=7), engine=engine)
    batch = fl.Batch.of(3, prompt_ids=fl.Column.of([[3], [5], [9, 2]], dim="prompt", dtype="i32"))
    info = CallInfo(0, "grpo", 0, "actor.generate", 0)
    op = type(actor).__dict__["generate"]
    whole = op.run(actor, op.bind((batch,), {"n": 2}), {}, info)
    how = {"engine": SharedEngine(engine, actor.version), "notes": Notes(), "warn": [].append}
    streamed = StreamedCall(op, actor, op.bind((batch,), {"n": 2}), {}, info, **how)
    assert isinstance(streamed, SteppedCall) and not streamed.step() and streamed.has_entered
    made = streamed.result()
    assert streamed.step() and made.keys == whole.keys and made.fields == whole.fields
    for name in whole.fields:
        assert made[name].to_list() == whole[name].to_list(), name
        assert made[name].marks == whole[name].marks


def test_rows_that_kept_their_cache_are_compared_where_they_began_with_the_version():
    from flowrl.marks import marks
    from flowrl.workers.gap import EXPECTED, with_expected

    versions = fl.Column.of([[1, 2], [2, 2, 2], []], dim="response", dtype="i32")
    sampled = versions.with_values(torch.arange(5.0))
    rows = fl.Batch.of(
        3,
        tokens=versions.marked(marks(sampler="actor")),
        response_mask=versions.with_values(torch.ones(5, dtype=torch.bool)),
        rollout_logprobs=sampled,
        temperature=fl.Column.of([1.0] * 3, dtype="f32"),
        versions=versions,
    )

    def compared(batch: fl.Batch) -> list[bool]:
        made = with_expected(batch, worker="actor", version=2, temperature=None)
        return torch.isfinite(made[EXPECTED].values).tolist()

    assert compared(rows) == [False, True, True, True, True]
    kept = rows.drop("versions").with_columns({"versions": versions.marked(marks(cache="kept"))})
    assert compared(kept) == [False, False, True, True, True]
