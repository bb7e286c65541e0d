"""Rows of NeMo Gym, played with their resources server: its tools and its grades, the policy as its agent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...errors import DataError, WorkerError
from ...workers.base import Opening
from ...workers.episodes import GraderFailed
from ..gateway import responses
from ..gateway.agents import Task
from ..gateway.requests import Refused
from ..opened_once import opened_once
from .nemo_gym_server import ResourcesServer, offered
from .package_rollouts import PackageRollouts

if TYPE_CHECKING:
    from ..environment import State

_OVER = 410  # as the gateway answers once the episode is over
_OWN = {"reward", "response", "responses_create_params"}
_NOTHING = {"id": "resp_none", "object": "response", "created_at": 0, "model": "policy", "output": []}
_NOTHING |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


@dataclass
class _Played:
    """What an episode leaves behind."""

    reward: float = 0.0
    scores: dict[str, float] = field(default_factory=dict[str, float])
    ended: str = "done"
    refused: str = ""  # why the policy did not answer


class NeMoGymEnvironment(PackageRollouts):
    """Play rows of NeMo Gym: ``NeMoGymEnvironment("http://127.0.0.1:8001", data="example.jsonl")``.

    ``url`` is the address of a resources server that runs, and ``data`` a file of its rows, at most ``tasks`` of them.
    An episode is what NeMo Gym's agents ``simple_agent`` and ``gymnasium_agent`` play: the session is seeded with the
    row, the policy is asked with the input and the tools of the row, the server runs the tools that it calls, and
    verifies what was said once an answer calls none. A server with ``reset`` and ``step`` is asked after each answer
    instead, and its rewards add up. Tools over MCP are those of the session.

    The reward is the server's; other numbers that it gives are in ``scores``, those of ``reward_components`` too. What
    ``seed_session``, ``reset`` or ``step`` raises fails the episode, what ``verify`` raises is a ``grader_failure``.

    >>> counter = fl.environments.NeMoGymEnvironment("http://127.0.0.1:8001", data="example.jsonl", tasks=100)
    >>> counter.url, counter.tasks
    ('http://127.0.0.1:8001', 100)
    """

    def __init__(self, url: str = "", *, data: str | Path = "", tasks: int | None = None) -> None:
        self.url, self.data, self.tasks = url, data, tasks

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The tasks: the input of each row as the prompt, and the row itself as JSON."""
        _ = self._paths  # an address without a server is told first
        return [{"prompt": prompt, "task": place, "entry": entry} for place, (prompt, entry) in enumerate(self._read())]

    def agent(self, task: Task) -> Any:
        """Play an episode with the server, and return what it gives."""
        row = json.loads(task.row["entry"])
        conversation = _Conversation(task, row, ResourcesServer(self.url, seconds=self.timeout))
        task.session.at_end(conversation.cut_off)
        return conversation.play(steps=self._has_steps)

    def open(self, opening: Opening) -> None:
        super().open(opening)
        _ = self._paths  # before several threads ask for them

    # -- what is there ------------------------------------------------------------------------------------------------

    @opened_once
    def _paths(self) -> list[str]:
        """What the server can be asked. Raises WorkerError where none is there, or another one."""
        who = type(self).__name__
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise WorkerError(f"{who}: {self.url!r} is no address of a server.", fix="Write http://HOST:PORT.")
        fix = "Start a resources server of NeMo Gym, and write where it listens."
        try:
            found = ResourcesServer(self.url, seconds=60.0).answer("/openapi.json", method="GET")
            paths = list(found.get("paths", {}))
        except (OSError, RuntimeError) as error:
            raise WorkerError(f"{who}: no server answers at {self.url}: {error}", fix=fix) from error
        if not {"/seed_session", "/verify"} <= {*paths} and not {"/reset", "/step"} <= {*paths}:
            raise WorkerError(f"{who}: {self.url} has neither /seed_session and /verify nor /reset and /step.", fix=fix)
        return paths

    @property
    def _has_steps(self) -> bool:
        return {"/reset", "/step"} <= {*self._paths}

    def _read(self) -> Iterable[tuple[Any, str]]:
        """The prompt and the text of each row. Raises DataError."""
        path = Path(self.data)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # a text may have other ends of lines in it
        except (OSError, UnicodeDecodeError) as error:
            fix = "Write data=, a file of NeMo Gym with a JSON object in each line."
            raise DataError(f"{type(self).__name__}: {str(path)!r} cannot be read: {error}", fix=fix) from error
        count = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if self.tasks is not None and count >= self.tasks:
                return
            count += 1
            try:
                yield self._prompt(json.loads(line)), line
            except (Refused, ValueError, TypeError, LookupError, RecursionError) as error:
                why = error.why if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
                raise DataError(
                    f"{type(self).__name__}: line {number} of {path} is no row that can be played: {why}.",
                    fix="A row has responses_create_params, with texts as input and functions as tools.",
                ) from error

    def _prompt(self, row: Mapping[str, Any]) -> Any:
        """The messages that a row begins with. Raises Refused, ValueError, TypeError or LookupError."""
        params = row["responses_create_params"]
        if not params["input"]:
            return "The environment speaks first."  # and what the model sees is in its calls
        request = responses.read(params)
        for tool in request.tools:
            name = tool["function"]["name"]
            if not self._has_steps and not offered(self._paths, name):
                raise ValueError(f"the server has no tool '{name}'")
        return [dict(message) for message in request.messages]

    # -- ends and grades ----------------------------------------------------------------------------------------------

    def _failure(self, result: Any, *, cut: bool) -> Exception | None:
        return RuntimeError(result.refused) if result.refused and not cut else None

    def _stopped_by(self, result: Any) -> str | None:
        return result.ended

    async def _graded(self, state: State) -> tuple[float, dict[str, float]]:
        total, scores = await super()._graded(state)
        played: _Played = state.result  # type: ignore[attr-defined]
        for name, value in played.scores.items():
            scores.setdefault(name, value)
        return total + played.reward, scores


class _Conversation:
    """An episode: what was said so far, with the policy on one side and the server on the other."""

    def __init__(self, task: Task, row: dict[str, Any], server: ResourcesServer) -> None:
        self._row, self._server = row, server
        self._params = dict(row["responses_create_params"])
        given = self._params["input"]
        self._input = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        self._policy = ResourcesServer(task.base_url)
        self._key = {"Authorization": f"Bearer {task.api_key}"}
        self._output: list[dict[str, Any]] = []
        self._latest: dict[str, Any] = _NOTHING
        self._played = _Played()
        self._cut = self._verifies = False

    def cut_off(self) -> None:
        """Wait no longer for the server: the episode is over. It may be called from another thread."""
        self._cut = True
        if not self._verifies:
            self._server.interrupt()

    def play(self, *, steps: bool) -> _Played:
        """Play it to its end, and have it verified."""
        try:
            self._play_steps() if steps else self._play_tools()
        except OSError:
            if not self._cut:
                raise
        if not steps:
            self._verifies = True
            self._verify()
        return self._played

    def _ask(self) -> list[dict[str, Any]]:
        """What the policy says, as items; none where it is not answered."""
        status, said = self._policy.ask(
            "/responses", {**self._params, "input": [*self._input, *self._output]}, headers=self._key
        )
        if status != 200:
            self._played.refused = "" if status == _OVER else f"the policy did not answer: {said[:300]}"
            return []
        self._latest = json.loads(said)
        items = self._latest["output"]
        self._output += items
        return items

    def _play_tools(self) -> None:
        """As simple_agent does: tools are called until an answer calls none."""
        over_mcp = self._server.begin(self._row)
        names = {tool["name"]: False for tool in self._params.get("tools") or []}
        names |= {tool["name"]: True for tool in over_mcp}
        self._params["tools"] = [*(self._params.get("tools") or []), *over_mcp]
        while calls := [item for item in self._ask() if item["type"] == "function_call"]:
            if self._latest["incomplete_details"]:
                break
            for call in calls:
                self._output.append(_given(call, self._called(call, names)))

    def _verify(self) -> None:
        answer = {**self._latest, "output": self._output}
        try:
            found = self._server.answer("/verify", {**self._row, "response": answer})
            self._played.reward = _number(found["reward"])
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            raise GraderFailed(f"verify: {type(error).__name__}: {error}") from error
        self._note(found)

    def _called(self, call: Mapping[str, Any], names: Mapping[str, bool]) -> str:
        """What a tool gives. Only tools that were offered are asked for: the server has other paths."""
        name = call["name"]
        if name not in names:
            return json.dumps({"error": f"There is no tool {name!r}; there are {', '.join(names) or 'none'}."})
        try:
            arguments = json.loads(call["arguments"])
        except ValueError as error:
            return json.dumps({"error": f"The arguments are no JSON: {error}"})
        return self._server.call(name, arguments, over_mcp=names[name])

    def _play_steps(self) -> None:
        """As gymnasium_agent does: a step for each answer, until the server says that it is over."""
        self._observe(self._server.answer("/reset", self._row).get("observation"))
        while self._ask():
            found = self._server.answer("/step", {**self._row, "response": self._latest})
            self._played.reward += _number(found.get("reward", 0.0))
            info = found.get("info") or {}
            if found.get("terminated") or found.get("truncated"):
                self._played.ended = "done" if found.get("terminated") else "truncated"
                self._note(info)
                return
            for given in info.get("tool_outputs") or []:
                self._output.append(_given(given, given["output"]))
            self._observe(found.get("observation"))

    def _observe(self, said: str | None) -> None:
        if said:
            self._output.append({"type": "message", "role": "user", "content": said})

    def _note(self, found: Mapping[str, Any]) -> None:
        """Take the numbers of what a server gave, as scores."""
        parts = found.get("reward_components")
        several = {**{n: v for n, v in found.items() if n not in self._row and n not in _OWN}}
        several |= parts if isinstance(parts, dict) else {}
        for name, value in several.items():
            if isinstance(value, (bool, int, float)) and math.isfinite(value):
                self._played.scores[name] = float(value)


def _given(call: Mapping[str, Any], output: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


def _number(value: Any) -> float:
    if isinstance(value, str) or not math.isfinite(number := float(value)):
        raise ValueError(f"the reward is {value!r}")
    return number
