"""An agent that knows an address and a key, and the tokenizer of those that talk to it."""

from __future__ import annotations

import json
import urllib.request

from letters import build_tokenizer

from flowrl.environments import AgentEnvironment, metric, reward

TEMPLATE = (
    "{% for m in messages %}{{ 'a' if m.role == 'user' else 'b' if m.role == 'tool' else '' }}{{ m.content }}"
    "{% if m.role == 'assistant' %};{% endif %}{% endfor %}"
)


def tokenizer():
    made = build_tokenizer()
    made.chat_template = TEMPLATE
    return made


def post(task, path, body, **headers):
    """What a client does that knows an address and a key."""
    sent = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json", **headers}
    url = task.base_url.removesuffix("/v1") + path
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), sent), timeout=60) as answer:
        found = answer.read().decode()
    return found if answer.headers["Content-Type"] == "text/event-stream" else json.loads(found)


def chat(task, messages, **more):
    return post(task, "/v1/chat/completions", {"model": "policy", "messages": messages, **more})


class Talks(AgentEnvironment):
    """Three turns of one conversation."""

    def rows(self):
        return []

    def agent(self, task):
        messages = [{"role": "system", "content": "c"}, {"role": "user", "content": task.row["prompt"]}]
        for turn in range(3):
            answer = chat(task, messages)["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": "de"[turn % 2]}]
        return "".join(message["content"] or "" for message in messages)

    @reward()
    def length(self, state):
        return float(len(state.result or ""))

    @metric
    def turns_seen(self, state):
        return float(state.turn)
