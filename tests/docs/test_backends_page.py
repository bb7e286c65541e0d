"""The page on backends says what docs/backends.json says, which the contracts of the engines have written."""

import ast
import json
import runpy
from pathlib import Path

import pytest

from flowrl.backends import names
from flowrl.placement.backends import names_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "backends.md").read_text()
RECORD = json.loads((DOCS / "backends.json").read_text())


@pytest.fixture
def made():
    return runpy.run_path(str(DOCS / "make_backends.py"))


def asked(name: str) -> list[str]:
    """What the contracts ask for, read without their imports."""
    tree = ast.parse((ROOT / "tests" / "backends" / "contracts.py").read_text())
    values = {t.id: n.value for n in tree.body if isinstance(n, (ast.Assign, ast.AnnAssign)) and n.value is not None
              for t in (n.targets if isinstance(n, ast.Assign) else [n.target]) if isinstance(t, ast.Name)}  # fmt: skip
    return [ast.literal_eval(key) for key in values[name].keys]


def test_the_tables_are_those_of_the_record(made):
    assert made["page"](PAGE) == PAGE, "run python docs/make_backends.py --page"


def test_every_backend_was_asked_for_everything(made):
    trains = set(names()) & set(names_of("train"))
    assert set(made["BACKENDS"]) == trains == {backend for backend, _ in made["COLUMNS"]}
    tables = RECORD["tables"]
    assert list(tables["capability"]["rows"]) == asked("CAPABILITIES"), "run python docs/make_backends.py"
    assert list(tables["axis"]["rows"]) == asked("AXES")
    for table in tables.values():
        assert all(len(answers) == len(table["columns"]) for answers in table["rows"].values())


def test_what_is_not_there_is_said_and_nothing_is_broken(made):
    """A no is a message of the project's own, not an exception of something else."""
    for table in RECORD["tables"].values():
        for row, answers in table["rows"].items():
            for answer in answers:
                assert answer == "yes" or "Error: " not in answer, (row, answer)


def test_alike_answers_share_a_note(made):
    alike = made["_alike"]
    assert alike("no axis pp in its mesh pp=2.", "pp") == alike("no axis cp in its mesh cp=2.", "cp")
    assert alike("knows no models of the kind 'gpt2'.", "gpt2") == "knows no models of this kind."
    assert alike("X has the weight 'a.b', and more.", "LoRA") == "It has the weight '...', and more."
