"""Rows to one prompt that are alike: against closed forms of the normal distribution, and plain Monte Carlo."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean

import pytest

from flowrl.placement.cost.group_correlation import correlation, draw_normals, part_below_longest
from flowrl.placement.cost.length_distribution import Lengths

NORMAL = NormalDist()
GROUP = 8


def pairs(rows: list[float]) -> tuple[list[float], list[float]]:
    """All ordered pairs of rows to one prompt."""
    groups = [rows[i : i + GROUP] for i in range(0, len(rows), GROUP)]
    both = [(a, b) for group in groups for i, a in enumerate(group) for j, b in enumerate(group) if i != j]
    return [a for a, _ in both], [b for _, b in both]


def pearson(rows: list[float]) -> float:
    left, right = pairs(rows)
    mean = fmean(left)
    both = fmean((a - mean) * (b - mean) for a, b in zip(left, right, strict=True))
    return both / fmean((a - mean) ** 2 for a in left)


@pytest.mark.parametrize("alike", [0.0, 0.3, 0.8, 1.0])
def test_rows_to_a_prompt_have_the_correlation_and_all_rows_are_normal(alike):
    drawn = list(draw_normals(random.Random(1), 40_000, GROUP, alike))
    assert fmean(drawn) == pytest.approx(0.0, abs=0.04)
    assert fmean(x * x for x in drawn) == pytest.approx(1.0, abs=0.04)
    assert pearson(drawn) == pytest.approx(alike, abs=0.03)


@pytest.mark.parametrize("alike", [0.2, 0.6, 0.9])
def test_lognormal_lengths_have_the_correlation_of_the_closed_form(alike):
    """``(exp(c s^2) - 1) / (exp(s^2) - 1)`` of lengths, ``c`` of their logarithms, and the mean of a lognormal."""
    sigma = 0.6
    lengths = Lengths(0, math.inf, "lognormal", (800.0, sigma), alike)
    drawn = list(lengths.draw(80_000, "a", GROUP))
    assert fmean(drawn) == pytest.approx(800.0, rel=0.02)
    assert pearson([math.log(x) for x in drawn]) == pytest.approx(alike, abs=0.02)
    expected = math.expm1(alike * sigma**2) / math.expm1(sigma**2)
    assert pearson(drawn) == pytest.approx(expected, abs=0.03)


def test_uniform_lengths_have_spearmans_correlation_of_a_gaussian_copula():
    """``6 / pi asin(c / 2)`` (Kruskal 1958)."""
    lengths = Lengths(0, math.inf, "uniform", (100.0, 900.0), 0.7)
    drawn = list(lengths.draw(80_000, "a", GROUP))
    assert min(drawn) >= 100 and max(drawn) <= 900 and fmean(drawn) == pytest.approx(500, rel=0.02)
    assert pearson(drawn) == pytest.approx(6 / math.pi * math.asin(0.35), abs=0.02)


def test_measured_lengths_keep_all_quantiles_of_a_step():
    quantiles = tuple(float(10 * i) for i in range(1, 22))
    plain, alike = (Lengths(0, math.inf, "measured", quantiles, c) for c in (0.0, 0.8))
    one, other = plain.draw(512, "a", GROUP), alike.draw(512, "a", GROUP)
    assert sorted(one) == pytest.approx(sorted(other))
    assert pearson(list(other)) > 0.5 > abs(pearson(list(one)))


def test_without_a_correlation_lengths_are_those_that_they_were():
    lengths = Lengths(0, 4096, "lognormal", (800.0, 1.0))
    assert lengths.draw(16, "a", 4) == lengths.draw(16, "a")
    assert lengths.longest(64, 8) == lengths.longest(64)


@pytest.mark.parametrize(("rows", "group", "alike"), [(64, 8, 0.3), (64, 8, 0.8), (256, 16, 0.5), (32, 32, 0.6)])
def test_the_longest_row_is_that_of_monte_carlo(rows, group, alike):
    """By its definition: all rows are below it as often as so many rows that differ are below theirs."""
    chance, tries = random.Random(3), 6000
    longest = sorted(max(draw_normals(chance, rows, group, alike)) for _ in range(tries))
    place = longest[int((1 - 0.5 / rows) ** rows * tries)]
    assert NORMAL.inv_cdf(part_below_longest(rows, group, alike)) == pytest.approx(place, abs=0.05)


def test_rows_that_are_equal_within_a_prompt_have_the_longest_of_as_many_prompts():
    assert part_below_longest(64, 8, 1.0) == pytest.approx((1 - 0.5 / 64) ** 8)
    assert part_below_longest(64, 8, 0.998) == pytest.approx(part_below_longest(64, 8, 1.0), rel=0.01)
    assert part_below_longest(64, 1, 0.9) == part_below_longest(64, 8, 0.0) == 1 - 0.5 / 64


@pytest.mark.parametrize("alike", [0.0, 0.4, 0.85])
def test_what_was_drawn_is_found_again_whatever_the_distribution(alike):
    prompts = [row // GROUP for row in range(4096)]
    for kind, numbers in (("lognormal", (300.0, 1.2)), ("uniform", (1.0, 90.0))):
        lengths = Lengths(0, math.inf, kind, numbers, alike)
        found = [correlation([round(x) for x in lengths.draw(4096, str(i), GROUP)], prompts) for i in range(4)]
        assert fmean(f for f in found if f is not None) == pytest.approx(alike, abs=0.05)


def test_few_rows_that_have_nothing_to_do_with_each_other_are_not_alike_on_average():
    chance, prompts = random.Random(5), [row // 4 for row in range(64)]
    found = [correlation([chance.random() for _ in prompts], prompts) for _ in range(1000)]
    assert fmean(f for f in found if f is not None) == pytest.approx(0.0, abs=0.03)


def test_where_nothing_can_be_told_there_is_no_correlation():
    assert correlation([], []) is None
    assert correlation([3, 4, 5], ["a", "b", "c"]) is None, "no prompt has two rows"
    assert correlation([3, 4, 5], ["a", "a", "a"]) is None, "there is one prompt"
    assert correlation([8, 8, 8, 8], [0, 0, 1, 1]) is None, "all rows were cut at the same length"
    assert correlation([1, 1, 9, 9], [0, 0, 1, 1]) == pytest.approx(1.0)


@pytest.mark.parametrize("alike", [0.0, 0.4, 0.85])
def test_steps_of_few_prompts_of_any_size_say_it_on_average(alike):
    chance = random.Random(7)
    found: list[float] = []
    for _ in range(400):
        prompts = [prompt for prompt in range(16) for _ in range(chance.randint(1, 8))]
        common = [chance.gauss(0, 1) for _ in range(16)]
        rows = [math.sqrt(alike) * common[p] + math.sqrt(1 - alike) * chance.gauss(0, 1) for p in prompts]
        found.append(correlation(rows, prompts) or 0.0)
    assert alike - 0.08 < fmean(found) < alike + 0.03, "of few prompts a little less"
