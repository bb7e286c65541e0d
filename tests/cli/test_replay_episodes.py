"""A run whose episodes overlapped steps, and went on under weights that were published meanwhile, is done again bit for bit:
the episodes come from its journal, and all else sees the weights that it saw."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from flows import module_of

from flowrl.cli import main
from flowrl.cli.arguments.script import load_script
from flowrl.errors import RewardError

FLOWS = Path(__file__).parents[1] / "runtime"

PLAN = """
pools: {{train: {{device: cpu}}, rollout: {{device: cpu}}, games: {{device: cpu}}}}
place:
  actor: {{train: {{pool: train}}, generate: {{pool: rollout}}}}
  game: {{pool: games}}
pipeline: {{staleness: {}, publish: {}}}
"""
ON_RANKS = """
pools: {{train: {{processes: 1}}, rollout: {{processes: 1}}, games: {{processes: 2}}}}
place:
  actor: {{train: {{pool: train}}, generate: {{pool: rollout}}}}
  game: {{pool: games}}
pipeline: {{staleness: {}, publish: {}, deadline: 300}}
"""


def played(out: Path, staleness: int, publish: str, *, within: bool = True, **parameters: bool) -> Path:
    """A run; ``within``: its publishes come in the middle of turns."""
    plan, module = out.with_suffix(".yaml"), module_of("beside_flow")
    plan.write_text(PLAN.format(staleness, publish))
    how = {"quiet": True, "save_models": False, "checkpoint_every": 3, "keep_sampled": True}
    with pytest.MonkeyPatch.context() as patched:
        if within:
            module.publishes_within_turns(patched, staleness)
        every = {"trajectories": 9, "trajectories_every": 1}
        module.flow.run(out=out, plan=str(plan), parameters={"beside": parameters}, **every, **how)
    return out


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def mixed(run: Path) -> list[tuple[int, set[int]]]:
    """The versions of rows that have several, with their steps; those of observed tokens do not count."""
    found = []
    for row in lines(run, "trajectories"):
        pairs = zip(row["versions"], row["response_mask"], strict=True)
        if len(versions := {version for version, sampled in pairs if sampled}) > 1:
            found.append((row["step"], versions))
    return found


def kept_within_a_turn(row: dict) -> bool:
    """Whether a turn of an episode has tokens of several versions."""
    turns = {(turn, version) for turn, version in zip(row["turn_ids"], row["versions"], strict=True) if turn >= 0}
    return len(turns) > len({turn for turn, _ in turns})


def begun(run: Path) -> list[list]:
    """What the pool that samples began with, in its order."""
    return [each[1:3] for line in lines(run, "digests") for each in line.get("begun", ())]


@pytest.mark.parametrize(("staleness", "publish"), [(1, "interrupt"), (4, "interrupt"), (1, "continue")])
def test_a_run_of_episodes_that_overlap_is_bitwise_equal(tmp_path, capsys, staleness, publish):
    """All of it, a step from the checkpoint before it, one node, and with the rows that were kept."""
    run = played(tmp_path / "run", staleness, publish)
    assert mixed(run), "rows go on under weights that are published meanwhile"
    told = [
        (publish == "continue" and kept_within_a_turn(row), row.get("cache") == "kept")
        for row in lines(run, "trajectories")
    ]
    assert all(kept == said for kept, said in told) and any(said for _, said in told) == (publish == "continue")
    keep = tmp_path / "again"
    assert main(["replay", str(run), "--keep", str(keep)]) == 0, capsys.readouterr().out
    assert "Bitwise equal: all 25 calls of 5 steps" in capsys.readouterr().out
    assert mixed(keep) == mixed(run) and begun(keep) == begun(run)
    assert lines(keep, "trajectories") == lines(run, "trajectories"), "with what they say of a cache that was kept"
    assert lines(keep, "journal") == lines(run, "journal"), "no episode is played again"
    assert main(["replay", str(run), "--step", "4"]) == 0, capsys.readouterr().out
    assert "from checkpoint 000000, beside step 3" in capsys.readouterr().out
    assert main(["replay", str(run), "--step", "1"]) == 0, "episodes of later steps are under way as it stops"
    assert main(["replay", str(run), "--step", "4", "--node", "game.rollout"]) == 0, capsys.readouterr().out
    assert main(["replay", str(run), "--forced"]) == 0, capsys.readouterr().out
    assert "game.rollout was given the 20 rows of the run. It had sampled the same tokens" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_episodes_on_processes_of_ray_are_bitwise_equal(tmp_path, capsys):
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    plan, run = tmp_path / "plan.yaml", tmp_path / "run"
    plan.write_text(ON_RANKS.format(2, "interrupt"))
    how = {"quiet": True, "save_models": False, "runtime": "ray"}
    module_of("beside_flow").flow.run(out=run, plan=str(plan), parameters={"beside": {"look": True}}, **how)
    assert main(["replay", str(run)]) == 0, capsys.readouterr().out
    assert "Bitwise equal: all" in capsys.readouterr().out


def test_beside_rows_of_another_kind_and_evaluations_too(tmp_path, capsys):
    """They take turns with episodes in the engine: how far it was with their rows is kept to."""
    run = played(tmp_path / "run", 4, "interrupt", within=False, look=True, mix=True)
    assert main(["replay", str(run)]) == 0, capsys.readouterr().out
    assert "Bitwise equal: all 50 calls of 5 steps" in capsys.readouterr().out
    assert main(["replay", str(run), "--step", "3", "--node", "actor.generate"]) == 0, capsys.readouterr().out


def test_what_a_replay_cannot_give_is_refused_before_anything_is_opened(tmp_path, capsys):
    """As of a record that lacks in which order the engine began with episodes and publishes."""
    run = played(tmp_path / "run", 1, "interrupt")
    broken = shutil.copytree(run, tmp_path / "broken")
    text = [line for line in (run / "digests.jsonl").read_text().splitlines() if '"begun"' not in line]
    (broken / "digests.jsonl").write_text("".join(f"{line}\n" for line in text))
    assert main(["replay", str(broken)]) == 2
    assert "has not recorded when its engines began with what" in capsys.readouterr().err


DOWN = """        with (Path(__file__).parent / "asked").open("a") as file:
            file.write(f"{step} {turn}\\n")
        time.sleep(0.02)
        if step == DOWN_AT and turn:
            raise OSError("down")
"""


@pytest.mark.parametrize(
    ("staleness", "publish", "reads"),
    [(1, "drain", False), (1, "interrupt", True), (1, "interrupt", False), (3, "interrupt", False), (3, "drain", True)],
)
def test_episodes_that_a_run_did_not_end_are_not_played_by_its_replay(tmp_path, capsys, staleness, publish, reads):
    """A run whose world was down in a later step is done again up to the last step that it has recorded. That step's
    calls are made, as rows of steps may be beside each other, and what is not in the journal is left out."""
    text = (FLOWS / "beside_flow.py").read_text().replace("        wait(step, turn)\n", DOWN)
    text = text.replace("DOWN_AT", str(staleness + 3))  # the steps up to 2 are recorded as it begins
    text = text.replace("import time\n", "import time\nfrom pathlib import Path\n", 1)
    read = "        if float(played.rewards.mean()) > 1e9:\n            return\n"
    text = text.replace("        if mix:\n", f"{read if reads else ''}        if mix:\n")
    script, plan, run = tmp_path / "mine.py", tmp_path / "plan.yaml", tmp_path / "run"
    script.write_text(text)
    plan.write_text(PLAN.format(staleness, publish))
    with pytest.raises(RewardError, match="down"):
        load_script(str(script)).run(
            out=run, plan=str(plan), quiet=True, save_models=False, parameters={"beside": {"steps": 8}}
        )
    asked = (tmp_path / "asked").read_text()
    done = 1 + max(line["step"] for line in lines(run, "metrics"))
    keep = tmp_path / "again"
    assert main(["replay", str(run), "--keep", str(keep)]) == 0, capsys.readouterr().out
    assert f"Bitwise equal: all {(5 + reads) * done} calls of {done} steps" in capsys.readouterr().out
    assert [line["step"] for line in lines(keep, "metrics")] == list(range(done)) and done > 2
    assert (tmp_path / "asked").read_text() == asked, "nobody is asked"
