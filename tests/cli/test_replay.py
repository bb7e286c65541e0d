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
from flowrl.schedule.events import AGAIN, PUBLISH

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
pipeline: {{staleness: {}, publish: {}}}
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


def begun_in(run: Path) -> list[list]:
    """What pools that sample have begun with, as it is recorded."""
    lines = map(json.loads, (run / "digests.jsonl").read_text().splitlines())
    return [each for line in lines for each in line.get("begun", ())]


def seen_by(run: Path, node: str) -> list[list[int]]:
    """The versions that each call of a node was started with, of each chunk."""
    lines = map(json.loads, (run / "digests.jsonl").read_text().splitlines())
    return [line["versions"][node.partition(".")[0]] for line in lines if line.get("node") == node]


def rewrite_begun(run: Path, begun: list[list]) -> None:
    """Have a run say that its pools have begun with this, in this order."""
    lines = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]
    program = lines[0]["program"]
    lines = [line for line in lines if "begun" not in line]
    lines.append({"program": program, "step": lines[-1]["step"], "begun": begun, "taken": {}})
    (run / "digests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def calls_of(run: Path, node: str) -> list[int]:
    lines = map(json.loads, (run / "digests.jsonl").read_text().splitlines())
    return [line["call"] for line in lines if line.get("node") == node]


AT_THE_END = {"0": 1000}  # steps after which rows have ended


def test_with_more_staleness_calls_see_the_versions_that_they_saw(tmp_path, capsys):
    run = ran(tmp_path / "run", staleness=3, steps=6)
    keep = tmp_path / "again"
    assert main(["replay", str(run), "--keep", str(keep)]) == 0, capsys.readouterr().out
    assert seen_by(keep, "actor.generate") == seen_by(run, "actor.generate")
    assert begun_in(run) and json.loads((keep / "replay.json").read_text())["begun"] == begun_in(run)


def test_versions_are_kept_to_where_timing_had_given_others(tmp_path, capsys):
    """The versions of a run whose every generate had seen the oldest ones that it may: a free run hardly gives these."""
    run = ran(tmp_path / "run", staleness=2, steps=5)
    begun: list[list] = []
    for step, call in enumerate(calls_of(run, "actor.generate")):
        if step > 2:
            begun.append(["rollout", PUBLISH, step - 2, AT_THE_END, [], "actor"])
        begun.append(["rollout", call, 0, AT_THE_END])
    rewrite_begun(run, begun)
    other = tmp_path / "oldest"
    main(["replay", str(run), "--keep", str(other)])
    assert seen_by(other, "actor.generate") == [[0], [0], [0], [1], [2]]


def test_chunks_of_a_call_see_the_versions_that_they_saw(tmp_path, capsys):
    """A publish came between two chunks of a call: it comes there again, and all is equal to the last bit."""
    run = overlapped(tmp_path / "run", 2, "fifo", "drain", 2, steps=4)
    first, second, *others = calls_of(run, "actor.generate")
    begun = [["rollout", first, 0, AT_THE_END], ["rollout", first, 1, {"0": 3}], ["rollout", second, 0, AT_THE_END]]
    begun += [["rollout", PUBLISH, 1, AT_THE_END, [], "actor"], ["rollout", second, 1, {}]]
    for version, call in enumerate(others, start=2):
        begun += [["rollout", call, 0, {"0": 2}], ["rollout", call, 1, {"0": 1}]]
        begun += [["rollout", PUBLISH, version, AT_THE_END, [], "actor"]]
    rewrite_begun(run, begun)
    so = tmp_path / "so"
    main(["replay", str(run), "--keep", str(so)])
    assert seen_by(so, "actor.generate")[:2] == [[0], [0, 1]]
    capsys.readouterr()
    assert main(["replay", str(so), "--keep", str(tmp_path / "again")]) == 0, capsys.readouterr().out
    assert "Bitwise equal: all" in capsys.readouterr().out
    assert seen_by(tmp_path / "again", "actor.generate") == seen_by(so, "actor.generate")


@pytest.mark.parametrize("how", [(3, "drain"), (1, "interrupt")], ids=str)
def test_calls_of_several_workers_see_the_versions_that_they_saw(tmp_path, capsys, how):
    """Of each worker its own: those that a free run would hardly give are given too."""
    staleness, publish = how
    plan = tmp_path / "plan.yaml"
    plan.write_text(TWO.format(staleness, publish))
    run, module = tmp_path / "run", module_of("two_actors_flow")
    module.flow.run("two_actors", out=run, plan=str(plan), quiet=True, save_models=False, steps=6)
    keep = tmp_path / "again"
    assert main(["replay", str(run), "--keep", str(keep)]) == 0, capsys.readouterr().out
    assert "Bitwise equal" in capsys.readouterr().out
    for name in ("first", "second"):
        assert seen_by(keep, f"{name}.generate") == seen_by(run, f"{name}.generate")
    if publish != "drain":
        return
    begun: list[list] = []
    numbers = zip(calls_of(run, "first.generate"), calls_of(run, "second.generate"), strict=True)
    for step, calls in enumerate(numbers):
        if step > 3:
            begun.append(["rollout", PUBLISH, step - 3, AT_THE_END, [], "first"])
        if step > 3 and step % 2:
            begun.append(["rollout", PUBLISH, (step - 3) // 2, AT_THE_END, [], "second"])
        begun += [["rollout", call, 0, AT_THE_END] for call in calls]
    rewrite_begun(run, begun)
    main(["replay", str(run), "--keep", str(tmp_path / "oldest")])
    assert seen_by(tmp_path / "oldest", "first.generate") == [[0], [0], [0], [0], [1], [2]]
    assert seen_by(tmp_path / "oldest", "second.generate") == [[0], [0], [0], [0], [0], [1]]


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
        (3, "fifo", "drain", 2),
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


def note_event(run: Path, kind: str, text: str) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 0.0, "kind": kind, "text": text}) + "\n")


def test_what_timing_has_decided_and_no_replay_can_give_is_refused(tmp_path, capsys):
    """Ranks that a pool has lost for good, rows that went with their copy, and a record without an order."""
    run = overlapped(tmp_path / "run", 1, "fifo", "interrupt", 1, steps=2)
    note_event(run, "renewed", "rank 1 was started again")
    assert main(["replay", str(run)]) == 0, "what its rows went on from is in the record, and there are none"
    capsys.readouterr()
    text = (run / "digests.jsonl").read_text()
    first = calls_of(run, "actor.generate")[0]
    again = ["rollout", AGAIN, 1, {"1": 4}, [], "actor", [[first, 0, {"0": 3}, False, True]]]
    rewrite_begun(run, [*begun_in(run)[:1], again, *begun_in(run)[1:]])
    assert main(["replay", str(run)]) == 2
    assert "rank 1 was lost, and of actor.generate of step 0 it began rows again" in capsys.readouterr().err
    (run / "digests.jsonl").write_text("".join(f"{line}\n" for line in text.splitlines() if '"begun"' not in line))
    assert main(["replay", str(run)]) == 2
    assert "has not recorded when its engines began with what" in capsys.readouterr().err
    (run / "digests.jsonl").write_text(text)
    note_event(run, "resized", "pool 'rollout' has 1 of 2 ranks: rank 1 is gone")
    assert main(["replay", str(run)]) == 2
    assert "a replay begins with all: pool 'rollout' has 1 of 2 ranks" in capsys.readouterr().err


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


def test_forced_rows_make_up_for_ranks_that_are_gone(tmp_path, capsys):
    run = overlapped(tmp_path / "run", 2, "window", "interrupt", 1, steps=3, keep_sampled=True)
    note_event(run, "resized", "pool 'rollout' has 1 of 2 ranks: rank 1 is gone")
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
