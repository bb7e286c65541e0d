"""What one call of a rollout plays: its rows, who plays them, what an episode may take, and the episodes that ended."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..graph.ops.partial_answers import Answers
from .episodes import Episode, Played, versions_of
from .policy_calls import Answer, Ask
from .sessions import sampled
from .tokens.row_support import CallSupport, RowSupport
from .tokens.sampling import SamplingArguments
from .user_code.environment_returns import check_anchor
from .user_code.failed_rewards import Policy
from .user_code.rows_in_progress import Row

if TYPE_CHECKING:
    from ..batch import Batch

#: What ``row`` holds besides the columns of the data: a seed that all episodes of a task share.
TASK_SEED = "task_seed"


@dataclass(frozen=True)
class Limits:
    """What an episode may take: ``Limits(turns=32, tokens=4096, seconds=600.0)``; None is without a limit."""

    turns: int
    turn_tokens: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def most(self, used: int) -> int | None:
        """How many tokens a turn may have after so many, where that is less than ``turn_tokens``; None where not."""
        if self.tokens is None or (self.turn_tokens is not None and self.turn_tokens <= self.tokens - used):
            return self.turn_tokens
        return self.tokens - used


class Game:
    """What one call plays: its rows and who plays them, and the episodes, a row each."""

    def __init__(
        self,
        rows: Batch,
        policy: Any,
        limits: Limits,
        failing: Policy,
        answers: Answers | None,
        task_seeds: Sequence[int],
        also: Sequence[str] = (),
    ) -> None:
        self.rows, self.policy, self.limits, self.failing, self._answers = rows, policy, limits, failing, answers
        self.also = also  # fields of episodes that are asked for
        self._recorded = CallSupport(len(rows))
        self.tokenizer = policy.tokenizer
        self.seeds: list[int] = rows.row_seeds().tolist()
        self.own_seeds: list[int] = rows.row_seeds("episode").tolist()
        columns = {n: rows[n].to_list() for n in rows.fields}
        self.prompts = [list(prompt) for prompt in columns.pop("prompt_ids")]
        columns.setdefault(TASK_SEED, list(task_seeds))
        self.columns = columns
        self.replaced: dict[int, list[str]] = {}  # why episodes failed in whose place others are, by their rows
        self._spare_seeds: dict[int, tuple[list[int], list[int]]] = {}
        self.known = answers.known if answers is not None else None
        self.told: dict[tuple[int, str], Row] = {}  # by row and function, as notes name them
        self.numbers: dict[str, int] = {}  # of observations as anchors
        self.encoded: dict[tuple[Any, ...], list[int]] = {}  # ids of short observations
        self.episodes: dict[int, Episode | Played] = self._played()
        fresh = len(self.episodes) < len(rows)
        self.room: int | None = policy.positions if fresh else None

    def begin(self, i: int) -> Episode:
        """Return an episode of a row that has not begun."""
        support = RowSupport() if "support_ids" in self.also else None
        return Episode(None, "", self.prompts[i], self.room, support=support)

    def row(self, i: int) -> dict[str, Any]:
        """Return what a reset is told of a row: lists and dicts are its own, which an episode may write to."""
        return {name: _copied(values[i]) for name, values in self.columns.items()}

    def number(self, observation: str) -> int:
        """Return the number of an observation that tells a state from others."""
        number = self.numbers.get(observation)
        if number is None:
            number = self.numbers[observation] = check_anchor(observation)
        return number

    def sampled(self, ask: Ask) -> Awaitable[Answer]:
        """Return what the policy samples. Raises DataError where too much is recorded of what could be drawn."""
        return self._counted(ask) if "support_ids" in self.also else sampled(ask)

    async def _counted(self, ask: Ask) -> Answer:
        answer = await sampled(ask)
        if answer.support is not None:
            self._recorded.count(len(answer.support.sizes), len(answer.support.ids))
        return answer

    @cached_property
    def own_most(self) -> int | None:
        """Tokens of an answer at most, as the policy was declared; None where it does not say."""
        how = getattr(self.policy, "how", None)
        return None if how is None else how(SamplingArguments()).max_tokens

    def _played(self) -> dict[int, Episode | Played]:
        """The episodes that were played before; their rows have the seeds that these had."""
        if self.known is None:
            return {}
        tokens, turns = self.known["response_ids"].to_list(), self.known["turn_ids"].to_list()
        at = {key: place for place, key in enumerate(self.known.keys)}
        replaced = self.known["replaced"].to_list()
        for i, key in enumerate(self.rows.keys):
            if key in at and replaced[at[key]]:
                self._take_seeds(i, replaced[at[key]])
        return {
            i: Played.of(prompt, tokens[at[key]], turns[at[key]])
            for i, (key, prompt) in enumerate(zip(self.rows.keys, self.prompts, strict=True))
            if key in at
        }

    def begin_spare(self, i: int, number: int, why: str) -> None:
        """Have another episode take the place of one that failed: the ``number``-th there, with seeds of its own."""
        self.replaced.setdefault(i, []).append(why)
        self._take_seeds(i, number)

    def _take_seeds(self, i: int, number: int) -> None:
        """Give a row the seeds of the episode that is the ``number``-th in the place of one that failed."""
        if number not in self._spare_seeds:
            several = self.rows.row_seeds("spare", number), self.rows.row_seeds("spare episode", number)
            self._spare_seeds[number] = several[0].tolist(), several[1].tolist()
        self.seeds[i], self.own_seeds[i] = (seeds[i] for seeds in self._spare_seeds[number])

    def keep(self, ended: Mapping[int, Episode]) -> None:
        """Hand over episodes that have ended, by their rows; all of them or none are known to a later process."""
        self.episodes |= ended
        if self._answers is None:
            return
        if failed := [i for i, episode in ended.items() if episode.failed]:
            self._answers.fail([self.rows.keys[i] for i in failed])
        elif ended:
            fields = [episode.fields(self.also) for episode in ended.values()]
            together = {name: [each[name] for each in fields] for name in fields[0]}
            versions = versions_of([*ended.values()])  # with what is known of them besides
            self._answers.keep([self.rows.keys[i] for i in ended], {**together, "versions": versions})


def _copied(value: Any) -> Any:
    """A value whose lists and dicts are new ones; what else is in them is the same."""
    if type(value) is list:
        return [_copied(each) for each in value]
    return {name: _copied(each) for name, each in value.items()} if type(value) is dict else value
