"""What adapters of stepped environments share: an answer is an action, with a reward and an end of its own."""

from __future__ import annotations

from typing import Any

from ..environment import Environment, State


class SteppedEnvironment(Environment):
    """Base of adapters whose package gives a reward with each step; a task is a seed, the prompt what is seen first.

    ``setup`` ends with :meth:`begin`, ``respond`` with :meth:`took`, or with :meth:`refuse` for an answer that is no
    action.
    """

    #: The reward of a turn whose answer is no action.
    penalty: float = 0.0

    def begin(self, state: Any, env: Any, first: str | list[dict[str, Any]]) -> None:
        """Note the environment of an episode. Raises ValueError where it begins otherwise than its task.

        ``first`` is what is seen first: the text of the prompt, or its messages.
        """
        state.env, state.earned, state.ended = env, 0.0, ""
        if isinstance(first, str):
            expected, which = state.row.get("prompt"), f"with seed {int(state.row['task_seed'])}"
        else:
            expected, which = list(state.messages[-len(first) :]), f"task {state.row.get('task')}"
        if isinstance(expected, type(first)) and first != expected:
            raise ValueError(f"{which} it began with {first!r}, and its task with {expected!r}")

    def took(self, state: Any, observation: str, reward: float, ended: str) -> str:
        """Note what a step gave, and the name of the end where it is one; return what is seen then."""
        state.earned, state.ended = reward, ended
        return observation

    def refuse(self, state: Any) -> str:
        """End an episode whose answer is no action."""
        return self.took(state, "", self.penalty, "no_action")

    async def _stopped(self, state: Any) -> str:
        return state.ended or await super()._stopped(state)

    async def _step(self, state: Any, action: str) -> tuple[State, str, float, bool | str]:
        state.earned = 0.0
        state, observation, _, over = await super()._step(state, action)
        return state, observation, state.earned, over
