"""A game of textarena: a task is a seed, an answer is an action, and what is new in an observation is shown."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ...errors import WorkerError, near
from .packages import import_package
from .stepped_environment import SteppedEnvironment

T = TypeVar("T")
_GLOBAL = threading.Lock()  # the games draw from the generator of the process


class TextArenaEnvironment(SteppedEnvironment):
    """Play a game of textarena: ``TextArenaEnvironment("GuessTheNumber-v0", tasks=500)``.

    ``id`` and further options are those of ``textarena.make``; a subclass may define ``make()`` instead. There are
    ``tasks`` tasks, whose seeds go up from ``seed``. The prompt of a task is its first observation, and all its
    episodes are reset with its seed; what the game draws later comes from that seed too, whatever is played beside it.

    A game of several ``players`` needs ``opponent(state, observation, luck)`` from a subclass, which gives their
    actions; ``luck`` is a generator whose seed is that of the task. The policy has the seat ``seat``. An answer is an
    action as it is. The reward is what the game gives the seat at its end, and the other seats' are not used. An
    episode ends as ``invalid_move`` where the game says that the seat has made one, else as ``done``.

    >>> guess = fl.environments.TextArenaEnvironment("GuessTheNumber-v0", tasks=500)
    >>> guess.id, guess.players, guess.seat
    ('GuessTheNumber-v0', 1, 0)
    """

    def __init__(
        self, id: str = "", *, players: int = 1, seat: int = 0, tasks: int = 1000, seed: int = 0, **options: Any
    ) -> None:
        if not 0 <= seat < players:
            raise WorkerError(f"seat={seat} is none of {players} players.", fix="Seats are counted from 0.")
        self.id, self.players, self.seat, self.tasks, self.seed, self.options = id, players, seat, tasks, seed, options

    def make(self) -> Any:
        """Make a game, a new one for each episode. Raises WorkerError for an unknown id or option."""
        package = import_package("textarena", extra="textarena", asks=self)
        known = package.envs.registration.ENV_REGISTRY
        if self.id not in known:
            meant = near(self.id, known)
            fix = (
                f"Did you mean '{meant}'?" if meant else "sorted(textarena.envs.registration.ENV_REGISTRY) lists them."
            )
            raise WorkerError(f"{type(self).__name__}: textarena has no game '{self.id}'.", fix=fix)
        try:
            return package.make(self.id, **self.options)
        except (ImportError, LookupError, TypeError) as error:
            fix = "Options are those of the game; some games need a package or data of their own."
            raise WorkerError(f"{type(self).__name__}: '{self.id}' cannot be made: {error}", fix=fix) from error

    def opponent(self, state: Any, observation: str, luck: random.Random) -> str:
        """Give the action of another player, from what that player sees."""
        raise self._without_opponent()

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The tasks: a seed each, and the first observation as the prompt."""
        if self.players > 1 and type(self).opponent is TextArenaEnvironment.opponent:
            raise self._without_opponent()
        return [{"prompt": _Game(self, i).first, "task_seed": i} for i in range(self.seed, self.seed + self.tasks)]

    def _without_opponent(self) -> WorkerError:
        return WorkerError(
            f"{type(self).__name__}: '{self.id}' has {self.players} players, and the policy is one of them.",
            fix="Define opponent(self, state, observation, luck), which gives an action, in a subclass.",
        )

    def setup(self, state: Any) -> None:
        """Make a game, and reset it with the seed of the task."""
        game = _Game(self, int(state.row["task_seed"]), state)
        self.begin(state, game, game.first)

    def respond(self, state: Any) -> str:
        """Take the action of an answer, and show what is new to the policy when it is its turn again."""
        game = state.env
        game.step(state.response)
        if game.over:
            return self.took(state, "", *game.result)
        return self.took(state, game.seen, 0.0, "")


class _Game:
    """A game under way, with the state of its luck; ``first`` and ``seen`` are what is new to the policy."""

    def __init__(self, env: TextArenaEnvironment, seed: int, state: Any = None) -> None:
        self._env, self._state, self.over, self._shown = env, state, False, ""
        self._drawn = random.Random(seed).getstate()
        self._luck = random.Random(seed)  # of opponents
        self._game = env.make()
        self._within(lambda: self._game.reset(num_players=env.players, seed=seed))
        self.first = self.seen = self._turn()

    def step(self, action: str) -> None:
        """Take an action of the policy, and those of the others until it is its turn again."""
        self.over, _ = self._within(lambda: self._game.step(action=action))
        self.seen = self._turn()

    @property
    def result(self) -> tuple[float, str]:
        """The reward of the policy's seat, and the name of the end."""
        rewards, about = self._game.close()
        seat = self._env.seat
        return float((rewards or {}).get(seat, 0.0)), "invalid_move" if about[seat].get("invalid_move") else "done"

    def _turn(self) -> str:
        """Play the others until it is the policy's turn; give what is new to it."""
        while not self.over:
            player, observation = self._within(self._game.get_observation)
            if player == self._env.seat:
                new = observation.removeprefix(self._shown)
                self._shown = observation
                return new
            action = self._env.opponent(self._state, observation, self._luck)
            self.over, _ = self._within(lambda action=action: self._game.step(action=action))
        return ""

    def _within(self, call: Callable[[], T]) -> T:
        """Call the game with its own luck in the generator of the process."""
        with _GLOBAL:
            before = random.getstate()
            random.setstate(self._drawn)
            try:
                return call()
            finally:
                self._drawn = random.getstate()
                random.setstate(before)
