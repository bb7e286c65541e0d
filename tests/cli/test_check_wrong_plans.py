"""Plans with a mistake each, and the message that ``flowrl check --plan`` must give: the text file beside the plan.

The first line of a plan is the command, without its ``--plan``. After a change of a message that is meant, write the files
again with ``python tests/cli/test_check_wrong_plans.py`` and read them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.cli import main

ROOT = Path(__file__).parents[2]
PLANS = sorted((ROOT / "tests" / "wrong_plans").glob("*.yaml"))


def said_of(plan: Path) -> tuple[int, str]:
    """Status and output of the command in a plan's first line."""
    words = plan.read_text().splitlines()[0].removeprefix("# flowrl ").split()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main([*words, "--plan", str(plan.relative_to(ROOT))])
    return status, out.getvalue()


@pytest.fixture
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.stem)
def test_the_message_is_the_text_beside_it(plan, at_the_root):
    status, said = said_of(plan)
    assert said.strip() == plan.with_suffix(".txt").read_text().strip()
    assert status == 1


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.stem)
def test_every_error_names_a_line_and_a_fix(plan):
    text = plan.with_suffix(".txt").read_text()
    errors = [block for block in text.split("\n\n") if "Error: " in block]
    assert errors
    for block in errors:
        rows = block.splitlines()
        assert rows[1].startswith(("  at   tests/wrong_plans/", "  at   algorithms/")) and ":" in rows[1], block
        assert rows[-1].startswith("  fix  "), block


def test_there_are_enough_and_no_two_say_the_same():
    texts = [plan.with_suffix(".txt").read_text() for plan in PLANS]
    first = [text.splitlines()[0] for text in texts]
    assert len(PLANS) >= 36 and len(set(first)) == len(first)


def test_json_has_the_same_findings(at_the_root):
    plan = next(p for p in PLANS if p.stem.endswith("several_at_once"))
    words = plan.read_text().splitlines()[0].removeprefix("# flowrl ").split()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*words, "--plan", str(plan.relative_to(ROOT)), "--format", "json"]) == 1
    errors = json.loads(out.getvalue())[0]["errors"]
    assert len(errors) >= 3 and {e["error"] for e in errors} == {"PlanError"} and all(e["line"] for e in errors)


def test_the_check_opens_nothing_heavy():
    code = (
        "import contextlib, io, sys\n"
        "from flowrl.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    status = main(['check', 'algorithms/ppo.py', '--plan', 'algorithms/plans/ppo_disaggregated_1024.yaml', "
        "'--model', 'actor=llama-70b', '--model', 'critic=llama-70b'])\n"
        "heavy = [m for m in ('torch', 'transformers', 'numpy', 'scipy', 'networkx', 'ray') if m in sys.modules]\n"
        "assert status == 0 and not heavy, (status, heavy)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    os.chdir(ROOT)
    for each in PLANS:
        each.with_suffix(".txt").write_text(said_of(each)[1].strip() + "\n")
