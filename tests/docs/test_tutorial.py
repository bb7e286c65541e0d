"""The program of the first tutorial: short, without findings, and it trains."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from flowrl.cli import load_script, main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "tutorial_program.py"


@pytest.fixture(autouse=True)
def beside_the_tasks(monkeypatch):
    """As with PYTHONPATH=algorithms."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT / "algorithms"), *sys.path])
    yield
    sys.modules.pop("tutorial_program", None)


def test_it_is_shorter_than_forty_lines():
    assert len(SCRIPT.read_text().splitlines()) < 40


def test_check_finds_nothing(capsys):
    assert main(["check", str(SCRIPT)]) == 0
    assert capsys.readouterr().out == "best_of_n: fine\n"


def test_the_mistake_of_the_page_gives_the_message_of_the_page(tmp_path, monkeypatch, capsys):
    text = SCRIPT.read_text().replace("        best = choice.best(batch)\n", "        best = batch\n")
    wrong = tmp_path / "docs" / "tutorial_program.py"
    wrong.parent.mkdir()
    wrong.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["check", "docs/tutorial_program.py"]) == 1
    assert capsys.readouterr().out == (ROOT / "docs" / "tutorial_wrong.txt").read_text()


def test_the_page_says_what_the_script_does():
    page, script = (ROOT / "docs" / "tutorial.md").read_text(), SCRIPT.read_text()
    prompts, n = (int(re.search(rf"{name}: int = (\d+)", script)[1]) for name in ("prompts", "n"))
    assert f"so {prompts} rows become {prompts * n}." in page
    assert all(f"`{word}" in page for word in ("Choice", "best", "margin", "x.predicted", "batch.groups()"))


def test_two_steps_of_it(tmp_path):
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flow = load_script(str(SCRIPT))
        parameters = {"best_of_n": {"steps": 2, "prompts": 4, "n": 4}}
        outcome = flow.run(out=tmp_path / "run", parameters=parameters, quiet=True, save_models=False)
    finally:
        torch.set_num_threads(threads)
    assert outcome.status == "done" and outcome.weights_digest
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert math.isfinite(line["loss"]) and 0 <= line["reward"] <= line["best"] <= 1
        assert line["rows"] <= 4, "one row per prompt is trained"
