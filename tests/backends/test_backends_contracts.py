"""The contracts of every engine: what docs/backends.md says of it is what it does."""

import json
import runpy
from pathlib import Path

import contracts
import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", contracts.CAPABILITIES)
def test_the_reference_does_everything(name):
    assert contracts.answers("capability", [name], "hf", {}) == ["yes"]


@pytest.mark.nightly
def test_the_tables_of_the_page_are_what_the_engines_say():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install '.[megatron]'")
    measured = runpy.run_path(str(DOCS / "make_backends.py"))["measure"]()
    assert measured["tables"] == json.loads((DOCS / "backends.json").read_text())["tables"], (
        "run python docs/make_backends.py"
    )
