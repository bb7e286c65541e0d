"""What a worker keeps is there again after a resume; a change that would be lost is refused."""

from __future__ import annotations

import pytest
from direct import run_direct
from flows import metrics, module_of

import flowrl as fl
from flowrl.errors import CheckError, WorkerError
from flowrl.placement.plan.plan import Place, Plan, Pool
from flowrl.runtime.storage.recorder import Recorder


@pytest.fixture
def kept():
    module_of("small_flow")
    return module_of("kept_flow")


def broken_off(monkeypatch, go, step):
    """Runs until that step is to be recorded."""
    real = Recorder.commit

    def commit(self, program, done, tokenizer):
        if done.number == step:
            raise OSError("the disk is full")
        return real(self, program, done, tokenizer)

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "commit", commit)
        with pytest.raises(OSError, match="full"):
            go()


@pytest.mark.parametrize("runtime", ["eager", "local", "ranks"])
def test_state_of_every_kind_is_there_again(kept, tmp_path, monkeypatch, runtime):
    plan = Plan({"b": Pool("b", processes=2)}, {"memory": Place("b")})

    def go(out, **how):
        if runtime == "ranks":
            return run_direct(kept.flow, plan, tmp_path / out, checkpoint_every=2, **how)[0]
        return kept.flow.run(out=tmp_path / out, quiet=True, runtime=runtime, checkpoint_every=2, **how)

    whole = go("whole")
    broken_off(monkeypatch, lambda: go("run"), 5)
    assert go("run", resume=True).weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def flow_of(cls):
    """A flow over one worker of a class, whose op ``note`` it calls."""
    source = module_of("small_flow").Numbers()
    flow = fl.Flow("notes")
    worker = flow.worker(cls, name="worker")

    def notes(steps: int = 3):
        for step, batch in flow.steps(source, steps):
            flow.log(step, y=worker.note(batch).y.mean())

    flow.program(notes)
    return flow


def change_list(self):
    self.seen["rows"].append(1)


def change_dict(self):
    self.seen["count"] = self.seen["count"] + 1


def change_tensor(self):
    self.seen["table"].add_(1)


def change_part_of_a_tensor(self):
    self.seen["table"][1:] *= 2


def change_binding(self):
    self.seen = dict(self.seen, other=1)


def change_deeply(self):
    self.seen["tree"][0][1]["leaf"] = 3


CHANGES = [change_list, change_dict, change_tensor, change_part_of_a_tensor, change_binding, change_deeply]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("place", ["here", "ranks"])
def test_a_change_that_is_not_declared_is_refused_at_the_call(tmp_path, change, place):
    import torch

    class Notes(fl.Worker):
        keeps = ("seen",)

        def __init__(self):
            self.seen = {"rows": [], "count": 0, "table": torch.ones(3), "tree": [(1, {"leaf": 2})]}

        @fl.op(reads="x", adds="y: f32[]")
        def note(self, batch):
            change(self)
            return {"y": batch.x}

    with pytest.raises(WorkerError) as raised:
        if place == "here":
            flow_of(Notes).run(out=tmp_path / "run", quiet=True)
        else:
            run_direct(flow_of(Notes), Plan({"a": "cpu"}), tmp_path / "run")
    assert raised.value.what == "worker.note changes 'seen', which Notes keeps, and does not declare it."
    assert raised.value.at.text == "def note(self, batch):"
    assert raised.value.fix == (
        'Write @fl.op(..., updates="seen"): then it is saved, and the op is not run again for the same rows.'
    )


def test_a_large_state_that_stays_costs_next_to_nothing():
    import time

    import torch

    from flowrl.workers.packed_state import Mark

    value = {"table": torch.zeros(30_000_000), "rows": list(range(100_000))}
    start = time.process_time()
    for _ in range(10):
        assert Mark(value).holds(value)
    assert time.process_time() - start < 1.0, "tensors are not read"


def test_what_a_checkpoint_could_not_hold_is_refused_when_the_worker_opens(tmp_path):
    import random

    class Notes(fl.Worker):
        keeps = ("seen",)

        def __init__(self):
            self.seen = {"rng": random.Random(0)}

        @fl.op(reads="x", adds="y: f32[]")
        def note(self, batch):
            return {"y": batch.x}

    with pytest.raises(WorkerError) as raised:
        flow_of(Notes).run(out=tmp_path / "run", quiet=True)
    assert raised.value.what == "'seen/rng' is a Random, which a checkpoint cannot hold."
    assert raised.value.at.text == 'worker = flow.worker(cls, name="worker")'


def test_an_attribute_that_is_not_there_is_refused_when_the_worker_opens(tmp_path):
    class Notes(fl.Worker):
        keeps = ("sen",)

        def __init__(self):
            self.seen = 0

        @fl.op(reads="x", adds="y: f32[]")
        def note(self, batch):
            return {"y": batch.x}

    with pytest.raises(WorkerError, match="Notes keeps 'sen', which it does not have when it is open"):
        flow_of(Notes).run(out=tmp_path / "run", quiet=True)


def test_changes_that_show_in_the_source_are_found_by_check():
    class Notes(fl.Worker):
        keeps = ("seen", "rows")

        def __init__(self):
            self.seen, self.rows, self.lost = 0, {}, 0

        @fl.op(reads="x", adds="y: f32[]")
        def note(self, batch):
            self.seen += len(batch)
            self.rows.setdefault("a", []).append(1)
            self.lost += 1
            self._memo = {}
            return {"y": batch.x}

    report = flow_of(Notes).check()
    assert [(e.what, e.at.text) for e in report.errors] == [
        ("Notes.note changes 'seen', which Notes keeps, and does not declare it.", "self.seen += len(batch)"),
        (
            "Notes.note changes 'rows', which Notes keeps, and does not declare it.",
            'self.rows.setdefault("a", []).append(1)',
        ),
    ]
    assert [(lint.what, lint.at.text) for lint in report.lints if lint.kind == "state"] == [
        (
            "Notes.note changes 'lost', which is not kept: it is lost when a run is resumed. "
            'keeps = ("lost",) and updates="lost" keep it.',
            "self.lost += 1",
        )
    ]


def test_declarations_that_would_lose_state_are_found_by_check():
    class Notes(fl.Worker):
        keeps = ("seen",)

        def __init__(self):
            self.seen = 0

        @fl.op(reads="x", adds="y: f32[]", updates="sen")
        def note(self, batch):
            return {"y": batch.x}

        @fl.op(reads="x", adds="r: f32[]", updates="seen", cost="external")
        def ask(self, batch):
            return {"r": batch.x}

    with pytest.raises(CheckError) as raised:
        flow_of(Notes).run(out="unused")
    assert {e.what: e.fix for e in raised.value.errors} == {
        "Notes.note updates 'sen', which Notes does not keep.": 'Write updates="seen".',
        "Notes.ask touches the world and updates 'seen': a resumed run takes its answer from the journal, and the state "
        "stays as it was.": "Update it in another op, which reads what this one adds.",
    }


def test_a_subclass_of_an_actor_keeps_what_it_names_besides_its_weights(tmp_path, monkeypatch):
    import torch

    from flowrl import rl

    module = module_of("stale_flow")

    class Watched(fl.Actor):
        keeps = ("lengths", "mean")

        def __init__(self, model, *, lr: float = 1e-3):
            super().__init__(model, lr=lr, max_tokens=5)
            self.lengths, self.mean = [], torch.zeros(1)

        @fl.op(reads="response_ids", updates="lengths", cost="train")
        def watch(self, batch) -> fl.Metrics:
            self.lengths.append(int(batch.response_ids.lengths.sum()))
            self.mean += self.lengths[-1]
            return fl.Metrics(length=float(self.mean))

    flow = fl.Flow("watched")
    actor = flow.worker(Watched, module.MODEL, name="actor")
    reward = flow.worker(fl.FunctionReward, module.digits, name="reward")

    def watched(steps: int = 4):
        for step, batch in flow.steps(module.arithmetic.prompts(4), steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=2)))
            metrics = actor.update(batch, loss=rl.ppo_clip())
            flow.log(step, metrics, watched=actor.watch(batch))

    flow.program(watched)

    def go(out, **how):
        return flow.run(out=tmp_path / out, quiet=True, checkpoint_every=1, save_models=False, **how)

    whole = go("whole")
    broken_off(monkeypatch, lambda: go("run"), 2)
    assert go("run", resume=True).weights_digest == whole.weights_digest
    lengths = [line["watched/length"] for line in metrics(tmp_path / "run")]
    assert lengths == [line["watched/length"] for line in metrics(tmp_path / "whole")] == sorted(lengths)


def test_ranks_that_compute_together_all_see_the_rows_that_kept_state_is_made_of():
    from flowrl.lowering.deployment import WorkerSpec
    from flowrl.runtime.distributed.calls.call_messages import shares_of
    from flowrl.runtime.distributed.protocol import Blueprint
    from flowrl.runtime.distributed.rank_parts import RankParts
    from flowrl.runtime.distributed.worker_group import WorkerGroup
    from flowrl.runtime.values.remote_batch import RemoteBatch

    class Watched(fl.Actor):
        keeps = ("lengths",)

        @fl.op(reads="x", updates="lengths", cost="train")
        def watch(self, batch) -> fl.Metrics:
            return fl.Metrics()

        @fl.op(reads="x", updates="weights", cost="train")
        def train(self, batch) -> fl.Metrics:
            return fl.Metrics()

    blueprint = Blueprint("actor", Watched, (), {}, {})
    group = WorkerGroup(None, blueprint, WorkerSpec("actor", collective=True), RankParts((0, 1), (0, 1), size=2))
    rows = RemoteBatch.drawn(fl.Batch.of(4, x=[1.0, 2.0, 3.0, 4.0]))
    assert shares_of(group, Watched.__dict__["watch"], {}, rows) == {0: None, 1: None}
    assert sorted(len(keys) for keys in shares_of(group, Watched.__dict__["train"], {}, rows).values()) == [2, 2]
