"""Arguments of the chat template in a request: read in every protocol, put before the environment's, or refused."""

from __future__ import annotations

import urllib.error

import pytest
from letters import build_tokenizer, model_of
from talking_agent import TEMPLATE, Talks, chat

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.environments.gateway import anthropic_messages, chat_completions, responses
from flowrl.environments.gateway.requests import Refused

USER = [{"role": "user", "content": "ab"}]
BODIES = [
    (chat_completions, {"messages": USER}),
    (responses, {"input": "ab"}),
    (anthropic_messages, {"messages": USER, "max_tokens": 4}),
]
READS = TEMPLATE + "{{ mood }}"


@pytest.mark.parametrize(("protocol", "body"), BODIES, ids=["completions", "responses", "messages"])
def test_they_are_read_in_every_protocol(protocol, body):
    assert protocol.read(body).chat_template_kwargs == {}
    assert protocol.read({**body, "chat_template_kwargs": None}).chat_template_kwargs == {}
    assert protocol.read({**body, "chat_template_kwargs": {"mood": "c"}}).chat_template_kwargs == {"mood": "c"}
    for wrong in ("c", ["c"], {"add_generation_prompt": False}, {"chat_template": "x"}):
        with pytest.raises(Refused, match="chat_template_kwargs") as refused:
            protocol.read({**body, "chat_template_kwargs": wrong})
        assert refused.value.status == 400


class Asks(Talks):
    """Asks with these arguments, one call after the other of one conversation."""

    def __init__(self, *given, own=None):
        self.given, self.chat_template_kwargs = given, own

    def agent(self, task):
        messages = [*USER]
        for given in self.given:
            answer = chat(task, messages, **({} if given is None else {"chat_template_kwargs": given}))
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "d"}]
        return "done"


def prompts(env, template=READS):
    """Play an episode; the text of its branch up to each answer, and how often it has forked."""
    pytest.importorskip("h11", reason="the gateway needs the package h11")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    engine = fl.testing.FakeEngine(vocab=8, stop=(1,), tokenizer=tokenizer)
    actor = fl.open(fl.Actor(model_of(), max_tokens=2), name="actor", engine=engine)
    source = fl.data.rows([{"prompt": "ab"}], batch=1)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer).with_call(CallInfo(seed=3, op="talk.rollout"))
    worker = fl.open(env, name="talk")
    try:
        found = worker.rollout(batch, policy=actor, turns=4, n=1)
    finally:
        worker.close()
    tokens, ids = found.tokens.to_list()[0], found.response_ids.to_list()[0]
    first = tokenizer.decode(tokens[: len(tokens) - len(ids)]).replace(" ", "")
    return first, found.forks.to_list()[0]


def test_those_of_a_request_come_before_those_of_the_environment():
    assert prompts(Asks(None)) == ("aab", 0)
    assert prompts(Asks(None, own={"mood": "e"})) == ("aabe", 0)
    assert prompts(Asks({"mood": "f"}, own={"mood": "e"})) == ("aabf", 0)
    assert prompts(Asks({}, None, own={"mood": "e"})) == ("aabe", 0)


def test_a_call_with_others_goes_on_from_none():
    assert prompts(Asks({"mood": "e"}, {"mood": "e"})) == ("aabe", 0)
    assert prompts(Asks({"mood": "e"}, {"mood": "f"}))[1] == 1


def test_one_that_the_template_never_reads_is_refused():
    why = []

    class Tries(Talks):
        def agent(self, task):
            try:
                chat(task, USER, chat_template_kwargs={"mod": "c"})
            except urllib.error.HTTPError as error:
                why.append((error.code, error.read().decode()))
            return chat(task, USER) and "done"

    prompts(Tries())
    assert why[0][0] == 400 and "reads no 'mod'" in why[0][1] and "it reads mood" in why[0][1]
