"""The cheapest placement by trying all of them: what the search is held against."""

from __future__ import annotations

import itertools
from math import inf

from flowrl.placement.search.branch_and_bound import Question


def all_partitions(members):
    """By labels, not by growth: every function from members to labels, taken once."""
    found = set()
    for labels in itertools.product(range(len(members)), repeat=len(members)):
        groups = {}
        for member, label in zip(members, labels, strict=True):
            groups.setdefault(label, []).append(member)
        found.add(tuple(sorted(tuple(g) for g in groups.values())))
    return sorted(found)


def brute(question: Question, table) -> tuple[float, float, int]:
    """(best, best of another partition, allocations): every partition, every allocation, no bound, no cache."""
    by_partition = {}
    count = 0
    for sets in all_partitions(question.members):
        split = question.pairs and not any(a in s and b in s for s in sets for a, b in question.pairs)
        best = inf
        choices = [
            [
                (i, n, v)
                for i, stock in enumerate(question.stocks)
                for n in stock.counts
                if (v := table.stages(s, (i, n)))
            ]
            for s in sets
        ]
        for spots in itertools.product(*choices):
            if any(sum(n for i, n, _ in spots if i == k) > s.devices for k, s in enumerate(question.stocks)):
                continue
            count += 1
            busy = [sum(v) for _, _, v in spots]
            latency = 0.0
            for stage in range(question.stages):
                there = [v[stage] for _, _, v in spots]
                latency += max([*there, question.fixed[stage]] if question.fixed else there)
            publishes = 0.0
            for a, b in question.pairs:
                i = next(i for i, s in enumerate(sets) if a in s)
                j = next(j for j, s in enumerate(sets) if b in s)
                if i != j:
                    seconds = table.publish((a, b), (sets[i], spots[i][:2]), (sets[j], spots[j][:2]))
                    publishes += seconds
                    busy[j] += seconds
            if question.fixed:
                busy.append(sum(question.fixed))
            for bound in question.staleness if split else (0,):
                best = min(best, max(*busy, 0, (latency + publishes) / (bound + 1)) if bound else latency + publishes)
        by_partition[sets] = best
    ordered = sorted(by_partition.values())
    return ordered[0], (ordered[1] if len(ordered) > 1 else inf), count
