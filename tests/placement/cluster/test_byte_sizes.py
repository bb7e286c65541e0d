"""Sizes of memory as a plan writes them, read and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import PlanError
from flowrl.placement.cluster.byte_sizes import read_size, written_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2TiB", 2**41),
        ("2 tib", 2**41),
        ("1.5TB", 1.5e12),
        ("512GiB", 2**39),
        ("64GB", 64e9),
        ("100MiB", 100 * 2**20),
        ("1e12", 1e12),
        ("1e+12B", 1e12),
        ("123", 123),
    ],
)
def test_a_size_is_read(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "2XB", "-2GB", "0TiB", "1.2.3GB", "inf", "nanGB", "2 T iB", "1e999GB"])
def test_what_is_no_size_is_refused_with_the_fix(text):
    with pytest.raises(PlanError, match="no size of memory") as refused:
        read_size(text)
    assert refused.value.fix == "Write a number with a unit: 2TiB."


@given(st.floats(1, 1e18) | st.integers(1, 1 << 60).map(float))
def test_what_is_written_reads_the_same(size):
    assert read_size(written_size(size)) == size
