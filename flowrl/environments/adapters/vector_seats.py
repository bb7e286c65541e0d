"""Episodes in the seats of vector environments of Gymnasium: a vector takes a step once all its episodes have acted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

#: What a step gives an episode: the observation, the reward, whether it is terminated, and whether it is truncated.
Stepped = tuple[Any, float, bool, bool]


class VectorSeats:
    """The vector environments that ``make`` gives: ``VectorSeats(lake.make_vec)``.

    :meth:`sit` gives an episode a seat of a vector that has taken no step yet. A vector all of whose episodes have left
    is reset and used again.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock = make, threading.RLock()
        self._filling: _Vector | None = None
        self._idle: list[Any] = []
        self._used: list[_Vector] = []

    def sit(self, seed: int) -> Seat:
        """Give a seat to an episode whose part of the vector is reset with ``seed``."""
        with self._lock:
            if self._filling is None or self._filling.full:
                env = self._idle.pop() if self._idle else self._make()
                self._filling = _Vector(env, self._lock, self._empty)
                self._used.append(self._filling)
            return Seat(self._filling, self._filling.add(seed))

    def close(self) -> None:
        """Close all vectors."""
        with self._lock:
            for env in [*self._idle, *(vector.env for vector in self._used)]:
                env.close()
            self._idle, self._used, self._filling = [], [], None

    def _empty(self, vector: _Vector, *, broken: bool) -> None:
        if vector not in self._used:
            return
        self._used.remove(vector)
        if self._filling is vector:
            self._filling = None
        if broken:
            vector.env.close()
        else:
            self._idle.append(vector.env)


def first_observations(env: Any, seeds: list[int]) -> list[Any]:
    """What a vector environment shows first with each of these seeds."""
    found: list[Any] = []
    for begin in range(0, len(seeds), env.num_envs):
        some = seeds[begin : begin + env.num_envs]
        found += _reset(env, some)[: len(some)]
    return found


class Seat:
    """The seat of an episode: :meth:`step` by step, and :meth:`leave` at its end."""

    def __init__(self, vector: _Vector, number: int) -> None:
        self._vector, self._number = vector, number

    @property
    def action_space(self) -> Any:
        """The space of one action."""
        return self._vector.env.single_action_space

    def first(self) -> Any:
        """The first observation; no further episode sits down in the vector then."""
        return self._vector.first(self._number)

    async def step(self, action: Any) -> Stepped:
        """Take an action, with those of all other episodes of the vector."""
        taken = self._vector.act(self._number, action)
        return taken.result() if taken.done() else await asyncio.wrap_future(taken)

    def leave(self) -> None:
        """Let the others go on without it. Nothing happens the second time."""
        self._vector.remove(self._number)


class _Vector:
    """A vector environment, the episodes in it, and their actions of the step to come."""

    def __init__(self, env: Any, lock: Any, empty: Callable[..., None]) -> None:
        self.env, self._lock, self._empty = env, lock, empty
        self._seeds: list[int] = []
        self._live: set[int] = set()
        self._actions: dict[int, Any] = {}
        self._waiting: dict[int, Future[Stepped]] = {}
        self._first: list[Any] | None = None
        self._broken = False

    @property
    def full(self) -> bool:
        """Whether no further episode can sit down."""
        return self._first is not None or len(self._seeds) == self.env.num_envs

    def add(self, seed: int) -> int:
        self._seeds.append(seed)
        self._live.add(len(self._seeds) - 1)
        return len(self._seeds) - 1

    def first(self, number: int) -> Any:
        with self._lock:
            if self._first is None:
                self._first = _reset(self.env, self._seeds)
            return self._first[number]

    def act(self, number: int, action: Any) -> Future[Stepped]:
        with self._lock:
            self.first(number)
            taken = self._waiting[number] = Future[Stepped]()
            taken.set_running_or_notify_cancel()  # so that it is never cancelled by who waits for it
            self._actions[number] = action
            self._go_on()
            return taken

    def remove(self, number: int) -> None:
        with self._lock:
            if number not in self._live:
                return
            self._live.discard(number)
            self._actions.pop(number, None)
            self._waiting.pop(number, None)
            if self._live:
                self._go_on()
            else:
                self._empty(self, broken=self._broken)

    def _go_on(self) -> None:
        """Take a step, if all have acted."""
        if len(self._actions) < len(self._live):
            return
        waiting, self._waiting = self._waiting, {}
        actions, self._actions = self._actions, {}
        spare = next(iter(actions.values()))  # of seats that are empty, or whose episode is over
        try:
            found = _step(self.env, [actions.get(i, spare) for i in range(self.env.num_envs)])
        except Exception as error:
            self._broken = True
            for taken in waiting.values():
                taken.set_exception(error)
            return
        for number, taken in waiting.items():
            taken.set_result(found[number])


def _reset(env: Any, seeds: list[int]) -> list[Any]:
    """The first observations; a seat that is empty has the last seed."""
    from gymnasium.vector.utils import iterate

    given = seeds + seeds[-1:] * (env.num_envs - len(seeds))
    observations, _ = env.reset(seed=given)
    return list(iterate(env.observation_space, observations))


def _step(env: Any, actions: list[Any]) -> list[Stepped]:
    from gymnasium.vector.utils import concatenate, create_empty_array, iterate

    space = env.single_action_space
    together = concatenate(space, actions, create_empty_array(space, len(actions)))
    observations, rewards, terminated, truncated, _ = env.step(together)
    each = zip(iterate(env.observation_space, observations), rewards, terminated, truncated, strict=True)
    return [(seen, float(paid), bool(over), bool(cut)) for seen, paid, over, cut in each]
