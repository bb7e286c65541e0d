"""Importing, checking and drawing bring in no engine and no tensors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "transformers", "networkx", "numpy")


def imported(code):
    """Which heavy libraries a fresh interpreter has after ``code``, which prints nothing."""
    code += f"\nimport json, sys\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_flowrl_is_light():
    assert imported("import flowrl") == []


def test_its_parts_are_light():
    names = "flowrl.cli, flowrl.flow, flowrl.batch, flowrl.rl, flowrl.data, flowrl.graph.tracing.trace_program, flowrl.graph.draw"
    more = "flowrl.placement.plan.plan, flowrl.schedule.machine, flowrl.analysis.study, flowrl.runtime.driver.runner, flowrl.workers.env, flowrl.backends"
    assert imported(f"import {names}, {more}") == []


def command(*words):
    """Code that runs a command line in silence."""
    return (
        "import contextlib, io\n"
        "from flowrl.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    assert main({list(words)!r}) == 0"
    )


@pytest.mark.parametrize("name", ["grpo", "ppo", "sft"])
def test_the_algorithms_are_checked_and_drawn_without_tensors(name):
    script = f"algorithms/{name}.py"
    assert imported(command("check", script)) == []
    for form in ("text", "mermaid", "dot", "json"):
        assert imported(command("graph", script, "--format", form)) == []


def test_a_command_loads_no_other_and_no_environments():
    code = command("check", "algorithms/grpo.py") + "\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "flowrl.cli.check" in loaded
    assert not {"flowrl.cli.diff", "flowrl.cli.show", "flowrl.cli.replay", "flowrl.environments"} & loaded


@pytest.mark.parametrize("form", ["svg", "html"])
def test_pictures_load_no_torch(form):
    pytest.importorskip("pygraphviz", reason="the layout of pictures needs pygraphviz")
    found = imported(command("graph", "algorithms/ppo.py", "--format", form))
    assert not {"torch", "transformers", "ray"} & set(found)
