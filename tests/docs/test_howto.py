"""The pages of docs/howto: every program and command on them runs, in an empty folder with a small model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from page_calls import wrong_arguments
from small_chat import save_small_chat, save_small_reward

from flowrl.cli import main, show
from flowrl.show.find_runs import find_runs

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.stem: page.read_text() for page in sorted((DOCS / "howto").glob("*.md")) if page.stem != "index"}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
ELSEWHERE = ("pip ", "tensorboard ")  # commands that are not flowrl's, which are not run


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """On one thread, without the pictures of a run, which other tests draw."""
    monkeypatch.setattr("flowrl.cli.run.draw_apart", lambda *what, **how: "")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small_chat(folder)
    return folder


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    save_small_reward(folder)
    return folder


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_shows_runs(name, model, reward, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("Qwen").mkdir()
    Path("Qwen/Qwen3-0.6B").symlink_to(model)
    Path("Skywork").mkdir()
    Path("Skywork/Skywork-Reward-V2-Llama-3.2-1B").symlink_to(reward)
    for file in ("prompts.jsonl", "held_out.jsonl"):
        rows = [{"question": f"{a}+1=", "answer": str(a + 1)} for a in range(64)]
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(BLOCK.findall(PAGES["own_reward"])[0][1])
    ran = 0
    for kind, text in BLOCK.findall(PAGES[name]):
        if kind in ("python", "yaml") and write(text):
            continue
        if kind == "python":
            exec(compile(text, f"{name}.md", "exec"), {"__name__": "page"})
            ran += 1
        elif kind == "sh":
            ran += sum(run(line) for line in text.splitlines())
    assert ran, "a page shows something that runs"


def write(text: str) -> bool:
    """Write a block that names its file in its first line, with fewer and shorter rows; returns whether it does."""
    named = re.match(r"# (\w+\.(?:py|yaml))\n", text)
    if named:
        Path(named[1]).write_text(re.sub(r"\b(batch|max_tokens|tokens)=\d+", r"\1=8", text))
    return bool(named)


def run(line: str) -> bool:
    """Run a command with a hundredth of its steps; a page is not served. Returns whether it is one of flowrl."""
    if line.startswith(ELSEWHERE):
        return False
    words = shlex.split(re.sub(r"(--[\w.-]*(?:steps|every)) (\d+)", fewer, line), comments=True)
    assert words[0] == "flowrl", line
    if "tensorboard" in words:
        pytest.importorskip("tensorboard", reason="the run is shown in tensorboard, which is not installed")
    if words[1] == "show":
        assert find_runs(show.read_options(words[2:]).run)
        return True
    fails = words[1] == "diff" or line.endswith("# fails")  # runs that were asked for otherwise differ
    assert main(words[1:]) == int(fails), line
    return True


def fewer(found: re.Match[str]) -> str:
    return f"{found[1]} {max(1, int(found[2]) // 100)}"


def test_every_page_is_listed():
    listed = re.search(r"```{toctree}\n.*?\n\n(.*?)```", (DOCS / "howto" / "index.md").read_text(), re.S)
    assert listed and sorted(listed[1].split()) == sorted(PAGES)
    assert "howto/index" in (DOCS / "index.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_arguments_that_a_page_gives_are_there(name):
    assert wrong_arguments(PAGES[name]) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short_and_is_a_question(name):
    text = PAGES[name]
    assert text.startswith("# ... ") and text.splitlines()[0].endswith("?")
    assert len(text.splitlines()) < 80
