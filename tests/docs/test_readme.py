"""README shows what is true: the driver, the plan, the graph."""

from __future__ import annotations

import re
from pathlib import Path

from flowrl.cli import load_script, main
from flowrl.graph.draw import render
from flowrl.placement.plan.plan import Plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)[number]


def test_the_program_is_that_of_the_driver(tmp_path, monkeypatch):
    """Saved as a script it checks, and its graph is that of algorithms/grpo.py without a preset."""
    monkeypatch.syspath_prepend(ROOT / "algorithms")
    (tmp_path / "mine.py").write_text(block("python"))
    shown, real = (load_script(str(path)) for path in (tmp_path / "mine.py", ROOT / "algorithms" / "grpo.py"))
    assert shown.check().text() == "grpo: fine"
    ops = [[(n.id, n.reads, n.adds) for n in flow.graph().nodes] for flow in (shown, real)]
    assert sorted(ops[0]) == sorted(ops[1])


def test_drivers_and_presets_are_as_many_as_it_says():
    flows = {path.stem: load_script(str(path)) for path in (ROOT / "algorithms").glob("*.py")}
    presets = {name: sum(len(p.presets) for p in flow.programs.values()) for name, flow in flows.items()}
    assert re.search(r"(\d+) drivers with (\d+) presets", README).groups() == (
        str(len(flows)),
        str(sum(presets.values())),
    )
    assert int(re.search(r"`rloo` and (\d+) more", README)[1]) == presets["grpo"] - 2


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


def test_the_pictures_for_a_phone_and_for_the_night_are_there():
    flow = load_script(str(ROOT / "algorithms" / "grpo.py"))
    narrow = (ROOT / "docs" / "images" / "grpo_graph_narrow.svg").read_text()
    made = render(flow.graph("grpo"), "svg", narrow=True)
    words = [re.findall(r">([^<>]+)</text>", svg) for svg in (narrow, made)]
    assert words[0] == words[1], (
        "flowrl graph algorithms/grpo.py --format svg --narrow -o docs/images/grpo_graph_narrow.svg"
    )
    assert "prefers-color-scheme: dark" in (ROOT / "docs" / "images" / "grpo_graph.svg").read_text()
    for name in re.findall(r'(?:src|srcset)="([^"]+)"', README):
        assert (ROOT / name).exists(), name


def test_files_that_it_names_are_there():
    for name in re.findall(r"\]\(([^)#]+)\)", README):
        if not name.startswith("http"):
            assert (ROOT / name).exists(), name


def test_the_simulation_is_what_the_command_prints(capsys):
    shown = next(b for b in re.findall(r"```text\n(.*?)```", README, re.S) if b.startswith("$ flowrl simulate"))
    command, _, printed = shown.replace("\\\n", " ").partition("\n")
    assert main(command.split()[2:]) == 0
    assert capsys.readouterr().out.strip() == printed.strip()
