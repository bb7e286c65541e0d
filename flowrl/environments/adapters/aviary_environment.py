"""An environment of Aviary: its reset and step run as they are, and the policy's calls of tools are its actions."""

from __future__ import annotations

import asyncio
import copy
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...errors import WorkerError, near
from ...workers.base import Opening
from ..opened_once import opened_once
from ..tool_calls import read_tool_calls
from ..tools import fits
from .event_loop import start_loop
from .packages import import_package
from .stepped_environment import SteppedEnvironment

if TYPE_CHECKING:
    from ..environment import State


class AviaryEnvironment(SteppedEnvironment):
    """Play tasks of Aviary: ``AviaryEnvironment("gsm8k", split="train", tasks=500)``.

    ``dataset`` is a task data set or an environment that the package ``aviary`` has by name, and further options are
    theirs; a subclass may define ``make()`` instead. ``tasks`` is the most tasks that are taken; a data set without an
    end needs it. The prompt of a task is what its environment says first, and an episode that begins otherwise fails.

    The tools are those of the environment, and its prompts show them; all tasks have the same. An answer becomes a
    ``ToolRequestMessage`` with the calls in it, also where there are none. A call of no such tool, or with other
    arguments than its schema has, is a call of Aviary's tool ``INVALID``, and counts in ``bad_tool_calls``. Rewards are
    those of the environment, turn by turn, and an episode ends as ``done`` or ``truncated`` where it says so. What
    ``step`` raises fails the episode, without a reward.

    >>> sums = fl.environments.AviaryEnvironment("gsm8k", split="train", tasks=500)
    >>> sums.dataset, sums.tasks, sums.options
    ('gsm8k', 500, {'split': 'train'})
    """

    def __init__(self, dataset: str = "", *, tasks: int | None = None, **options: Any) -> None:
        self.dataset, self.tasks, self.options = dataset, tasks, options

    def make(self) -> Any:
        """Make a ``TaskDataset``. Raises WorkerError for an unknown name or option."""
        core = _package(self)
        known = {**core.ENV_REGISTRY, **core.TASK_DATASET_REGISTRY}
        if self.dataset not in known:
            meant = near(self.dataset, known)
            fix = f"Did you mean '{meant}'?" if meant else f"There are {', '.join(sorted(known))}."
            raise WorkerError(f"{type(self).__name__}: aviary has nothing named '{self.dataset}'.", fix=fix)
        try:
            if self.dataset in core.TASK_DATASET_REGISTRY:
                return core.TaskDataset.from_name(self.dataset, **self.options)
            return core.EnvsTaskDataset(core.Environment.from_name(self.dataset, **self.options))
        except (ImportError, OSError, TypeError, ValueError) as error:
            fix = "Options are those of the data set or environment; some need a package such as aviary.gsm8k."
            raise WorkerError(f"{type(self).__name__}: '{self.dataset}' cannot be made: {error}", fix=fix) from error

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The tasks: the first messages of each, and its place in the data set."""
        return [{"prompt": first, "task": place} for place, (first, _) in enumerate(self._begun)]

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools of the environments, as chat templates take them."""
        listed = [tools for _, tools in self._begun]
        other = next((place for place, tools in enumerate(listed) if tools != listed[0]), None)
        if other is not None:
            raise WorkerError(
                f"{type(self).__name__}: task {other} of '{self.dataset}' has other tools than task 0.",
                fix="Take tasks with the same tools: the prompts of a source show the same.",
            )
        return listed[0] if listed else []

    async def setup(self, state: Any) -> None:
        """Make the environment of the task, and reset it."""
        env = self._env(int(state.row["task"]))
        state.end = weakref.finalize(state, self._end, env)  # its grade calls this, else whoever forgets it
        state.end.atexit = False
        messages, tools = await self._there(env.reset())
        state.offered = _schemas(tools)
        self.begin(state, env, _shown(messages))

    async def respond(self, state: Any) -> list[dict[str, Any]]:
        """Take the calls of an answer, and show what is observed then."""
        tools = import_package("aviary.tools", extra="aviary", asks=self)
        asked: list[Any] = []
        for call in read_tool_calls(state.response, list(state.offered)):
            good = not call.error and _is_call(call.name, call.arguments, state.offered)
            state.tool_calls += 1
            state.bad_tool_calls += not good
            name, given = (call.name, dict(call.arguments)) if good else (tools.INVALID_TOOL_NAME, {})
            function = tools.ToolCallFunction(name=name, arguments=given)
            asked.append(tools.ToolCall(id=tools.ToolCall.generate_id(), function=function))
        request = tools.ToolRequestMessage(content=state.response, tool_calls=asked)
        observed, reward, done, truncated = await self._there(state.env.step(request))
        self.took(state, "", float(reward), "done" if done else "truncated" if truncated else "")
        return _shown(observed)

    def open(self, opening: Opening) -> None:
        super().open(opening)
        _ = self._loop, self._made  # before several threads ask for them

    def close(self) -> None:
        loop = self.__dict__.pop("_loop", None)
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        super().close()

    @opened_once
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop in which all environments run, as they may share clients among them."""
        return start_loop("flowrl-aviary")

    async def _there(self, running: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, self._loop))

    @opened_once
    def _made(self) -> Any:
        return self.make()

    def _env(self, place: int) -> Any:
        """A new environment of a task."""
        data = self._made
        if not _is_finite(data):
            return data.get_new_env()
        env = data.get_new_env_by_idx(place)
        return copy.deepcopy(env) if isinstance(data, _package(self).EnvsTaskDataset) else env

    @opened_once
    def _begun(self) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
        """What each task says first, and its tools."""
        data = self._made
        if _is_finite(data):
            count = len(data) if self.tasks is None else min(self.tasks, len(data))
        elif self.tasks is None:
            fix = "Write tasks=, the most that are taken."
            raise WorkerError(f"{type(self).__name__}: '{self.dataset}' has tasks without end.", fix=fix)
        else:
            count = self.tasks

        async def begin(place: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            env = self._env(place)
            try:
                messages, tools = await env.reset()
                return _shown(messages), list(_schemas(tools).values())
            finally:
                await env.close()

        async def begin_all() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
            return [await begin(place) for place in range(count)]

        return asyncio.run(begin_all())

    def _end(self, env: Any) -> None:
        loop = self.__dict__.get("_loop")
        if loop is not None and loop.is_running():
            asyncio.run_coroutine_threadsafe(env.close(), loop)

    async def _graded(self, state: State) -> tuple[float, dict[str, float]]:
        state.end()  # type: ignore[attr-defined]
        total, scores = await super()._graded(state)
        scores |= {"tool_calls": float(state.tool_calls), "bad_tool_calls": float(state.bad_tool_calls)}
        return total, scores


def _package(env: AviaryEnvironment) -> Any:
    return import_package("aviary.env", extra="aviary", asks=env)


def _is_finite(data: Any) -> bool:
    try:
        return len(data) >= 0
    except TypeError:
        return False


def _shown(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of Aviary as ours. Raises ValueError for images."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message.is_multimodal:
            raise ValueError("an observation has an image, and the policy reads text")
        shown = {"role": message.role, "content": message.content or ""}
        if message.role == "tool":
            shown["name"] = message.name
        found.append(shown)
    return found


def _schemas(tools: Sequence[Any]) -> dict[str, dict[str, Any]]:
    return {
        tool.info.name: {"type": "function", "function": tool.info.model_dump(exclude_none=True, by_alias=True)}
        for tool in tools
    }


def _is_call(name: str, arguments: Any, offered: Mapping[str, Any]) -> bool:
    """Whether there is such a tool, and its schema has these arguments."""
    if name not in offered or not isinstance(arguments, Mapping):
        return False
    schema = offered[name]["function"].get("parameters") or {}
    properties = schema.get("properties") or {}
    if not set(schema.get("required") or ()) <= set(arguments) <= set(properties):
        return False
    return all(_fits(value, properties[key]) for key, value in arguments.items())


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    try:
        return fits(value, schema)
    except KeyError:  # a type that is not JSON's, as Aviary writes for lists
        return True
