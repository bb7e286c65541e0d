"""Plays servers of NeMo Gym, given their addresses and the rows of their examples, by a policy; prints what came of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from adapter_play import page_trained, played

from flowrl.environments import NeMoGymEnvironment


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALLS = [call("increment_counter", count=count) for count in (1, 2, 3)]
WRONG = [call("increment_counter", count="many"), call("verify", reward=1)]
WORDS = {
    "example_session_state_mgmt": ["done", *CALLS, *WRONG, call("get_counter_value")],
    "mcqa": [rf"\boxed{{{letter}}}" for letter in "ABCD"],
    "example_multi_turn_gymnasium": ["Eiffel", "20", "no"],
    "blackjack": ["<action>hit</action>", "<action>stand</action>"],
    "example_mcp_weather": [call("get_weather", city="Paris"), "The weather in Paris is sunny and 72 F."],
}
#: Where tools are called an answer has to end by itself: a call that is cut off is none.
MOST = {"example_session_state_mgmt": 2, "example_mcp_weather": 2}

if __name__ == "__main__":
    where = json.loads(sys.argv[1])
    found = {}
    for name, (url, data) in where.items():
        env = NeMoGymEnvironment(url, data=data, tasks=2)
        found[name] = played(env, WORDS[name], tasks=2, n=64, turns=5, max_tokens=MOST.get(name, 1))
    url, data = where["example_session_state_mgmt"]
    changed = {'"http://127.0.0.1:8001"': repr(url), '"example.jsonl"': repr(str(Path(data)))}
    words = ["done", *(call("increment_counter", count=count) for count in (1, 3))]
    found["page"] = page_trained("Rows of NeMo Gym", words, changed)
    print(f"\n{json.dumps(found)}")
