"""Programs whose rows take other ways than from one op to the next: what the tests of ranks run besides."""

from __future__ import annotations

from small_flow import Numbers

import flowrl as fl
from flowrl import rl

ASKED: list[tuple[int, ...]] = []  # keys that the world was asked about


class Stateful(fl.Worker):
    """Row by row, and yet its answers depend on updates, which happen in one place."""

    keeps = ("total",)

    def __init__(self):
        self.total = 0.0

    @fl.op(reads="x", adds="y: f32[]", cost="forward", pieces=True)
    def values(self, batch):
        return {"y": batch.x.values * 0 + self.total}

    @fl.op(reads="s", updates="total", cost="train")
    def feed(self, batch) -> fl.Metrics:
        self.mark_updated()
        self.total += batch.s.mean()
        return fl.Metrics(total=self.total)

    @fl.op(reads="y", updates="total", cost="train")
    def update(self, batch) -> fl.Metrics:
        self.mark_updated()
        self.total += 1.0
        return fl.Metrics(total=self.total)


class Pair(fl.Worker):
    @fl.op(reads="x", adds="u: f32[]")
    def one(self, batch):
        return {"u": batch.x.values * 0 + 1}

    @fl.op(reads="x", adds="u: f32[]")
    def two(self, batch):
        return {"u": batch.x.values * 0 + 2}

    @fl.op(reads={"batch": "x", "other": "x"}, adds="d: f32[]", pieces=True)
    def diff(self, batch, other):
        found = dict(zip(other.keys, other.x.values.tolist(), strict=True))
        return {"d": [found.get(k, -99.0) - x for k, x in zip(batch.keys, batch.x.values.tolist(), strict=True)]}

    @fl.op(reads="x", adds="s: f32[]", pieces=True)
    def add(self, batch, *, more):
        return {"s": batch.x.values + more.values}

    @fl.op(reads="x", adds="x: f32[]", rows="apart", pieces=True)
    def half(self, batch):
        return {"x": batch.x.values / 2}

    @fl.op(reads="x", adds="r: f32[]", rows="expand", pieces=True)
    def thrice(self, batch):
        return {"r": [x + i for x in batch.x.values.tolist() for i in range(3)]}

    @fl.op(reads="x", rows="filter")
    def best(self, batch):
        return batch.take(batch.x.values.argsort(descending=True).tolist()[:4])

    @fl.op(reads="x", adds="place: f32[]")
    def number(self, batch):
        return {"place": [float(i) for i in range(len(batch))]}


class Moody(fl.Worker):
    """Does not give the same rows twice."""

    feelings = 0.0

    @fl.op(reads="x", adds="mood: f32[]")
    def feel(self, batch):
        Moody.feelings += 1.0
        return {"mood": batch.x.values * 0 + Moody.feelings}


class Asked(fl.Worker):
    """Touches the world, row by row: every call is noted."""

    @fl.op(reads="x", adds="r: f32[]", cost="external", pieces=True)
    def judge(self, batch):
        ASKED.extend(batch.keys)
        return {"r": batch.x.values * 2}


flow = fl.Flow("stateful")
asked = flow.worker(Asked)
moody = flow.worker(Moody)
state = flow.worker(Stateful)
pair = flow.worker(Pair)


@flow.program
def stateful(steps: int = 4):
    for step, batch in flow.steps(Numbers(batch=6), steps):
        batch = state.values(batch)
        flow.log(step, state.update(batch), y=batch.y.mean())


@flow.program
def choose(steps: int = 2):
    """Two versions of the same rows, some of each."""
    for step, batch in flow.steps(Numbers(batch=6), steps):
        one, two = pair.one(batch), pair.two(batch)
        both = one.filter(one.x < 2).concat(two.filter(two.x >= 2))
        flow.log(step, u=both.u.sum(), n=both.count())


@flow.program
def two_batches(steps: int = 2):
    for step, batch in flow.steps(Numbers(batch=6), steps):
        other = batch.filter(batch.x >= 2).concat(batch.filter(batch.x < 2))
        flow.log(step, d=pair.diff(batch, other).d.sum())


@flow.program
def window(steps: int = 10):
    held = None
    for step, batch in flow.steps(Numbers(batch=2), steps):
        batch = pair.one(batch)
        held = batch if held is None else batch.concat(held.filter(held.x < -1))
        flow.log(step, u=held.u.sum())


@flow.program
def apart(steps: int = 3):
    """Rows in a batch of their own, others that are made of them, and what was found brought back."""
    for step, batch in flow.steps(Numbers(batch=6), steps):
        batch = pair.best(batch)
        halves = pair.half(pair.one(batch))
        made = pair.thrice(halves)
        batch = rl.collect(batch, made, r="max") | halves.rename(x="h")
        flow.log(step, r=(batch.r * batch.x).sum(), h=(batch.h - batch.x).sum(), n=made.count())


@flow.program
def ordered(steps: int = 2):
    for step, batch in flow.steps(Numbers(batch=6), steps):
        batch = pair.number(pair.best(batch))
        flow.log(step, sum=(batch.place * batch.x).sum())


@flow.program
def columns(steps: int = 6):
    """A column and a batch that go on into the next step, handed to an op that is split."""
    column = before = None
    for step, batch in flow.steps(Numbers(batch=6), steps):
        if column is not None:
            made = pair.add(before, more=column)
            flow.log(step, s=made.s.sum(), o=(column * before.x).mean())
        column, before = batch.x * 2.0, batch


@flow.program
def moods(steps: int = 3):
    for step, batch in flow.steps(Numbers(batch=4), steps):
        batch = pair.one(moody.feel(batch))
        flow.log(step, mood=batch.mood.mean(), u=batch.u.sum())


@flow.program
def fed(steps: int = 4):
    """An update that pulls its rows from another pool."""
    for step, batch in flow.steps(Numbers(batch=6), steps):
        batch = pair.add(state.values(batch), more=batch.x)
        flow.log(step, state.feed(batch))


@flow.program
def judged(steps: int = 2):
    for step, batch in flow.steps(Numbers(batch=6), steps):
        batch = asked.judge(batch)
        flow.log(step, r=batch.r.mean())
