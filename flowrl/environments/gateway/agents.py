"""Runs an agent for a session: a function in a thread, or a program."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from .sessions import Ended, Session


@dataclass(frozen=True)
class Task:
    """What an agent is given: a row, and where it asks the model.

    ``row`` are the columns of the data, ``seed`` is the episode's own. ``base_url`` and ``api_key`` are for clients of
    OpenAI's protocol; for those of Anthropic's ``base_url`` is without the ``/v1`` at its end. ``environ`` has both, as
    the clients look for them.

    >>> task = fl.environments.Task({"prompt": "1+1?"}, 7, "http://127.0.0.1:41234/v1", "its key")
    >>> task.environ["ANTHROPIC_BASE_URL"]
    'http://127.0.0.1:41234'
    """

    row: Mapping[str, Any]
    seed: int
    base_url: str
    api_key: str = field(repr=False)
    session: Session = field(default_factory=Session, repr=False)

    @property
    def environ(self) -> dict[str, str]:
        """The variables of the environment that clients read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }


def start_agent(agent: Callable[[Task], Any], task: Task) -> None:
    """Run an agent in a thread; the session is told how it ends."""

    def run() -> None:
        try:
            given = agent(task)
            if inspect.iscoroutine(given):
                given = asyncio.run(given)
            task.session.end(Ended(given))
        except BaseException as error:  # also an exit that it asks for: nobody else is told of it here
            task.session.end(Ended(error=error))

    context = copy_context()  # so that what it prints is told to whom that of the rollout is
    threading.Thread(target=context.run, args=(run,), daemon=True, name="flowrl-agent").start()


def run_program(command: Sequence[str], task: Task) -> str:
    """Run a program to its end: it reads the row as JSON, and its output is the result. Raises RuntimeError."""
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **task.environ},
        start_new_session=True,
        text=True,
    )

    def end() -> None:
        with suppress(ProcessLookupError, PermissionError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    task.session.at_end(end)
    out, err = process.communicate(json.dumps(dict(task.row), default=str))
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {err.strip()[-1000:]}")
    return out
