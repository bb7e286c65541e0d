"""An environment of Gymnasium, played in messages: a task is a seed, and an answer is an action."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Coroutine, Iterable, Mapping
from functools import cached_property
from typing import Any

from ...errors import WorkerError
from ..opened_once import opened_once
from .packages import import_package
from .stepped_environment import SteppedEnvironment
from .vector_seats import Seat, VectorSeats, first_observations

_NUMBER = re.compile(r"\s*(-?[0-9]{1,18})\s*")


class GymnasiumEnvironment(SteppedEnvironment):
    """Play an environment of Gymnasium: ``GymnasiumEnvironment("FrozenLake-v1", tasks=500, is_slippery=False)``.

    ``id`` and further options are those of ``gymnasium.make``; a subclass may define ``make()`` instead. There are
    ``tasks`` tasks, whose seeds go up from ``seed``. The prompt of a task is its first observation, and all its
    episodes are reset with its seed; one that begins with another observation fails, as its seed does not decide it.

    ``show(observation)`` gives the text that the policy sees, and ``read(text)`` the action that an answer means. Texts
    and whole numbers are shown as they are; an answer is the action itself in a ``Text`` space, and a whole number in a
    ``Discrete`` one. Other spaces need these functions from a subclass. An answer that ``read`` refuses by a ValueError
    ends the episode as ``no_action``, with ``penalty`` as its turn's reward. All other rewards are those of Gymnasium,
    turn by turn, and an episode ends as ``terminated`` or ``truncated`` where Gymnasium says so.

    With ``num_envs`` so many episodes share a vector environment, which takes a step once all of them have acted;
    ``vectorization_mode="async"`` has a process for each of its parts. A subclass may define ``make_vec()``.

    >>> class Lake(fl.environments.GymnasiumEnvironment):
    ...     system = "Walk from field 0 to field 15 of a frozen lake, 4 by 4: 0 left, 1 down, 2 right, 3 up."
    >>> lake = Lake("FrozenLake-v1", tasks=2, is_slippery=False)
    >>> lake.rows()
    [{'prompt': '0', 'task_seed': 0}, {'prompt': '0', 'task_seed': 1}]
    >>> state, _ = lake.reset(lake.rows()[0], seed=0)
    >>> lake.step(state, "2")[1:]
    ('1', 0.0, False)
    >>> lake.step(state, "1")[1:]
    ('', 0.0, 'terminated')
    """

    def __init__(
        self,
        id: str = "",
        *,
        tasks: int = 1000,
        seed: int = 0,
        num_envs: int | None = None,
        vectorization_mode: str = "sync",
        **options: Any,
    ) -> None:
        if num_envs is not None and num_envs < 1:
            raise WorkerError(
                f"num_envs={num_envs} is no number of episodes.", fix="Write num_envs=8, or leave it out."
            )
        if vectorization_mode not in ("sync", "async"):
            raise WorkerError(
                f"vectorization_mode='{vectorization_mode}' is none of sync and async.",
                fix="Write 'async' for a process for each episode of a vector; define make_vec() for another vector.",
            )
        self.id, self.tasks, self.seed, self.options = id, tasks, seed, options
        self.num_envs, self.vectorization_mode = num_envs, vectorization_mode

    def make(self) -> Any:
        """Make a ``gymnasium.Env``, a new one for each episode. Raises WorkerError for an unknown id or option."""
        gymnasium = import_package("gymnasium", extra="gymnasium", asks=self)
        try:
            return gymnasium.make(self.id, **self.options)
        except (gymnasium.error.Error, TypeError) as error:
            fix = "gymnasium.pprint_registry() lists the ids; options are those of the environment."
            raise WorkerError(
                f"{type(self).__name__}: gymnasium.make('{self.id}') refuses: {error}", fix=fix
            ) from error

    def make_vec(self) -> Any:
        """Make a ``gymnasium.vector.VectorEnv`` of ``num_envs`` environments, as :meth:`make` gives them."""
        vector = import_package("gymnasium.vector", extra="gymnasium", asks=self)
        alone = copy.copy(self)  # as it was before it was opened: it may go to other processes
        for name in ("_seats", "_warn", "_settle", "_notes", "_functions"):
            alone.__dict__.pop(name, None)
        made = [alone.make] * (self.num_envs or 1)
        if self.vectorization_mode == "async":
            return vector.AsyncVectorEnv(made, context="forkserver")  # a fork would copy the threads' locks
        return vector.SyncVectorEnv(made)

    def show(self, observation: Any) -> str:
        """Give the text of an observation. Raises TypeError for one that is neither text nor a whole number."""
        if isinstance(observation, str):
            return observation
        try:
            return str(observation.__index__())
        except (AttributeError, TypeError):
            raise TypeError(f"an observation is {type(observation).__name__}, no text") from None

    def read(self, text: str, space: Any) -> Any:
        """Give the action of an answer. Raises ValueError for an answer that is none."""
        if type(space).__name__ == "Text":
            return text
        found = _NUMBER.fullmatch(text)
        if found is None or not space.contains(int(found[1])):
            raise ValueError(f"it is no number of {space}")
        return int(found[1])

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The tasks: a seed each, and the first observation as the prompt."""
        alone, seeds = self.num_envs is None, list(range(self.seed, self.seed + self.tasks))
        env = self.make() if alone else self.make_vec()
        try:
            self._expect_actions(env.action_space if alone else env.single_action_space)
            begun = (env.reset(seed=seed)[0] for seed in seeds) if alone else self._begin_all(env, seeds)
            return [{"prompt": self.show(first), "task_seed": i} for first, i in zip(begun, seeds, strict=True)]
        except TypeError as error:
            fix = "Define show(self, observation), which gives a text, in a subclass."
            raise WorkerError(f"{type(self).__name__}: {error}.", fix=fix) from error
        finally:
            env.close()

    def _begin_all(self, env: Any, seeds: list[int]) -> list[Any]:
        try:
            return first_observations(env, seeds)
        except Exception as error:
            raise WorkerError(
                f"{type(self).__name__}: {type(env).__name__} takes no list of seeds, one for each part: {error}",
                fix="Leave out make_vec(), so that the vector is made of environments that each have a seed.",
            ) from error

    def _expect_actions(self, space: Any) -> None:
        if type(self).read is GymnasiumEnvironment.read and type(space).__name__ not in ("Text", "Discrete"):
            raise WorkerError(
                f"{type(self).__name__}: actions are of {space}, and an answer is a text.",
                fix="Define read(self, text, space), which gives an action, in a subclass.",
            )

    def setup(self, state: Any) -> None:
        """Make an environment, and reset it with the seed of the task; or take a seat in a vector environment."""
        seed = int(state.row["task_seed"])
        if self.num_envs is not None:
            state.seat, state.begun = self._seats.sit(seed), False
            weakref.finalize(state, state.seat.leave)
            state.earned, state.ended = 0.0, ""
            return
        env = self.make()
        weakref.finalize(state, env.close)
        self.begin(state, env, self.show(env.reset(seed=seed)[0]))

    def respond(self, state: Any) -> str | Coroutine[Any, Any, str]:
        """Take the action of an answer, and show what is observed then."""
        if self.num_envs is not None:
            return self._act_with_others(state, state.seat)
        try:
            action = self.read(state.response, state.env.action_space)
        except ValueError:
            return self.refuse(state)
        observation, reward, terminated, truncated, _ = state.env.step(action)
        return self._seen(state, observation, float(reward), terminated, truncated)

    async def _act_with_others(self, state: Any, seat: Seat) -> str:
        try:
            if not state.begun:
                self.begin(state, seat, self.show(seat.first()))
                state.begun = True
            try:
                action = self.read(state.response, seat.action_space)
            except ValueError:
                return self.refuse(state)
            said = self._seen(state, *await seat.step(action))
        except BaseException:
            seat.leave()
            raise
        finally:
            if state.ended:
                seat.leave()
        return said

    def _seen(self, state: Any, observation: Any, reward: float, terminated: bool, truncated: bool) -> str:
        ended = "terminated" if terminated else "truncated" if truncated else ""
        return self.took(state, self.show(observation), reward, ended)

    # -- vector environments ------------------------------------------------------------------------------------------

    @opened_once
    def _seats(self) -> VectorSeats:
        return VectorSeats(self.make_vec)

    @cached_property
    def _is_async(self) -> bool:
        return self.num_envs is not None or super()._is_async

    async def _graded(self, state: Any) -> tuple[float, dict[str, float]]:
        if self.num_envs is not None:  # also where a limit has ended it
            state.seat.leave()
        return await super()._graded(state)

    def close(self) -> None:
        """Close the vector environments."""
        if (seats := self.__dict__.pop("_seats", None)) is not None:
            seats.close()
        super().close()
