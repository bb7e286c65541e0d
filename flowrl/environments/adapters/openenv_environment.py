"""An environment that a server of OpenEnv offers: each episode is a session of its own, over a WebSocket."""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from collections.abc import Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import WorkerError
from ...workers.base import Opening
from ..opened_once import opened_once
from .event_loop import start_loop
from .packages import import_package
from .stepped_environment import SteppedEnvironment

if TYPE_CHECKING:
    from ..environment import State

_CODE = re.compile(r"\(code: (?:WSErrorCode\.)?(\w+)\)$")


class OpenEnvEnvironment(SteppedEnvironment):
    """Play what a server of OpenEnv offers: ``OpenEnvEnvironment("http://127.0.0.1:8000", action="message")``.

    ``url`` is the address of a server that runs. There are ``tasks`` tasks, whose seeds go up from ``seed``; further
    options go to its ``reset``. The prompt of a task is its first observation, and all its episodes are reset with its
    seed; one that begins with another observation fails, as its seed does not decide it.

    ``action`` is the field of an action that an answer is; without it an answer is the action as a JSON object.
    ``observation`` is the field that the policy sees; without it the whole observation as JSON. A subclass may define
    ``show(observation)`` and ``read(text)`` instead. An answer that ``read`` or the server refuses as no action ends
    the episode as ``no_action``, with ``penalty`` as its turn's reward. All other rewards are those of the server, turn
    by turn, and an episode ends as ``done`` where it says so. A server without room for a further session, or that is
    away, is an ``infrastructure_failure``.

    >>> echo = fl.environments.OpenEnvEnvironment("http://127.0.0.1:8000", action="message", observation="said")
    >>> echo.read("hello"), echo.show({"said": "hello", "length": 5})
    ({'message': 'hello'}, 'hello')
    """

    def __init__(
        self,
        url: str = "",
        *,
        action: str | None = None,
        observation: str | None = None,
        tasks: int = 100,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.url, self.action, self.observation = url, action, observation
        self.tasks, self.seed, self.options = tasks, seed, options

    def show(self, observation: Mapping[str, Any]) -> str:
        """Give the text of an observation. Raises KeyError for one without the field."""
        if self.observation is None:
            return json.dumps(observation, ensure_ascii=False, sort_keys=True)
        said = observation[self.observation]
        return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, sort_keys=True)

    def read(self, text: str) -> dict[str, Any]:
        """Give the action of an answer. Raises ValueError for an answer that is none."""
        if self.action is not None:
            return {self.action: text}
        action = json.loads(text)
        if not isinstance(action, dict):
            raise ValueError("it is no object")
        return action

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The tasks: a seed each, and the first observation as the prompt."""
        seeds = range(self.seed, self.seed + self.tasks)
        try:
            firsts = asyncio.run(self._firsts(seeds))
        except (OSError, RuntimeError, KeyError) as error:
            fix = (
                f"Start a server there, as by: uvicorn my_env.server.app:app --port 8000. It gives no task: {error!r}."
            )
            raise WorkerError(f"{type(self).__name__}: {self.url} plays nothing.", fix=fix) from error
        return [{"prompt": first, "task_seed": i} for i, first in zip(seeds, firsts, strict=True)]

    async def setup(self, state: Any) -> None:
        """Open a session, and reset it with the seed of the task."""
        client = self._client()
        self._sessions.add(client)
        weakref.finalize(state, self._end, client)  # where it fails; else its grade ends it
        self.begin(state, client, await self._there(self._first(client, int(state.row["task_seed"]))))

    async def respond(self, state: Any) -> str:
        """Take the action of an answer, and show what is observed then."""
        try:
            action = self.read(state.response)
        except ValueError:
            return self.refuse(state)
        try:
            result = await self._there(_asked(state.env.step(action)))
        except RuntimeError as error:
            if (code := _CODE.search(str(error))) is not None and code[1] == "VALIDATION_ERROR":
                return self.refuse(state)
            raise
        return self.took(state, self.show(result.observation), float(result.reward or 0.0), "done" * bool(result.done))

    def open(self, opening: Opening) -> None:
        super().open(opening)
        _ = self._loop  # before several threads ask for it

    def close(self) -> None:
        loop = self.__dict__.pop("_loop", None)
        if loop is not None:
            ending = [asyncio.run_coroutine_threadsafe(_asked(client.close()), loop) for client in self._sessions]
            for each in ending:
                each.exception()  # waits for it
            loop.call_soon_threadsafe(loop.stop)
        super().close()

    # -- sessions -----------------------------------------------------------------------------------------------------

    @opened_once
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the sockets of all sessions belong to."""
        return start_loop("flowrl-openenv")

    async def _there(self, running: Coroutine[Any, Any, Any]) -> Any:
        """Await in the loop of the sockets."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, self._loop))

    def _client(self) -> Any:
        return import_package("openenv.core", extra="openenv", asks=self).GenericEnvClient(base_url=self.url)

    @opened_once
    def _sessions(self) -> set[Any]:
        """The clients whose sessions are open."""
        return set()

    def _end(self, client: Any) -> None:
        """End a session, unless that is done."""
        loop = self.__dict__.get("_loop")
        if loop is not None and client in self._sessions:
            self._sessions.discard(client)
            asyncio.run_coroutine_threadsafe(_asked(client.close()), loop)

    async def _graded(self, state: State) -> tuple[float, dict[str, float]]:
        self._end(state.env)  # type: ignore[attr-defined]
        return await super()._graded(state)

    async def _first(self, client: Any, seed: int) -> str:
        return self.show((await _asked(client.reset(seed=seed, **self.options))).observation)

    async def _firsts(self, seeds: Iterable[int]) -> list[str]:
        client = self._client()
        try:
            return [await self._first(client, seed) for seed in seeds]
        finally:
            await client.close()


async def _asked(answer: Any) -> Any:
    """What a client is answered. Raises OSError for a session that the server does not have, or has lost."""
    try:
        return await answer
    except RuntimeError as error:
        code = _CODE.search(str(error))
        if code is not None and code[1] in ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"):
            raise OSError(str(error)) from error
        raise
    except Exception as error:
        if type(error).__module__.startswith("websockets"):
            raise OSError(f"{type(error).__name__}: {error}") from error
        raise
