"""Episodes of an environment: what is known of each while it is played, and the fields that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..batch import Batch, Column, Key
from ..graph.ops.field_types import FieldType, parse_fields
from ..marks import Marks, spelled, vocabulary
from .tokens.packed_tokens import marked
from .tokens.sampling import GENERATED, sampled_marks

PLAYED = (
    GENERATED
    + ", rewards: f32[], turns: i32[], turn_rewards: f32[*turn], turn_states: i64[*turn], turn_ids: i32[*response]"
)


@dataclass
class Episode:
    """One play: its state, and the response so far. ``turn_ids[i]`` is the turn of a sampled token, -1 if observed."""

    state: Any
    observation: str  # the latest
    prompt: list[int]
    room: int | None = None  # tokens that the model has positions for
    tokens: list[int] = field(default_factory=list[int])
    turn_ids: list[int] = field(default_factory=list[int])
    rollout_logprobs: list[float] = field(default_factory=list[float])
    sampling_logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    turn_states: list[int] = field(default_factory=list[int])
    turn_rewards: list[float] = field(default_factory=list[float])
    temperature: float = 1.0
    outcome: str = ""  # what the environment called its end
    cut: bool = False  # the latest action was cut off at the most tokens of a turn
    full: bool = False  # no room was left for what the environment said and an answer

    def plays(self, turn: int) -> bool:
        """Whether it is sampled for in a turn."""
        del turn
        return not self.over

    def before(self, turn: int) -> list[int]:
        """The tokens of its response before a turn."""
        del turn
        return self.tokens

    @property
    def over(self) -> bool:
        """Whether nothing more is sampled: the environment said so, or there is no room for another token."""
        return bool(self.outcome) or self.full or not self._fits(1)

    @property
    def reason(self) -> str:
        """How it ended: the environment's outcome; ``length`` where tokens ran out; ``turns`` where turns did."""
        return self.outcome or ("length" if self.over or self.cut else "turns")

    def _fits(self, count: int) -> bool:
        return self.room is None or len(self.prompt) + len(self.tokens) + count <= self.room

    def observe(self, ids: list[int]) -> None:
        """Append what the environment says: no loss, no log-probability. Where no answer fits behind it, it is over."""
        if not self._fits(len(ids) + 1):
            self.full = True
            return
        self._append(ids, -1, [0.0] * len(ids), [0.0] * len(ids), 0)

    def act(self, ids: list[int], rollout: list[float], sampling: list[float], version: int) -> None:
        """Append what the policy sampled, as it was sampled."""
        self._append(ids, len(self.turn_rewards), rollout, sampling, version)

    def _append(self, ids: list[int], turn: int, rollout: list[float], sampling: list[float], version: int) -> None:
        self.tokens += ids
        self.turn_ids += [turn] * len(ids)
        self.rollout_logprobs += rollout
        self.sampling_logprobs += sampling
        self.versions += [version] * len(ids)

    def fields(self) -> dict[str, list[Any]]:
        """The fields of this row, in lists of one."""
        found = {
            "response_ids": self.tokens,
            "tokens": self.prompt + self.tokens,
            "response_mask": [turn >= 0 for turn in self.turn_ids],
            "rollout_logprobs": self.rollout_logprobs,
            "sampling_logprobs": self.sampling_logprobs,
            "versions": self.versions,
            "temperature": self.temperature,
            "finished": bool(self.outcome),
            "finish_reason": self.reason,
            "rewards": sum(self.turn_rewards),
            "turns": len(self.turn_rewards),
            "turn_rewards": self.turn_rewards,
            "turn_states": self.turn_states,
            "turn_ids": self.turn_ids,
        }
        return {name: [value] for name, value in found.items()}


@dataclass(frozen=True)
class Played:
    """An episode that was played to its end before: its response, and where each of its turns begins.

    It is sampled for again among those that are not, as the bits of their tokens may depend on how many rows there are;
    what comes of that is left aside.
    """

    prompt: list[int]
    tokens: list[int]
    begins: tuple[int, ...]

    @staticmethod
    def of(prompt: list[int], tokens: list[int], turn_ids: list[int]) -> Played:
        """From the fields of its row."""
        turns = range(max(turn_ids, default=-1) + 1)
        return Played(prompt, tokens, tuple(turn_ids.index(turn) for turn in turns))

    def plays(self, turn: int) -> bool:
        """See :meth:`Episode.plays`."""
        return turn < len(self.begins)

    def before(self, turn: int) -> list[int]:
        """See :meth:`Episode.before`."""
        return self.tokens[: self.begins[turn]]


def columns_of(
    keys: Sequence[Key], episodes: Sequence[Episode | Played], known: Batch | None, policy: Any
) -> dict[str, Column]:
    """The fields of episodes; ``known`` has those of episodes that were played before."""
    fresh = [(key, e.fields()) for key, e in zip(keys, episodes, strict=True) if isinstance(e, Episode)]
    made = Batch(
        [key for key, _ in fresh],
        {name: _column(type_, [fields[name][0] for _, fields in fresh]) for name, type_ in _TYPES.items()},
    )
    whole = made if known is None else known.select(*made.fields).concat(made).take_keys(keys)
    return marked(whole.columns, _marks(whole, policy))


_TYPES: dict[str, FieldType] = {name: type_ for name, type_ in parse_fields(PLAYED).items() if type_ is not None}


def _column(type_: FieldType, rows: list[Any]) -> Column:
    return Column.of(rows, dim=type_.dims[0][1:] if type_.dims else None, dtype=type_.dtype)


def _marks(rows: Batch, policy: Any) -> dict[str, Marks]:
    """Where the fields of episodes come from."""
    turns = zip(rows["temperature"].to_list(), rows["turns"].to_list(), strict=True)
    cut = not rows["rollout_logprobs"].equal(rows["sampling_logprobs"])
    return sampled_marks(
        sorted({spelled(temperature) for temperature, count in turns if count}),
        "what was sampled from" if cut else "",
        worker=policy.identity() if hasattr(policy, "identity") else "",
        tokenizer=vocabulary(policy.tokenizer),
    )
