"""Tests lie where their modules lie, and have their names: the rule of CONTRIBUTING.md under "Where tests go"."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "flowrl"
#: Folders that mirror no folder of the source: the drivers and the pages are not in it.
OTHERS = ("algorithms", "docs")
#: Tests of the whole package, which stand beside the folders.
WHOLE = ("doctests", "hanging_tests", "house", "import_light", "public", "safe_reading", "type_checkers", "version")
#: Folders of the source that are called like a library, or lie beside one that is: no folder of the tests may be, or
#: Python would find it where the library is not installed. Their name stands before the module's.
PREFIXED = (
    "backends/fsdp2",
    "backends/hf",
    "backends/megatron",
    "backends/sglang",
    "backends/vllm",
    "runtime/distributed/ray",
)
FILES = sorted(TESTS.rglob("test_*.py"))


def names_in(folder: str) -> set[str]:
    """What a test in a folder may be named after: its modules and folders, and the folder itself for several of them."""
    here = SOURCE / folder
    names = {path.stem for path in here.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    for inner in PREFIXED:
        if Path(inner).parent == Path(folder):
            names |= {f"{Path(inner).name}_{path.stem}" for path in (SOURCE / inner).rglob("*.py")}
    if folder != ".":
        names |= {here.name, *(f"{here.name}_{name}" for name in names)}
    return names - {"__init__", "__main__"}


def misplaced(folder: str, name: str) -> str | None:
    """What is wrong with a test file of that name there, if anything is."""
    if folder.split("/")[0] in OTHERS or (folder == "." and name in WHOLE):
        return None
    if not (SOURCE / folder / "__init__.py").exists():
        return f"{Path('flowrl', folder)} is no folder"
    if folder in PREFIXED:
        return f"tests/{folder} would be found for the library: write test_{Path(folder).name}_ before the name"
    names = names_in(folder)
    if name in names or any(name.startswith(f"{first}_") for first in names):
        return None
    return f"{Path('flowrl', folder)} has no module or folder that test_{name} begins with"


def test_the_page_for_contributors_has_the_folders_in_the_order_of_their_imports():
    """The line of CONTRIBUTING.md: some layers that import-linter checks, in its order, with every folder among them."""
    layers = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0][
        "layers"
    ]
    (line,) = re.findall(r"^(.* > errors)$", (TESTS.parent / "CONTRIBUTING.md").read_text(), re.M)
    said = line.split(" > ")
    order = [next((at for at, layer in enumerate(layers) if set(one.split(" | ")) <= set(layer.split(" | "))), -1)
             for one in said]  # fmt: skip
    assert -1 not in order and order == sorted(order)
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders and folders <= {name for one in said for name in one.split(" | ")}


def test_a_test_file_lies_and_is_named_as_its_module():
    said = {file: misplaced(str(file.relative_to(TESTS).parent), file.stem.removeprefix("test_")) for file in FILES}
    wrong = [f"{file.relative_to(TESTS)}: {what}" for file, what in said.items() if what]
    assert FILES and not wrong, "\n".join(wrong)


def test_names_are_unique():
    assert [name for name, count in Counter(file.name for file in FILES).items() if count > 1] == []


def test_what_tests_share_is_no_test():
    """No test is opened by another one: what both use is a module of its own."""
    opens = re.compile(r"^ *(?:from|import) test_\w|with_name\([\"']test_", re.M)
    assert [
        file.name for file in TESTS.rglob("*.py") if file.parent.name != "wrong" and opens.search(file.read_text())
    ] == []


def test_exceptions_are_needed():
    assert all((TESTS / folder).is_dir() and not (SOURCE / folder).exists() for folder in OTHERS)
    assert all((TESTS / f"test_{name}.py").exists() and not (SOURCE / f"{name}.py").exists() for name in WHOLE)
    assert all((SOURCE / folder / "__init__.py").exists() and not (TESTS / folder).exists() for folder in PREFIXED)


@pytest.mark.parametrize(
    ("folder", "name", "said"),
    [
        ("graph/ops", "allowed", None),
        ("graph/ops", "allowed_by_hand", None),
        ("graph", "allowed", "flowrl/graph has no module or folder that test_allowed begins with"),
        ("graph", "graph_of_two", None),
        ("backends", "hf_generate", None),
        ("backends", "generate", "flowrl/backends has no module"),
        ("backends/hf", "generate", "tests/backends/hf would be found for the library: write test_hf_ before"),
        (".", "batch", None),
        (".", "anything", "flowrl has no module"),
        ("gpu", "moves", "flowrl/gpu is no folder"),
        ("docs", "anything", None),
    ],
)
def test_the_rule_tells_right_places_from_wrong_ones(folder, name, said):
    found = misplaced(folder, name)
    assert found is None if said is None else found is not None and found.startswith(said)
