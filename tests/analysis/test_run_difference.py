"""Two runs part where they part: the first metric, call, field, row and token are named, on each runtime alike."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from flows import module_of
from hypothesis import given
from hypothesis import strategies as st
from letters import model_of

import flowrl as fl
from flowrl import rl
from flowrl.analysis.run_difference import compare_runs, in_words
from flowrl.batch import Batch, Column
from flowrl.cli import main
from flowrl.runtime.storage.digest_lines import read_digests
from flowrl.runtime.values.row_digests import RowDigests, keys_of_text, keys_to_text

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
PROMPTS = [{"prompt": text} for text in ("ab", "cdefabc", "fbad", "ca")]
S1 = {"pools": {"train": {"device": "cpu"}, "rollout": {"device": "cpu"}}}


def letters(response: str) -> float:
    return float(len(set(response)))


def odd(response: str) -> float:
    return letters(response) + (response.count("a") > 1)


def small_grpo(out, score=letters, **options):
    """A run of two steps of a tiny model."""
    flow = fl.Flow("small")
    actor = flow.worker(fl.Actor, model_of(**SMALL), name="actor", lr=1e-2, max_tokens=6)
    reward = flow.worker(fl.FunctionReward, score, name="reward")

    @flow.program
    def small(steps: int = 2) -> None:
        for step, rows in flow.steps(fl.data.rows(PROMPTS, batch=2), steps):
            batch = reward.score(actor.generate(rows, n=3))
            flow.log(step, actor.update(rl.group_advantages(batch), loss=rl.ppo_clip()), reward=batch.rewards.mean())

    flow.run(out=out, quiet=True, save_models=False, trajectories_every=1, **options)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, and the same again in the eager runtime."""
    folder = tmp_path_factory.mktemp("runs")
    return small_grpo(folder / "a"), small_grpo(folder / "b", runtime="eager")


def test_equal_runs_are_bitwise_equal_whatever_the_runtime(runs, capsys):
    found = compare_runs(*runs)
    assert found.is_equal
    assert found.steps == 2
    assert [made.node for made in read_digests(runs[0])][:3] == ["data.draw", "actor.generate", "reward.score"]
    assert main(["diff", *map(str, runs)]) == 0
    said = capsys.readouterr().out
    assert f"Bitwise equal: all {found.calls} calls of 2 steps gave the same." in said
    assert "The final weights are equal." in said
    assert "runtime local -> eager" in said


def test_the_first_step_call_field_row_and_value_are_named(runs, tmp_path, capsys):
    other = small_grpo(tmp_path / "other", score=odd)
    found = compare_runs(runs[0], other)
    first = found.different[0]
    rows = [line for line in map(json.loads, (runs[0] / "trajectories.jsonl").read_text().splitlines())]
    parted = [tuple(r["key"]) for r in rows if r["step"] == first.step and odd(r["response"]) != letters(r["response"])]
    assert (first.program, first.node, first.fields) == ("small", "reward.score", ("rewards",))
    assert sorted(first.rows) == sorted(parted)
    assert first.kept is not None
    assert first.kept.second == first.kept.first + 1
    assert first.by == {"rewards": 1.0}
    assert found.metric is not None
    assert "reward" in found.metric.values
    assert main(["diff", str(runs[0]), str(other), "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["different"][0]["node"] == "reward.score"
    said = in_words(found, "a", "b")
    assert "reward: fn letters -> odd" in said
    assert "code of odd in test_run_difference.py is in the second alone" in said


def test_times_of_a_publish_are_no_difference(runs, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(runs[0], copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    told = [line | {"actor.publish/load_seconds": 0.5, "actor.publish/proof_seconds": 0.25} for line in lines]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    slower = tmp_path / "slower"
    shutil.copytree(copy, slower)
    text = (copy / "metrics.jsonl").read_text()
    (slower / "metrics.jsonl").write_text(text.replace(": 0.5", ": 0.75").replace(": 0.25", ": 2.5"))
    assert compare_runs(copy, slower).is_equal


def test_runs_with_no_call_in_common_are_not_equal(runs, capsys):
    found = compare_runs(*runs, program="other")
    assert not found.calls and not found.is_equal
    assert main(["diff", *map(str, runs), "--program", "other"]) == 1
    assert "No calls can be compared" in capsys.readouterr().out


def test_the_first_token_is_named(runs, tmp_path):
    other = small_grpo(tmp_path / "other", seed=1)
    found = compare_runs(runs[0], other)
    first = found.different[0]
    assert ("seed", "0", "1") in found.asked
    assert (first.step, first.node) == (0, "actor.generate")
    kept = first.kept
    assert kept is not None
    rows = [
        {tuple(line["key"]): line for line in map(json.loads, (run / "trajectories.jsonl").read_text().splitlines())}
        for run in (runs[0], other)
    ]
    a, b = (some[kept.key][kept.field] for some in rows)
    assert a[: kept.place] == b[: kept.place]
    assert (kept.first, kept.second) == (a[kept.place], b[kept.place])


def test_of_a_longer_run_the_steps_that_both_did_are_compared(tmp_path):
    for name, steps in (("a", 4), ("b", 6)):
        module_of("small_flow").flow.run("train", out=tmp_path / name, steps=steps, quiet=True)
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.is_equal
    assert found.done == {"train": (4, 6)}
    assert ("train: steps", "4", "6") in found.asked


def test_a_resumed_run_records_the_same(tmp_path):
    whole = module_of("small_flow").flow.run("train", out=tmp_path / "a", steps=6, quiet=True)
    parts = {"out": tmp_path / "b", "quiet": True, "checkpoint_every": 2}
    module_of("small_flow").flow.run("train", steps=3, **parts)
    module_of("small_flow").flow.run("train", steps=6, resume=True, **parts)
    assert compare_runs(whole.out, tmp_path / "b").is_equal


KEYS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), unique=True, min_size=1, max_size=20).map(sorted)


@given(KEYS)
def test_keys_as_text_are_the_keys(keys):
    assert keys_of_text(keys_to_text(keys)) == keys


@given(KEYS, st.randoms(use_true_random=False), st.integers(1, 4))
def test_digests_do_not_depend_on_order_or_parts_and_show_one_bit(keys, random, parts):
    torch.manual_seed(random.randrange(1 << 30))
    batch = Batch(
        keys,
        {
            "x": Column(torch.randn(len(keys))),
            "tokens": Column.of([[random.randrange(99) for _ in range(random.randrange(4))] for _ in keys], dim="t"),
            "said": Column([random.choice(["a", "b", None]) for _ in keys]),
        },
    )
    whole = RowDigests.merged([RowDigests.of(batch, batch.fields)])
    shuffled = batch.take(random.sample(range(len(keys)), len(keys)))
    found = RowDigests.merged([RowDigests.of(part, part.fields) for part in shuffled.split(parts)])
    assert found == whole
    row = random.randrange(len(keys))
    changed = batch["x"].values.clone()
    changed[row] = -changed[row]
    other = RowDigests.merged([RowDigests.of(batch.drop("x").with_columns({"x": Column(changed)}), batch.fields)])
    assert {n for n in batch.fields if other.fields[n] != whole.fields[n]} == {"x"}
    rows = [whole.rows[2 * i : 2 * i + 2] != other.rows[2 * i : 2 * i + 2] for i in range(len(keys))]
    assert not any(rows[:row] + rows[row + 1 :])
