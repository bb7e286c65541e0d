"""flowrl export RUN FILE: conversations of a run that went well, which another flow learns from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from letters import build_tokenizer, model_of

import flowrl as fl
from flowrl import rl
from flowrl.cli import main
from flowrl.environments import Environment, reward

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %};{% endif %}{% endfor %}"


def chat_tokenizer():
    made = build_tokenizer()
    made.chat_template = TEMPLATE
    return made


def model(**how):
    return fl.Model(config=model_of(**SIZES, num_key_value_heads=4).config, tokenizer=chat_tokenizer)


class Talk(Environment):
    turns = 2

    def respond(self, state):
        return "d" if state.turn == 1 else None

    @reward()
    def long(self, state, responses):
        return sum(map(len, responses))


class Plain(fl.Env):
    turns = 2

    def reset(self, row, seed):
        return 0, "a"

    def step(self, state, action):
        return state + 1, "b", float(state), state == 1


def play(folder: Path, env, **how) -> Path:
    flow = fl.Flow("played")
    actor = flow.worker(fl.Actor, model(), lr=1e-3, max_tokens=3, name="actor")
    game = flow.worker(env, name="game")
    source = fl.data.rows(
        [{"prompt": "ab"}, {"prompt": "ba"}], batch=2, shuffle=False, chat=issubclass(env, Environment)
    )

    @flow.program
    def train(steps: int = 2):
        for step, batch in flow.steps(source, steps):
            batch = rl.group_advantages(game.rollout(batch, policy=actor, n=4, **how))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean())

    flow.run(out=folder, quiet=True, trajectories=2, trajectories_every=1)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return play(tmp_path_factory.mktemp("talked") / "run", Talk, messages=True)


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_conversations_are_those_of_the_episodes(run, tmp_path, capsys):
    file = tmp_path / "deep" / "all.jsonl"
    assert main(["export", str(run), str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 16 of 16 conversations\n"
    rows = read(file)
    assert len(rows) == 16
    for row in rows:
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant"]
        assert row["messages"][0]["content"] in ("ab", "ba") and row["messages"][2]["content"] == "d"
        assert row["reward"] == row["long"] == sum(map(len, said))


def test_those_that_are_good_enough_are_kept_and_train(run, tmp_path, capsys):
    file = tmp_path / "good.jsonl"
    rewards = sorted(line["rewards"] for line in read(run / "trajectories.jsonl"))
    middle = rewards[len(rewards) // 2]
    assert main(["export", str(run), str(file), "--least", f"reward={middle}", "--least", "long=0"]) == 0
    rows = read(file)
    assert len(rows) == sum(value >= middle for value in rewards) and all(row["reward"] >= middle for row in rows)

    flow = fl.Flow("learns")
    actor = flow.worker(fl.Actor, model(), lr=1e-2, name="actor")
    good = fl.data.jsonl(str(file), messages="messages", batch=4)

    @flow.program
    def learn(steps: int = 6):
        for step, batch in flow.steps(good, steps):
            flow.log(step, actor.update(batch, loss=rl.sft()))

    flow.run(out=tmp_path / "learned", quiet=True)
    losses = [
        value for line in read(tmp_path / "learned" / "metrics.jsonl") for n, value in line.items() if n == "loss"
    ]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_parquet_has_the_same_rows(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet needs pyarrow")
    assert main(["export", str(run), str(tmp_path / "all.jsonl")]) == 0
    assert main(["export", str(run), str(tmp_path / "all.parquet")]) == 0
    assert parquet.read_table(tmp_path / "all.parquet").to_pylist() == read(tmp_path / "all.jsonl")


def test_plain_environments_have_turns_as_messages(tmp_path):
    folder = play(tmp_path / "run", Plain, messages=True)
    for line in read(folder / "trajectories.jsonl"):
        roles = [message["role"] for message in line["conversation"]]
        assert roles == ["user", "assistant"] * 2 and line["conversation"][2]["content"] == "b"


def test_a_run_without_conversations_and_names_that_no_row_has_are_refused(run, tmp_path, capsys):
    without = play(tmp_path / "run", Talk)
    assert main(["export", str(without), str(tmp_path / "x.jsonl")]) != 0
    assert "has no conversations among its trajectories" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "x.jsonl"), "--least", "lenght=1"]) != 0
    assert "No conversation of" in (said := capsys.readouterr().err) and "long" in said
    assert main(["export", str(run), str(tmp_path / "model"), "--least", "long=1"]) == 2
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize("word", ["--push-to-hub=me/x", "--worker=actor", "--checkpoint=best", "--dtype=bf16"])
def test_what_is_for_a_model_is_refused_for_a_file(run, tmp_path, capsys, word):
    assert main(["export", str(run), str(tmp_path / "x.jsonl"), *word.split("=")]) == 2
    name = word.partition("=")[0]
    assert f"{name} is for a model, and {tmp_path}/x.jsonl holds conversations." in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()


def test_rows_whose_reward_has_another_name_or_is_missing(tmp_path, capsys):
    place = {"program": "train", "step": 0, "conversation": [{"role": "user", "content": "ab"}]}
    lines = [
        {**place, "key": [0], "grades": 2.0},
        {**place, "key": [1], "rewards": None, "scores": {"long": None}, "grades": 1.0},
        {**place, "key": [2], "rewards": 1.0, "scores": {"long": 3}, "grades": None},
    ]
    (tmp_path / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = tmp_path / "x.jsonl"
    assert main(["export", str(tmp_path), str(file)]) == 0
    assert [row["reward"] for row in read(file)] == [None, None, 1.0]
    for least, kept in (("grades=1", [[0], [1]]), ("reward=0", [[2]]), ("long=0", [[2]]), ("rewards=0", [[2]])):
        assert main(["export", str(tmp_path), str(file), "--least", least]) == 0
        assert [row["key"] for row in read(file)] == kept
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet needs pyarrow")
    assert main(["export", str(tmp_path), str(tmp_path / "x.parquet")]) == 0
    assert [row["long"] for row in parquet.read_table(tmp_path / "x.parquet").to_pylist()] == [None, None, 3]
    assert main(["export", str(tmp_path), str(file), "--least", "nothing=1"]) == 2
    assert "grades, long, reward, rewards, step" in capsys.readouterr().err
