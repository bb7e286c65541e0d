"""The abstract search against a brute force that shares nothing with it but the table."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from math import inf

import pytest
from brute_search import all_partitions, brute

from flowrl.placement.search.branch_and_bound import Choice, Question, Stock, cheapest
from flowrl.placement.search.partitions import all_counts, node_counts, partitions


@dataclass
class RandomTable:
    """Seconds drawn per (set, stock, count): no monotony, no structure; some do not fit."""

    seed: int
    stages_of: dict[str, tuple[int, ...]]
    stages_count: int
    scaling: bool
    missing: float
    calls: int = 0
    seen: dict = field(default_factory=dict)

    def _draw(self, *key):
        return random.Random(repr((self.seed, key))).random()

    def stages(self, members, spot):
        self.calls += 1
        if spot[1] < len(members) and self.missing and self._draw("few", members, spot) < 0.7:
            return None
        if self._draw("fits", members, spot) < self.missing:
            return None
        found = [0.0] * self.stages_count
        for member in members:
            for stage in self.stages_of[member]:
                work = 1 + 20 * self._draw("work", member, stage)
                speed = 1 + self._draw("kind", member, stage, spot[0])
                found[stage] += (
                    work / speed / spot[1] ** 0.8 if self.scaling else 20 * self._draw(members, member, stage, spot)
                )
        return tuple(found)

    def publish_least(self, pair, source, target):
        return 0.0

    def fits(self, sets, spots):
        return True

    def publish(self, pair, source, target):
        return 3 * self._draw("publish", pair, source, target)


def seconds(choice: Choice | None) -> float:
    return inf if choice is None else choice.seconds


def draw_question(seed: int):
    """Up to 4 members, up to 16 devices in one or two stocks, pairs, CPU time, staleness."""
    rng = random.Random(seed)
    members = ("actor.train", "actor.generate", "critic", "ref")[: rng.choice([1, 2, 3, 3, 4, 4])]
    two = rng.random() < 0.35
    sizes = [rng.randint(1, 6), rng.randint(1, 6)] if two else [rng.choice([1, 2, 3, 5, 8, 16, 16])]
    if len(members) == 4 and sizes[0] == 16:
        counts = [(1, 2, 4, 8, 16)] if rng.random() < 0.5 else [all_counts(16)]
    else:
        counts = [all_counts(n) if rng.random() < 0.7 else tuple(sorted({1, n})) for n in sizes]
    stages = rng.randint(1, 4)
    pairs = (("actor.train", "actor.generate"),) if len(members) > 1 and rng.random() < 0.6 else ()
    question = Question(
        members=members,
        stocks=tuple(Stock(f"k{i}", n, c) for i, (n, c) in enumerate(zip(sizes, counts, strict=True))),
        stages=stages,
        pairs=pairs,
        staleness=rng.choice([(0,), (0, 1), (1,), (0, 1, 4)]),
        fixed=tuple(rng.random() * 4 for _ in range(stages)) if rng.random() < 0.3 else (),
    )
    uses = {m: tuple(rng.sample(range(stages), rng.randint(1, stages))) for m in members}
    return question, RandomTable(seed, uses, stages, scaling=rng.random() < 0.5, missing=rng.choice([0, 0, 0.3, 0.7]))


@pytest.mark.parametrize("block", range(10))
def test_equals_brute_force(block):
    """400 drawn questions: winner and runner-up to the last digits."""
    feasible = 0
    for seed in range(40 * block, 40 * block + 40):
        question, table = draw_question(seed)
        best, second, count = brute(question, table)
        answer = cheapest(question, table)
        assert seconds(answer.best) == pytest.approx(best, rel=1e-12), seed
        assert seconds(answer.runner_up) == pytest.approx(second, rel=1e-12), seed
        assert answer.evaluated <= count
        feasible += answer.best is not None
        if answer.best is not None and answer.runner_up is not None:
            assert answer.best.sets != answer.runner_up.sets
    assert feasible > 20


def test_those_that_are_kept_equal_brute_force():
    """The best of each partition with each staleness, put in order: every one of them found by trying all."""
    for seed in range(80):
        question, table = draw_question(seed)
        kinds = [
            replace(question, only=(sets,), staleness=(s,))
            for sets in partitions(question.members)
            for s in question.staleness
            if s == 0 or (not any(a in one and b in one for one in sets for a, b in question.pairs) and question.pairs)
        ]
        best = sorted(
            c.seconds for q in kinds if (c := cheapest(q, table).best) is not None and c.staleness in q.staleness
        )
        answer = cheapest(question, table, keep=4)
        if question.staleness[0] == 0:  # else sets that are together are tried one step after another as well
            assert [c.seconds for c in answer.ranked] == pytest.approx(best[:4], rel=1e-12), seed
        plain = cheapest(question, table)
        assert (seconds(answer.best), seconds(answer.runner_up)) == (seconds(plain.best), seconds(plain.runner_up))


def test_winner_is_a_valid_allocation():
    for seed in range(60):
        question, table = draw_question(seed)
        best = cheapest(question, table).best
        if best is None:
            continue
        assert sorted(m for s in best.sets for m in s) == sorted(question.members)
        for i, stock in enumerate(question.stocks):
            assert sum(n for k, n in best.spots if k == i) <= stock.devices
        for members, spot in zip(best.sets, best.spots, strict=True):
            assert spot[1] in question.stocks[spot[0]].counts
            assert table.stages(members, spot) is not None


@pytest.mark.parametrize("scaling", [True, False])
def test_four_models_on_128_devices(scaling):
    """All integer allocations: C(127, 3) of them for four sets alone."""
    table = RandomTable(7, {"a": (0, 2), "b": (1, 2), "c": (1,), "d": (1,)}, 3, scaling=scaling, missing=0.0)
    question = Question(("a", "b", "c", "d"), (Stock("a100-80", 128, all_counts(128)),), 3)
    started = time.perf_counter()
    answer = cheapest(question, table)
    assert time.perf_counter() - started < 10
    assert answer.best is not None and answer.runner_up is not None
    assert answer.pruned > answer.evaluated > 0


def test_each_cost_is_asked_for_once():
    table = RandomTable(1, {"a": (0,), "b": (0,), "c": (0,)}, 1, scaling=True, missing=0.0)
    cheapest(Question(("a", "b", "c"), (Stock("k", 16, all_counts(16)),), 1), table)
    assert table.calls <= (2**3 - 1) * 16


def test_nothing_fits():
    table = RandomTable(1, {"a": (0,)}, 1, scaling=True, missing=1.1)
    answer = cheapest(Question(("a",), (Stock("k", 4, all_counts(4)),), 1), table)
    assert answer.best is None and answer.runner_up is None and answer.evaluated == 0


def test_more_sets_than_devices_are_left_out():
    table = RandomTable(1, {m: (0,) for m in "abcd"}, 1, scaling=True, missing=0.0)
    answer = cheapest(Question(tuple("abcd"), (Stock("k", 1, (1,)),), 1), table)
    assert answer.best is not None and answer.best.sets == (tuple("abcd"),) and answer.runner_up is None


def test_ideal_scaling_is_never_better_apart():
    """The lower bound that d_cost has by construction: with perfect scaling one set is as good as any split."""

    class Ideal:
        def stages(self, members, spot):
            return tuple(sum(w for m, s, w in work if m in members and s == i) / spot[1] for i in range(2))

        def publish_least(self, pair, source, target):
            return 0.0

        def fits(self, sets, spots):
            return True

        def publish(self, pair, source, target):
            return 0.0

    work = [("a", 0, 10.0), ("a", 1, 5.0), ("b", 1, 7.0), ("c", 1, 3.0)]
    answer = cheapest(Question(("a", "b", "c"), (Stock("k", 24, all_counts(24)),), 2), Ideal())
    assert answer.best is not None
    assert answer.best.seconds == pytest.approx(25.0 / 24)
    assert answer.runner_up is not None and answer.runner_up.seconds > answer.best.seconds * (1 - 1e-12)


def test_staleness_needs_a_split_pair():
    """One set has nothing to overlap; apart, S=1 takes the busier of the two."""

    class Two:
        def stages(self, members, spot):
            return (8.0 * ("g" in members) / spot[1], 8.0 * ("t" in members) / spot[1])

        def publish_least(self, pair, source, target):
            return 0.0

        def fits(self, sets, spots):
            return True

        def publish(self, pair, source, target):
            return 0.5

    stocks = (Stock("k", 4, (1, 2, 3, 4)),)
    together = cheapest(Question(("t", "g"), stocks, 2, pairs=(("t", "g"),)), Two())
    assert together.best is not None and together.best.seconds == 4.0 and together.best.staleness == 0
    apart = cheapest(Question(("t", "g"), stocks, 2, pairs=(("t", "g"),), staleness=(1,)), Two())
    assert apart.runner_up is not None
    assert (
        apart.runner_up.sets == (("t",), ("g",)) and apart.runner_up.seconds == 4.5 and apart.runner_up.staleness == 1
    )


def test_counts_never_cross_a_node_in_part():
    for nodes, devices in [(2, 8), (3, 12), (2, 6), (4, 1), (1, 7)]:
        counts = node_counts(nodes=nodes, devices=devices)
        total = nodes * devices
        assert counts[-1] == total and counts[0] == 1
        rng = random.Random(devices)
        for _ in range(200):
            left, sizes = total, []
            while left and (fitting := [c for c in counts if c <= left]):
                sizes.append(rng.choice(fitting))
                left -= sizes[-1]
            start = 0
            for size in sorted(sizes, reverse=True):
                first, last = start // devices, (start + size - 1) // devices
                assert first == last or (start % devices == 0 and size % devices == 0)
                start += size
            assert start <= total


def test_partitions_are_all_of_them():
    for n in range(6):
        members = "abcde"[:n]
        found = [tuple(sorted(p)) for p in partitions(members)]
        assert len(found) == len(set(found))
        if n:
            assert sorted(found) == all_partitions(members)
