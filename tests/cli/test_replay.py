"""A run, a step or a call of it is done again in another folder, and is equal to the last bit, or what differs is told."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from flows import module_of

from flowrl import Batch, rl
from flowrl.backends.continuous import ContinuousBatch
from flowrl.cli import main
from flowrl.cli.arguments.script import load_script

FLOWS = Path(__file__).parents[1] / "runtime"
GRPO = Path(__file__).parents[2] / "algorithms" / "grpo.py"

PLAN = """
pools: {{train: {{device: cpu}}, rollout: {{device: cpu}}}}
place:
  actor: {{train: {{pool: train}}, generate: {{pool: rollout}}}}
  reward: {{pool: train}}
pipeline: {{staleness: {}}}
"""
TWO = """
pools: {{train: {{device: cpu}}, rollout: {{device: cpu}}}}
place:
  first: {{train: {{pool: train}}, generate: {{pool: rollout}}}}
  second: {{train: {{pool: train}}, generate: {{pool: rollout}}}}
  reward: {{pool: train}}
pipeline: {{staleness: {}}}
"""
OVERLAP = """
pools: {{train: {{device: cpu}}, rollout: {{device: cpu}}}}
place:
  actor: {{train: {{pool: train}}, generate: {{pool: rollout}}}}
pipeline: {{staleness: {}, order: {}, publish: {}, chunks: {}}}
"""
ON_RANKS = """
pools: {{train: {{processes: 1}}, rollout: {{processes: 2}}, cpu: {{processes: 1}}}}
place:
  actor: {{train: {{pool: train}}, generate: {{pool: rollout}}}}
  reward: {{pool: cpu}}
  witness: {{pool: cpu}}
pipeline: {{staleness: {}, order: {}, publish: {}, chunks: {}, deadline: 300}}
"""


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


def ran(out: Path, *, staleness: int = 0, program: str = "stale", **options) -> Path:
    plan = out.with_suffix(".yaml")
    plan.write_text(PLAN.format(staleness))
    module_of("stale_flow").flow.run(program, out=out, plan=str(plan), quiet=True, save_models=False, **options)
    return out


def asked_world(run: Path) -> int:
    """How many rows the journal has answers of."""
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return sum(len(line["keys"]) for line in lines if "adds" in line)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "small"
    module_of("small_flow").flow.run("train", out=out, steps=8, quiet=True, checkpoint_every=3)
    return out


def test_a_whole_run_is_bitwise_equal_and_nothing_of_it_changes(small_run, capsys):
    before = contents(small_run)
    assert main(["replay", str(small_run)]) == 0
    said = capsys.readouterr().out
    assert "was done again from its start." in said
    assert "Bitwise equal: all" in said and "The final weights are equal." in said
    assert contents(small_run) == before


def test_a_step_is_done_again_from_the_checkpoint_before_it(small_run, tmp_path, capsys):
    before = contents(small_run)
    keep = tmp_path / "again"
    said = ["replay", str(small_run), "--step", "6", "--node", "counter.update", "--keep", str(keep)]
    assert main([*said, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["calls"], found["steps"], found["changed"]) == (True, 1, 1, [])
    begun = [line["text"] for line in map(json.loads, (keep / "events.jsonl").read_text().splitlines())]
    assert begun[0].startswith("train from step 6")
    lines = [json.loads(line) for line in (keep / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(7)), "it ends after the step that was asked for"
    assert asked_world(keep) == asked_world(small_run), "the world is not asked again"
    assert contents(small_run) == before


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_of_a_model_is_bitwise_equal_at_staleness_0_and_1(tmp_path, capsys, staleness):
    run = ran(tmp_path / "run", staleness=staleness, steps=4, checkpoint_every=2)
    assert main(["replay", str(run)]) == 0, capsys.readouterr().out
    assert main(["replay", str(run), "--step", "3"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "Bitwise equal" in said


def test_with_more_staleness_calls_see_the_versions_that_they_saw(tmp_path, capsys):
    run = ran(tmp_path / "run", staleness=3, steps=6)
    lines = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]
    seen = [line["versions"]["actor"] for line in lines if line["node"] == "actor.generate"]
    keep = tmp_path / "again"
    assert main(["replay", str(run), "--keep", str(keep)]) == 0, capsys.readouterr().out
    pins = json.loads((keep / "replay.json").read_text())["pins"]
    assert [[version["actor"]] for version in pins.values()] == seen, "each generate is given its version"


def test_versions_are_kept_to_where_timing_had_given_others(tmp_path, capsys):
    """The versions of a run whose every generate had seen the oldest ones that it may: a free run hardly gives these."""
    run = ran(tmp_path / "run", staleness=2, steps=5)
    keep = tmp_path / "again"
    assert main(["replay", str(run), "--keep", str(keep)]) == 0, capsys.readouterr().out
    lines = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]
    step = 0
    for line in lines:
        if line["node"] == "actor.generate":
            line["versions"]["actor"] = [max(0, step - 2)]
            step += 1
    (run / "digests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = tmp_path / "oldest"
    main(["replay", str(run), "--keep", str(other)])
    found = [json.loads(line) for line in (other / "digests.jsonl").read_text().splitlines()]
    seen = [line["versions"]["actor"] for line in found if line["node"] == "actor.generate"]
    assert seen == [[0], [0], [0], [1], [2]]


def test_with_more_staleness_calls_of_several_workers_see_the_versions_that_they_saw(tmp_path, capsys):
    """Of each worker its own: those that a free run would hardly give are given too."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(TWO.format(3))
    run, module = tmp_path / "run", module_of("two_actors_flow")
    module.flow.run("two_actors", out=run, plan=str(plan), quiet=True, save_models=False, steps=6)
    keep = tmp_path / "again"
    assert main(["replay", str(run), "--keep", str(keep)]) == 0, capsys.readouterr().out
    assert "Bitwise equal" in capsys.readouterr().out

    def seen(out: Path) -> dict[str, list[list[int]]]:
        lines = [json.loads(line) for line in (out / "digests.jsonl").read_text().splitlines()]
        return {
            n: [line["versions"][n] for line in lines if line["node"] == f"{n}.generate"] for n in ("first", "second")
        }

    pins = json.loads((keep / "replay.json").read_text())["pins"].values()
    assert {name: [[v[name]] for v in pins if name in v] for name in ("first", "second")} == seen(run) == seen(keep)
    lines, step = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()], {}
    for line in lines:
        for name in line.get("versions", {}) if line["node"].endswith(".generate") else ():
            number = step[name] = step.get(name, -1) + 1
            line["versions"][name] = [max(0, number - 3) if name == "first" else max(0, number - 3) // 2]
    (run / "digests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(["replay", str(run), "--keep", str(tmp_path / "oldest")])
    assert seen(tmp_path / "oldest") == {
        "first": [[0], [0], [0], [0], [1], [2]],
        "second": [[0], [0], [0], [0], [0], [1]],
    }


def overlapped(
    out: Path,
    *how: object,
    text: str = OVERLAP,
    runtime: str = "local",
    keep_sampled: bool = False,
    **parameters: object,
) -> Path:
    """A run whose rows leave one by one: staleness, order, publish and chunks."""
    plan = out.with_suffix(".yaml")
    plan.write_text(text.format(*how))
    asked = {"overlap": parameters}
    flow = module_of("overlap_flow").flow
    flow.run(
        out=out,
        plan=str(plan),
        runtime=runtime,
        quiet=True,
        save_models=False,
        parameters=asked,
        checkpoint_every=3,
        keep_sampled=keep_sampled,
    )
    return out


@pytest.mark.parametrize(
    "how",
    [
        (1, "fifo", "interrupt", 1),
        (2, "window", "continue", 2),
        pytest.param((3, "window", "drain", 1), marks=pytest.mark.nightly),
        pytest.param((4, "window", "interrupt", 3), marks=pytest.mark.nightly),
        pytest.param((2, "fifo", "continue", 1), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_rows_that_leave_one_by_one_are_bitwise_equal(tmp_path, capsys, how):
    """Publishes between two tokens, groups that steps exchange, evaluations between: from the start, and one step."""
    run = overlapped(tmp_path / "run", *how, steps=5, look=True)
    assert main(["replay", str(run)]) == 0, capsys.readouterr().out
    assert "Bitwise equal: all" in capsys.readouterr().out
    assert main(["replay", str(run), "--step", "4"]) == 0, capsys.readouterr().out
    assert "from checkpoint 000000, overlap step 3" in capsys.readouterr().out
    assert main(["replay", str(run), "--step", "1"]) == 0, "calls of later steps are under way as it stops"


@pytest.mark.nightly
@pytest.mark.parametrize("how", [(1, "fifo", "interrupt", 1), (2, "window", "interrupt", 2)], ids=str)
def test_processes_of_ray_are_bitwise_equal(tmp_path, capsys, how):
    """Two processes that sample and one that trains: what timing has decided between them is given again."""
    run = overlapped(tmp_path / "run", *how, text=ON_RANKS, runtime="ray", steps=5)
    begun = [line for line in map(json.loads, (run / "digests.jsonl").read_text().splitlines()) if "begun" in line]
    assert begun, "the order of what the engines began with is recorded"
    assert main(["replay", str(run)]) == 0, capsys.readouterr().out
    assert "Bitwise equal: all" in capsys.readouterr().out
    assert main(["replay", str(run), "--step", "4"]) == 0, capsys.readouterr().out


def test_a_run_whose_ranks_were_started_again_is_refused(tmp_path, capsys):
    run = overlapped(tmp_path / "run", 1, "fifo", "interrupt", 1, steps=2)
    event = {"time": 0.0, "kind": "renewed", "text": "rank 1 was started again"}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    assert main(["replay", str(run)]) == 2
    said = capsys.readouterr().err
    assert "ranks were lost in it" in said and "rank 1 was started again" in said
    text = (run / "digests.jsonl").read_text().splitlines()
    (run / "digests.jsonl").write_text("".join(f"{line}\n" for line in text if '"begun"' not in line))
    (run / "events.jsonl").write_text("")
    assert main(["replay", str(run)]) == 2
    assert "has not recorded when its pool of engines began with what" in capsys.readouterr().err


def sample_otherwise(monkeypatch) -> None:
    """Have rows be sampled with other seeds: as an engine now and then gives other tokens, whose sums are others."""
    seeds = Batch.row_seeds
    monkeypatch.setattr(Batch, "row_seeds", lambda rows, *about: seeds(rows, *about) + 1)


@pytest.mark.parametrize(
    "how", [(0, "fifo", "drain", 1), (1, "fifo", "drain", 1), (2, "window", "interrupt", 2)], ids=str
)
def test_with_the_rows_of_the_run_all_else_is_equal(tmp_path, capsys, monkeypatch, how):
    """The replay samples other rows; those of the run take their place, and each call after them gives the same."""
    run = overlapped(tmp_path / "run", *how, steps=4, keep_sampled=True)
    assert main(["replay", str(run), "--forced"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "actor.generate was given the 32 rows of the run. It had sampled the same tokens; " in said
    before = contents(run)
    sample_otherwise(monkeypatch)
    assert main(["replay", str(run), "--forced"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert re.search(r"sampled other tokens in \d+ of them, first in step 0, row \d+, sample \d, token \d+; log", said)
    assert "Bitwise equal: all" in said and "The final weights are equal." in said
    assert main(["replay", str(run), "--forced", "--step", "3", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and sum(each["parted"] for each in found["sampled_again"]) > 0
    assert contents(run) == before
    assert main(["replay", str(run)]) == 1, "without them the rows are others"


@pytest.mark.parametrize("how", [(2, "window", "interrupt", 2), (1, "fifo", "interrupt", 1)], ids=str)
def test_rows_that_are_longer_than_those_of_the_run_hold_up_nothing(tmp_path, capsys, monkeypatch, how):
    """What the engine is to begin with next, after as many steps as in the run, may wait for rows that are not done."""
    submit = ContinuousBatch.submit

    def ending_soon(batch, *given, **named):
        batch._ends = frozenset(range(0, 99, 2))
        return submit(batch, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(ContinuousBatch, "submit", ending_soon)
        run = overlapped(tmp_path / "run", *how, steps=4, keep_sampled=True)
    assert main(["replay", str(run), "--forced"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "sampled other tokens" in said and "Bitwise equal: all" in said


def test_forced_rows_make_up_for_ranks_that_were_started_again(tmp_path, capsys):
    run = overlapped(tmp_path / "run", 2, "window", "interrupt", 1, steps=3, keep_sampled=True)
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 0.0, "kind": "renewed", "text": "rank 1 was started again"}) + "\n")
    assert main(["replay", str(run)]) == 2
    assert "replay them with --forced" in capsys.readouterr().err
    assert main(["replay", str(run), "--forced"]) == 0, capsys.readouterr().out


def test_rows_that_were_not_kept_are_not_forced(small_run, tmp_path, capsys):
    assert main(["replay", str(small_run), "--forced"]) == 2
    assert "has not kept the rows that it sampled" in capsys.readouterr().err
    run = overlapped(tmp_path / "run", 0, "fifo", "drain", 1, steps=3, keep_sampled=True)
    files = sorted((run / "sampled").glob("*.safetensors"))
    assert len(files) == 3, "a call each"
    files[-1].write_bytes(files[-1].read_bytes()[:-9])
    assert main(["replay", str(run), "--forced"]) == 1
    assert "cannot be read" in capsys.readouterr().err
    files[-1].unlink()
    assert main(["replay", str(run), "--forced"]) == 1
    assert "The run has not kept the rows of actor.generate in step 2." in capsys.readouterr().err


def test_a_changed_reward_is_told_first_and_what_it_changes_after(tmp_path, capsys):
    script = tmp_path / "mine.py"
    text = (FLOWS / "small_flow.py").read_text()
    script.write_text(text)
    run = tmp_path / "run"
    assert main(["run", str(script), "--program", "train", "--steps", "4", "--out", str(run), "--quiet"]) == 0
    script.write_text(text.replace("self.total * 0.5 + scale", "self.total * 0.25 + scale"))
    capsys.readouterr()
    assert main(["replay", str(run)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("Changed since the run:\n  Counter.update in mine.py") or "Counter" in said.splitlines()[1]
    assert "First call: train, step 0, counter.update:" in said
    assert "  total " in said and "(by " in said


def test_what_cannot_be_replayed_is_said(small_run, tmp_path, capsys):
    run = shutil.copytree(small_run, tmp_path / "run")
    for words, what in (
        (["--step", "9"], "--step 9: 'train' has done the steps 0 to 7."),
        (["--node", "counter.updat"], "Write --node counter.update."),
        (["--program", "trian"], "Write --program train."),
    ):
        assert main(["replay", str(run), *words]) == 2
        assert what in capsys.readouterr().err
    (run / "digests.jsonl").unlink()
    assert main(["replay", str(run)]) == 2
    assert "has recorded no calls" in capsys.readouterr().err


def test_a_preset_gives_functions_as_it_did_then(tmp_path, capsys):
    words = ["--preset", "rloo", "--steps", "2", "--prompts-per-step", "2", "--quiet", "--no-save"]
    assert main(["run", str(GRPO), *words, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "run")]) == 0
    assert "Bitwise equal" in capsys.readouterr().out


def test_a_function_that_only_code_has_given_cannot_be_replayed(tmp_path, capsys):
    flow = load_script(str(GRPO))
    given = {"steps": 1, "prompts_per_step": 2, "advantages": lambda batch: rl.group_advantages(batch)}
    flow.run("grpo", out=tmp_path / "run", quiet=True, save_models=False, parameters={"grpo": given})
    assert main(["replay", str(tmp_path / "run")]) == 2
    assert "'grpo' was given advantages=<lambda> by the code that began the run" in capsys.readouterr().err
