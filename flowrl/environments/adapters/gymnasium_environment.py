"""An environment of Gymnasium, played in messages: a task is a seed, and an answer is an action."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import WorkerError
from .packages import import_package
from .stepped_environment import SteppedEnvironment

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

    def __init__(self, id: str = "", *, tasks: int = 1000, seed: int = 0, **options: Any) -> None:
        self.id, self.tasks, self.seed, self.options = id, tasks, seed, options

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
        env = self.make()
        try:
            self._expect_actions(env.action_space)
            return [{"prompt": self._first(env, i), "task_seed": i} for i in range(self.seed, self.seed + self.tasks)]
        except TypeError as error:
            fix = "Define show(self, observation), which gives a text, in a subclass."
            raise WorkerError(f"{type(self).__name__}: {error}.", fix=fix) from error
        finally:
            env.close()

    def _expect_actions(self, space: Any) -> None:
        if type(self).read is GymnasiumEnvironment.read and type(space).__name__ not in ("Text", "Discrete"):
            raise WorkerError(
                f"{type(self).__name__}: actions are of {space}, and an answer is a text.",
                fix="Define read(self, text, space), which gives an action, in a subclass.",
            )

    def _first(self, env: Any, seed: int) -> str:
        return self.show(env.reset(seed=seed)[0])

    def setup(self, state: Any) -> None:
        """Make an environment, and reset it with the seed of the task."""
        env = self.make()
        weakref.finalize(state, env.close)
        self.begin(state, env, self._first(env, int(state.row["task_seed"])))

    def respond(self, state: Any) -> str:
        """Take the action of an answer, and show what is observed then."""
        try:
            action = self.read(state.response, state.env.action_space)
        except ValueError:
            return self.refuse(state)
        observation, reward, terminated, truncated, _ = state.env.step(action)
        ended = "terminated" if terminated else "truncated" if truncated else ""
        return self.took(state, self.show(observation), float(reward), ended)
