"""docs/published.md: its tables are what the script finds, and most steps are predicted."""

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_page_has_the_steps_that_are_predicted():
    text = (DOCS / "published.md").read_text()
    script = runpy.run_path(str(DOCS / "make_published.py"))
    assert script["page"](text) == text, "run python docs/make_published.py"


def test_constants_were_fitted_on_four_rows_and_hold_for_most():
    script = runpy.run_path(str(DOCS / "make_published.py"))
    assert len(script["FITTED"]) == 4
    found = re.findall(
        r"^\| (v0\.\d) (?!deepseek).* \| ([\d.]+)( \(fitted\)| \*\*\\\*\*\*)? \|$",
        (DOCS / "published.md").read_text(),
        re.M,
    )
    first = [float(ratio) for release, ratio, _ in found if release != "v0.6"]
    assert len(first) == 16 and sum(abs(ratio - 1) <= 0.3 for ratio in first) >= 12
    assert sum("fitted" in mark for *_, mark in found) == 4
