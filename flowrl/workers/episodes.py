"""Episodes of an environment: what is known of each while it is played, and the fields that come of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..batch import Batch, Column, Key
from ..errors import RunError
from ..graph.ops.field_types import FieldType, parse_fields
from ..marks import Marks, marks, spelled, vocabulary
from .tokens.packed_tokens import marked
from .tokens.sampling import GENERATED, sampled_marks
from .user_code.failed_rewards import Died

if TYPE_CHECKING:
    from .policy_calls import Answer
    from .tokens.row_support import RowSupport

PLAYED = (
    GENERATED
    + ", rewards: f32[], turns: i32[], turn_rewards: f32[*turn], turn_states: i64[*turn], turn_ids: i32[*response]"
    + ", outcome: any, sampled_tokens: i32[], delivered_tokens: i32[], retries: i32[], replaced: i32[]"
    + ", forks: i32[], repairs: i32[], scores: any"
)
#: What a rollout that marks failures adds besides.
MARKED = "failed: bool[], failed_why: any"
#: What a rollout that keeps the branches of episodes adds besides.
BRANCHED = "branches: any"
#: What a rollout adds besides that records which tokens could be drawn.
RECORDED = "support_ids: i32[*support], support_sizes: i32[*response]"
#: What a rollout that keeps the conversations adds besides.
TOLD = "conversation: any"

#: How an episode may end: the environment ended it, a limit did, or something failed.
OUTCOMES = (
    "finished",
    "truncated_turns",
    "truncated_tokens",
    "truncated_wall",
    "environment_failure",
    "grader_failure",
    "infrastructure_failure",
)
_TRUNCATED = {"turns": "truncated_turns", "length": "truncated_tokens", "time": "truncated_wall"}


class GraderFailed(Exception):
    """What grades an episode has failed; its cause is what it raised."""


def failure_of(error: BaseException) -> str:
    """Return the outcome of an episode whose user code failed.

    What the machine and the network do is no fault of the environment: an OSError, a process that died, a call that
    does not come back.
    """
    if isinstance(error, GraderFailed):
        cause = error.__cause__
        return "infrastructure_failure" if isinstance(cause, OSError) else "grader_failure"
    return "infrastructure_failure" if isinstance(error, (OSError, Died)) else "environment_failure"


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
    begun: bool = False  # its environment has reset
    late: bool = False  # its seconds have run out
    sampled: list[int] = field(default_factory=list[int])  # all ids that came from the engine, in their order
    kept_cache: bool = False  # some came from keys and values that were kept through a publish
    wasted: int = 0  # tokens that were sampled for it and are not in it
    retries: int = 0  # attempts that failed and were played anew
    replaced: int = 0  # episodes before this one in its place, which failed
    forks: int = 0  # times that its history was rewritten
    repairs: int = 0  # answers that came back with other white space, and were taken as they were sampled
    failed: str = ""  # which failure ended it, of OUTCOMES
    why: str = ""  # what failed
    grade: float = 0.0  # of an episode that had no turn
    scores: dict[str, float] = field(default_factory=dict[str, float])  # what each function that grades it gave
    conversation: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # messages, where they are kept
    branches: list[Episode] = field(default_factory=list["Episode"])  # the others, where its history forked
    support: RowSupport | None = None  # which tokens could be drawn, where that is recorded; any where one was observed

    @property
    def over(self) -> bool:
        """Whether nothing more is sampled: the environment said so, or there is no room for another token."""
        return bool(self.outcome or self.failed) or self.late or self.full or not self._fits(1)

    @property
    def reason(self) -> str:
        """How it ended: the environment's outcome; ``length`` where tokens ran out; ``turns`` where turns did."""
        if self.failed:
            return "failed"
        return self.outcome or ("time" if self.late else "length" if self.over or self.cut else "turns")

    def _fits(self, count: int) -> bool:
        return self.room is None or len(self.prompt) + len(self.tokens) + count <= self.room

    def observe(self, ids: list[int]) -> None:
        """Append what the environment says: no loss, no log-probability. Where no answer fits behind it, it is over."""
        if not self._fits(len(ids) + 1):
            self.full = True
            return
        self.add_context(ids)

    def add_context(self, ids: Sequence[int]) -> None:
        """Append tokens that are not trained."""
        self.tokens += ids
        self.turn_ids += [-1] * len(ids)
        self.rollout_logprobs += [0.0] * len(ids)
        self.sampling_logprobs += [0.0] * len(ids)
        self.versions += [0] * len(ids)
        if self.support is not None:
            self.support.skip(len(ids))

    def act(self, answer: Answer) -> None:
        """Append what the policy sampled, as it was sampled."""
        self.sampled += answer.ids
        self.kept_cache |= answer.kept_cache
        self.tokens += answer.ids
        self.turn_ids += [len(self.turn_rewards)] * len(answer.ids)
        self.rollout_logprobs += answer.rollout_logprobs
        self.sampling_logprobs += answer.sampling_logprobs
        self.versions += answer.versions
        if self.support is not None:
            assert answer.support is not None, "it was asked for"
            self.support.extend(answer.support)

    def give(self, reward: float) -> None:
        """Add a reward to the latest turn."""
        if self.turn_rewards:
            self.turn_rewards[-1] += reward
        else:
            self.grade += reward

    @property
    def is_as_sampled(self) -> bool:
        """Whether its tokens that are trained are those that the engine sampled, in their order."""
        return [t for t, turn in zip(self.tokens, self.turn_ids, strict=True) if turn >= 0] == self.sampled

    @property
    def branch(self) -> dict[str, list[Any]]:
        """Itself as a branch of another one: what :func:`flowrl.rl.branches` makes a row of."""
        return {
            "prompt_ids": self.prompt,
            "response_ids": self.tokens,
            "response_mask": [turn >= 0 for turn in self.turn_ids],
            "rollout_logprobs": self.rollout_logprobs,
            "sampling_logprobs": self.sampling_logprobs,
            "versions": self.versions,
            **self._recorded,
        }

    @property
    def _recorded(self) -> dict[str, list[int]]:
        """The fields of RECORDED, where they are kept."""
        support = self.support
        return {} if support is None else {"support_ids": list(support.ids), "support_sizes": list(support.sizes)}

    @property
    def _delivered(self) -> int:
        """How many of its tokens are trained, without its branches."""
        return len(self.turn_ids) - self.turn_ids.count(-1)

    def fields(self, also: Sequence[str] = ()) -> dict[str, Any]:
        """The fields of this row; and those besides that are in ``also``."""
        found: dict[str, Any] = {
            "response_ids": self.tokens,
            "tokens": self.prompt + self.tokens,
            "response_mask": [turn >= 0 for turn in self.turn_ids],
            "rollout_logprobs": self.rollout_logprobs,
            "sampling_logprobs": self.sampling_logprobs,
            "versions": self.versions,
            "temperature": self.temperature,
            "finished": bool(self.outcome) and not self.failed,
            "finish_reason": self.reason,
            "rewards": math.nan if self.failed else self.grade + sum(self.turn_rewards),
            "turns": len(self.turn_rewards),
            "turn_rewards": self.turn_rewards,
            "turn_states": self.turn_states[: len(self.turn_rewards)],
            "turn_ids": self.turn_ids,
            "outcome": self.failed or _TRUNCATED.get(self.reason if not self.outcome else "", "finished"),
            "sampled_tokens": len(self.sampled) + self.wasted,
            "delivered_tokens": sum(each._delivered for each in (self, *self.branches)),
            "retries": self.retries,
            "replaced": self.replaced,
            "forks": self.forks,
            "repairs": self.repairs,
            "scores": self.scores,
        }
        more = {
            "failed": bool(self.failed),
            "failed_why": self.why,
            "branches": [each.branch for each in self.branches],
            "conversation": self.conversation,
            **self._recorded,
        }
        return found | {name: value for name, value in more.items() if name in also}


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

    def before(self, turn: int) -> list[int]:
        """The tokens of its response before a turn."""
        return self.tokens[: self.begins[turn]]


def columns_of(
    keys: Sequence[Key],
    episodes: Sequence[Episode | Played],
    known: Batch | None,
    policy: Any,
    *,
    also: Sequence[str] = (),
) -> dict[str, Column]:
    """The fields of episodes; ``known`` has those of episodes that were played before. Raises as :func:`check_ids`."""
    own = [(key, e) for key, e in zip(keys, episodes, strict=True) if isinstance(e, Episode)]
    fresh = [(key, e.fields(also)) for key, e in own]
    types = _TYPES | {name: type_ for name, type_ in _MORE.items() if name in also}
    columns = {name: _column(type_, [fields[name] for _, fields in fresh]) for name, type_ in types.items()}
    made = Batch([key for key, _ in fresh], {**columns, "versions": versions_of([e for _, e in own])})
    check_ids(made, [e for _, e in own])
    whole = made if known is None else known.select(*made.fields).concat(made).take_keys(keys)
    return marked(whole.columns, _marks(whole, policy))


def versions_of(episodes: Sequence[Episode]) -> Column:
    """The version of each token; marked where an episode, or a branch of it, kept keys and values through a publish."""
    kept = any(each.kept_cache for episode in episodes for each in (episode, *episode.branches))
    versions = _column(_TYPES["versions"], [episode.versions for episode in episodes])
    return versions.marked(marks(cache="kept")) if kept else versions


def check_ids(made: Batch, episodes: Sequence[Episode]) -> None:
    """Raise RunError where the ids that are trained are not those that the engine sampled, in their order."""
    import torch

    trained = made["response_ids"].values[made["response_mask"].values.bool()] if len(made) else torch.tensor([])
    came = torch.tensor([token for episode in episodes for token in episode.sampled], dtype=trained.dtype)
    if not torch.equal(trained.cpu(), came) or not all(b.is_as_sampled for e in episodes for b in e.branches):
        raise RunError(
            f"{len(trained)} tokens of these episodes would be trained, and they are not the {len(came)} that the "
            "engine sampled.",
            fix="Give an environment no access to the tokens of its episodes.",
        )


def _typed(declared: str) -> dict[str, FieldType]:
    return {name: type_ for name, type_ in parse_fields(declared).items() if type_ is not None}


_TYPES, _MORE = _typed(PLAYED), _typed(f"{MARKED}, {BRANCHED}, {TOLD}, {RECORDED}")


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
