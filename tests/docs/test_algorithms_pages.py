"""The pages on algorithms have every driver, preset and function, and tables that are what the code gives."""

import ast
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from flowrl import rl
from flowrl.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ALGORITHMS = (DOCS / "algorithms.md").read_text()
CHOOSING = (DOCS / "choosing.md").read_text()
WORKERS = (DOCS / "workers.md").read_text()
LANGUAGE = (DOCS / "language.md").read_text()
DRIVERS = sorted(path.stem for path in (ROOT / "algorithms").glob("*.py"))


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(DOCS / "make_algorithms.py"))


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def section(driver):
    found = re.search(rf"^## {driver}$(.*?)(?=^## )", ALGORITHMS, re.M | re.S)
    assert found, f"docs/algorithms.md has no section '{driver}'"
    return found[1]


def rows(text):
    """Of a table of presets: name -> the other cells."""
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in re.findall(r"^\|.*\|$", text, re.M)]
    return {line[0].strip(" |`"): line[1:] for line in lines}


def squeezed(text):
    return re.sub(r"\s|,(?=\s*[)\]}])", "", text)


# -- what is generated -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["choosing.md", "algorithms.md"])
def test_the_generated_tables_are_those_of_now(made, name):
    text = (DOCS / name).read_text()
    assert made["page"](name, text) == text, "run python docs/make_algorithms.py"


def test_the_table_of_costs_counts_what_a_step_calls(made):
    costs = rows(CHOOSING)
    assert set(made["DRIVERS"]) == set(DRIVERS)
    assert costs["ppo`: `ppo`, `vapo"][:6] == ["1", "2", "2", "1", "2", "1"]
    assert costs["remax"][0] == "2" and costs["dapo"][0] == "1+" and costs["dapo"][6] == "yes"
    names = " ".join(costs)
    for driver in DRIVERS:
        for _, preset, _ in made["presets"](made["loaded"](driver)):
            assert driver in names and (preset is None or f"`{preset}`" in CHOOSING), (driver, preset)


def test_a_record_of_runs_becomes_a_table(made, tmp_path):
    run = {"title": "grpo-gspo", "seed": 0, "number": "reward_accuracy", "first": 0.3, "last": 0.9, "steps": 150}
    run |= {"mark": 0.85, "reached": True}
    record = tmp_path / "learning.json"
    made["learning"].__globals__["LEARNING"] = record
    assert made["learning"]() == "Nothing is recorded yet."
    others = {"seed": 1, "first": 0.5, "last": 0.8, "reached": False}
    record.write_text(json.dumps({"runs": [{**run, "seconds": 9}, {**run, **others, "seconds": 12}]}))
    text = made["learning"]()
    assert "| `grpo-gspo` | 0, 1 | reward accuracy | 0.40 -> 0.80 to 0.90 | 150 | 9 to 12 |" in text
    assert "Not learned in this time: `grpo-gspo` (0.80, mark 0.85, seed 1)." in text
    assert "Not recorded yet: `grpo`, `grpo-dr_grpo`, " in text and "`grpo-gspo`, `" not in text.split("yet: ")[1]
    assert text.endswith("(images/learning.png)")


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_and_its_presets_have_equation_line_and_paper(made, driver):
    files = [ROOT / "algorithms" / f"{driver}.py", *(ROOT / "algorithms" / "presets").glob(f"{driver}.py")]
    text, source = section(driver), squeezed("".join(file.read_text() for file in files))
    assert "arXiv:" in text and "Departures" in text
    for block in blocks(text):
        for line in block.splitlines():
            assert squeezed(line) in source, f"{driver}.py has no line {line}"
    table = rows(text)
    for _, preset, _ in made["presets"](made["loaded"](driver)):
        if preset is None:
            continue
        equation, line, paper = table[preset]
        assert equation and "arXiv:" in paper
        for said in re.findall(r"`(\w+)=(.*?)`", line):
            name, value = said[0], squeezed(said[1])
            written = rf'("{name}":|\b{name}(:[\w.\[\],|]+)?=){re.escape(value)}'  # a preset's, or a default
            assert re.search(written, source), f"{driver}.py has no {name}={value}"


def test_every_function_of_rl_is_on_a_page():
    text = ALGORITHMS + WORKERS + LANGUAGE
    assert [name for name in rl.__all__ if not re.search(rf"\brl\.{name}\b", text)] == []


def test_every_gate_and_word_of_a_policy_loss_is_on_the_page():
    from flowrl.rl import corrections, gates, policy
    from flowrl.rl import loss_spec as spec
    from flowrl.rl.advantages import CENTERS, SCALES

    names = [n for n, v in vars(gates).items() if getattr(v, "__module__", "") == gates.__name__]
    assert [n for n in names if f"{n}(" not in ALGORITHMS] == []
    words = (*policy.RATIOS, *policy.ANCHORS, *spec.AGGREGATES, *CENTERS, *SCALES)
    words += (*corrections.LEVELS, *corrections.HOWS, *corrections.DIVERGENCES, *corrections.OVER)
    assert [word for word in words if f'"{word}"' not in ALGORITHMS] == []


@pytest.mark.parametrize("page", ["algorithms.md", "choosing.md", "workers.md"])
def test_code_on_the_pages_is_python(page):
    for block in blocks((DOCS / page).read_text()):
        ast.parse(block)


def test_the_commands_of_the_page_are_understood(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(ROOT)
    lines = re.findall(r"^\$ (?:python|flowrl check|flowrl graph) (algorithms/.*)$", ALGORITHMS, re.M)
    assert len(lines) == 4
    for line in lines:
        words = re.sub(r" --(out|format) \S+", "", line).split()
        assert main(["check", *words]) == 0, line
    assert "error" not in capsys.readouterr().out


def test_losses_that_the_pages_make_can_be_made():
    made = [b for b in blocks(ALGORITHMS + WORKERS) if b.startswith(("loss =", "@rl.loss"))]
    assert len(made) == 3
    for block in made:
        names: dict = {"rl": rl}
        exec(block, names)
        for name in ("loss", "same_gate", "weighted", "contrast"):
            found = names.get(name)
            assert found is None or isinstance(found() if callable(found) else found, rl.Loss)


def test_the_loss_per_row_of_the_page_compares_rows_of_a_prompt():
    import torch

    names: dict = {"rl": rl}
    exec(next(b for b in blocks(WORKERS) if "contrast" in b), names)
    lengths = torch.tensor([2, 1, 1])
    x = rl.LossInputs(
        predicted=torch.tensor([-1.0, -3.0, -4.0, -5.0]),
        mask=torch.ones(4, dtype=torch.bool),
        fields={"rewards": torch.tensor([1.0, 0.0, 1.0])},
        lengths=lengths,
        row=torch.arange(3).repeat_interleave(lengths),
        by_row=frozenset({"rewards"}),
        group=torch.tensor([0, 0, 1]),
    )
    losses, reports = names["contrast"]().compute(x)
    assert losses.tolist() == [-1.0, 0.0, 0.0] and reports == {}
