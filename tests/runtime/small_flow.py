"""A flow without models, quick enough to be run hundreds of times: what the runtime tests run."""

from __future__ import annotations

from collections import UserList

import flowrl as fl
from flowrl.graph.ops.field_types import FieldType

#: Keys that the external op was really called with. No list: those of a script are put back where a run goes back.
CALLS: UserList[tuple[int, ...]] = UserList()


class Counter(fl.Worker):
    """Keeps a running total that updates move, so that lost or doubled updates show."""

    keeps = ("total", "seen")

    def __init__(self, start: float = 0.0):
        self.total = start
        self.seen: list[int] = []

    @fl.op(reads="x", adds="y: f32[]", cost="forward")
    def values(self, batch):
        noise = (batch.row_seeds() % 1000).float() / 1000
        return {"y": batch.x.values + noise + self.total}

    @fl.op(reads="x", adds="z: f32[]", rows="expand")
    def spread(self, batch, *, n: int = 2):
        return {"z": (batch.expand(n).row_seeds() % 97).float()}

    @fl.op(reads="y", updates="total", cost="train")
    def update(self, batch, *, scale: float = 1.0) -> fl.Metrics:
        self.mark_updated()
        self.total = round(self.total * 0.5 + scale * batch.y.mean(), 6)
        self.seen += [k[0] for k in batch.keys]
        return fl.Metrics(total=self.total, count=len(batch))

    def digest(self) -> str:
        return f"{self.total!r} {self.seen}"


class World(fl.Worker):
    """Touches the world: every call is noted in CALLS."""

    @fl.op(reads="y", adds="r: f32[]", cost="external")
    def judge(self, batch):
        CALLS.extend(batch.keys)
        return {"r": batch.y.values * 2}


class Fails(fl.Worker):
    @fl.op(reads="x", adds="bad: f32[]")
    def fail(self, batch, *, at: int = 0):
        raise ValueError(f"broken on purpose {at}")

    @fl.op(reads="x", adds="wrong: i32[]")
    def wrong_type(self, batch):
        return {"wrong": batch.x}

    @fl.op(reads="x", adds="short: f32[]")
    def short(self, batch):
        return {"short": [1.0]}


class Numbers:
    """A source of one number per row; ends after ``rows`` where that is given."""

    tokenizer = staticmethod(lambda: None)

    def __init__(self, batch: int = 4, rows: int | None = None):
        self.batch, self.rows = batch, rows

    def schema(self):
        return {"x": FieldType("f32")}

    def cursor(self):
        return Place(self)

    def to_batch(self, rows, first_uid, tokenizer):
        keys = [(first_uid + i,) for i in range(len(rows))]
        return fl.Batch.of(keys, x=fl.Column.of([float(r["x"]) for r in rows], dtype="f32"))


class Place:
    def __init__(self, source):
        self.source, self.at = source, 0

    def draw(self, count):
        end = self.at + (count or self.source.batch)
        if self.source.rows is not None:
            end = min(end, self.source.rows)
        found = [{"x": i % 7} for i in range(self.at, end)]
        self.at = end
        return found

    def state(self):
        return {"at": self.at}

    def load_state(self, state):
        self.at = state["at"]


flow = fl.Flow("train")
counter = flow.worker(Counter, start=1.0)
world = flow.worker(World)
fails = flow.worker(Fails)


@flow.program
def train(steps: int = 10, every: int = 3):
    """Reads values, keeps a Python number, a live batch and a deferred baseline over steps."""
    scale, before, baseline = 1.0, None, 0.0
    for step, batch in flow.steps(Numbers(), steps):
        batch = counter.values(batch)
        batch = world.judge(batch)
        if before is not None:
            batch = batch.filter(batch.y > before.y.min() - 1e9)
        baseline = baseline * 0.9 + batch.r.mean() * 0.1
        if step % every == 0:
            scale = scale * 0.9 + float(baseline) * 0.01
            more = counter.values(flow.more(2))
            flow.log(step, extra=more.y.mean())
        metrics = counter.update(batch, scale=scale)
        before = batch
        flow.log(step, metrics, reward=batch.r.mean(), baseline=baseline, scale=scale)


@flow.program
def ends(rows: int = 10):
    """A source that ends: the last batch is short."""
    for step, batch in flow.steps(Numbers(rows=rows)):
        flow.log(step, count=batch.count(), x=batch.x.sum())


@flow.program
def two_loops(steps: int = 4):
    for step, batch in flow.steps(Numbers(rows=8)):
        counter.update(counter.values(batch))
        flow.log(step, first=batch.count())
    for step, batch in flow.steps(Numbers(batch=2), steps):
        metrics = counter.update(counter.values(batch))
        flow.log(step, metrics)


@flow.program
def warmed_up(warm: int = 2, steps: int = 4):
    for step, batch in flow.steps(Numbers(), warm):
        flow.log(step, counter.update(counter.values(batch)))
    for step, batch in flow.steps(Numbers(batch=2), steps):
        flow.log(step, counter.update(counter.values(batch)))


@flow.program
def evaluated(steps: int = 4):
    """Asks a worker once more after its loop."""
    for step, batch in flow.steps(Numbers(), steps):
        metrics = counter.update(world.judge(counter.values(batch)))
        flow.log(step, metrics)
    test = counter.values(flow.take(Numbers(batch=3)))
    flow.log(step + 1, last=test.y.mean())


@flow.program
def tested(steps: int = 4):
    """Has the world judge further rows after its loop, and reads what it says."""
    for step, batch in flow.steps(Numbers(), steps):
        metrics = counter.update(world.judge(counter.values(batch)))
        flow.log(step, metrics)
    test = world.judge(counter.values(flow.take(Numbers(batch=3))))
    flow.log(step + 1, last=float(test.r.mean()))


@flow.program
def breaks(step_of_failure: int = 1):
    for step, batch in flow.steps(Numbers(), 5):
        if step == step_of_failure:
            bad = fails.fail(batch)
            fails.fail(batch, at=1)
            flow.log(step, bad=bad.bad.mean())
        flow.log(step, x=batch.x.mean())


@flow.program
def wrong_type():
    for _, batch in flow.steps(Numbers(), 1):
        fails.wrong_type(batch)


@flow.program
def short():
    for _, batch in flow.steps(Numbers(), 1):
        fails.short(batch)
