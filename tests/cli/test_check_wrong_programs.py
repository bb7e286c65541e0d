"""Programs with a mistake each, and the message that ``flowrl check`` must give: the docstring of the program."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.cli import main

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "tests" / "wrong").glob("*.py"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Messages name files relative to the working directory; a script's folder joins the path."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(ROOT / "tests" / "wrong")):
            del sys.modules[name]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_the_message_is_the_docstring(program, capsys):
    status = main(["check", str(program.relative_to(ROOT))])

    said = capsys.readouterr()
    expected = ast.get_docstring(ast.parse(program.read_text()), clean=False)
    assert (said.out + said.err).strip() == expected.strip()
    assert status == (2 if expected.startswith("UsageError") else 1)


def test_there_are_enough_and_each_says_what_is_wrong_with_it():
    assert len(PROGRAMS) >= 24
    for program in PROGRAMS:
        after = program.read_text().split('"""')[2].strip().splitlines()
        assert after[0].startswith("# "), f"{program.name}: a comment below the docstring says what the mistake is"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_every_error_names_a_line_and_all_but_crashes_a_fix(program):
    message = ast.get_docstring(ast.parse(program.read_text()), clean=False)
    blocks = [b for b in message.strip().split("\n\n") if "Error: " in b]
    assert blocks
    for block in blocks:
        rows = block.splitlines()
        assert rows[-1].startswith("  fix  "), block
        if "has 2 flows" not in block:
            assert rows[1].startswith(f"  at   tests/wrong/{program.name}:"), block


def test_nothing_heavy_is_imported_to_find_them():
    code = (
        "import contextlib, io, json, sys\n"
        "from flowrl.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "    statuses = [main(['check', p]) for p in sys.argv[1:]]\n"
        "heavy = [m for m in ('torch', 'transformers', 'numpy', 'networkx', 'ray') if m in sys.modules]\n"
        "print(json.dumps([statuses, heavy]))\n"
    )
    paths = [str(p.relative_to(ROOT)) for p in PROGRAMS]
    done = subprocess.run([sys.executable, "-c", code, *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    statuses, heavy = json.loads(done.stdout)
    assert heavy == []
    assert all(statuses)
