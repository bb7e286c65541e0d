"""The page on what fails elsewhere: every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_test_that_the_page_names_is_there(file, test):
    text = (ROOT / file).read_text()
    assert f"def {test}(" in text if test else "def test_" in text


def test_every_row_has_a_test_or_says_that_it_was_not_tried():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| [\w-]+#\d+", line)]
    assert len(rows) > 25 and len(NAMED) > 20
    for row in rows:
        assert "`tests/" in row or row.endswith("| the same |") or "the same, " in row or "*not tried*" in row, row
