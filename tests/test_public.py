"""The public API: what ``__all__`` lists, the reference has, and the pages use are the same; every example runs."""

from __future__ import annotations

import doctest
import inspect
import re
import runpy
from pathlib import Path

import pytest

import flowrl as fl
from flowrl import rl

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = runpy.run_path(str(DOCS / "make_reference.py"))
ENTRIES = MADE["entries"]()
#: Pages that show programs which are wrong on purpose.
WRONG = ("wrong_programs.md", "mistakes.md")
PAGES = [ROOT / "README.md", *(p for p in sorted(DOCS.glob("*.md")) if p.name not in WRONG)]
#: Functions of ``rl`` that no paper has: tools, and training on given rows.
WITHOUT_PAPER = {"clamp", "collect", "first_groups", "loss", "sft", "where", "correct", "reject", "Loss", "LossInputs"}
WITHOUT_PAPER |= {"Gate", "Correction", "Rejection", "policy_loss", "clipped_rewards", "value_clip"}


def listed():
    """The entries of the reference, in its order."""
    return [name for page in MADE["PAGES"] for names in page.groups.values() for name in names]


def text_of(entry):
    return inspect.getdoc(entry) or ""


def test_the_reference_has_every_public_name_once_and_no_other():
    assert sorted(listed()) == sorted(ENTRIES)
    pages = "".join(p.read_text() for p in (DOCS / "reference").glob("*.md"))
    directives = re.findall(r"^\.\. auto(?:function|class|exception):: flowrl\.(\S+)$", pages, re.M)
    assert sorted(directives) == sorted(name.removeprefix("fl.") for name in ENTRIES)


def test_the_pages_of_the_reference_are_those_of_now():
    for name, text in MADE["texts"]().items():
        assert (DOCS / "reference" / name).read_text() == text, "run python docs/make_reference.py"
    assert {p.name for p in (DOCS / "reference").glob("*.md")} == set(MADE["texts"]())


def test_the_pages_use_public_names_alone():
    known = {*ENTRIES, *MADE["MODULES"]}
    for page in PAGES:
        text = page.read_text()
        used = set(
            re.findall(r"(?<![\w./-])((?:fl|rl)(?:\.(?:data|allowed|gates|errors|testing))?\.[A-Za-z]\w*)", text)
        )
        assert sorted(used - known) == [], page.name
        imported = re.findall(r"^(?:>>> )?(?:from|import) (flowrl\b.*)$", text, re.M)
        for words in imported:
            names = words.partition(" import ")[2].split(", ")
            plain = words == "flowrl as fl" or (words.startswith("flowrl import ") and {*names} <= {"rl", *fl.__all__})
            plain |= words.startswith("flowrl.environments import ") and {*names} <= {*fl.environments.__all__}
            assert plain, f"{page.name}: {words}"


def test_the_methods_of_a_flow_that_pages_call_are_in_the_reference():
    called = {m for p in PAGES for m in re.findall(r"\bflow\.([a-z_]+)\(", p.read_text())}
    assert called <= {*MADE["METHODS"]["fl.Flow"]}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_has_a_sentence_and_its_methods_too(name):
    entry = ENTRIES[name]
    first = text_of(entry).split("\n\n")[0]
    assert first and first.rstrip()[-1] in ".:", f"{name} begins with {first!r}"
    if inspect.isclass(entry) and not issubclass(entry, BaseException):
        for method in MADE["methods"](name, entry):
            assert text_of(getattr(entry, method)), f"{name}.{method} says nothing"


@pytest.mark.parametrize("name", [n for n in ENTRIES if n.startswith("rl.")])
def test_an_algorithm_names_its_source(name):
    if name.removeprefix("rl.") not in WITHOUT_PAPER:
        text = text_of(ENTRIES[name])
        seen = [text, *(text_of(getattr(rl.gates, gate)) for gate in re.findall(r"rl\.gates\.(\w+)`", text))]
        assert re.search(r"arXiv:\d{4}\.\d{4,5}|\((?:\w+ )+(?:et al\. )?\d{4}", " ".join(seen)), name


@pytest.mark.parametrize(
    "name", [n for n, e in ENTRIES.items() if not n.startswith("fl.errors.") or n == "fl.errors.At"]
)
def test_an_entry_has_an_example_that_runs(name):
    example = doctest.DocTestParser().get_doctest(
        text_of(ENTRIES[name]), {"fl": fl, "rl": rl, "__name__": "example"}, name, None, 0
    )
    assert example.examples, f"{name} has no example"
    said = []
    result = doctest.DocTestRunner().run(example, out=said.append)
    assert result.failed == 0, "".join(said)
