"""Prompts of one model about the rows of another, and what is found about rows brought back to those they came from."""

import json
import runpy
from pathlib import Path

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.batch import CallInfo
from flowrl.errors import DataError, FieldError, ModelError, ProgramError, RowsError

TASK = runpy.run_path(str(Path(__file__).parents[2] / "algorithms" / "tasks" / "arithmetic.py"))
SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def model(name, **more):
    given = TASK[name]
    return fl.Model(config={**given.config, **SMALL, **more}, tokenizer=given.tokenizer)


@pytest.fixture(scope="module")
def actor():
    return fl.open(fl.Actor(model("MODEL"), max_tokens=5))


@pytest.fixture(scope="module")
def judge():
    return fl.open(fl.Actor(model("JUDGE"), lr=None, max_tokens=3))


@pytest.fixture
def rows(actor):
    source = TASK["prompts"](3)
    batch = source.to_batch(source.cursor().draw(), 10, actor.tokenizer)
    return actor.generate(batch.with_call(CallInfo(seed=3)), n=2)


def test_text_goes_from_one_tokenizer_to_the_other(actor, judge, rows):
    asked = judge.ask(rows, "{prompt}{response}?", tokenizer=actor)
    assert asked.keys == rows.keys and asked.fields == ("prompt", "prompt_ids")
    for i in range(len(rows)):
        answer = actor.tokenizer.decode(rows.response_ids[i], skip_special_tokens=True)
        assert asked.prompt[i] == f"{rows.prompt[i]}{answer}?"
        assert asked.prompt_ids[i].tolist() == judge.tokenizer(asked.prompt[i])["input_ids"]
    with pytest.raises(ModelError, match="ask reads 'response_ids', whose ids another tokenizer made"):
        judge.ask(rows, "{prompt}{response}?", tokenizer=judge)


def test_columns_are_filled_in_as_python_formats_them(actor, judge, rows):
    graded = rows.with_columns({"grade": fl.Column.of([i / 3 for i in range(6)])})
    asked = judge.ask(graded, "{{{answer}}} {grade:.1f} {answer!r}", tokenizer=actor)
    assert asked.prompt[2] == f"{{{rows.answer[2]}}} 0.7 {rows.answer[2]!r}"


def test_a_prompt_without_its_text_is_decoded(actor, judge, rows):
    with_text, without = (judge.ask(b, "{prompt}=", tokenizer=actor) for b in (rows, rows.drop("prompt")))
    assert with_text.prompt.to_list() == without.prompt.to_list()


def test_a_chat_goes_through_the_template(actor):
    def built():
        tokenizer = TASK["build_tokenizer"]("yn")
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content }}+{% endfor %}{{ '=' if add_generation_prompt }}"
        )
        return tokenizer

    given = model("JUDGE")
    judge = fl.open(fl.Actor(fl.Model(config=given.config, tokenizer=built), lr=None))
    rows = fl.Batch.of([(0,), (1,)], answer=["1", "2"])
    asked = judge.ask(rows, "{answer}", chat=True, system="9", tokenizer=actor)
    assert asked.prompt.to_list() == ["9+1+=", "9+2+="]


def test_a_chat_has_arguments_of_its_template(actor):
    def built():
        tokenizer = TASK["build_tokenizer"]("yn")
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '=' if thinks else '+' }}"
        return tokenizer

    given = model("JUDGE")
    judge = fl.open(fl.Actor(fl.Model(config=given.config, tokenizer=built), lr=None))
    rows = fl.Batch.of([(0,), (1,)], answer=["1", "2"])
    for thinks, end in ((True, "="), (False, "+")):
        asked = judge.ask(rows, "{answer}", chat=True, chat_template_kwargs={"thinks": thinks}, tokenizer=actor)
        assert asked.prompt.to_list() == [f"1{end}", f"2{end}"]
    with pytest.raises(ModelError, match="reads no 'think'") as error:
        judge.ask(rows, "{answer}", chat=True, chat_template_kwargs={"think": True}, tokenizer=actor)
    assert error.value.fix == "Did you mean 'thinks'?"


def test_no_rows_are_asked_nothing(actor, judge, rows):
    asked = judge.ask(rows.take([]), "{prompt}{response}", tokenizer=actor)
    assert len(asked) == 0 and asked.fields == ("prompt", "prompt_ids")


@pytest.mark.parametrize(
    ("template", "how", "error", "what"),
    [
        ("{}", {}, ProgramError, "ask: '{}' in the text names no column."),
        ("{0}", {}, ProgramError, "ask: '{0}' in the text names no column."),
        ("{answer.real}", {}, ProgramError, "ask: '{answer.real}' in the text names no column."),
        ("{answer", {}, ProgramError, "ask: the text cannot be read: expected '}' before end of string."),
        ("Right?", {}, ProgramError, "ask: the text names no column, so every row would be asked the same."),
        (3, {}, ProgramError, "ask: template=3 is not text."),
        ("{answer}", {"system": "x"}, ProgramError, "system= is for chats, and this is plain text."),
        ("{answer}", {"chat_template_kwargs": {}}, ProgramError, "chat_template_kwargs= is for chats"),
        (
            "{answer}",
            {"chat": True, "chat_template_kwargs": {"tools": []}},
            ProgramError,
            "ask: chat_template_kwargs has",
        ),
        (
            "{answer}",
            {"chat": True, "chat_template_kwargs": "x"},
            ProgramError,
            "ask: chat_template_kwargs='x' is no dict",
        ),
        ("{anwser}", {}, FieldError, "reads 'anwser', which no op before it adds."),
        ("{tokens}", {}, FieldError, "ask: 'tokens' is i32[*token], which is no text."),
        ("{answer}", {"chat": True}, DataError, "The prompts are chats, and the tokenizer has no chat template."),
        ("{none}", {}, ModelError, "ask: the prompt of row (10, 0) has no token."),
    ],
)
def test_texts_that_cannot_be_filled_are_refused(actor, judge, rows, template, how, error, what):
    more = rows.with_columns({"none": fl.Column.of([""] * 6, dtype="any")})
    with pytest.raises(error) as caught:
        judge.ask(more, template, tokenizer=actor, **how)
    assert what in caught.value.what and caught.value.fix


def test_a_name_in_a_text_is_looked_for_among_what_text_can_be_made_of(judge, rows, actor):
    with pytest.raises(FieldError) as near:
        judge.ask(rows, "{respons}", tokenizer=actor)
    assert near.value.fix == "Did you mean 'response'?" and "tokens" not in near.value.have
    with pytest.raises(FieldError) as far:
        judge.ask(rows, "{question}", tokenizer=actor)
    assert far.value.fix.startswith("{prompt} is the text of the prompt")


# -- brought back --------------------------------------------------------------------------------------------------------


def batch(keys, **columns):
    return fl.Batch.of(keys, **columns)


def test_every_row_gets_what_was_found_about_those_made_of_it():
    rows = batch([(3, 0), (1, 0), (3, 1)], x=[1.0, 2.0, 3.0])
    said = batch(
        [(1, 0, 1), (3, 1, 0), (3, 0, 0), (1, 0, 0), (3, 0, 1, 7)], rewards=[1.0, 2.0, 3.0, 4.0, 6.0], y=[1, 2, 3, 4, 5]
    )
    found = rl.collect(rows, said, rewards="mean")
    assert found.keys == rows.keys and found.fields == ("x", "rewards")
    assert found.rewards.to_list() == [4.5, 2.5, 2.0]
    for how, wanted in (("sum", [9.0, 5.0, 2.0]), ("min", [3.0, 1.0, 2.0]), ("max", [6.0, 4.0, 2.0])):
        assert rl.collect(rows, said, rewards=how).rewards.to_list() == wanted
    both = rl.collect(rows, said, rewards="max", y="sum", into={"y": "z"})
    assert both.z.to_list() == [8.0, 5.0, 2.0] and both.fields == ("x", "rewards", "z")


def test_the_nearest_row_is_the_parent():
    rows = batch([(0,), (0, 1)], x=[0.0, 0.0])
    said = batch([(0, 1, 5), (0, 2), (0, 1)], r=[1.0, 2.0, 4.0])
    assert rl.collect(rows, said, r="sum").r.to_list() == [2.0, 5.0]


def test_rows_that_are_gone_are_left_out_and_rows_without_any_are_an_error():
    said = batch([(0, 0), (1, 0), (1, 1)], r=[1.0, 2.0, 3.0])
    assert rl.collect(batch([(1,)], x=[0.0]), said, r="mean").r.to_list() == [2.5]
    with pytest.raises(RowsError, match=r"rl.collect: no row was made of the row \(2,\)\."):
        rl.collect(batch([(1,), (2,)], x=[0.0, 0.0]), said, r="mean")
    assert len(rl.collect(said.take([]).select(), said, r="mean")) == 0


@pytest.mark.parametrize(
    ("fields", "error", "what"),
    [
        ({}, ProgramError, "rl.collect names no field."),
        ({"r": "avg"}, ProgramError, "rl.collect: r='avg' is none of mean, sum, min, max."),
        ({"ids": "mean"}, FieldError, "rl.collect: 'ids' is i32[*token], and one number per row is wanted."),
        ({"text": "mean"}, FieldError, "rl.collect: 'text' is any, and one number per row is wanted."),
        ({"rr": "mean"}, FieldError, "rl.collect reads 'rr', which no op before it adds."),
    ],
)
def test_what_cannot_be_collected_is_refused(fields, error, what):
    said = batch(
        [(0, 0)], r=[1.0], ids=fl.Column.of([[1]], dim="token", dtype="i32"), text=fl.Column.of(["a"], dtype="any")
    )
    with pytest.raises(error) as caught:
        rl.collect(batch([(0,)], x=[0.0]), said, **fields)
    assert caught.value.what == what


def test_the_tokenizer_of_a_flow_is_that_of_the_actor_that_is_trained(tmp_path):
    """Also where a frozen judge is declared before it."""
    flow = fl.Flow("x")
    judge = flow.worker(fl.Actor, model("JUDGE"), lr=None, max_tokens=2, name="judge")
    actor = flow.worker(fl.Actor, model("MODEL"), max_tokens=4, name="actor", lr=1e-3)
    verdict = flow.worker(fl.FunctionReward, TASK["says_yes"], tokenizer=judge, name="verdict")

    @flow.program
    def x(steps: int = 2):
        for step, rows in flow.steps(TASK["prompts"](4), steps):
            rows = actor.generate(rows, n=4)
            asked = judge.ask(rows, TASK["QUESTION"]) | rows.select("answer")
            said = verdict.score(judge.generate(asked, n=3))
            rows = rl.group_advantages(rl.collect(rows, said, rewards="mean"))
            flow.log(step, actor.update(rows, loss=rl.ppo_clip()), reward=rows.rewards.mean(), n=said.count())

    assert not flow.check().errors
    lines = {}
    for runtime in ("eager", "local"):
        out = flow.run(out=tmp_path / runtime, runtime=runtime, quiet=True, save_models=False, checkpoint_every=1).out
        lines[runtime] = [
            {k: v for k, v in json.loads(line).items() if k.split("/")[-1] not in ("seconds", "tokens_per_second")}
            for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
    assert lines["eager"] == lines["local"] and lines["eager"][0]["n"] == 48
