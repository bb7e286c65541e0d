"""A taskset of verifiers 0.4: its tasks, hooks and rewards run unchanged; the policy answers the calls of its agent."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...errors import WorkerError
from ...workers.base import Opening
from ..gateway.agents import Task
from ..opened_once import opened_once
from .packages import import_package
from .verifiers_rollouts import VerifiersRollouts, failure_named

if TYPE_CHECKING:
    from ..environment import State

_CHAT = "flowrl-chat"  # the harness that runs in this process
_numbers = itertools.count()


class TasksetEnvironment(VerifiersRollouts):
    """Play a taskset of verifiers 0.4: ``TasksetEnvironment("gsm8k-v1", tasks=500)``.

    ``taskset`` is the module or package of the taskset, and further options are the fields of its config. ``tasks``
    is the most tasks that are taken; an infinite taskset needs it. An episode is an episode of verifiers' own: setup,
    agent, stop conditions, finalize and scoring run as they are, and each call of the model goes through a gateway, so
    sampled ids stay as they are. The reward is that of the trace, and rewards and metrics are in ``scores`` by name.
    ``finish_reason`` is the stop condition. ``state.result`` is the trace.

    ``harness`` names the program that plays: ``"null"``, ``"bash"`` and others of verifiers are processes. Without one,
    the chat program of verifiers, which is that of ``null``, runs in this process. A task or a harness that needs a
    container is refused. An environment of several agents is refused too, as one policy is trained.

    >>> sums = fl.environments.TasksetEnvironment("gsm8k-v1", tasks=500)
    >>> sums.taskset, sums.tasks, sums.harness
    ('gsm8k-v1', 500, None)
    """

    def __init__(
        self, taskset: str = "", *, tasks: int | None = None, harness: str | None = None, **options: Any
    ) -> None:
        self.taskset, self.tasks, self.harness, self.options = taskset, tasks, harness, options

    def make(self) -> Any:
        """Load the environment of verifiers that plays the taskset. Raises WorkerError where that fails."""
        package = _package(self)
        loaders = import_package("verifiers.v1.utils.loaders", extra="verifiers-tasksets", asks=self)
        sys.modules.setdefault(_CHAT.replace("-", "_"), _chat_module(package))
        try:
            config = loaders.resolve_env_config({"taskset": {"id": self.taskset, **self.options}})
            roles = [name for name, value in config if isinstance(value, package.AgentConfig)]
            if len(roles) != 1:
                raise WorkerError(
                    f"{type(self).__name__}: '{self.taskset}' has {len(roles)} agents: {', '.join(roles)}.",
                    fix="Take a taskset whose environment has one agent: one policy is trained.",
                )
            if loaders.harness_class(self.harness or _CHAT).NEEDS_CONTAINER:
                raise WorkerError(
                    f"{type(self).__name__}: the harness '{self.harness}' of verifiers needs a container.",
                    fix="No container is started here: take 'bash', 'null' or another that needs none.",
                )
            own = {"harness": {"id": self.harness or _CHAT}, "runtime": {"type": "subprocess"}}
            role = getattr(config, roles[0]).model_dump(exclude_unset=True) | own
            changed = {roles[0]: package.AgentConfig.model_validate(role)}
            return loaders.load_environment(config.model_copy(update=changed))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            fix = "Name an installed module that exports a Taskset, and fields of its config."
            raise WorkerError(f"{type(self).__name__}: '{self.taskset}' cannot be loaded: {error}", fix=fix) from error

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The tasks: the prompt of each, its place in the taskset and its key."""
        return [
            {"prompt": _prompt(task.data), "task": place, "key": task.key} for place, task in enumerate(self._tasks)
        ]

    def agent(self, task: Task) -> Any:
        """Run an episode of verifiers, and return its trace."""
        return self._wait_for(self._roll_out(task))

    def open(self, opening: Opening) -> None:
        super().open(opening)
        _ = self._tasks  # before several threads ask for them
        self._served = self._wait_for(_enter(self._made))

    def close(self) -> None:
        served = vars(self).pop("_served", None)
        if served is not None:
            self._wait_for(_leave(*served))
        super().close()

    @opened_once
    def _made(self) -> Any:
        return self.make()

    @opened_once
    def _tasks(self) -> list[Any]:
        view = self._made.taskset
        if not view.bounded and self.tasks is None:
            fix = "Write tasks=, the most that are taken."
            raise WorkerError(f"{type(self).__name__}: '{self.taskset}' has tasks without end.", fix=fix)
        found = list(view if self.tasks is None else view.take(self.tasks))
        for task in found:
            if task.NEEDS_CONTAINER or task.data.image is not None:
                need = f"the image {task.data.image}" if task.data.image else "a container"
                raise WorkerError(
                    f"{type(self).__name__}: task {task.data.idx} of '{self.taskset}' needs {need}.",
                    fix="No container is started here: take tasks that need none.",
                )
        return found

    async def _roll_out(self, task: Task) -> Any:
        """Play an episode. Its key is in the environment of this process meanwhile, where verifiers looks for it."""
        package, variable = _package(self), f"FLOWRL_API_KEY_{next(_numbers)}"
        os.environ[variable] = task.api_key
        try:
            client = package.EvalClientConfig(base_url=task.base_url, api_key_var=variable)
            context = package.ModelContext(model="policy", client=client)
            episode = await self._made.run_episode(self._task_of(task.row), context)
        finally:
            del os.environ[variable]
        if episode.errors:
            raise failure_named({episode.errors[-1].type}, f"{episode.errors[-1].type}: {episode.errors[-1].message}")
        return episode.traces[0]

    def _task_of(self, row: Mapping[str, Any]) -> Any:
        found = self._tasks[int(row["task"])]
        if found.key != row["key"]:
            raise ValueError(f"task {row['task']} of '{self.taskset}' is another one here: its key is {found.key}")
        return found

    # -- ends and grades ----------------------------------------------------------------------------------------------

    def _failure(self, result: Any, *, cut: bool) -> Exception | None:
        if result.ok:
            return None
        error = result.errors[-1]
        return failure_named({error.type}, f"{error.type}: {error.message}")

    def _stopped_by(self, result: Any) -> str | None:
        return result.stop_condition

    async def _graded(self, state: State) -> tuple[float, dict[str, float]]:
        total, scores = await super()._graded(state)
        trace: Any = state.result  # type: ignore[attr-defined]
        scores |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        scores |= {name: float(reward.score) for name, reward in trace.rewards.items() if reward is not None}
        return total + float(trace.reward), scores


def _package(env: TasksetEnvironment) -> Any:
    """The package, with the interface of 0.4."""
    package = import_package("verifiers", extra="verifiers-tasksets", asks=env)
    try:
        return import_package("verifiers.v1", extra="verifiers-tasksets", asks=env)
    except WorkerError as error:
        version = getattr(package, "__version__", "")
        fix = "pip install 'flowrl-lm[verifiers-tasksets]', which takes 0.4; 0.3 is played by VerifiersEnvironment."
        raise WorkerError(f"verifiers {version} has no tasksets: {error}", fix=fix) from error


async def _enter(made: Any) -> tuple[asyncio.Event, asyncio.Task[None]]:
    """Open what all episodes share; one task opens and closes it, as its contexts ask for."""
    opened, closing = asyncio.Event(), asyncio.Event()

    async def serve() -> None:
        async with made.serving():
            # An interception server keeps a client for each key that it has seen, so each episode gets one of its own.
            made._interception = None
            opened.set()
            await closing.wait()

    serving, ready = asyncio.create_task(serve()), asyncio.create_task(opened.wait())
    await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        ready.cancel()
        await serving  # raises what has failed
    return closing, serving


async def _leave(closing: asyncio.Event, serving: asyncio.Task[None]) -> None:
    closing.set()
    await serving


def _prompt(data: Any) -> Any:
    """The prompt of a task, as messages where it has several or a system message.

    Where its environment speaks first there is none, and its name takes the place: what the model sees is in its calls.
    """
    if not data.prompt:
        return str(data.name or data.idx)
    prompt = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else _plain(data.prompt or ())
    return [{"role": "system", "content": data.system_prompt}, *prompt] if data.system_prompt else prompt


def _plain(messages: Iterable[Any]) -> list[dict[str, Any]]:
    return [message.model_dump(mode="json", exclude_none=True) for message in messages]


def _chat_module(package: Any) -> ModuleType:
    """A module with a harness, as verifiers finds one: its chat program, run in this process instead of a new one."""
    from openai import APIStatusError, AsyncOpenAI
    from verifiers.v1.dialects.chat import message_to_wire  # type: ignore[import-not-found]
    from verifiers.v1.harnesses.null import NullHarness  # type: ignore[import-not-found]
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE  # type: ignore[import-not-found]

    program: dict[str, Any] = {"__name__": "flowrl_chat_program"}
    exec(compile(CHAT_PROGRAM_SOURCE, "verifiers chat program", "exec"), program)

    class ChatHarness(NullHarness):
        """The chat loop of verifiers in this process."""

        async def setup(self, runtime: Any) -> None:
            """Nothing is installed."""

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: Mapping[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            """Run the loop until the model calls no tool, or is refused a further turn."""
            from argparse import Namespace
            from contextlib import AsyncExitStack

            import httpx

            system, prompt = self.resolve_prompt(data)
            opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
            messages = [{"role": "system", "content": system}] if system else []
            messages += [each if isinstance(each, dict) else message_to_wire(each) for each in opening]
            async with AsyncExitStack() as stack:
                web = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
                client = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=web, max_retries=0)
                servers = {n: {"url": url, "timeout": self.config.tool_timeout} for n, url in mcp_urls.items()}
                connected: Any = ([], {}, {})
                if servers:
                    connected = await program["connect_mcp"]({"mcpServers": servers}, stack, set())
                tools, dispatch, open_servers = connected
                compactor = program["Compactor"](client, ctx.model, tools, False, None)
                compactor.note_good(messages)
                asked = Namespace(tool_interception_url=tool_interception_url or "", api_key=secret)
                asked.bash = asked.edit = asked.search = False
                try:
                    await program["run_chat_loop"](asked, compactor, messages, dispatch, open_servers, web)
                except APIStatusError as refused:
                    if refused.status_code != 410:  # as the gateway answers once a limit has ended the episode
                        raise
            return package.ProgramResult(0, "", "")

    module = ModuleType(_CHAT.replace("-", "_"))
    ChatHarness.__module__ = module.__name__
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    return module
