"""Episodes of several turns on vLLM: what is trained is what was sampled, the trainer finds the same log-probabilities, and
who listens is shown tokens as they come.

They need vLLM: `make vllm-test`.
"""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from vllm_tiny import CONFIGS, EOS, PROMPTS, VOCAB, train

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.workers.policy_calls import Ask, policy_calls
from flowrl.workers.tokens.sampling import SamplingArguments

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]
torch.set_num_threads(1)
TURNS = 4


class Numbers:
    """A tokenizer whose text is its ids."""

    eos_token_id = EOS

    def encode(self, text, add_special_tokens=False):
        return [int(word) for word in text.split()]

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))

    def get_vocab(self):
        return {str(number): number for number in range(VOCAB)}


class Talk(fl.Env):
    turns = TURNS

    def reset(self, row, seed):
        return 0, "21 22"

    def step(self, state, action):
        return state + 1, f"{30 + state} 31 32", float(len(action)), state + 1 == TURNS


@pytest.fixture
def policies(opened, monkeypatch):
    """The actor with vLLM, and one with the reference engine that has its weights."""
    ours, theirs = opened("qwen2")
    train(theirs, 7)
    ours.take_weights(theirs.plain_weights())
    monkeypatch.setattr(ours.mirror, "_tokenizer", Numbers())
    monkeypatch.setattr(theirs, "_tokenizer", Numbers())
    model = fl.Model(config=CONFIGS["qwen2"], tokenizer=Numbers)
    return [fl.open(fl.Actor(model, max_tokens=9), name="actor", engine=engine) for engine in (ours, theirs)]


def play(policy, **how):
    rows = fl.Batch.of(len(PROMPTS), prompt_ids=fl.Column.of(PROMPTS, dim="prompt", dtype="i32"))
    rows = rows.with_call(CallInfo(seed=3, op="talk.rollout"))
    return fl.open(Talk(), name="talk").rollout(rows, policy=policy, n=3, **how)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_p": 0.9}, {"greedy": True}], ids=str)
def test_all_turns_are_trained_as_they_were_sampled_with_the_trainers_log_probabilities(policies, monkeypatch, how):
    policy, trainer = policies
    engine, sampled, stepped = policy.engine, Counter(), type(policy.engine).step

    def step(self):
        ended = stepped(self)
        sampled.update(tuple(row.ids) for row in ended)
        return ended

    monkeypatch.setattr(type(engine), "step", step)
    found = play(policy, **how)
    trained = Counter()
    for ids, turns in zip(found.response_ids.to_list(), found.turn_ids.to_list(), strict=True):
        for turn in range(TURNS):
            trained[tuple(token for token, of in zip(ids, turns, strict=True) if of == turn)] += 1
    assert trained == sampled and found.turns.to_list() == [TURNS] * len(found)
    read, mask = trainer.logprobs(found).old_logprobs.values, found.response_mask.values
    assert float((found.rollout_logprobs.values - read)[mask].abs().max()) < 1e-4
    assert int(mask.sum()) > 3 * len(found), "several tokens a turn"
    assert found.response_ids.to_list() == play(trainer, **how).response_ids.to_list(), "those of the reference engine"


class Listens:
    streams, is_gone = True, False

    def __init__(self):
        self.shown = []

    def show(self, ids):
        self.shown.append(tuple(ids))


def test_who_listens_is_shown_tokens_as_they_come(policies):
    policy, _ = policies
    calls, listeners = policy_calls(policy, SamplingArguments(max_tokens=100)), [Listens() for _ in range(8)]
    calls.ask([Ask(i, [2 + i, 5], seed=i, start=0, listener=each) for i, each in enumerate(listeners)])
    answers = {}
    while calls.waiting:
        answers |= {answer.session: answer for answer in calls.answers()}
    calls.close()
    longest = max(answers, key=lambda i: len(answers[i].ids))
    shown = listeners[longest].shown
    assert len(answers[longest].ids) > 20 and len(shown) >= 2
    for i, each in enumerate(listeners):
        assert all(tuple(answers[i].ids[: len(part)]) == part for part in each.shown)
        assert [len(part) for part in each.shown] == sorted({len(part) for part in each.shown}), "each has more"
