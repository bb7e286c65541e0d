"""An environment of the package verifiers: its own loop, tools and rubric run; the policy answers its model calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import WorkerError
from ...workers.base import Opening
from ..gateway.agents import Task
from ..opened_once import opened_once
from .verifiers_rollouts import VerifiersRollouts, failure_named

if TYPE_CHECKING:
    from ...workers.episodes import Episode
    from ...workers.game import Game
    from ..environment import State

_SPLITS = {"train": "get_dataset", "eval": "get_eval_dataset"}


class VerifiersEnvironment(VerifiersRollouts):
    """Play an environment of verifiers 0.3: ``VerifiersEnvironment("wordle", split="eval", max_turns=6)``.

    ``id`` and further arguments are those of ``verifiers.load_environment``; a subclass may define ``make()`` instead.
    Tasks are the examples of its data set for ``split``: ``"train"`` or ``"eval"``. An episode is a rollout of
    verifiers' own, whose calls of the model the policy answers through a gateway, so sampled ids stay as they are.
    The reward is what the rubric gives, also one that compares the rollouts of a group, and its metrics are in
    ``scores``. ``finish_reason`` is the stop condition.

    ``state.result`` is the state of verifiers, for further functions marked by ``reward`` and ``metric``. Where a limit
    of flowrl's rollout ends an episode, verifiers grades it as far as it came. A rollout that verifiers ends with an
    error fails, and has no reward, unless the answer is at fault: an empty one, or a malformed call of a tool.

    >>> game = fl.environments.VerifiersEnvironment("wordle", split="eval")
    >>> game.id, game.split
    ('wordle', 'eval')
    """

    def __init__(self, id: str = "", *, split: str = "train", **arguments: Any) -> None:
        if split not in _SPLITS:
            raise WorkerError(f"split='{split}' is neither 'train' nor 'eval'.", fix="Write split='eval'.")
        self.id, self.split, self.arguments = id, split, arguments

    def make(self) -> Any:
        """Load the environment of verifiers."""
        return _verifiers().load_environment(self.id, **self.arguments)

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The tasks: the prompt of each example, and its place in the data set."""
        found = enumerate(self._examples)
        return [{"prompt": _plain(example["prompt"]), "example": i} for i, example in found]

    def agent(self, task: Task) -> Any:
        """Run a rollout of verifiers, and grade it unless its group is graded together."""
        return self._wait_for(self._roll_out(task))

    def open(self, opening: Opening) -> None:
        super().open(opening)
        _ = self._made, self._clients  # before several threads ask for them

    @opened_once
    def _made(self) -> Any:
        return self.make()

    @opened_once
    def _examples(self) -> Any:
        return getattr(self._made, _SPLITS[self.split])()

    @opened_once
    def _clients(self) -> Callable[[Task], Any]:
        """What makes a client of verifiers for the key of an episode; all share their connections."""
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=f"{self._gateway.address}/v1", api_key="none", max_retries=0, timeout=None)
        kind = _verifiers().OpenAIChatCompletionsClient
        return lambda task: kind(client.with_options(api_key=task.api_key))

    async def _roll_out(self, task: Task) -> Any:
        env, example = self._made, dict(self._examples[int(task.row["example"])])
        state = await env.rollout(example, self._clients(task), "policy", {})
        if not self._scores_groups:
            await (env.rubric.score_rollout if env.score_rollouts else env.rubric.dummy_score_rollout)(state)
            await env.rubric.cleanup(state)
        return state

    # -- ends and grades ----------------------------------------------------------------------------------------------

    def _failure(self, result: Any, *, cut: bool) -> Exception | None:
        error = result["error"]
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if cut or error is None or kinds & {"InvalidModelResponseError", "ToolParseError"}:
            return None  # as it is taken for an error, nothing has failed, or the policy's answer is at fault
        return failure_named(kinds, f"{type(error).__name__}: {error}", error)

    def _stopped_by(self, result: Any) -> str | None:
        return result["stop_condition"]

    async def _graded(self, state: State) -> tuple[float, dict[str, float]]:
        total, scores = await super()._graded(state)
        if self._scores_groups:
            return total, scores
        return total + _take_score(state.result, scores), scores  # type: ignore[attr-defined]

    @property
    def _scores_groups(self) -> bool:
        return bool(self._made.requires_group_rollouts)

    @property
    def _grades_groups(self) -> bool:
        return self._scores_groups or super()._grades_groups

    async def _grade_group(self, game: Game, episodes: Mapping[int, Episode]) -> None:
        await super()._grade_group(game, episodes)
        if self._scores_groups:
            states = [episode.state.result for episode in episodes.values()]
            await self._code(game, next(iter(episodes)), "score_group", (states,))
            for episode, state in zip(episodes.values(), states, strict=True):
                episode.give(_take_score(state, episode.scores))

    def _function(self, name: str) -> Callable[..., Any]:
        return self._score_group if name == "score_group" else super()._function(name)

    def _score_group(self, states: Sequence[Any]) -> None:
        async def score() -> None:
            env = self._made
            await (env.rubric.score_group if env.score_rollouts else env.rubric.dummy_score_group)(list(states))
            for state in states:
                await env.rubric.cleanup(state)

        self._wait_for(score())


def _take_score(state: Any, scores: dict[str, float]) -> float:
    """The reward of a rollout; its metrics are put among ``scores``."""
    scores |= {name: float(value) for name, value in (state["metrics"] or {}).items()}
    return float(state["reward"])


def _plain(prompt: Any) -> Any:
    """A prompt without the fields of messages that are empty."""
    if isinstance(prompt, str):
        return prompt
    return [{name: value for name, value in dict(message).items() if value is not None} for message in prompt]


def _verifiers() -> Any:
    """The package, with the interface of its versions up to 0.3."""
    try:
        import verifiers
    except ImportError:
        raise WorkerError(
            "VerifiersEnvironment needs the package verifiers, before 0.4.", fix="pip install 'verifiers>=0.3,<0.4'."
        ) from None
    if not hasattr(verifiers, "load_environment"):
        raise WorkerError(
            f"verifiers {verifiers.__version__} has no load_environment, which 0.4 left out.",
            fix="pip install 'verifiers>=0.3,<0.4'.",
        )
    return verifiers
