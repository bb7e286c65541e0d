"""What every executor does, whichever runs the calls: the same tests for this process and for ranks."""

from __future__ import annotations

import pytest
import torch
from direct import place_for, run_direct
from flows import metrics, module_of

import flowrl as fl
from flowrl.backends import open_engine
from flowrl.batch import CallInfo
from flowrl.errors import RankLost, RunError
from flowrl.graph.ops.batch_ops import OPS
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.executor import Executor, RunServices
from flowrl.runtime.local.executor import LocalExecutor
from flowrl.runtime.storage.checkpoints import checkpoint_folder as checkpoint
from flowrl.runtime.storage.journal import Journal
from flowrl.runtime.values.call import Call
from flowrl.runtime.values.chunks import join_chunks

KINDS = ("local", "one rank", "three ranks")
PLANS = {
    "one rank": Plan({"a": "cpu"}),
    "three ranks": Plan({"a": "cpu", "b": Pool("b", processes=2)}, {"world": Place("b"), "pair": Place("b")}),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def executor_of(kind: str, flow, program: str, out, **how) -> Executor:
    """An executor with the services of a run in a folder."""
    out.mkdir(exist_ok=True)
    if kind == "local":
        executor = LocalExecutor({h.name: h for h in flow.handles}, open_engine)
    else:
        executor = place_for(flow, PLANS[kind], out, program, **how)
    executor.attach(RunServices(Journal(out / "journal.jsonl", beside="journal*.jsonl")))
    return executor


def call_of(worker: str | None, op: fl.Op, index: int, step: int = 0) -> Call:
    title = f"{worker or op.owner}.{op.name}"
    return Call(index, op, worker, {}, {}, None, CallInfo(0, "train", step, title, index))


def start(executor: Executor, handle, op: str, index: int, *, chunk: int = 0, **arguments):
    """Start an op of a worker on values."""
    declared = getattr(handle.cls, op)
    return executor.start(call_of(handle.name, declared, index), chunk, executor.open(handle.name), arguments)


def rows(small, count: int = 6) -> fl.Batch:
    return small.Numbers().to_batch([{"x": i} for i in range(count)], 0, None)


def test_a_call_gives_what_its_op_gives(small, kind, tmp_path):
    executor = executor_of(kind, small.flow, "train", tmp_path)
    found = executor.get(start(executor, small.counter, "spread", 0, batch=executor.put(rows(small)), n=2).result())
    executor.close()
    assert found.keys == tuple((i, j) for i in range(6) for j in range(2)) and found.fields == ("x", "z")
    assert len(set(found["z"].values.tolist())) > 6, "each row has a seed of its own"
    assert found["x"].values.tolist() == [float(i) for i in range(6) for _ in range(2)]


def test_calls_of_a_worker_are_done_in_the_order_in_which_they_are_waited_for(small, kind, tmp_path):
    executor = executor_of(kind, small.flow, "train", tmp_path)
    batch = start(executor, small.counter, "values", 0, batch=executor.put(rows(small))).result()
    pending = [start(executor, small.counter, "update", 1 + i, batch=batch, scale=float(i)) for i in range(3)]
    totals = [p.result()["total"] for p in pending]
    again = start(executor, small.counter, "update", 9, batch=batch, scale=0.0).result()["total"]
    executor.close()
    assert len(set(totals)) == 3 and again == pytest.approx(totals[-1] / 2, abs=1e-6)


def test_an_op_of_a_library_needs_no_worker(small, kind, tmp_path):
    executor = executor_of(kind, small.flow, "train", tmp_path)
    batch = start(executor, small.counter, "values", 0, batch=executor.put(rows(small))).result()
    mean = executor.start(call_of(None, OPS["mean"], 1), 0, None, {"column": batch["x"]}).result()
    executor.close()
    assert float(mean) == 2.5


def test_chunks_put_together_are_the_whole(kind, tmp_path):
    module = module_of("ranks_flow")
    executor = executor_of(kind, module.flow, "two_batches", tmp_path)
    batch = executor.put(module.Numbers().to_batch([{"x": i} for i in range(6)], 0, None))
    whole = start(executor, module.pair, "thrice", 0, batch=batch).result()
    parts = [start(executor, module.pair, "thrice", 0, chunk=n, batch=batch.take(some))
             for n, some in enumerate(([0, 1], [2, 3], [4, 5]))]  # fmt: skip
    found, wanted = executor.get(join_chunks([p.result() for p in parts])), executor.get(whole)
    executor.close()
    assert found.keys == wanted.keys and found["r"].values.tolist() == wanted["r"].values.tolist()
    assert found["r"].values.tolist() == [float(x + i) for x in range(6) for i in range(3)]


def test_a_failure_has_the_line_of_the_program(small, kind, tmp_path):
    with pytest.raises(RunError, match="broken on purpose 0") as raised:
        if kind == "local":
            small.flow.run("breaks", out=tmp_path / "run", quiet=True)
        else:
            run_direct(small.flow, PLANS[kind], tmp_path / "run", "breaks")
    assert raised.value.at.file.endswith("small_flow.py") and "fails.fail(batch)" in raised.value.at.text


def test_a_failure_is_raised_by_whoever_waits_and_the_next_call_is_done(small, kind, tmp_path):
    executor = executor_of(kind, small.flow, "train", tmp_path)
    pending = start(executor, small.fails, "fail", 0, batch=executor.put(rows(small)), at=3)
    with pytest.raises((ValueError, RunError), match="broken on purpose 3"):
        pending.result()
    fine = start(executor, small.counter, "values", 1, batch=executor.put(rows(small))).result()
    assert len(executor.get(fine)) == 6
    executor.close()


def test_the_world_is_asked_once_for_a_call(small, kind, tmp_path):
    for _ in range(2):  # the second executor finds the journals of the first
        executor = executor_of(kind, small.flow, "train", tmp_path)
        batch = start(executor, small.counter, "values", 0, batch=executor.put(rows(small))).result()
        judged = [start(executor, small.world, "judge", 1, batch=batch).result() for _ in range(2)]
        first, second = (executor.get(j)["r"].values.tolist() for j in judged)
        assert first == second and len(small.CALLS) == 6
        executor.sync()
        executor.close()


def test_a_state_that_one_has_saved_another_restores(small, kind, tmp_path):
    executor = executor_of(kind, small.flow, "train", tmp_path / "run")
    batch = start(executor, small.counter, "values", 0, batch=executor.put(rows(small))).result()
    total = start(executor, small.counter, "update", 1, batch=batch, scale=3.0).result()["total"]
    record = {"stage": 0, "program": None, "finished": [], "marks": {}, "seed": 0}
    folder = checkpoint.write(executor.capture(tmp_path / "checkpoints", record, {0: batch, 1: batch["y"]}))
    wanted = executor.get(batch)
    executor.close()
    for other in KINDS:
        taker = executor_of(other, small.flow, "train", tmp_path / other)
        checkpoint.load_worker(folder, "counter", taker.open("counter"))
        live = checkpoint.load_live(folder, checkpoint.load_manifest(folder))
        values = {i: taker.put(v) for i, v in live.items()}
        assert taker.get(values[0]).digest() == wanted.digest()
        assert taker.get(values[1]).values.tolist() == wanted["y"].values.tolist()
        again = start(taker, small.counter, "update", 2, batch=values[0], scale=0.0).result()["total"]
        assert again == pytest.approx(total / 2, abs=1e-6)
        taker.close()


def test_a_reset_makes_workers_anew(small, kind, tmp_path):
    executor = executor_of(kind, small.flow, "train", tmp_path)
    totals = []
    for _ in range(2):
        batch = start(executor, small.counter, "values", 0, batch=executor.put(rows(small))).result()
        totals.append(start(executor, small.counter, "update", 1, batch=batch, scale=1.0).result()["total"])
        executor.reset()
        assert not executor.workers and not executor.servers
    executor.close()
    assert totals[0] == totals[1]


def test_what_is_lost_comes_back_or_is_raised(small, kind, tmp_path):
    executor = executor_of(kind, small.flow, "train", tmp_path)
    lost = RankLost("rank 0 died.", ranks=[0])
    if kind == "local":
        with pytest.raises(RankLost) as raised:
            executor.recover(lost)
        assert raised.value is lost
        return
    events = []
    executor.attach(RunServices(on_loss=lambda lost: events.append("lost"), on_restart=events.append))
    batch = start(executor, small.counter, "values", 0, batch=executor.put(rows(small))).result()
    wanted = executor.get(batch).digest()
    executor.ranks.kill = ("bring", 0)  # its rows go with it, and are made again by the same call
    assert executor.get(batch).digest() == wanted and events == ["lost", "rank 0"]
    executor.recover(lost)  # now without its state
    assert executor.ranks.restarted.count(0) == 2 and "counter" not in executor.workers
    assert len(executor.get(start(executor, small.counter, "values", 1, batch=executor.put(rows(small))).result())) == 6
    executor.close()


# -- a model ----------------------------------------------------------------------------------------------------------

APART = Plan({"a": "cpu", "b": "cpu"}, {"actor": {"train": Place("a"), "generate": Place("b")}})


@pytest.fixture(params=("local", "ranks"))
def model(request, tmp_path):
    """An executor with an actor that trains and its copy that generates; and the engine of each."""
    flow = module_of("stale_flow").flow
    if request.param == "local":
        executor = LocalExecutor({h.name: h for h in flow.handles}, open_engine)
    else:
        executor = place_for(flow, APART, tmp_path, "stale", parameters={"stale": {"steps": 2}})
    executor.open("actor")
    executor.open_server("actor")

    def engine(serving: bool):
        if request.param == "local":
            return (executor.servers if serving else executor.workers)["actor"].engine
        key = ("actor", serving)
        return next(rank.workers[key].engine for rank in executor.ranks.ranks.values() if key in rank.workers)

    yield executor, engine
    executor.close()


def nudge(engine) -> None:
    with torch.no_grad():
        for shard in engine.shards():
            shard.tensor.mul_(1.01)
    engine.weights_written()


def test_weights_are_installed_as_they_are_or_as_they_were_staged(model):
    executor, engine = model
    first = executor.workers["actor"].digest()
    assert executor.servers["actor"].digest() == first, "it opens with the weights of the trained one"
    nudge(engine(False))
    executor.workers["actor"].mark_published(1)
    assert executor.install("actor", 1) >= 0
    second = executor.workers["actor"].digest()
    assert second != first and executor.servers["actor"].digest() == second
    assert executor.servers["actor"].version == 1
    staged = executor.stage("actor")
    nudge(engine(False))
    executor.install("actor", 2, staged)
    assert executor.servers["actor"].digest() == second != executor.workers["actor"].digest()
    assert executor.servers["actor"].version == 2


def test_an_offloaded_worker_holds_no_memory_and_comes_back_as_it_was(model, tmp_path):
    executor, engine = model
    before = executor.workers["actor"].digest()
    executor.offload("actor.train")
    assert sum(s.tensor.untyped_storage().nbytes() for s in engine(False).shards()) == 0
    executor.onload("actor.train")
    assert executor.open("actor").digest() == before
    executor.offload("actor.train")
    executor.offload("actor.generate")
    executor.install("actor", 1)  # it is loaded for that
    record = {"stage": 0, "program": None, "finished": [], "marks": {}, "seed": 0}
    checkpoint.write(executor.capture(tmp_path / "checkpoints", record, {}))
    assert executor.open("actor").digest() == before == executor.open_server("actor").digest()


# -- programs ---------------------------------------------------------------------------------------------------------


def test_a_program_in_chunks_has_the_numbers_of_one_without(kind, tmp_path):
    module = module_of("ranks_flow")
    steps = {"judged": {"steps": 3}}
    module.flow.run("judged", out=tmp_path / "whole", quiet=True, parameters=steps)
    pipeline = Pipeline(chunks=2)
    if kind == "local":
        plan = Plan({"a": "cpu", "b": "cpu"}, {"asked": Place("b")}, pipeline=pipeline)
        module.flow.run("judged", out=tmp_path / "run", quiet=True, plan=plan, parameters=steps)
    else:
        pools = PLANS[kind].pools
        plan = Plan(pools, {"asked": Place("b")} if "b" in pools else {}, pipeline=pipeline)
        run_direct(module.flow, plan, tmp_path / "run", "judged", parameters=steps)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
