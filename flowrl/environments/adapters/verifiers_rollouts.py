"""What adapters of verifiers share: its rollouts run in one event loop, and how one of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...workers.base import Opening
from ...workers.sessions import CodeFailed
from ...workers.user_code.code_calls import CodeCall
from ..gateway.agent_environment import AgentEnvironment
from ..gateway.sessions import Ended
from .event_loop import start_loop

if TYPE_CHECKING:
    from ...workers.env import Game
    from ...workers.episodes import Episode

_INFRASTRUCTURE = {"InfraError", "SandboxError", "TunnelError", "InterceptionError"}


class VerifiersRollouts(AgentEnvironment):
    """Base of adapters whose ``agent`` is a rollout of verifiers; ``state.result`` is what it leaves behind."""

    turns: int = 1000  # verifiers has a limit of its own

    def open(self, opening: Opening) -> None:
        super().open(opening)
        _ = self._loop  # before several threads ask for it

    def close(self) -> None:
        loop = self.__dict__.pop("_loop", None)
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        super().close()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop in which all rollouts run, as an environment may share clients and locks among them."""
        return start_loop("flowrl-verifiers")

    def _wait_for(self, running: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(running, self._loop).result()

    def _failure(self, result: Any, *, cut: bool) -> Exception | None:
        """What failed in a rollout, and neither the policy nor a limit that has ``cut`` it is to blame for."""
        raise NotImplementedError

    def _stopped_by(self, result: Any) -> str | None:
        """The stop condition of a rollout."""
        raise NotImplementedError

    async def _calls(self, game: Game, i: int, episode: Episode, play: Any) -> None:
        await super()._calls(game, i, episode, play)
        over = bool(episode.outcome)
        if not over:  # by a limit, at which the package is refused a further call
            play.task.session.close("the episode of this session is over")
            ended = await self._code(game, i, "agent", (play,), lambda returned: returned)
            assert isinstance(ended, Ended), "a closed session hands over no call"
            play.state.result = ended.result
        if (failed := self._failure(play.state.result, cut=not over)) is not None:
            raise CodeFailed(CodeCall(i, self.agent, (), self._row(game, i, "agent")), failed)
        if over:
            episode.outcome = self._stopped_by(play.state.result) or "done"


def failure_named(kinds: set[str], said: str, error: Exception | None = None) -> Exception:
    """An error of verifiers by the names of its classes: an OSError where the machine is at fault."""
    return OSError(said) if kinds & _INFRASTRUCTURE else error or RuntimeError(said)
