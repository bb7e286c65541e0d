"""Plays an environment of verifiers by a policy, then by verifiers itself with the same answers; prints both as JSON.

``python verifiers_game.py FOLDER``: the package and what it needs are in that folder.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(sys.argv[1])
sys.path.append(str(Path(__file__).parents[2]))

import verifiers as vf
from datasets import Dataset
from letters import SMALL, model_of
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import flowrl as fl
from flowrl import rl
from flowrl.batch import CallInfo
from flowrl.environments import VerifiersEnvironment

TEMPLATE = (
    "{% for m in messages %}{{ 'a' if m.role == 'user' else 'b' if m.role == 'tool' else '' }}{{ m.content }}"
    "{% if m.role == 'assistant' %};{% endif %}{% endfor %}"
)


CALL = '<tool_call>{"name": "double", "arguments": {"text": "ab"}}</tool_call>'


def tokenizer():
    """Letters, and a call of a tool as one token."""
    words = ["<pad>", ";", *"abcde", CALL]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("<tool_call>.*?</tool_call>|."), "isolated")
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token=";")
    fast.chat_template = TEMPLATE
    return fast


class Echo(vf.MultiTurnEnv):
    """Repeats the last letter."""

    async def env_response(self, messages, state, **more):
        return [vf.UserMessage(content="c" + (messages[-1].content or "")[-1:])]

    @vf.stop
    async def said_e(self, state):
        return any("e" in (step["response"].message.content or "") for step in state["trajectory"])


def double(text: str) -> str:
    """Say it twice.

    Args:
        text: what to say
    """
    return text * 2


def load_environment(groups=False, breaks=False, tools=False):
    def length(completion, answer):
        return sum(len(message.content or "") for message in completion) + float(answer)

    async def messages(completion):
        return float(len(completion))

    def spread(states):
        lengths = [len(state["completion"]) for state in states]
        return [float(length - min(lengths)) for length in lengths]

    class Breaks(Echo):
        async def env_response(self, messages, state, **more):
            raise vf.InfraError("the machine is away")

    rows = [{"prompt": [{"role": "user", "content": "ab"}], "answer": str(i)} for i in range(4)]
    funcs, weights = [length, messages, *([spread] if groups else [])], [0.5, 2.0, *([3.0] if groups else [])]
    rubric = vf.Rubric(funcs=funcs, weights=weights)
    if tools:
        return vf.ToolEnv(tools=[double], dataset=Dataset.from_list(rows), rubric=rubric, max_turns=3)
    return (Breaks if breaks else Echo)(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=3)


class Own(VerifiersEnvironment):
    def make(self):
        return load_environment(**self.arguments)


class Said(vf.Client):
    """Answers with given texts, one after another; an empty one is refused as the package does."""

    def __init__(self, texts):
        self.texts = iter(texts)

    async def get_response(self, prompt, model, sampling_args, tools=None, **more):
        text = next(self.texts)
        if not text:
            raise vf.errors.EmptyModelResponseError("nothing was said")
        asked = {"name": "double", "arguments": '{"text": "ab"}'}
        calls = [vf.types.ToolCall(id=f"call_{i}", **asked) for i in range(text.count(CALL) if tools else 0)]
        content = text.split("<tool_call>")[0].strip() if calls else text
        message = vf.types.ResponseMessage(
            content=content, tool_calls=calls or None, finish_reason="stop", is_truncated=False
        )
        return vf.types.Response(id="x", created=0, model=model, usage=None, message=message)

    setup_client = to_native_tool = to_native_prompt = get_native_response = None
    raise_from_native_response = from_native_response = close = None


def drawn(env):
    source = env.source(batch=4, shuffle=False)
    return source.to_batch(source.cursor().draw(), 0, tokenizer()).with_call(CallInfo(seed=3, op="echo.rollout"))


def trained(env):
    """How far the log-probabilities of the trainer are from those of the rollout, and whether there is a gradient."""
    actor = fl.open(fl.Actor(replace(SMALL, tokenizer=tokenizer), lr=1e-3, max_tokens=4), name="actor")
    worker = fl.open(env, name="echo")
    try:
        batch = rl.group_advantages(worker.rollout(drawn(env), policy=actor, n=4))
    finally:
        worker.close()
    metrics = actor.update(batch, loss=rl.ppo_clip(entropy=0.01))
    return {"gap": metrics.gap_max, "gradient": metrics.grad_norm}


def played(env, **how):
    engine = fl.testing.FakeEngine(vocab=8, stop=(1,), tokenizer=tokenizer())
    policy = fl.open(fl.Actor(model_of(), max_tokens=4), name="actor", engine=engine)
    batch = drawn(env)
    worker = fl.open(env, name="echo")
    try:
        found = worker.rollout(batch, policy=policy, on_error="mark", max_failed=1.0, **how)
        ends = dict(worker.outcomes(found))
    finally:
        worker.close()
    rows = []
    for ids, turns, score, *rest in zip(
        *(found[n].to_list() for n in ("response_ids", "turn_ids", "scores", "rewards", "finish_reason", "outcome")),
        strict=True,
    ):
        texts = [
            tokenizer().decode([i for i, n in zip(ids, turns, strict=True) if n == turn], skip_special_tokens=True)
            for turn in range(max(turns, default=-1) + 1)
        ]
        reward, reason, outcome = rest
        rows.append({"texts": texts, "scores": score, "reward": reward, "reason": reason, "outcome": outcome})
    return {"rows": rows, "delivered": ends["delivered_fraction"]}


async def graded(env, texts, n):
    """What verifiers gives groups of rollouts in which the model says these texts."""
    found = []
    for first in range(0, len(texts), n):
        example = dict(env.get_dataset()[first // n])
        states = [await env.rollout(example, Said(each), "policy", {}) for each in texts[first : first + n]]
        await env.rubric.score_group(states)
        for state in states:
            scored = {"reward": state["reward"], "scores": state["metrics"], "reason": state["stop_condition"]}
            found.append(scored)
    return found


def both(n, **arguments):
    ours = played(Own(**arguments), n=n)
    texts = [row["texts"] for row in ours["rows"]]
    return ours | {"theirs": asyncio.run(graded(load_environment(**arguments), texts, n))}


if __name__ == "__main__":
    found = {"alone": both(3), "groups": both(3, groups=True), "tools": both(6, tools=True)}
    found |= {"cut": played(Own(), n=3, turns=1), "breaks": played(Own(breaks=True), n=3), "trained": trained(Own())}
    print(json.dumps(found))
