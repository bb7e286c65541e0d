"""The blocks of docs/language.md are one script that passes check, and one that runs on plain workers."""

import re
import sys
from pathlib import Path

import pytest

from flowrl.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "language.md").read_text()
DRIVER, BY_HAND = PAGE.split("## Line by line")


def blocks(text):
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S))


@pytest.fixture
def driver(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "driver.py"
    path.write_text(blocks(DRIVER))
    yield path
    sys.modules.pop("driver", None)


def test_the_driver_of_the_page_passes_the_check(driver, capsys):
    assert main(["check", str(driver)]) == 0
    said = capsys.readouterr().out
    lints = re.findall(r"lint (\w+): (.*)\n.*:\d+   (.*)", said)
    assert lints == [
        (
            "serial",
            "this line waits for reward.score: steps cannot overlap past it.",
            "while len(kept) < rows:  # waits for the rewards",
        )
    ]
    programs = re.findall(r"@flow\.program\ndef (\w+)", DRIVER)
    assert programs == [
        "train",
        "shaped",
        "judged",
        "truncated",
        "refilled",
        "controlled",
        "warmup",
        "evaluate",
        "curious",
    ]
    assert all(f"{name}: " in said for name in programs)


def test_the_commands_of_the_page_are_understood(driver, capsys):
    for line in re.findall(r"^\$ python driver\.py (.*)$", PAGE, re.M):
        assert main(["check", str(driver), *line.split()]) == 0
    capsys.readouterr()


def test_the_same_lines_run_on_plain_workers(monkeypatch):
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(ROOT / "algorithms"))
    try:
        names: dict = {}
        exec("import flowrl as fl\nfrom flowrl import rl\n" + blocks(BY_HAND), names)
    finally:
        torch.set_num_threads(threads)
    assert names["metrics"]["steps"] == 1
