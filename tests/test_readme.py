"""README shows what is true: the driver, the plan, the graph."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from flowrl.cli import load_script, main
from flowrl.placement.plan import Plan

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)[number]


def test_the_driver_is_the_one_in_algorithms():
    shown, real = ast.parse(block("python")), ast.parse((ROOT / "algorithms" / "grpo.py").read_text())

    def program(tree: ast.Module) -> str:
        return ast.dump(next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "grpo"))

    assert program(shown) == program(real)
    workers = [ast.dump(n) for n in shown.body if isinstance(n, ast.Assign)]
    assert workers == [ast.dump(n) for n in real.body if isinstance(n, ast.Assign)][: len(workers)]


def test_the_plan_is_the_one_in_algorithms_and_fits_the_driver():
    path = ROOT / "algorithms" / "plans" / "split_cpu.yaml"
    assert block("yaml").strip() == path.read_text().strip()
    plan = Plan.load(path)
    flow = load_script(str(ROOT / "algorithms" / "grpo.py"))
    plan.check_workers([h.name for h in flow.handles], ["hf"])
    assert plan.pool("reward") != plan.pool("actor")


def test_the_picture_is_that_of_the_program():
    flow = load_script(str(ROOT / "algorithms" / "grpo.py"))
    svg = (ROOT / "docs" / "images" / "grpo_graph.svg").read_text()
    for node in flow.graph("grpo").nodes:
        assert node.op in svg
        for field in node.adds:
            assert field in svg


def test_files_that_it_names_are_there():
    for name in re.findall(r"\]\(([^)#]+)\)", README):
        if not name.startswith("http"):
            assert (ROOT / name).exists(), name


def test_the_simulation_is_what_the_command_prints(capsys):
    shown = next(b for b in re.findall(r"```text\n(.*?)```", README, re.S) if b.startswith("$ flowrl simulate"))
    command, _, printed = shown.replace("\\\n", " ").partition("\n")
    assert main(command.split()[2:]) == 0
    assert capsys.readouterr().out.strip() == printed.strip()
