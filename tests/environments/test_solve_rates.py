"""pass@k is the mean over all sets of k samples; maj@n is the verdict on the answer that most samples give."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from flowrl.environments.solve_rates import majority, pass_at_k, solve_rates


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_it_is_the_mean_over_all_sets_of_k_samples(n):
    for c in range(n + 1):
        right = [i < c for i in range(n)]
        for k in range(1, n + 1):
            sets = list(combinations(right, k))
            assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, sets)), len(sets)))


def test_nothing_is_lost_of_many_samples():
    assert pass_at_k(10_000, 1, 1) == 1e-4 and pass_at_k(10_000, 0, 5_000) == 0.0
    assert pass_at_k(10_000, 3, 7) == pytest.approx(1 - (1 - 3e-4) ** 7, rel=2e-3)
    assert 1 - pass_at_k(4_000, 20, 2_000) == pytest.approx(comb(3_980, 2_000) / comb(4_000, 2_000), rel=1e-6)
    found = [pass_at_k(2_000, 40, k) for k in range(1, 2_001, 37)]
    assert found == sorted(found) and found[0] > 0 and found[-1] <= 1


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_other_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match=f"{c} of {n} samples are right and sets have {k}"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "first"),
    [
        (["4", "5", "5"], 1),
        (["5", "4", "4", "5"], 0),  # a tie: the one that was sampled first
        ([None, "4", None, None], 1),
        ([None, "", None], None),
        ([], None),
        (["1/2", "7", r"\frac{1}{2}"], 0),
        (["7", "0.5", "$1/2$"], 1),
        (["10,000", "3", "1e4"], 0),
        (["a  b", "c", "a\nb"], 0),
        (["(1,2)", "(3,2)", "7", "7"], 2),  # no numbers, although each ends with one
        (["x = 7", "7", "8", "8"], 2),
        (["B", "b", "C", "C"], 2),
        (["1/0", "2", "2", "1/0"], 0),
    ],
)
def test_the_majority_is_of_equal_answers(answers, first):
    assert majority(answers) == first


def records_of(*tasks):
    """Of tasks whose samples are ``(reward, answer)``."""
    return [
        {"task": task, "sample": sample, "reward": reward, "answer": answer}
        for task, samples in enumerate(tasks)
        for sample, (reward, answer) in enumerate(samples)
    ]


def test_rates_are_by_task():
    first = [(1.0, "4"), (0.0, "5"), (0.0, "5"), (0.2, None), (0.0, "6"), (1.0, "4")]
    second = [(0.0, "1")] * 6
    found = solve_rates(records_of(first, second), right_at=1.0)
    assert list(found) == ["pass@1", "pass@2", "pass@4", "pass@6", "maj@6"]
    assert found["pass@2"] == [1 - comb(4, 2) / comb(6, 2), 0.0] and found["pass@6"] == [1.0, 0.0]
    assert found["maj@6"] == [1.0, 0.0], "of 4 and 5, with two votes each, 4 was first"
    assert solve_rates(records_of(first), right_at=0.2)["pass@1"] == [0.5]


def test_a_majority_is_asked_for_where_answers_are_marked_in_several_samples():
    assert list(solve_rates(records_of([(1.0, "4")]), right_at=1.0)) == ["pass@1"]
    assert list(solve_rates(records_of([(1.0, None), (0.0, "")]), right_at=1.0)) == ["pass@1", "pass@2"]
    assert list(solve_rates([{"task": 0, "reward": 1.0}] * 2, right_at=1.0)) == ["pass@1", "pass@2"]
    found = solve_rates(records_of([(1.0, "4"), (1.0, "4")], [(1.0, None), (1.0, None)]), right_at=1.0)
    assert found["maj@2"] == [1.0, 0.0], "without an answer the majority has none"


def test_a_task_with_fewer_graded_samples_is_left_out():
    found = solve_rates(records_of([(1.0, "4"), (None, None)], [(0.0, "1"), (1.0, "1")]), right_at=1.0)
    assert found["pass@1"] == [1.0, 0.5] and found["pass@2"] == [1.0] and found["maj@2"] == [0.0]
    assert solve_rates(records_of([(None, None)]), right_at=1.0) == {"pass@1": []}
    found = solve_rates(records_of([(None, "4"), (1.0, None)]), right_at=1.0)
    assert found == {"pass@1": [1.0], "pass@2": []}, "what failed has no vote"
    assert solve_rates([], right_at=1.0) == {}


def test_the_bound_is_met_as_rewards_are_kept():
    import torch

    reward = float(torch.tensor(0.9))  # rewards are f32: a little less than 0.9
    assert reward < 0.9
    assert solve_rates(records_of([(reward, None)]), right_at=0.9) == {"pass@1": [1.0]}
    assert solve_rates(records_of([(0.8999, None)]), right_at=0.9) == {"pass@1": [0.0]}
