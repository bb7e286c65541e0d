"""What a call says of sampling stands over what the worker was declared with, the same words in every call."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.errors import ModelError, WorkerError
from flowrl.workers.model_options import Sampling
from flowrl.workers.tokens.sampling import SamplingArguments

WORDS = ["<pad>", ";", "a", "b", "c", "d"]


def build_tokenizer():
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(WORDS)}, []))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";")


MODEL = fl.Model(
    config={
        "model_type": "qwen2",
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    tokenizer=build_tokenizer,
)

DECLARED = Sampling(max_tokens=9, temperature=0.8, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.1)
SAID = {
    "greedy": True,
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.7,
    "top_k": 2,
    "min_p": 0.2,
    "repetition_penalty": 1.3,
}


class Once(fl.Env):
    """One turn after the prompt."""

    turns = 1

    def reset(self, row, seed):
        return None, ""

    def step(self, state, action):
        return None, "", 0.0, True


def named(of: type | object) -> set[str]:
    return {field.name for field in fields(of)}  # type: ignore[arg-type]


def parameters(op) -> set[str]:
    return set(inspect.signature(op.fn).parameters) - {"self", "batch"}


def test_every_call_that_samples_takes_every_word_of_sampling():
    words = named(Sampling)
    assert named(SamplingArguments) == words
    assert parameters(fl.Actor.generate) == {*words, "n"}
    turn = {"max_tokens": "turn_tokens"}
    assert parameters(fl.Env.rollout) == {turn.get(n, n) for n in words} | {"n", "policy", "turns"} | {
        *("tokens", "seconds", "on_error", "retries", "backoff", "max_failed", "spare", "branches", "messages")
    }
    declared = set(inspect.signature(fl.Actor).parameters)
    assert words - {"greedy", "support"} <= declared


def test_what_a_call_says_stands_over_the_declaration():
    tokenizer = build_tokenizer()
    plain = SamplingArguments().over(DECLARED, ("b", 5), tokenizer)
    assert plain == Sampling(9, 0.8, 0.9, 4, False, (3, 5), 0.1, 1.1)
    for name, value in SAID.items():
        told = SamplingArguments(**{name: value}).over(DECLARED, ("b", 5), tokenizer)
        assert {n for n in named(Sampling) if getattr(told, n) != getattr(plain, n)} == {name}
        assert getattr(told, name) == value
    assert SamplingArguments(stop="c").over(DECLARED, "b", tokenizer).stop == (4,)
    assert SamplingArguments(stop=()).over(DECLARED, "b", tokenizer).stop == ()
    with pytest.raises(ModelError, match="is 2 tokens of this tokenizer"):
        SamplingArguments(stop="ab").over(DECLARED, (), tokenizer)


@pytest.fixture(scope="module")
def actor():
    return fl.open(fl.Actor(MODEL, max_tokens=6))


def rows(op: str):
    ids = fl.Column.of([[2], [3, 4], [5, 2, 3], [4]], dim="prompt", dtype="i32")
    return fl.Batch.of(4, prompt_ids=ids).with_call(CallInfo(seed=7, op=op))


@pytest.mark.parametrize(
    "said",
    [
        {"greedy": True},
        {"temperature": 0.3},
        {"top_p": 0.2},
        {"top_k": 2},
        {"min_p": 0.9},
        {"repetition_penalty": 5.0},
        {"stop": ("a", "b")},
    ],
    ids=lambda said: next(iter(said)),
)
def test_a_rollout_of_one_turn_samples_as_generate_does(actor, said):
    """The same call seeds and arguments give the same tokens, and another word another distribution."""
    played = fl.open(Once()).rollout(rows("same"), policy=actor, n=3, turn_tokens=6, **said)
    made = actor.generate(rows("same"), n=3, **said)
    for name in ("response_ids", "temperature"):
        assert played[name].equal(made[name]), name
    for name in ("rollout_logprobs", "sampling_logprobs"):  # rows that leave one by one are computed beside others
        torch.testing.assert_close(played[name].values, made[name].values, atol=1e-4, rtol=0)
    plain = actor.generate(rows("same"), n=3)
    assert not made["response_ids"].equal(plain["response_ids"])
    cut = set(said) & {"top_p", "top_k", "min_p", "repetition_penalty", "greedy"}
    if cut:
        assert not made["sampling_logprobs"].values.equal(made["rollout_logprobs"].values)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"min_p": 1.5}, "min_p=1.5 is not a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is not a number above 0"),
        ({"top_p": 0.0}, "top_p=0.0 is not a number above 0"),
        ({"top_k": -1}, "top_k=-1 is not a whole number"),
    ],
)
def test_a_rollout_refuses_what_generate_refuses(actor, said, what):
    for call in (
        lambda: fl.open(Once()).rollout(rows("x"), policy=actor, **said),
        lambda: actor.generate(rows("x"), **said),
    ):
        with pytest.raises(fl.FlowError, match=what):
            call()


# -- lr=None ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [fl.Actor, fl.Critic, fl.RewardModel])
def test_without_a_learning_rate_no_worker_is_trained(cls):
    """lr=None says the same of every worker with a model: no optimizer, and no update."""
    from flowrl import rl

    assert cls(MODEL, lr=None).build().optim is None
    assert cls(MODEL, lr=1e-3).build().optim.lr == 1e-3
    assert not cls.is_trained({"lr": None}) and cls.is_trained({"lr": 1e-3})
    loss = {fl.Actor: rl.sft(), fl.Critic: rl.value_clip(), fl.RewardModel: rl.bradley_terry()}[cls]
    flow = fl.Flow("frozen")
    frozen = flow.worker(cls, MODEL, lr=None, name="frozen")
    source = fl.data.rows([{"prompt": "a", "response": "b"}], batch=1, response="response")

    @flow.program
    def train() -> None:
        for step, batch in flow.steps(source, 1):
            flow.log(step, frozen.update(batch, loss=loss))

    said = [str(error) for error in flow.check("train").errors]
    assert any("is not trained: it has no lr." in text for text in said), said


def test_the_defaults_of_a_learning_rate():
    assert fl.Actor(MODEL).build().optim.lr == fl.Critic(MODEL).build().optim.lr == 1e-5
    assert fl.RewardModel(MODEL).build().optim is None


def test_a_declaration_that_cannot_be_made_says_so_at_its_line():
    """The handle makes each worker once, so that no class has to look at its own arguments."""

    class Unsigned:
        __signature__ = "none"

        def __call__(self, **columns):
            return 0.0

    flow = fl.Flow("unsigned")
    with pytest.raises(WorkerError, match="FunctionReward cannot be made with these arguments: TypeError") as error:
        flow.worker(fl.FunctionReward, Unsigned())
    assert error.value.at is not None


def test_one_generator_for_the_whole_module_stays_as_it_is(actor):
    """Sampling takes no number from torch's generator."""
    state = torch.random.get_rng_state()
    actor.generate(rows("same"), min_p=0.1)
    assert torch.equal(torch.random.get_rng_state(), state)
