"""What adapters share whose agent plays a whole episode of another package, which also grades what a limit cuts off."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from typing import TYPE_CHECKING, Any

from ...workers.sessions import CodeFailed, OutOfTime
from ...workers.user_code.code_calls import CodeCall
from ..gateway.agent_environment import AgentEnvironment
from ..gateway.sessions import Ended

if TYPE_CHECKING:
    from ...workers.episodes import Episode
    from ...workers.game import Game


class PackageRollouts(AgentEnvironment, metaclass=ABCMeta):
    """Base of adapters whose ``agent`` plays an episode; ``state.result`` is what it leaves behind.

    An agent that a limit cuts off is answered with status 410, and gives what it has.
    """

    @abstractmethod
    def _failure(self, result: Any, *, cut: bool) -> Exception | None:
        """What failed in an episode, and neither the policy nor a limit that has ``cut`` it is to blame for."""

    @abstractmethod
    def _stopped_by(self, result: Any) -> str | None:
        """The name of the end of an episode."""

    async def _calls(self, game: Game, i: int, episode: Episode, play: Any) -> None:
        late: OutOfTime | None = None
        try:
            await super()._calls(game, i, episode, play)
        except OutOfTime as error:
            late = error
        over = bool(episode.outcome)
        if not over:
            play.task.session.close("the episode of this session is over")
            ended = await self._code(game, i, "agent", (play,), ends=True)
            assert isinstance(ended, Ended), "a closed session hands over no call"
            play.state.result = ended.result
        if (failed := self._failure(play.state.result, cut=not over)) is not None:
            raise CodeFailed(CodeCall(i, self.agent, (), self._row(game, i, "agent")), failed)
        if over:
            episode.outcome = self._stopped_by(play.state.result) or "done"
        if late is not None:
            raise late
