"""Arguments of the chat template are those of prompts and of replies alike, and of no template that reads none."""

from __future__ import annotations

import pytest
from chat_templates import CHATML, chat_tokenizer
from letters import model_of

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.environments import Environment
from flowrl.environments.chat import ids_behind
from flowrl.errors import DataError, ModelError, WorkerError

#: As that of Qwen3: without thinking an answer begins behind an empty thought.
THINKS = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}",
)
OFF = {"enable_thinking": False}


class Talk(Environment):
    turns = 3

    def rows(self):
        return [{"prompt": f"{i}?"} for i in range(2)]

    def respond(self, state):
        return "why?"


class Quick(Talk):
    chat_template_kwargs = OFF


class Given(Talk):
    """Its constructor says which."""

    def __init__(self, **kwargs):
        self.chat_template_kwargs = kwargs


def played(env, template=THINKS):
    tokenizer = chat_tokenizer(template)
    engine = fl.testing.FakeEngine(vocab=len(tokenizer), stop=(1,), tokenizer=tokenizer)
    actor = fl.open(fl.Actor(model_of(), max_tokens=4), name="actor", engine=engine)
    source = env.source(batch=2, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer).with_call(CallInfo(seed=1, op="chat.rollout"))
    found = fl.open(env).rollout(batch, policy=actor, n=2)
    pairs = zip(found.prompt_ids.to_list(), found.response_ids.to_list(), strict=True)
    return [tokenizer.decode([*prompt, *response]) for prompt, response in pairs]


@pytest.mark.parametrize("env", [Quick(), Given(enable_thinking=False)])
def test_the_prompt_and_every_reply_have_them(env):
    begin = "<|im_start|>assistant\n"
    for text in played(env):
        assert text.count(begin) == 4 and text.count(f"{begin}<think></think>") == 4
    for text in [*played(Talk()), *played(Given(enable_thinking=True))]:
        assert text.count(begin) == 4 and f"{begin}<think></think>" not in text


def test_what_is_behind_an_answer_is_rendered_with_them():
    tokenizer, reply = chat_tokenizer(THINKS), [{"role": "user", "content": "x"}]
    plain, quick = (ids_behind(reply, tokenizer, last=None, more=more) for more in ({}, OFF))
    assert quick[: len(plain)] == plain and tokenizer.decode(quick[len(plain) :]) == "<think></think>"


def test_conversations_to_learn_from_have_them():
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think></think>y"}]
    source = Quick().source_of(fl.data.rows, [{"talk": talk}], batch=1, messages="talk")
    batch, tokenizer = source.to_batch(source.cursor().draw(), 0, chat_tokenizer(THINKS)), chat_tokenizer(THINKS)
    assert tokenizer.decode(batch.prompt_ids[0]).endswith("assistant\n<think></think>")
    other = Quick().source_of(
        fl.data.rows, [{"talk": talk}], batch=1, messages="talk", chat_template_kwargs={"enable_thinking": True}
    )
    batch = other.to_batch(other.cursor().draw(), 0, tokenizer)
    assert tokenizer.decode(batch.prompt_ids[0]).endswith("assistant\n")


def test_a_source_has_none_of_its_own_as_replies_would_lack_them():
    with pytest.raises(DataError, match="replies of Talk would be rendered without") as error:
        Talk().source(batch=1, chat_template_kwargs=OFF)
    assert "chat_template_kwargs = {'enable_thinking': False} in the class" in error.value.fix
    assert error.value.at is not None and error.value.at.file == __file__


def test_a_source_may_say_what_the_class_says():
    for env, given in [(Talk(), None), (Talk(), {}), (Quick(), OFF)]:
        source = env.source(batch=1, chat_template_kwargs=given)
        assert (source.reading.chat_template_kwargs or None) == env.chat_template_kwargs
    with pytest.raises(DataError, match="replies of Quick would be rendered without") as error:
        Quick().source(batch=1, chat_template_kwargs=None)
    assert error.value.fix == "Write chat_template_kwargs = None in the class."


def test_prompts_that_are_plain_text_are_no_chats_and_have_none():
    source = type("Plain", (Quick,), {"chat": False})().source(batch=2)
    with pytest.raises(DataError, match="chat_template_kwargs= is for chats, and the prompts are plain text"):
        source.schema()


def test_prompts_that_are_lists_have_them_whatever_chat_says():
    class Listed(Quick):
        chat = False

        def rows(self):
            return [{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(2)]

    begin = "<|im_start|>assistant\n"
    for text in played(Listed()):
        assert text.count(begin) == 4 and text.count(f"{begin}<think></think>") == 4


@pytest.mark.parametrize("env", [Quick, Given])
def test_one_that_the_template_never_reads_is_found_before_anything_is_sampled(env, monkeypatch):
    monkeypatch.setattr(fl.testing.FakeEngine, "submit", lambda *given: pytest.fail("a row was sampled"))
    tokenizer = chat_tokenizer(CHATML)
    env = env() if env is Quick else env(enable_thinking=False)
    with pytest.raises(ModelError, match="reads no 'enable_thinking'"):
        env.check_template(tokenizer, print)
    with pytest.raises(DataError, match="reads no 'enable_thinking'"):
        played(env, CHATML)
    env.check_template(chat_tokenizer(THINKS), print)


def test_what_is_no_argument_is_told_at_the_declaration():
    flow = fl.Flow("wrong")
    with pytest.raises(WorkerError, match="Wrong: chat_template_kwargs has 'tools'") as error:
        flow.worker(type("Wrong", (Talk,), {"chat_template_kwargs": {"tools": []}}))
    assert error.value.at is not None and error.value.at.file == __file__
    with pytest.raises(WorkerError, match="Given: chat_template_kwargs has 'tokenize'"):
        Given(tokenize=True).check_template(chat_tokenizer(THINKS), print)
    with pytest.raises(DataError, match="has 'tokenize'"):
        Given(tokenize=True).source(batch=1)
