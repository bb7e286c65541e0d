"""Blocks of a page are made anew between their markers, and a marker that is lacking is told."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = "docs/make_it.py"


@pytest.fixture
def fill():
    return runpy.run_path(str(DOCS / "fill_blocks.py"))["fill"]


def block(name: str, text: str) -> str:
    return f"<!-- {name}: written by {SCRIPT} -->\n\n{text}\n\n<!-- end of {name} -->"


def test_blocks_are_filled_and_the_rest_stays(fill):
    page = f"# Title\n\n{block('a', 'old')}\n\nbetween\n\n{block('b', 'older')}\n"
    odd = "| \\1 | {x} |"
    filled = fill(page, {"a": lambda: "new", "b": lambda: odd}, SCRIPT)
    assert filled == f"# Title\n\n{block('a', 'new')}\n\nbetween\n\n{block('b', odd)}\n"
    assert fill(filled, {"a": lambda: "new"}, SCRIPT) == filled


@pytest.mark.parametrize(
    "page",
    [
        "nothing",
        block("a", "x").partition("<!-- end")[0],
        block("a", "x") * 2,
        block("a", "x").replace("make_it", "make"),
    ],
)
def test_a_page_without_the_markers_is_refused(fill, page):
    with pytest.raises(ValueError, match=f"<!-- a: written by {SCRIPT} -->"):
        fill(page, {"a": lambda: "new"}, SCRIPT)
