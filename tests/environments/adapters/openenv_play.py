"""Plays the example server of OpenEnv by a policy, then by OpenEnv's own client with the same answers; prints both."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time

import uvicorn
from adapter_play import page_trained, played
from openenv.cli.commands.init import init
from openenv.core import GenericEnvClient
from openenv.core.env_server.http_server import create_app

from flowrl.environments import OpenEnvEnvironment
from flowrl.errors import WorkerError

LETTERS = list("abcde")
FIELDS = {"action": "message", "observation": "echoed_message"}


def served(app):
    """The address of an app that runs in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    until = time.monotonic() + 120
    while not server.started and time.monotonic() < until:
        time.sleep(0.05)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def raw(url, rows):
    """What the server gives OpenEnv's own client for the answers of these rows."""
    for row in rows:
        row["theirs"] = {"rewards": [], "done": []}
        with GenericEnvClient(base_url=url).sync() as client:
            client.reset(seed=row["task"]["task_seed"])
            for text in row["texts"]:
                result = client.step({"message": text})
                row["theirs"]["rewards"].append(result.reward)
                row["theirs"]["done"].append(result.done)


def both(url, **how):
    found = played(OpenEnvEnvironment(url, tasks=4, **FIELDS), LETTERS, tasks=4, n=3, max_tokens=3, **how)
    raw(url, found["rows"])
    return found


def refused(env):
    try:
        list(env.rows())
    except WorkerError as error:
        return str(error)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        init("echo_env", output_dir=folder)
        sys.path.append(folder)
        from echo_env.models import EchoAction, EchoObservation
        from echo_env.server.app import app  # room for one session
        from echo_env.server.echo_env_environment import EchoEnvironment

    class Counts(EchoEnvironment):
        """Ends after as many answers as its seed says."""

        def reset(self, seed=None, episode_id=None, **more):
            self.left = seed
            return super().reset(seed=seed).model_copy(update={"echoed_message": "abcde"[seed]})

        def step(self, action):
            self.left -= 1
            return super().step(action).model_copy(update={"done": self.left < 0})

    class Forgets(EchoEnvironment):
        """Begins otherwise each time."""

        begun = 0

        def reset(self, seed=None, episode_id=None, **more):
            Forgets.begun += 1
            return super().reset().model_copy(update={"echoed_message": str(Forgets.begun)})

    def served_as(kind):
        return served(create_app(kind, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=64))

    echo, counts, single = served_as(EchoEnvironment), served_as(Counts), served(app)
    found = {"echo": both(echo, turns=3), "counts": both(counts)}
    found["json"] = played(
        OpenEnvEnvironment(echo, tasks=2),
        ["a", '{"message": "ab"}', '{"mesage": 1}'],
        tasks=2,
        n=8,
        turns=2,
        max_tokens=1,
    )
    found["full"] = played(OpenEnvEnvironment(single, tasks=4, **FIELDS), LETTERS, tasks=4, n=3, turns=3, max_tokens=2)
    found["forgets"] = played(OpenEnvEnvironment(served_as(Forgets), tasks=2, **FIELDS), LETTERS, tasks=2, n=2)
    changed = {'"http://127.0.0.1:8000"': repr(echo)}
    found["page"] = page_trained("Servers of OpenEnv", LETTERS, changed)
    found["refused"] = [
        refused(OpenEnvEnvironment("http://127.0.0.1:9")),
        refused(OpenEnvEnvironment(echo, observation="no")),
    ]
    print(f"\n{json.dumps(found)}")
