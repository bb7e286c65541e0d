"""Agents made of real packages ask the gateway; prints, of each, what came of its episodes as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import flowrl as fl
from flowrl import rl
from flowrl.batch import CallInfo
from flowrl.environments import AgentEnvironment, reward

CHARS = [chr(i) for i in range(32, 127)]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def build_tokenizer() -> Any:
    """A token for each character of ASCII."""
    words = {word: i for i, word in enumerate(["<pad>", "\x04", *CHARS, "\x1a"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="\x1a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="\x04")
    made.chat_template = TEMPLATE
    return made


MODEL = fl.Model(
    config={
        "model_type": "llama",
        "vocab_size": 3 + len(CHARS),
        "max_position_embeddings": 60_000,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    tokenizer=build_tokenizer,
)


class Asks(AgentEnvironment):
    turns = 6

    def rows(self) -> list[dict[str, Any]]:
        return [{"prompt": "What is 2+2?"}]

    @reward()
    def length(self, state: Any) -> float:
        """How much was said."""
        return float(len(state.result))


class OpenAIChat(Asks):
    """Two turns of a conversation, the second one as a stream."""

    def agent(self, task: Any) -> str:
        from openai import OpenAI

        client = OpenAI(base_url=task.base_url, api_key=task.api_key)
        messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
        first = client.chat.completions.create(model="policy", messages=messages, logprobs=True).choices[0]
        assert first.logprobs and first.logprobs.content
        messages += [first.message, {"role": "user", "content": "Sure?"}]
        parts = client.chat.completions.create(model="policy", messages=messages, stream=True)
        return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


class OpenAIAsync(Asks):
    """The same without a thread for each call."""

    async def agent(self, task: Any) -> str:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
        first = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        messages += [first, {"role": "user", "content": "Sure?"}]
        second = await client.chat.completions.create(model="policy", messages=messages)
        return second.choices[0].message.content or ""


class OpenAIResponses(Asks):
    """Two turns, the first as a stream of events."""

    def agent(self, task: Any) -> str:
        from openai import OpenAI

        client = OpenAI(base_url=task.base_url, api_key=task.api_key)
        said: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
        *_, last = client.responses.create(model="policy", input=said, stream=True)
        assert last.type in ("response.completed", "response.incomplete")  # ended, or cut off
        said += [{"role": "assistant", "content": last.response.output_text}, {"role": "user", "content": "Sure?"}]
        return client.responses.create(model="policy", input=said).output_text


class OpenAIKeptResponses(Asks):
    """Two turns, the second one behind the response that it names."""

    def agent(self, task: Any) -> str:
        from openai import OpenAI

        client = OpenAI(base_url=task.base_url, api_key=task.api_key)
        first = client.responses.create(model="policy", input=task.row["prompt"])
        again = client.responses.create(model="policy", input="Sure?", previous_response_id=first.id)
        return again.output_text


class AnthropicMessages(Asks):
    """Two turns, the second one as a stream."""

    def agent(self, task: Any) -> str:
        from anthropic import Anthropic

        client = Anthropic(base_url=task.base_url.removesuffix("/v1"), api_key=task.api_key)
        messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
        first = client.messages.create(model="policy", messages=messages, max_tokens=8)
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Sure?"}]
        with client.messages.stream(model="policy", messages=messages, max_tokens=8) as stream:
            return "".join(stream.text_stream)


class Streams(Asks):
    """Three turns, each as a stream of another client; the pieces of each are its whole text, which goes back."""

    def agent(self, task: Any) -> str:
        from anthropic import Anthropic
        from openai import OpenAI

        client = OpenAI(base_url=task.base_url, api_key=task.api_key)
        messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
        chunks = client.chat.completions.create(model="policy", messages=messages, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        messages += [{"role": "assistant", "content": "".join(pieces)}, {"role": "user", "content": "Sure?"}]
        events = [*client.responses.create(model="policy", input=messages, stream=True)]
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        said = [("".join(pieces), events[-1].response.output_text)]  # type: ignore[union-attr]
        messages += [{"role": "assistant", "content": said[0][0]}, {"role": "user", "content": "Really?"}]
        other = Anthropic(base_url=task.base_url.removesuffix("/v1"), api_key=task.api_key)
        with other.messages.stream(model="policy", messages=messages, max_tokens=8) as stream:
            pieces = [*stream.text_stream]
            said.append(("".join(pieces), stream.get_final_text()))
        assert all(shown == whole for shown, whole in said), said
        return said[-1][1]


class LangChain(Asks):
    """An agent of LangChain with a tool."""

    def agent(self, task: Any) -> str:
        from langchain.agents import create_agent
        from langchain_openai import ChatOpenAI

        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        model = ChatOpenAI(model="policy", base_url=task.base_url, api_key=task.api_key)
        agent = create_agent(model, tools=[add])
        found = agent.invoke({"messages": [{"role": "user", "content": task.row["prompt"]}]})
        again = agent.invoke({"messages": [*found["messages"], {"role": "user", "content": "Sure?"}]})
        return str(again["messages"][-1].content)


class SmolAgents(Asks):
    """An agent of smolagents that calls tools, and is told what is wrong with its answers."""

    def agent(self, task: Any) -> str:
        from smolagents import OpenAIModel, ToolCallingAgent

        model = OpenAIModel(model_id="policy", api_base=task.base_url, api_key=task.api_key)
        agent = ToolCallingAgent(tools=[], model=model, max_steps=2, verbosity_level=0)
        return str(agent.run(task.row["prompt"]))


def play(environment: type[Asks]) -> dict[str, Any]:
    """What came of two episodes of an agent, how far the engine's log-probabilities are from those of whole rows, and
    what an update on all of their branches did, by whether they said much."""
    actor = fl.open(fl.Actor(MODEL, max_tokens=8, lr=1e-2), name="actor")
    worker = fl.open(environment(), name="asks")
    source = worker.source(batch=1)
    batch = source.to_batch(source.cursor().draw(), 0, actor.tokenizer)
    try:
        found = worker.rollout(batch.with_call(CallInfo(seed=3, op="asks.rollout")), policy=actor, n=2, branches=True)
    finally:
        worker.close()
    own, made, mask = actor.logprobs(found).old_logprobs, found.rollout_logprobs, found.response_mask
    inside = mask.values.bool()
    rewards = fl.Column.of([1.0, 0.0], dtype="f32")  # what was said may be of one length
    rows = rl.branches(rl.group_advantages(found.drop("rewards").with_columns({"rewards": rewards})))
    metrics = actor.update(rows, loss=rl.ppo_clip())
    after = actor.logprobs(rows).old_logprobs.values
    trained, good = rows.response_mask.values.bool(), rows.advantages.values > 0
    more = (after - rows.rollout_logprobs.values)[trained & good].mean()
    return {
        "grad_norm": metrics["grad_norm"],
        "tokens": [int(trained.sum()), sum(found.sampled_tokens.to_list())],
        "more": float(more),
        "outcomes": found.outcome.to_list(),
        "why": found.finish_reason.to_list(),
        "calls": [scores["calls"] for scores in found.scores.to_list()],
        "forks": [scores["forks"] for scores in found.scores.to_list()],
        "rewards": found.rewards.to_list(),
        "delivered": worker.outcomes(found)["delivered_fraction"],
        "gap": float((own.values - made.values)[inside].abs().max()),
    }


if __name__ == "__main__":
    made = {each.__name__: each for each in Asks.__subclasses__()}
    print(json.dumps({name: play(made[name]) for name in sys.argv[1:]}))
