"""Evaluation is the rollout of training; what it saves can be compared, task by task."""

from __future__ import annotations

import contextlib
import json
import math
from itertools import combinations
from statistics import fmean

import pytest
from letters import build_tokenizer, model_of

import flowrl as fl
import flowrl.environments.evaluate as evaluation
from flowrl.cli import main
from flowrl.environments.evaluate import compare, evaluate, read_results, save_results, summary_of
from flowrl.errors import UsageError

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT = """
from flowrl.environments import Environment, metric, reward

class Letters(Environment):
    chat = False

    def __init__(self, letter="a", fails=-1):
        self.letter, self.fails = letter, fails

    def rows(self):
        return [{"prompt": "ab", "number": i} for i in range(6)]

    @reward()
    def has(self, response, number):
        if number == self.fails:
            raise ConnectionError("down")
        return float(self.letter in response)

    @metric
    def length(self, response):
        return len(response)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("eval")
    (made / "letters_env.py").write_text(TEXT)
    fl.open(fl.Actor(model_of(**SIZES))).save(str(made / "model"))
    return made


def run(folder, out, *words):
    name = f"{folder / 'letters_env.py'}:Letters"
    more = ["--policy", str(folder / "model"), "--max-tokens", "4", "--out", str(folder / out), *words]
    assert main(["eval", name, *more]) == 0
    return read_results(folder / out)


def test_it_is_the_rollout_of_a_program(folder, capsys):
    records, summary = run(folder, "plain", "--n", "3", "--seed", "5")
    assert json.loads(capsys.readouterr().out) == summary
    env = fl.open(fl.environments.load_environment(f"{folder / 'letters_env.py'}:Letters"))
    policy = fl.open(fl.Actor(str(folder / "model"), lr=None, max_tokens=4), name="policy")
    again = evaluate(env, policy, env.source(batch=2, shuffle=False, repeat=False), n=3, rows=64, seed=5)
    keep = ("task", "sample", "prompt", "response", "reward", "scores", "outcome", "turns", "sampled_tokens")
    assert [{n: r[n] for n in keep} for r in again] == [{n: r[n] for n in keep} for r in records], "whatever the batch"
    assert [(r["task"], r["sample"]) for r in records] == [(i, k) for i in range(6) for k in range(3)]
    for record in records:
        text = record["response"].replace("<pad>", "")
        assert record["reward"] == float("a" in text) == record["scores"]["has"]
    assert summary["reward"] == pytest.approx(sum(r["reward"] for r in records) / 18)
    assert summary["scores"]["length"] == pytest.approx(sum(r["scores"]["length"] for r in records) / 18)
    assert summary["outcomes"] == {"finished": 18} and summary["tasks"] == 6 and summary["seed"] == 5


def test_solved_tasks_are_told_with_their_error_over_tasks(folder, capsys):
    records, summary = run(folder, "solved", "--n", "6", "--seed", "1")
    rights = [[r["reward"] >= 1 for r in records if r["task"] == i] for i in range(6)]
    for k in (1, 2, 4, 6):
        shares = [sum(map(any, combinations(right, k))) / math.comb(6, k) for right in rights]
        mean = sum(shares) / 6
        error = math.sqrt(sum((share - mean) ** 2 for share in shares) / 5 / 6)
        assert (summary[f"pass@{k}"], summary[f"pass@{k}_standard_error"]) == pytest.approx((mean, error))
    assert 0 < summary["pass@1"] < summary["pass@6"] == summary["best_of_n"] and summary["right_at"] == 1
    assert "maj@6" not in summary and {r["answer"] for r in records} == {None}, "no response marks an answer"
    again = run(folder, "never", "--n", "6", "--seed", "1", "--right-at", "1.5")[1]
    assert again["pass@6"] == 0 and again["reward"] == summary["reward"]


def test_the_majority_of_marked_answers_is_told(tmp_path):
    record = {"prompt": "?", "response": "", "scores": {}, "outcome": "finished", "turns": 1, "sampled_tokens": 2}
    said = [[("4", 1.0), ("4.0", 1.0), ("5", 0.0)], [("1", 0.0), ("1", 0.0), ("2", 1.0)]]
    found = [record | {"task": t, "answer": a, "reward": r} for t, samples in enumerate(said) for a, r in samples]
    summary = summary_of(found, {})
    assert (summary["maj@3"], summary["maj@3_standard_error"]) == (0.5, 0.5)
    assert summary["pass@1"] == 0.5 and summary["pass@3"] == 1 and summary["best_of_n"] == 1


def test_the_answer_is_in_what_was_sampled_last():
    tokenizer = build_tokenizer()
    assert evaluation._answer([2, 3], [-1, -1], tokenizer) is None and evaluation._answer([], [], tokenizer) is None

    class Words:
        def decode(self, ids, skip_special_tokens=False):
            assert skip_special_tokens
            return "".join(ids)

    assert evaluation._answer(["#### 1", "no:", "#### 2"], [0, -1, 1], Words()) == "2"
    assert evaluation._answer(["#### 1", "no:", "well"], [0, -1, 1], Words()) is None
    assert evaluation._answer(["so ", "#### 1", "#### 3"], [0, 0, -1], Words()) == "1"
    assert evaluation._answer([r"\boxed{}"], [0], Words()) is None


def test_failures_are_counted_and_no_reward(folder, capsys):
    with pytest.warns(UserWarning, match="failed"):
        records, summary = run(folder, "failing", "--arg", "fails=2", "--n", "2")
    assert summary["outcomes"] == {"finished": 10, "infrastructure_failure": 2}
    assert [r["reward"] for r in records if r["task"] == 2] == [None, None] and "down" in records[4]["failed_why"]
    assert summary["reward"] == pytest.approx(sum(r["reward"] for r in records if r["task"] != 2) / 10)


def test_two_evaluations_are_compared_task_by_task(folder, capsys):
    first, _ = run(folder, "one", "--n", "2")
    second, _ = run(folder, "two", "--n", "2", "--arg", "letter=b")
    capsys.readouterr()
    assert main(["eval", "--compare", str(folder / "one"), str(folder / "two")]) == 0
    told = json.loads(capsys.readouterr().out)
    pairs = [(sum(r["reward"] for r in of if r["task"] == i) / 2) for of in (first, second) for i in range(6)]
    differences = [b - a for a, b in zip(pairs[:6], pairs[6:], strict=True)]
    assert told["difference"] == pytest.approx(sum(differences) / 6) and told["tasks"] == 6


def test_other_tasks_are_not_compared(folder, tmp_path):
    records, _ = run(folder, "all")
    fewer, _ = run(folder, "fewer", "--rows", "4")
    assert fewer == records[:4]
    with pytest.raises(UsageError, match="played other tasks: their first 4 are the same"):
        compare(folder / "all", folder / "fewer")
    with pytest.raises(UsageError, match="holds no results"):
        compare(tmp_path, folder / "all")


def test_a_summary_of_nothing_has_no_mean(tmp_path):
    summary = summary_of([], {"policy": "none"})
    assert math.isnan(summary["reward"]) and summary["episodes"] == 0
    save_results(tmp_path, [], summary)
    assert read_results(tmp_path)[0] == []


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_what_ends_a_line_in_a_text_ends_no_line_of_the_file(end, tmp_path):
    record = {"task": 0, "sample": 0, "prompt": f"a{end}b", "response": f"{end}", "reward": 1.0, "scores": {}}
    record |= {"outcome": "finished", "turns": 1, "sampled_tokens": 2}
    save_results(tmp_path, [record, record], summary_of([record, record], {}))
    assert read_results(tmp_path)[0] == [record, record] and compare(tmp_path, tmp_path)["difference"] == 0


def test_tasks_of_a_file(folder):
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": "ba", "number": i}) + "\n" for i in range(3)))
    records, _ = run(folder, "file", "--data", str(file), "--greedy")
    tokenizer = build_tokenizer()
    assert [r["prompt"] for r in records] == [tokenizer.decode(tokenizer.encode("ba"))] * 3


CHAT = """
from flowrl.environments import Environment

class Chat(Environment):
    chat_template_kwargs = {"mood": "e"}

    def rows(self):
        return [{"prompt": "ab"}]
"""


def test_arguments_of_the_chat_template_come_before_those_of_the_environment(tmp_path, capsys):
    def built():
        tokenizer = build_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"
        return tokenizer

    (tmp_path / "chat_env.py").write_text(CHAT)
    config = model_of(**SIZES).config
    fl.open(fl.Actor(fl.Model(config=config, tokenizer=built))).save(str(tmp_path / "model"))
    words = ["eval", f"{tmp_path / 'chat_env.py'}:Chat", "--policy", str(tmp_path / "model"), "--max-tokens", "2"]
    for name, more, ends in (("own", [], "e"), ("other", ["--chat-template-kwargs", '{"mood": "f"}'], "f")):
        assert main([*words, "--out", str(tmp_path / name), *more]) == 0
        records, summary = read_results(tmp_path / name)
        assert records[0]["prompt"].replace(" ", "") == f"ab{ends}"
        assert summary.get("chat_template_kwargs") == ({"mood": "f"} if more else None)
    assert main([*words, "--out", str(tmp_path / "none"), "--chat-template-kwargs", '{"mod": "f"}']) != 0
    assert "reads no 'mod'" in capsys.readouterr().err


def test_what_plays_no_chat_takes_none(tmp_path, capsys):
    (tmp_path / "plain_env.py").write_text("import flowrl as fl\n\nclass Plain(fl.Env):\n    pass\n")
    words = ["eval", f"{tmp_path / 'plain_env.py'}:Plain", "--policy", "m", "--out", str(tmp_path / "out")]
    assert main([*words, "--chat-template-kwargs", "{}"]) == 2
    assert "Plain is no Environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs an environment"),
        (["x:Y"], "needs --policy MODEL"),
        (["x:Y", "--policy", "m"], "needs --out FOLDER"),
        (["x:Y", "--policy", "m", "--out", "o", "--arg", "level"], "--arg level is no NAME=VALUE"),
        (
            ["x:Y", "--policy", "m", "--out", "o", "--right-at", "nan"],
            "--right-at nan: no reward is right or wrong by it",
        ),
        (["x:Y", "--policy", "m", "--out", "o", "--right-at", "all"], "--right-at"),
        (["x:Y", "--policy", "m", "--out", "o", "--plan", ""], "--plan: the name is empty"),
        (
            ["x:Y", "--policy", "m", "--out", "o", "--chat-template-kwargs", "off"],
            "chat_template_kwargs='off' is no dict",
        ),
        (["x:Y", "--policy", "m", "--out", "o", "--chat-template-kwargs", '{"tools": []}'], "has 'tools'"),
        (["x:Y", "--policy", "m", "--out", "o", "--level", "2"], "'--level' is no option here"),
        (["not_there.at_all", "--policy", "m", "--out", "o"], "no module 'not_there.at_all'"),
    ],
)
def test_wrong_words_are_told(words, said, capsys):
    assert main(["eval", *words]) == 2
    assert said in capsys.readouterr().err


def test_each_episode_is_written_once_however_many_batches_there_are(tmp_path, monkeypatch):
    written = []
    dumps = json.dumps
    monkeypatch.setattr(evaluation.json, "dumps", lambda value, **how: (written.append(value), dumps(value, **how))[1])
    so_far = evaluation.SoFar(tmp_path)
    (tmp_path / "results.part.jsonl").write_text("of an evaluation that was broken off\n")
    rewards = [None, 0.0, 1.0, 0.25, None, 1.0, 0.5, 1.0, 0.0, 1.0]
    records = [{"task": i // 2, "sample": i % 2, "reward": reward} for i, reward in enumerate(rewards * 4)]
    for first in range(0, len(records), 4):
        so_far.add(records[first : first + 4])
        means = [fmean(v) for v in evaluation._by_task(records[: first + 4]).values()]
        assert so_far.tasks == first // 2 + 2 and so_far.reward == pytest.approx(fmean(means))
        lines = (tmp_path / "results.part.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == records[: first + 4]
    assert written == records
    so_far.finish({"tasks": 20})
    assert written == [*records, {"tasks": 20}] and read_results(tmp_path) == (records, {"tasks": 20})
    assert not (tmp_path / "results.part.jsonl").exists()
    evaluation.SoFar(tmp_path / "none").finish({})
    assert read_results(tmp_path / "none") == ([], {})


def test_it_tells_how_far_it_is_and_keeps_what_is_played_when_it_is_broken_off(folder, capsys, monkeypatch):
    run(folder, "told", "--batch", "4")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("4 of 64 tasks, reward ") and second.startswith("6 of 64 tasks, reward ")
    assert not (folder / "told" / "results.part.jsonl").exists()

    records_of, played = evaluation._records, list[int]()

    def stopped(batch, policy):
        played.append(len(batch))
        if len(played) == 2:
            raise KeyboardInterrupt
        return records_of(batch, policy)

    monkeypatch.setattr(evaluation, "_records", stopped)
    words = ["eval", f"{folder / 'letters_env.py'}:Letters", "--policy", str(folder / "model"), "--batch", "4"]
    for out, results in (("told", 6), ("new", None)):
        played.clear()
        with contextlib.suppress(KeyboardInterrupt):
            main([*words, "--max-tokens", "4", "--out", str(folder / out)])
        part = (folder / out / "results.part.jsonl").read_text().splitlines()
        assert [json.loads(line)["task"] for line in part] == [0, 1, 2, 3]
        if results:
            assert len(read_results(folder / out)[0]) == results  # those of an earlier one are still there
    with pytest.raises(UsageError, match="broken off: results.part.jsonl is what had been played"):
        read_results(folder / "new")
