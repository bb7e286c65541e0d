"""What is drawn of a run by its folder: one that is done, one that failed, one that was stopped, one of several programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.cli import main
from flowrl.cli.arguments.resume_command import how_to_go_on
from flowrl.errors import shown

DRIVER = (Path(__file__).parents[1] / "runtime" / "stale_flow.py").read_text()
DRIVER = DRIVER.replace("Path(__file__).parents[2]", f"Path({str(Path(__file__).parents[2])!r})")
PLAN = """
pools: {train: {processes: 1}, rollout: {processes: 1}}
place: {actor: {train: {pool: train}, generate: {pool: rollout}}, reward: {pool: train}, ref: {pool: train}}
pipeline: {staleness: 1}
"""
FAILS = """
@flow.program
def fails(steps: int = 4):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        batch = broken.score(actor.generate(batch, n=GROUP))
        flow.log(step, actor.update(rl.group_advantages(batch), loss=rl.ppo_clip()), reward=batch.rewards.mean())
"""
BROKEN = """
def breaks(prompt: str, response: str) -> float:
    asked.append(prompt)
    if len(asked) > 3 * PROMPTS * GROUP:
        raise ValueError("no more")
    return float(len(response))


asked = []
broken = flow.worker(fl.FunctionReward, breaks)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "stale_flow.py"
    path.write_text(DRIVER + BROKEN + FAILS)
    return path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    """Run a command: its status, and what it printed."""

    def run(*words: object) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


def test_a_run_with_a_plan_is_drawn_from_its_folder(driver: Path, tmp_path: Path, said) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "a"
    plan.write_text(PLAN)
    status, printed, _ = said("run", driver, "--steps", 3, "--plan", plan, "--out", out, "--quiet", "--no-save")
    assert status == 0 and f"graph: {out / 'graph.html'}   timeline: {out / 'timeline.html'}" in printed
    driver.unlink()  # nothing but the folder is needed

    status, text, _ = said("graph", out)
    assert status == 0 and "program stale {" in text
    assert re.search(r"actor\.generate on rollout.*# .* · \d+ %", text), text
    assert re.search(r"actor\.update -> actor\.publish: weights \d+ kB", text)
    record = json.loads(said("graph", out, "--format", "json")[1])
    nodes = {node["id"]: node for node in record["nodes"]}
    assert nodes["actor.publish"]["seconds"] > 0 and nodes["rl.group_advantages"]["pool"] == "rollout"
    assert said("graph", out, "--format", "svg", "--narrow")[1].startswith("<svg")

    status, table, _ = said("timeline", out)
    assert status == 0 and "actor.generate" in table and "measured" in table
    page = said("timeline", out, "--format", "html", "--out", tmp_path / "t.html")
    assert page[0] == 0 and (tmp_path / "t.html").read_text() == (out / "timeline.html").read_text()
    trace = json.loads(said("timeline", out, "--format", "trace")[1])
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    lines = [json.loads(line) for line in (out / "timeline.jsonl").read_text().splitlines()]
    assert len(bars) == sum(bool(line["pool"]) for line in lines)
    assert trace["traceEvents"][0]["args"]["name"] == "stale (run)"


def test_a_run_that_failed_has_its_pages_and_its_curve(driver: Path, tmp_path: Path, said) -> None:
    out = tmp_path / "a"
    status, _, errors = said("run", driver, "--program", "fails", "--out", out, "--quiet")
    assert status == 1 and "ValueError: no more" in errors
    assert f"graph: {out / 'graph.html'}   timeline: {out / 'timeline.html'}" in errors
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    assert "actor.update" in (out / "timeline.html").read_text() and "broken.score" in (out / "graph.html").read_text()
    assert (out / "reward.png").stat().st_size > 1000
    table = said("timeline", out)[1]
    assert "3 steps" in table and "fails" in table


def test_a_run_without_a_step_has_a_graph_and_says_so(driver: Path, tmp_path: Path, said) -> None:
    out = tmp_path / "a"
    driver.write_text(driver.read_text().replace("if len(asked) > 3 * PROMPTS * GROUP:", "if asked:"))
    assert said("run", driver, "--program", "fails", "--out", out, "--quiet")[0] == 1
    assert (out / "graph.html").exists() and not (out / "timeline.html").exists()
    assert said("graph", out)[0] == 0
    status, _, errors = said("timeline", out)
    assert (status, errors) == (
        2,
        f"UsageError: the run in {out} has no step that is done.\n  fix  Look again when one is.\n",
    )


def test_programs_of_a_run_are_chosen_by_name(driver: Path, tmp_path: Path, said) -> None:
    out = tmp_path / "a"
    words = ("--program", "every_other,stale", "--every_other.steps", 2, "--stale.steps", 2, "--out", out)
    assert said("run", driver, *words, "--quiet", "--no-save")[0] == 0
    assert {p.name for p in out.glob("*.html")} == {
        *("graph.html", "timeline.html", "graph.every_other.html", "timeline.every_other.html"),
    }
    assert "program stale {" in said("graph", out)[1]
    assert "program every_other {" in said("graph", out, "--program", "every_other")[1]
    assert "every_other" in said("timeline", out, "--program", "every_other")[1].splitlines()[0]
    status, _, errors = said("timeline", out, "--program", "evry_other")
    assert status == 2 and errors == (
        f"UsageError: the run in {out} has no program 'evry_other'.\n"
        "  have every_other, stale\n"
        "  fix  Write --program every_other.\n"
    )


def test_what_is_no_run_is_said(tmp_path: Path, said) -> None:
    assert said("timeline", tmp_path)[2] == (
        f"UsageError: {tmp_path} holds no run.\n  fix  Name the folder that a run was recorded in, with --out.\n"
    )
    assert said("timeline")[2] == (
        "UsageError: flowrl timeline needs the folder of a run.\n  fix  Write flowrl timeline RUN.\n"
    )
    assert "is a folder, not a script" in said("graph", tmp_path)[2]
    (tmp_path / "run.json").write_text("{}")
    assert "has no graph in its run.json" in said("graph", tmp_path)[2]
    status, _, errors = said("timeline", tmp_path, "--formt", "html")
    assert (status, "'--formt' is no option here" in errors) == (2, True)


def test_a_run_that_was_stopped_says_how_it_goes_on_or_begins_again(tmp_path):
    flow, out = fl.Flow("made"), tmp_path / "the run"
    out.mkdir()
    assert how_to_go_on(flow, out) == "nothing was recorded, so there is nothing to go on from"
    (out / "run.json").write_text("{}")
    again = f"with: flowrl run {shown(flow.script)} --out '{out}' --resume"
    assert how_to_go_on(flow, out) == f"it has no checkpoint yet; it begins again {again}"
    (out / "checkpoints" / ".000000.part").mkdir(parents=True)
    assert how_to_go_on(flow, out) == f"it has no checkpoint yet; it begins again {again}", "that one is not whole"
    (out / "checkpoints" / "000000").mkdir()
    assert how_to_go_on(flow, out) == f"go on {again}"
