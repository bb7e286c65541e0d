"""Plays the taskset `openenv` of verifiers 0.4 by a policy, then OpenEnv's own client with the same answers."""

from __future__ import annotations

import json
import sys

URL = sys.argv[1]
sys.path += sys.argv[2:]  # the client of OpenEnv and what it imports, behind the packages of verifiers

from adapter_play import page_trained, played  # noqa: E402
from openenv import GenericEnvClient  # noqa: E402

from flowrl.environments import TasksetEnvironment  # noqa: E402

LETTERS = list("abcde")


def raw(row):
    """The rewards that the server gives for the answers of a row."""
    with GenericEnvClient(base_url=URL).sync() as client:
        client.reset(**TASKS[row["task"]["task"]])
        return [client.step({"message": text}).reward for text in row["texts"] if text.strip()]


TASKS = [{"seed": 0}, {"seed": 1}]

if __name__ == "__main__":
    env = TasksetEnvironment("openenv", base_url=URL, resets=TASKS)
    found = {"played": played(env, LETTERS, tasks=2, n=4, max_tokens=3, turns=3)}
    for row in found["played"]["rows"]:
        row["theirs"] = raw(row)
    changed = {'"http://127.0.0.1:8000"': repr(URL)}
    found["page"] = page_trained("A taskset of verifiers with servers of OpenEnv", LETTERS, changed)
    print(f"\n{json.dumps(found)}")
