"""README shows what is true: the driver, the plan, the graph."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from small_chat import save_small_chat

from flowrl.cli import load_script, main
from flowrl.graph.draw import render
from flowrl.placement.plan.plan import Plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def block(language: str) -> str:
    return blocks(language)[0]


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """The program as a reader saves it, beside its data and a small model of the name that it has."""
    monkeypatch.chdir(tmp_path)
    save_small_chat(tmp_path / "Qwen" / "Qwen3-0.6B")
    rows = [{"question": f"{a}+1=", "answer": str(a + 1)} for a in range(64)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("grpo.py").write_text(block("python"))
    return "grpo.py"


def test_the_program_is_that_of_the_driver(shown):
    """Its graph is that of algorithms/grpo.py without a preset, and of the picture; its reward reads the answer too."""
    mine, real = (load_script(str(path)) for path in (shown, ROOT / "algorithms" / "grpo.py"))
    assert mine.check().text() == "grpo: fine"
    ops = [{n.id: ({*n.reads} - {"answer"}, n.adds) for n in flow.graph().nodes} for flow in (mine, real)]
    assert ops[0] == ops[1]


def test_the_program_trains(shown, capsys):
    assert main(["run", shown, "--steps", "1", "--prompts-per-step", "2", "--out", "runs/first"]) == 0
    assert main(["check", shown]) == 0


def test_the_mistake_is_what_check_says(shown, capsys):
    lines = block("python").splitlines(keepends=True)
    Path(shown).write_text("".join(line for line in lines if "rl.advantages" not in line))
    assert main(["check", shown]) == 1
    said = next(b for b in blocks("text") if b.startswith("FieldError")).splitlines()
    for line, printed in zip(said, capsys.readouterr().out.splitlines(), strict=False):
        assert printed.startswith(line.removesuffix("...")), printed


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


def test_the_simulation_is_how_the_command_begins(capsys):
    shown = next(b for b in blocks("text") if b.startswith("$ flowrl simulate"))
    command, _, printed = shown.replace("\\\n", " ").partition("\n")
    assert main(command.split()[2:]) == 0
    assert capsys.readouterr().out.startswith(printed)
