from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.placement.reshard.transportation import transport


@st.composite
def problems(draw):
    sinks = draw(st.integers(1, 4))
    capacity = draw(st.lists(st.integers(0, 3), min_size=sinks, max_size=sinks))
    places = min(sum(capacity), 7)
    supply = []
    while places > 0 and len(supply) < 5:
        supply.append(draw(st.integers(0, min(3, places))))
        places -= supply[-1]
        if not draw(st.booleans()):
            break
    worth = [draw(st.dictionaries(st.integers(0, sinks - 1), st.integers(0, 9))) for _ in supply]
    return supply, capacity, worth


def best(supply, capacity, worth):
    """The highest worth, by trying every order of the places."""
    pieces = [a for a, n in enumerate(supply) for _ in range(n)]
    places = [b for b, n in enumerate(capacity) for _ in range(n)]
    return max(
        sum(worth[a].get(b, 0) for a, b in zip(pieces, order, strict=False))
        for order in set(permutations(places, len(pieces)))
    )


@settings(max_examples=300, deadline=None)
@given(problems())
def test_worth_is_the_highest_there_is(problem):
    supply, capacity, worth = problem
    flow = transport(supply, capacity, worth)
    assert [sum(sent.values()) for sent in flow] == list(supply)
    assert all(sum(sent.get(b, 0) for sent in flow) <= n for b, n in enumerate(capacity))
    assert sum(n * worth[a].get(b, 0) for a, sent in enumerate(flow) for b, n in sent.items()) == best(*problem)
