"""``flowrl eval`` with another engine than the reference: one that a test has, and vLLM."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from letters import build_tokenizer, model_of

import flowrl as fl
from flowrl.cli import main
from flowrl.placement.backends import BACKENDS, Backend, Option

TEXT = r"""
from flowrl.environments import Environment, reward

class Letters(Environment):
    chat = False

    def rows(self):
        return [{"prompt": "ab"}, {"prompt": "cd"}, {"prompt": "ef"}]

    @reward()
    def has(self, response):
        return float("a" in response)
"""
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
OPENED = []


class Watched(fl.testing.FakeEngine):
    """It keeps how it was opened, and whether it was closed."""

    def __init__(self, build):
        super().__init__(vocab=8, stop=(1,), tokenizer=build_tokenizer(), rows=build.options.get("rows"))
        self.build, self.closed = build, False
        OPENED.append(self)

    def close(self):
        self.closed = True


def open_engine(build):
    return Watched(build)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("eval_engines")
    (made / "letters_env.py").write_text(TEXT)
    fl.open(fl.Actor(model_of(**SIZES, initializer_range=0.3))).save(str(made / "model"))
    return made


@pytest.fixture
def fake(monkeypatch):
    row = Backend("fake", "a table", module=__name__, generates=True, options=(Option("rows", 4, "rows", 1),))
    monkeypatch.setitem(BACKENDS, "fake", row)
    OPENED.clear()
    return OPENED


def run(folder, out, *words):
    words = ["--policy", str(folder / "model"), "--max-tokens", "4", "--out", str(folder / out), *words]
    status = main(["eval", f"{folder / 'letters_env.py'}:Letters", *words])
    if status:
        return status
    summary = json.loads((folder / out / "summary.json").read_text())
    return [json.loads(line) for line in (folder / out / "results.jsonl").read_text().splitlines()], summary


def test_the_engine_that_is_named_samples(folder, fake, capsys):
    records, summary = run(folder, "named", "--engine", "fake", "--n", "4", "--seed", "3")
    (engine,) = fake
    assert summary["engine"] == "fake" and engine.steps > 0 and engine.closed
    env = fl.open(fl.environments.load_environment(f"{folder / 'letters_env.py'}:Letters"))
    actor = fl.Actor(str(folder / "model"), lr=None, max_tokens=4)
    policy = fl.open(actor, name="policy", engine=fl.testing.FakeEngine(8, stop=(1,), tokenizer=build_tokenizer()))
    source = env.source(batch=3, shuffle=False, repeat=False)
    assert fl.environments.evaluate.evaluate(env, policy, source, n=4, seed=3) == records
    assert [name for name in summary if name.startswith("pass@") and "error" not in name] == [
        "pass@1",
        "pass@2",
        "pass@4",
    ]
    assert run(folder, "plain")[1]["engine"] == "hf"


def test_a_plan_says_which_engine_and_its_options(folder, fake, capsys):
    plan = folder / "plan.yaml"
    plan.write_text("place:\n  actor:\n    generate: {pool: main, engine: fake, rows: 2}\n")
    _, summary = run(folder, "planned", "--plan", str(plan), "--n", "2")
    assert summary["engine"] == "fake" and fake[0].build.options == {"rows": 2}
    fake.clear()
    plan.write_text(plan.read_text().replace("rows", "room"))
    assert run(folder, "wrong", "--plan", str(plan)) == 1 and not fake
    told = capsys.readouterr().err
    assert f"{plan}:3" in told and "room" in told
    assert run(folder, "wrong", "--engine", "fast") == 2 and "--engine fast is no engine" in capsys.readouterr().err


def test_arguments_of_a_template_that_no_prompt_goes_through_are_refused(folder, fake, capsys):
    assert run(folder, "thinks", "--engine", "fake", "--chat-template-kwargs", '{"enable_thinking": false}') == 1
    assert "chat_template_kwargs= is for chats, and the prompts are plain text." in capsys.readouterr().err
    assert not (folder / "thinks" / "summary.json").exists()


def test_an_engine_is_closed_where_the_evaluation_fails(folder, fake, capsys):
    (folder / "bad.jsonl").write_text('{"prompt": ""}\n')
    assert run(folder, "failing", "--engine", "fake", "--data", str(folder / "bad.jsonl")) != 0
    assert [engine.closed for engine in fake] == [True]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")
def test_vllm_samples_what_the_reference_engine_does(folder, capsys):
    plan = folder / "vllm.yaml"
    plan.write_text("place:\n  policy:\n    generate: {pool: main, engine: vllm, context: 64, kv_cache: 0.0625}\n")
    words = ["--n", "4", "--seed", "5", "--right-at", "0.5"]
    theirs, _ = run(folder, "reference", *words)
    ours, summary = run(folder, "vllm", "--plan", str(plan), *words)
    assert summary["engine"] == "vllm" and ours == theirs
