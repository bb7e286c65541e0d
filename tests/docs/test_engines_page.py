"""The page on engines says what docs/engines.json says, which the tests of the engines have written."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from flowrl.placement.backends import BACKENDS, names_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "engines.md").read_text()
RECORD = json.loads((DOCS / "engines.json").read_text())


@pytest.fixture(scope="module")
def made():
    return runpy.run_path(str(DOCS / "make_engines.py"))


def section(name: str) -> str:
    """What stands on the page between the markers of a block."""
    return PAGE.partition(f"<!-- {name}: written by")[2].partition(f"<!-- end of {name} -->")[0]


def test_the_tables_are_those_of_the_record_and_of_the_table_of_backends(made):
    assert made["page"](PAGE) == PAGE, "run python docs/make_engines.py --page"


def test_every_engine_was_asked_for_everything(made):
    asked = {table: {column.title for column in columns} for table, columns in made["SUITES"].items()}
    assert {table: set(columns) for table, columns in RECORD.items()} == asked, "run python docs/make_engines.py"
    for table, columns in made["SUITES"].items():
        for column in columns:
            names, found = made["names"](column), RECORD[table][column.title]
            assert names and list(found["answers"]) == names, f"run python docs/make_engines.py '{column.title}'"
            assert set(found["versions"]) in (set(column.packages), set())
            assert found["versions"] or set(found["answers"].values()) == {made["NOT_RUN"]}
            assert found["versions"] or table != "contract", f"the contract is not held by {column.title}"


def test_every_engine_that_runs_have_is_on_the_page(made):
    engines = {name for name in names_of("generate") if BACKENDS[name].built}
    assert engines <= {re.split(r"\W", column.title)[0] for column in made["SUITES"]["contract"]}
    assert all(f"`{name}`" in section("traits") for name in engines)


def test_the_contract_is_kept_or_what_is_lacking_is_said():
    for columns in RECORD.values():
        for title, found in columns.items():
            asked = {test: answer for test, answer in found["answers"].items() if found["versions"]}
            wrong = {
                test: answer for test, answer in asked.items() if not re.match(r"yes$|yes: .|no: .|failed: .", answer)
            }
            assert not wrong, f"{title} was not asked: {wrong}"
    for title, found in RECORD["contract"].items():
        assert found["answers"]["it streams"] == "yes", title
        assert not any(answer.startswith("failed") for answer in found["answers"].values()), title


def test_options_are_those_of_the_table_of_backends():
    rows = re.findall(r"^\| `(\w+)` \|", section("options"), re.M)
    assert set(rows) == {o.name for name in names_of("generate") for o in BACKENDS[name].options}


SUITE = """
import pytest

@pytest.mark.parametrize("it", ["one", "two", "oneandmore"])
@pytest.mark.parametrize("n", [1, 2])
def test_it_counts(it, n):
    if it == "two" and n == 2:
        pytest.skip("it counts to one")

@pytest.mark.parametrize("it", ["one", "two", "oneandmore"])
def test_it_says_how(it, record_property):
    record_property("modes", "a, b")
    assert it != "oneandmore", "as it is"

@pytest.mark.parametrize("it", [pytest.param("two", marks=pytest.mark.skip("two is not installed"))])
def test_it_is_there(it):
    pass
"""


@pytest.mark.parametrize(
    ("param", "found"),
    [
        ("one", {"it counts": "yes", "it says how": "yes: a, b", "it is there": "not run"}),
        ("two", {"it counts": "no: it counts to one", "it says how": "yes: a, b", "it is there": "not run"}),
        (
            "oneandmore",
            {
                "it counts": "yes",
                "it says how": "failed: test_it_says_how[oneandmore], AssertionError: as it is",
                "it is there": "not run",
            },
        ),
    ],
)
def test_a_test_that_skips_itself_is_a_no_and_one_that_fails_is_no_yes(made, tmp_path, param, found):
    path = tmp_path / "test_suite.py"
    path.write_text(SUITE)
    answers = made["answers"](Path(sys.executable), path, param)
    answers["it says how"] = answers["it says how"].partition(" assert")[0]
    assert answers == found


def test_a_suite_that_does_not_run_is_an_error(made, tmp_path):
    path = tmp_path / "test_suite.py"
    path.write_text("def test_it(): pass\nimport nothing_of_this_name\n")
    with pytest.raises(RuntimeError, match="did not run"):
        made["answers"](Path(sys.executable), path)


@pytest.mark.nightly
def test_the_tables_of_the_page_are_what_the_engines_do(made):
    """Of those that need no other environment; the tests of the others run by themselves."""
    found = made["measure"](["hf", "FakeEngine", "sglang, its protocol"])["contract"]
    answers = {title: column["answers"] for title, column in found.items()}
    assert answers == {title: column["answers"] for title, column in RECORD["contract"].items()}, (
        "run python docs/make_engines.py"
    )
