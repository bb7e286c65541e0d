"""An environment that the policy plays in for several turns, its sampled tokens kept exactly as they were sampled."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..batch import CallInfo
from ..column import Column
from ..data.surrogates import half_of_pair
from ..errors import RewardError, WorkerError
from ..graph.allowed import number, problem, whole, worker
from ..graph.arguments import takes
from ..graph.declare import op
from ..graph.signature import CallShape
from ..graph.site import defined_at
from ..graph.types import STANDARD
from ..marks import Marks, other_ids, spelled, values, vocabulary
from .base import Opening, Worker
from .failures import Died, Late, said
from .notes import DEATHS, Notes, Row, code_of, named_row
from .records import SAMPLING
from .sampling import GENERATED, SamplingArguments, Stop, sampled_marks, sampling_marks
from .tokens import append, marked, pack
from .user_code import Aside

if TYPE_CHECKING:
    from ..batch import Batch

PLAYED = (
    GENERATED
    + ", rewards: f32[], turns: i32[], turn_rewards: f32[*turn], turn_states: i64[*turn], turn_ids: i32[*response]"
)


def _columns(shape: CallShape) -> str:
    return ", ".join(["prompt_ids", *sorted(name for name in shape.have if name not in STANDARD)])


def _played(shape: CallShape) -> Mapping[str, Marks]:
    """``marks=`` of a rollout: the policy samples, as it was declared to where the call does not say."""
    policy = getattr(shape.call.get("policy"), "arguments", {})
    return sampling_marks(replace(shape, init=policy))


def played_marks(episodes: list[Episode], policy: Any) -> dict[str, Marks]:
    """Where the fields of episodes come from."""
    temperatures = sorted({spelled(e.temperature) for e in episodes if e.turn_states})
    cut = any(e.rollout_logprobs != e.sampling_logprobs for e in episodes)
    return sampled_marks(
        temperatures,
        "what was sampled from" if cut else "",
        worker=policy.identity() if hasattr(policy, "identity") else "",
        tokenizer=vocabulary(policy.tokenizer),
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


def _begun(returned: Any) -> tuple[Any, str]:
    """What a reset returned. Raises ValueError and TypeError for another thing."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise TypeError(f"it returned {returned!r}, not (state, observation)")
    return returned[0], _text(returned[1])


def _stepped(returned: Any) -> tuple[Any, str, float, str]:
    """What a step returned, with the outcome as a text: ``done``, or its name. Raises ValueError and TypeError."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 4:
        raise TypeError(f"it returned {returned!r}, not (state, observation, reward, done)")
    state, observation, reward, done = returned
    if not math.isfinite(number := float(reward)):
        raise ValueError(f"it returned the reward {number}")
    return state, _text(observation), number, done if isinstance(done, str) else "done" if done else ""


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"it returned the observation {observation!r}, which is no text")
    if (half := half_of_pair(observation)) is not None:
        raise ValueError(f"it returned an observation with half of a surrogate pair at character {half}")
    return observation


def _numbered(anchor: Any) -> int:
    """The number of an anchor state: 63 bits of a hash that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(_written(anchor).encode(), digest_size=8).digest(), "little") >> 1


def _written(anchor: Any) -> str:
    """An anchor as text, another one for each. Raises TypeError for a thing whose text may change from run to run."""
    if isinstance(anchor, str):
        return ascii(str(anchor))
    if isinstance(anchor, int):
        return str(int(anchor))
    if isinstance(anchor, tuple):
        return f"({''.join(_written(part) + ',' for part in anchor)})"
    raise TypeError(f"it returned {anchor!r}, which is no text, whole number or tuple of such")


class Env(Worker):
    """Base of environments. Subclass it and write two plain functions, :meth:`reset` and :meth:`step`.

    ``row`` holds the columns of the batch. An observation is text; an empty one adds nothing. Rewards add up. ``done``
    is true where the episode is over, or the name of its outcome: ``"won"``.
    ``turns`` is the most turns of an episode (32 unless a subclass or a call says otherwise). ``timeout`` is the most
    seconds of one call of these functions, ten minutes unless a subclass says otherwise; with None they are called in
    the thread of the op, where a debugger works, and may take for ever. A third function, :meth:`anchor`, says which
    states are the same.

    >>> class Guess(fl.Env):
    ...     turns = 3
    ...
    ...     def reset(self, row, seed):
    ...         return seed % 10, "a number?"
    ...
    ...     def step(self, state, action):
    ...         right = action.strip() == str(state)
    ...         return state, "no", float(right), right
    >>> game = Guess()
    >>> state, observation = game.reset({}, seed=14)
    >>> game.step(state, "4")
    (4, 'no', 1.0, True)
    """

    turns: int = 32
    timeout: float | None = 600.0
    notes_rows = True
    _tokenizer: Any = None
    _aside: Aside | None = None
    _notes = Notes()

    @classmethod
    def check_declaration(cls, arguments: Mapping[str, Any]) -> None:
        fix = "Give seconds for one call of reset, step or anchor, or None to wait for ever."
        if not (allowed := number(above=0, fix=fix) | None).accepts(cls.timeout):
            raise WorkerError(f"{cls.__name__}: {problem('timeout', cls.timeout, allowed)}", fix=fix)
        for name, handed, gives in (
            ("reset", ("row", "seed"), "(state, observation)"),
            ("step", ("state", "action"), "(state, observation, reward, done)"),
        ):
            fn = getattr(cls, name)
            try:
                inspect.signature(fn).bind(None, *handed)
            except TypeError:
                said = ", ".join(inspect.signature(fn).parameters)
                raise WorkerError(
                    f"{cls.__name__}.{name}({said}) cannot be called with {' and '.join(handed)}.",
                    at=defined_at(fn),
                    fix=f"Write def {name}(self, {', '.join(handed)}), which returns {gives}: "
                    "an environment is a pure function, and its state is handed on.",
                ) from None

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[Any, str]:
        """Start an episode: its state, and the first observation, shown after the prompt."""
        raise WorkerError(
            f"{type(self).__name__} has no reset.", fix="Define reset(self, row, seed) -> (state, observation)."
        )

    def step(self, state: Any, action: str) -> tuple[Any, str, float, bool | str]:
        """Take an action (the policy's text): the next state, the observation, the reward, whether it is over.

        A text in place of true is the name of the outcome, an empty one is false.
        """
        raise WorkerError(
            f"{type(self).__name__} has no step.",
            fix="Define step(self, state, action) -> (state, observation, reward, done).",
        )

    def anchor(self, state: Any, observation: str) -> str | int | tuple[Any, ...]:
        """What tells the state before a turn from others of the row: a text, a whole number, or a tuple of such.

        Turns of one prompt with equal anchors are compared with each other (GiGPO, arXiv:2505.10978, "anchor states").
        Asked before each turn, with the latest observation, which is the answer here; it changes nothing.
        """
        return observation

    def open(self, opening: Opening) -> None:
        self._opening, self._notes = opening, opening.notes

    def close(self) -> None:
        if self._aside is not None:
            self._aside.close()

    @op(reads=_columns, adds=PLAYED, rows="expand", cost="external", pieces=True, marks=_played)
    @takes(
        policy=worker("respond", form="the handle of a worker that samples", fix="Write policy=actor."),
        n=whole(least=1, fix="Give n= 1 or more."),
        turns=whole(least=1),
        turn_tokens=whole(least=1),
        **{name: rule for name, rule in SAMPLING.items() if name != "max_tokens"},
    )
    def rollout(
        self,
        batch: Batch,
        *,
        policy: Any,
        n: int = 1,
        turns: int | None = None,
        turn_tokens: int | None = None,
        greedy: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Stop | None = None,
    ) -> Mapping[str, Any]:
        """Play ``n`` episodes per row with ``policy``, the handle of an actor that serves.

        A response is everything after the prompt: observations (``response_mask`` false) and sampled tokens
        (true). Sampled ids are kept as sampled and never made again from text; the next turn's prompt is
        exactly the tokens so far. ``turn_tokens`` bounds one turn, the others from ``greedy`` to ``stop`` say how
        its tokens are sampled, as in :meth:`Actor.generate`. Whether an episode is over is asked before
        each turn, so nothing is sampled after its end; it also ends where the model has no position left. An
        exception in user code, a call of it that takes longer than ``timeout``, or a result that is not as declared,
        raises RewardError with the row.

        ``turn_rewards`` and ``turn_states`` have one value per turn: its reward, and the number of the anchor
        before it, equal where anchors are. ``turn_ids`` is the turn, from 0, of a sampled token; -1 for observations.
        ``rewards`` is the sum of a row's ``turn_rewards``, ``turns`` their count. ``finished`` is true where the
        environment ended the episode, and ``finish_reason`` says how: the outcome that ``step`` named, or ``done``;
        ``length`` where the tokens of the model or of the last turn ran out, ``turns`` where the turns did.
        """
        children = batch.expand(n)
        episodes = self._begin(children, policy)
        seeds = children.row_seeds()
        limit = self.turns if turns is None else turns
        said = SamplingArguments(
            greedy=greedy,
            max_tokens=turn_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=stop,
        )
        for _ in range(limit):
            active = [i for i, e in enumerate(episodes) if not e.over]
            if not active:
                break
            self._turn(children, episodes, active, seeds, policy, said)
        return marked(self._fields(children, episodes), played_marks(episodes, policy))

    def _begin(self, rows: Batch, policy: Any) -> list[Episode]:
        made = values(rows["prompt_ids"].marks, "tokenizer")
        if made and (own := vocabulary(policy.tokenizer)) and made != {own}:
            raise other_ids(f"{self.name or type(self).__name__}.rollout", "prompt_ids")
        columns = {n: rows[n].to_list() for n in rows.fields}
        prompts = columns.pop("prompt_ids")
        seeds = rows.row_seeds("episode").tolist()
        episodes: list[Episode] = []
        given = [({n: c[i] for n, c in columns.items()}, seeds[i]) for i in range(len(rows))]
        begun = self._user("reset", _begun, rows, range(len(rows)), given)
        for i, (state, observation) in enumerate(begun):
            episode = Episode(state, observation, list(prompts[i]), policy.positions)
            if observation:
                episode.observe(policy.tokenizer.encode(observation, add_special_tokens=False))
            episodes.append(episode)
        return episodes

    def _turn(
        self, rows: Batch, episodes: list[Episode], active: list[int], seeds: Any, policy: Any, said: SamplingArguments
    ) -> None:
        """One turn of all episodes that go on: sample, step, observe."""
        import torch

        seen = [(episodes[i].state, episodes[i].observation) for i in active]
        for i, anchor in zip(active, self._user("anchor", _numbered, rows, active, seen), strict=True):
            episodes[i].turn_states.append(anchor)
        contexts = pack([episodes[i].prompt + episodes[i].tokens for i in active], "prompt", "i32")
        starts = torch.tensor([len(episodes[i].tokens) for i in active], dtype=torch.int64)
        sampled = policy.respond(contexts, seeds[torch.tensor(active)], starts, said)
        version = policy.read_version()
        ids = sampled.ids.to_list()
        rollout, sampling = sampled.rollout_logprobs.to_list(), sampled.sampling_logprobs.to_list()
        stopped = sampled.finished.tolist()
        texts = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
        acted = [(episodes[i].state, text) for i, text in zip(active, texts, strict=True)]
        stepped = self._user("step", _stepped, rows, active, acted)
        for place, i in enumerate(active):
            episode = episodes[i]
            episode.act(ids[place], rollout[place], sampling[place], version)
            episode.temperature, episode.cut = sampled.temperature, not stopped[place]
            episode.state, episode.observation, reward, episode.outcome = stepped[place]
            episode.turn_rewards.append(reward)
            if episode.observation and not episode.outcome:
                episode.observe(policy.tokenizer.encode(episode.observation, add_special_tokens=False))

    def _user(
        self, name: str, take: Callable[[Any], Any], rows: Batch, which: Sequence[int], given: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call user code for some rows, one after another, and take what it returned apart.

        A failure of either names the row.
        """
        title, fn = f"{self.name or type(self).__name__}.{name}", getattr(self, name)
        call, code = rows.call or CallInfo(), code_of(fn)
        told = [Row(call.program, call.step, title, rows.keys[i], code) for i in which]
        dead = next((row for row in told if self._notes.count_deaths(row) >= DEATHS), None)
        if dead is not None:
            raise self._failed(dead, Died(self._notes.count_deaths(dead)))
        self._aside = self._aside or Aside()
        jobs = [lambda args=args: take(fn(*args)) for args in given]
        outcomes = self._aside.run(jobs, self.timeout, self._notes, lambda place: told[place])
        last = outcomes[-1] if outcomes else None
        if isinstance(last, WorkerError):
            raise last
        if isinstance(last, BaseException):
            raise self._failed(told[len(outcomes) - 1], last) from last
        return outcomes

    def _failed(self, row: Row, error: BaseException) -> RewardError:
        longer = "; where it needs longer, write timeout = SECONDS in the class" if isinstance(error, Late) else ""
        return RewardError(
            f"{row.op} failed for row {named_row(row.key)}: {said(error)}.", fix=f"Mend {row.code}{longer}."
        )

    def _fields(self, rows: Batch, episodes: list[Episode]) -> dict[str, Any]:
        ids = pack([e.tokens for e in episodes], "response", "i32")
        return {
            "response_ids": ids,
            "tokens": append(rows["prompt_ids"], ids, dim="token"),
            "response_mask": pack([[t >= 0 for t in e.turn_ids] for e in episodes], "response", "bool"),
            "rollout_logprobs": pack([e.rollout_logprobs for e in episodes], "response", "f32"),
            "sampling_logprobs": pack([e.sampling_logprobs for e in episodes], "response", "f32"),
            "versions": pack([e.versions for e in episodes], "response", "i32"),
            "temperature": Column.of([e.temperature for e in episodes], dtype="f32"),
            "finished": [bool(e.outcome) for e in episodes],
            "finish_reason": [e.reason for e in episodes],
            "rewards": [sum(e.turn_rewards) for e in episodes],
            "turns": [len(e.turn_rewards) for e in episodes],
            "turn_rewards": pack([e.turn_rewards for e in episodes], "turn", "f32"),
            "turn_states": Column.of([e.turn_states for e in episodes], dim="turn", dtype="i64"),
            "turn_ids": pack([e.turn_ids for e in episodes], "response", "i32"),
        }
