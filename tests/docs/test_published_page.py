"""docs/published.md: its tables are what the script finds, and most steps are predicted."""

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
TESTS = Path(__file__).parents[1]


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


def test_orderings_are_held_by_tests_that_are_there():
    text = (DOCS / "published.md").read_text().partition("## Orderings")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)`", text))
    there = {
        name for file in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    assert len(named) >= 6 and not named - there


def test_where_one_step_off_is_faster_than_in_turns_it_is_predicted_so():
    """Pairs of one release, model and number of devices: in which order they are published, and predicted."""
    line = r"^\| (v0\.\d \S+), (synchronous|1 step off), (\d+) GPUs .* \| ([\d.]+) \| ([\d.]+) \| [\d.]+.*\|$"
    steps: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for model, way, devices, published, predicted in re.findall(line, (DOCS / "published.md").read_text(), re.M):
        steps.setdefault((model, devices), {})[way] = float(published), float(predicted)
    pairs = {key: (by["synchronous"], by["1 step off"]) for key, by in steps.items() if len(by) == 2}
    faster = {key: [off < turns for turns, off in zip(*both, strict=True)] for key, both in pairs.items()}
    assert len(faster) == 7 and all(published == predicted for published, predicted in faster.values())
    assert [key for key, (published, _) in faster.items() if not published] == [("v0.4 qwen3-30b-a3b", "32")]
