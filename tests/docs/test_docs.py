"""Pages that name files and messages stay true to them."""

import re
import runpy
from pathlib import Path

import pytest

from flowrl.placement.model.zoo import SHIPPED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_page_of_wrong_programs_is_made_from_them():
    made = runpy.run_path(str(DOCS / "make_wrong_programs.py"))["page"]()
    assert (DOCS / "wrong_programs.md").read_text() == made, "run python docs/make_wrong_programs.py"


def test_the_page_of_mistakes_is_made_from_the_wrong_programs():
    made = runpy.run_path(str(DOCS / "make_mistakes.py"))["page"]()
    assert (DOCS / "mistakes.md").read_text() == made, "run python docs/make_mistakes.py"
    assert made.count("](wrong_programs.md#wrong-") >= len(list((ROOT / "tests" / "wrong").glob("*.py")))
    kinds = set(re.findall(r"^### `(\w+)`: .", made, re.M))
    assert kinds == set(re.findall(r"^### `(\w+)`", made, re.M)), "every class of error says what it is about"


def test_the_page_of_damage_is_made_from_what_is_tested():
    made = runpy.run_path(str(DOCS / "make_damage.py"))["page"]()
    assert (DOCS / "damage.md").read_text() == made, "run python docs/make_damage.py"


def test_the_page_of_the_layout_is_made_from_the_first_lines():
    made = runpy.run_path(str(DOCS / "make_layout.py"))
    text = made["page"]()
    assert (DOCS / "layout.md").read_text() == text, "run python docs/make_layout.py"
    files = [path for path in made["FLOWRL"].rglob("*.py") if path.name != "__init__.py"]
    assert len(re.findall(r"^\| `\w+\.py` \| .*\.? \|$", text, re.M)) == len(files), "a file without a first line"
    assert all(made["first_line"](path) for path in made["FLOWRL"].rglob("*.py"))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_files_that_a_page_names_are_there(page):
    named = re.findall(r"`((?:flowrl|algorithms|tests|docs|benchmarks)/[\w/.]*)`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_the_journey_names_a_file_at_every_stop():
    text = (DOCS / "journey.md").read_text()
    stops = re.findall(r"^\*\*(\d+)\. (.*?)(?=^\*\*|^## |\Z)", text, re.M | re.S)
    assert [int(number) for number, _ in stops] == list(range(1, len(stops) + 1)) and len(stops) > 12
    assert [number for number, body in stops if "`flowrl/" not in body] == []


def test_the_page_of_plans_names_every_model_that_is_known_by_name():
    page = (DOCS / "plans.md").read_text()
    assert [name for name in SHIPPED if f"`{name}`" not in page] == []
