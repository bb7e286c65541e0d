"""The example of docs/agents.md trains a small model; clients that people use are trained the same way."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flowrl as fl

pytest.importorskip("h11", reason="the gateway needs the package h11")
PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


def small_model():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", ";", *"0123456789+=", "Sure?", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"Sure\?|."), "isolated")
    tokenizer.decoder = decoders.Fuse()

    def build():
        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";", padding_side="left"
        )
        made.chat_template = (
            "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %};{% endif %}{% endfor %}"
        )
        return made

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = {"model_type": "llama", "vocab_size": len(words), "max_position_embeddings": 64, **sizes, **ids}
    return fl.Model(config={**config, "num_key_value_heads": 4}, tokenizer=build)


def page():
    """The names of the page's program, with a model that is small."""
    names = {"__name__": "page"}
    [block] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert '"Qwen/Qwen3-0.6B"' in block
    names["small"] = small_model()
    exec(compile(block.replace('"Qwen/Qwen3-0.6B"', "small"), str(PAGE), "exec"), names)
    return names


def test_the_example_trains(tmp_path):
    page()["flow"].run("train", steps=2, tasks=2, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(
        line["solver/delivered_fraction"] == 1.0 and line["solver/finished"] == 16 for line in lines
    )
    assert all(line["solver/calls"] == 2 and line["solver/forks"] == 0 for line in lines)


def test_the_limits_on_the_page_are_those_of_the_gateway():
    from flowrl.environments.gateway import requests, server, sessions

    text = PAGE.read_text()
    assert (server._LARGEST, server._STRANGE, server._HEAD) == (8 << 20, 64 << 10, 32 << 10)
    for number in (
        requests._MOST,
        server._CONNECTIONS,
        sessions._AT_ONCE,
        int(sessions._PER_SECOND),
        int(server._READING),
    ):
        assert f"{number:,}" in text


CLIENT = """
import json, os, sys
import anthropic, openai
row = json.load(sys.stdin)
messages = [{"role": "user", "content": row["prompt"]}]
client = openai.OpenAI(max_retries=0)
answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=8).choices[0].message
messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
chunks = list(client.chat.completions.create(model="policy", messages=messages, stream=True, max_tokens=8))
said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
plain = [{"role": m["role"], "content": m.get("content") or ""} for m in messages]
said = client.responses.create(model="policy", input=plain, max_output_tokens=8).output_text
plain += [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
with client.responses.stream(model="policy", input=plain, max_output_tokens=8) as stream:
    said = [event for event in stream if event.type == "response.output_text.done"][0].text
plain += [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
other = anthropic.Anthropic(max_retries=0)
found = other.messages.create(model="policy", messages=plain, max_tokens=8).content[0].text
plain += [{"role": "assistant", "content": found}, {"role": "user", "content": "Sure?"}]
with other.messages.stream(model="policy", messages=plain, max_tokens=8) as stream:
    print(stream.get_final_text(), end="")
try:
    openai.OpenAI(api_key="wrong", max_retries=0).chat.completions.create(model="policy", messages=messages)
except openai.AuthenticationError:
    pass
else:
    sys.exit("a wrong key was taken")
"""


@pytest.mark.nightly
def test_the_clients_of_openai_and_anthropic_are_trained(tmp_path):
    """In an environment of their own, as they pin other packages."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    installed = subprocess.run([python, "-m", "pip", "install", "-q", "openai", "anthropic"], capture_output=True)
    if installed.returncode:
        pytest.skip("the package index gives no openai and anthropic")
    played = play_with(python)
    assert set(played.outcome.to_list()) == {"finished"}, played.failed_why.to_list()
    assert set(played.turns.to_list()) == {6} and {each["forks"] for each in played.scores.to_list()} == {0.0}


def play_with(python):
    from flowrl.batch import CallInfo

    class Clients(fl.environments.AgentEnvironment):
        command = (python, "-c", CLIENT)

        def rows(self):
            return []

    actor = fl.open(fl.Actor(small_model(), max_tokens=4), name="actor")
    source = fl.data.rows([{"prompt": "1+2="}, {"prompt": "3+4="}], batch=2, shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, actor.tokenizer).with_call(CallInfo(seed=3, op="x.rollout"))
    worker = fl.open(Clients(), name="clients")
    try:
        return worker.rollout(batch, policy=actor, n=2, on_error="mark", max_failed=1.0)
    finally:
        worker.close()
