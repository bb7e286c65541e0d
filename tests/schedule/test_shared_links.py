"""Links that several pass at once: the fair rates by what defines them, times by small steps, and on the clock."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import SPLIT, Driver, Times, pools_of, setup

from flowrl.schedule.events import Follower
from flowrl.schedule.shared_links import SharedLinks, fair_rates

LINKS = [("train", "network"), ("rollout", "network"), ("train", "link")]
FLOWS = st.dictionaries(
    st.integers(0, 5), st.dictionaries(st.sampled_from(LINKS), st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0]))
)


@settings(max_examples=300)
@given(FLOWS)
def test_rates_are_max_min_fair(flows):
    """No link is full beyond all of it, and who is slowed has a full link on which nobody is faster: that is it."""
    rates = fair_rates(flows)
    assert list(rates) == list(flows)
    used = {link: sum(parts.get(link, 0.0) * rates[key] for key, parts in flows.items()) for link in LINKS}
    assert all(part <= 1 + 1e-9 for part in used.values())
    for key, parts in flows.items():
        assert 0 < rates[key] <= 1
        if rates[key] < 1:
            full = [link for link, part in parts.items() if part > 0 and used[link] > 1 - 1e-6]
            on = {link: [rates[k] for k, other in flows.items() if other.get(link, 0.0) > 0] for link in full}
            assert any(rates[key] >= max(of) - 1e-9 for of in on.values())


@pytest.mark.parametrize("seed", range(8))
def test_everything_ends_when_small_steps_end_it(seed):
    chance = random.Random(seed)
    starts = sorted(
        (chance.uniform(0, 6), i, chance.uniform(1, 5), {link: chance.random() for link in chance.sample(LINKS, 2)})
        for i in range(5)
    )
    found, links, waiting = dict[int, float](), SharedLinks(), list(starts)
    while waiting or links.next() < float("inf"):
        time = links.next()
        if waiting and waiting[0][0] < time:
            time, key, seconds, parts = waiting.pop(0)
            links.begin(key, seconds, parts, time=time)
        else:
            found |= dict.fromkeys(links.finish(time), time)
    left, time, ends, step = dict[int, float](), 0.0, dict[int, float](), 1e-3
    parts_of = {i: parts for _, i, _, parts in starts}
    while len(ends) < 5:
        left |= {i: seconds for at, i, seconds, _ in starts if time - step < at <= time}
        rates = fair_rates({i: parts_of[i] for i in left})
        time += step
        for i in list(left):
            left[i] -= step * rates[i]
            if left[i] <= 0:
                ends[i] = time
                del left[i]
    assert found == pytest.approx(ends, abs=0.02)


def test_who_has_its_links_alone_ends_to_the_last_digit_when_it_would():
    links = SharedLinks()
    links.begin("a", 0.1, {LINKS[0]: 1.0}, time=0.2)
    links.begin("b", 5.0, {LINKS[1]: 1.0}, time=0.25)
    assert links.next() == 0.2 + 0.1 and links.finish(0.2 + 0.1) == ["a"] and links.next() == 0.25 + 5.0


# -- on the virtual clock ---------------------------------------------------------------------------------------------

NETWORK = ("train", "network")
TWO = {"a": Follower("train", "of_a"), "b": Follower("train", "of_b")}


def two_publishes(shares: dict[str, dict[tuple[str, str], float]]) -> dict[str, tuple[float, float]]:
    """Two workers that train in one pool, one after the other, and are each published to a pool of their own."""
    times = Times({"a.update": 3, "b.update": 1, "a.publish": 4, "b.publish": 4}, shares=shares)
    pools = {"a.update": "train", "b.update": "train", "a.generate": "of_a", "b.generate": "of_b"}
    driver = Driver(setup(TWO, ("train", "of_a", "of_b"), staleness=1), times, pools)
    for _ in driver.steps(1):
        driver.call("a.update", reads=("a",), updates="a")
        driver.call("b.update", reads=("b",), updates="b")
    driver.clock.end()
    return {span.title: (span.start, span.end) for span in driver.clock.flown.spans}


def test_publishes_of_two_pools_share_the_network_of_the_one_that_trains():
    alone = two_publishes({})
    first, second = alone["a.publish"][0], alone["b.publish"][0]
    both = two_publishes({"a.publish": {NETWORK: 1.0}, "b.publish": {NETWORK: 1.0}})
    assert alone["a.publish"][1] == first + 4 and alone["b.publish"][1] == second + 4
    left = 4 - (second - first)  # of the first when the second begins; then each has half of the network
    assert both["a.publish"] == pytest.approx((first, second + 2 * left))
    assert both["b.publish"] == pytest.approx((second, second + 2 * left + (4 - left)))


def test_publishes_over_links_of_their_own_do_not_slow_each_other():
    alone = two_publishes({})
    other = two_publishes({"a.publish": {NETWORK: 0.5}, "b.publish": {NETWORK: 0.5}})
    assert all(other[title] == pytest.approx(alone[title]) for title in alone)


SECONDS = {"actor.generate": 6, "reward.score": 1, "ref.logprobs": 6, "actor.update": 3, "actor.publish": 2}
GATHERS = {"actor.publish": {NETWORK: 1.0, ("rollout", "network"): 1.0}, "ref.logprobs": {NETWORK: 0.5}}


def flown(shares, *, queue: int = 0, publish: str = "drain", steps: int = 8):
    driver = Driver(setup(staleness=1, publish=publish, queue=queue), Times(SECONDS, shares=shares), pools_of(SPLIT))
    for _ in driver.steps(steps):
        rows = driver.generate()
        driver.update(driver.score(rows), driver.logprobs(rows))
    driver.clock.end()
    return driver.clock


def together(clock, one: str, other: str) -> float:
    """Seconds in which two titles run at once."""
    spans = clock.flown.spans
    return sum(
        max(0.0, min(a.end, b.end) - max(a.start, b.start))
        for a in spans
        for b in spans
        if a.title == one and b.title == other
    )


@pytest.mark.parametrize("publish", ["drain", "continue", "interrupt"])
def test_a_publish_beside_all_gathers_takes_longer_and_so_do_they(publish):
    plain, shared = flown({}, publish=publish), flown(GATHERS, publish=publish)
    assert together(plain, "actor.publish", "ref.logprobs") > 1, "or the test tells nothing"
    for title, seconds in (("actor.publish", 2), ("ref.logprobs", 6)):
        longer = [s.end - s.start for s in shared.flown.spans if s.title == title]
        assert max(longer) > seconds + 0.1
        # of each second in which both run, two thirds are of either: 1 / (1 + 0.5)
        lost = sum(longer) - seconds * len(longer)
        assert lost == pytest.approx(together(shared, "actor.publish", "ref.logprobs") / 3)
    assert shared.time >= plain.time
    assert shared.flown.versions == plain.flown.versions


@pytest.mark.parametrize("queue", [0, 3])
def test_calls_that_were_handed_to_a_busy_pool_follow_one_another_without_a_gap_or_an_overlap(queue):
    times = Times({"ref.logprobs": 2, "critic.values": 1, "actor.publish": 2}, shares=GATHERS)
    driver = Driver(setup(staleness=1, queue=queue), times, pools_of(SPLIT))
    for _ in driver.steps(4):
        rows = driver.generate()
        values = driver.call("critic.values", rows, reads=("critic",), rowwise=True, queues=True)
        driver.update(driver.logprobs(rows), driver.logprobs(rows), values)
    driver.clock.end()
    spans = sorted((s for s in driver.clock.flown.spans if "train" in s.pools), key=lambda s: (s.start, s.end))
    assert len(spans) == 4 * 4
    for before, after in itertools.pairwise(spans):
        assert after.start >= before.end - 1e-9
    waited = sum(s.end - s.start for s in spans)
    assert waited == pytest.approx(4 * 5 + together(driver.clock, "actor.publish", "ref.logprobs") / 3)


def test_a_clock_whose_costs_know_no_links_is_as_it_was():
    assert flown({}).flown.spans == flown({"actor.publish": {}, "ref.logprobs": {}}).flown.spans
