"""Plays environments of Aviary by a policy, then by Aviary itself with the same answers; prints both as JSON."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from adapter_play import page_trained, played
from aviary.env import DummyEnv, DummyTaskDataset, EnvsTaskDataset
from aviary.envs.gsm8k.env import GSM8kDataset
from aviary.message import Message
from aviary.tools import ToolCall, ToolCallFunction, ToolRequestMessage

from flowrl.environments import AviaryEnvironment
from flowrl.errors import WorkerError

SUMS = [{"question": f"{a}+{b}?", "answer": f"It is that. #### {a + b}"} for a in (1, 2) for b in (1, 2, 3)]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


SAID = [
    *(call("submit_answer", answer=str(n)) for n in (2, 3, 4)),
    call("submit_answer", answer="much"),
    call("submit_answer", reply="2"),
    call("calculator", expr="1+1"),
    call("calculator", expr="1/0"),
    call("calculater", expr="1+1"),
    "<tool_call>{</tool_call>",
    "two",
]
TOLD = [
    *(call("print_story", story=word) for word in ("once", "upon")),
    call("cast_int", x=2.5),
    call("cast_int", x="2"),
    call("get_random_int") + call("cast_float", x="1.5"),
    "a",
]


class Stories(AviaryEnvironment):
    """Environments that the package has, one for each task."""

    def make(self):
        return EnvsTaskDataset([DummyEnv(task=task, end_immediately=False) for task in ("owls", "mice")])


def request(text):
    """An answer as Aviary takes it, read by hand."""
    asked = []
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", text):
        good = body.endswith("}") and "reply" not in body and "calculater" not in body and '"x": "2"' not in body
        found = json.loads(body) if good else {"name": "INVALID", "arguments": {}}
        asked.append(ToolCall(id=str(len(asked)), function=ToolCallFunction(**found)))
    return ToolRequestMessage(content=text, tool_calls=asked)


async def given(env, texts):
    await env.reset()
    rewards, ends = [], []
    for text in texts:
        _, reward, done, truncated = await env.step(request(text))
        rewards.append(float(reward))
        ends.append("done" if done else "truncated" if truncated else "")
    return {"rewards": rewards, "ends": ends}


def both(env, data, words, **how):
    found = played(env, words, n=6, max_tokens=1, **how)
    for row in found["rows"]:
        place = row["task"]["task"]
        other = data.get_new_env() if isinstance(data, DummyTaskDataset) else data.get_new_env_by_idx(place)
        row["theirs"] = asyncio.run(given(other, row["texts"]))
    return found


def refused(env):
    try:
        return list(env.rows()) and list(env.schemas)
    except WorkerError as error:
        return str(error)


class Mixed(AviaryEnvironment):
    def make(self):
        return EnvsTaskDataset([DummyEnv(), GSM8kDataset(**self.options).get_new_env_by_idx(0)])


class Forgets(AviaryEnvironment):
    """Begins otherwise each time."""

    begun = 0

    def make(self):
        class Counts(DummyEnv):
            async def reset(self):
                Forgets.begun += 1
                _, tools = await super().reset()
                return [Message(content=str(Forgets.begun))], tools

        return EnvsTaskDataset([Counts()])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.jsonl").write_text("\n".join(map(json.dumps, SUMS)))
        options: dict[str, Any] = {"split": "train_full", "hf_source": folder}
        sums = GSM8kDataset(**options)
        page = {'"gsm8k", split="train"': f'"gsm8k", split="train_full", hf_source={folder!r}'}
        found = {
            "sums": both(AviaryEnvironment("gsm8k", **options), sums, SAID, tasks=6, turns=4),
            "stories": both(Stories(), Stories().make(), TOLD, tasks=2, turns=4),
            "endless": both(AviaryEnvironment("dummy", tasks=3), DummyTaskDataset(), TOLD, tasks=3, turns=4),
            "forgets": played(Forgets(), TOLD, tasks=1, n=2),
            "page": page_trained("Environments of Aviary", SAID, page),
            "refused": [
                refused(AviaryEnvironment("gsm8")),
                refused(AviaryEnvironment("dummy")),
                refused(AviaryEnvironment("gsm8k", splt="train")),
                refused(Mixed(**options)),
            ],
        }
    print(f"\n{json.dumps(found)}")
