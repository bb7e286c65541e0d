import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_page_has_the_tables_that_the_planner_gives():
    text = (DOCS / "reshard.md").read_text()
    assert runpy.run_path(str(DOCS / "make_reshard_table.py"))["page"](text) == text, (
        "run python docs/make_reshard_table.py"
    )
