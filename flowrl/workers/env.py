"""An environment that the policy plays in for several turns, its sampled tokens kept exactly as they were sampled."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..batch import CallInfo
from ..data.surrogates import half_of_pair
from ..errors import RewardError, WorkerError
from ..graph.ops.allowed import number, problem, whole, worker
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.field_types import STANDARD
from ..graph.ops.partial_answers import Answers, answers_of_call
from ..graph.ops.signature import CallShape
from ..graph.script.site import defined_at
from ..marks import Marks, other_ids, values, vocabulary
from .base import Opening, Worker
from .episodes import PLAYED, Episode, Played, columns_of
from .model_options import SAMPLING
from .tokens.packed_tokens import pack
from .tokens.sampling import SamplingArguments, Stop, sampling_marks
from .user_code.failed_rewards import Died, Late, said
from .user_code.rows_in_progress import DEATHS, Notes, Row, code_of, named_row
from .user_code.run_rows import Aside

if TYPE_CHECKING:
    from ..batch import Batch


def _columns(shape: CallShape) -> str:
    return ", ".join(["prompt_ids", *sorted(name for name in shape.have if name not in STANDARD)])


def _played(shape: CallShape) -> Mapping[str, Marks]:
    """``marks=`` of a rollout: the policy samples, as it was declared to where the call does not say."""
    policy = getattr(shape.call.get("policy"), "arguments", {})
    return sampling_marks(replace(shape, init=policy))


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


class _Game:
    """What one call plays: its rows and who plays them, and the episodes, a row each."""

    def __init__(
        self, rows: Batch, policy: Any, sampling: SamplingArguments, limit: int, answers: Answers | None
    ) -> None:
        self.rows, self.policy, self.sampling, self.limit, self._answers = rows, policy, sampling, limit, answers
        self.seeds = rows.row_seeds()
        self.known = answers.known if answers is not None else None
        self.episodes: list[Episode | Played] = []

    def played(self, prompts: Sequence[list[int]]) -> list[Played | None]:
        """The episodes that were played before, None for the others."""
        if self.known is None:
            return [None] * len(self.rows)
        tokens, turns = self.known["response_ids"].to_list(), self.known["turn_ids"].to_list()
        at = {key: place for place, key in enumerate(self.known.keys)}
        return [
            Played.of(prompt, tokens[at[key]], turns[at[key]]) if key in at else None
            for key, prompt in zip(self.rows.keys, prompts, strict=True)
        ]

    def keep(self, row: int, episode: Episode) -> None:
        """Hand over an episode that has ended."""
        if self._answers is not None:
            self._answers.keep([self.rows.keys[row]], episode.fields())


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
            if inspect.iscoroutinefunction(fn):
                raise WorkerError(
                    f"{cls.__name__}.{name} is async; its episodes are stepped one after another.",
                    at=defined_at(fn),
                    fix=f"Write def {name}(...), and asyncio.run(...) in it for what is async.",
                )
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
        sampling = SamplingArguments.of(locals(), max_tokens=turn_tokens)
        answers, children = answers_of_call(), batch.expand(n)
        game = _Game(children, policy, sampling, self.turns if turns is None else turns, answers)
        self._begin(game)
        for turn in range(game.limit):
            if not any(isinstance(e, Episode) and e.plays(turn) for e in game.episodes):
                break
            self._turn(game, turn)
        return columns_of(children.keys, game.episodes, game.known, policy)

    def _begin(self, game: _Game) -> None:
        """Begin all episodes; those that were played before are there as they were."""
        rows, policy = game.rows, game.policy
        made = values(rows["prompt_ids"].marks, "tokenizer")
        if made and (own := vocabulary(policy.tokenizer)) and made != {own}:
            raise other_ids(f"{self.name or type(self).__name__}.rollout", "prompt_ids")
        columns = {n: rows[n].to_list() for n in rows.fields}
        prompts = [list(prompt) for prompt in columns.pop("prompt_ids")]
        seeds = rows.row_seeds("episode").tolist()
        before = game.played(prompts)
        fresh = [i for i, episode in enumerate(before) if episode is None]
        room = policy.positions if fresh else None
        begun: dict[int, Episode] = {}

        def begin(i: int, returned: Any) -> None:
            state, observation = _begun(returned)
            episode = begun[i] = Episode(state, observation, prompts[i], room)
            if observation:
                episode.observe(policy.tokenizer.encode(observation, add_special_tokens=False))
            if episode.over:
                game.keep(i, episode)

        self._user("reset", begin, rows, fresh, [({n: c[i] for n, c in columns.items()}, seeds[i]) for i in fresh])
        game.episodes = [begun[i] if episode is None else episode for i, episode in enumerate(before)]

    def _turn(self, game: _Game, turn: int) -> None:
        """One turn of all episodes that go on: sample, step, observe."""
        import torch

        rows, policy = game.rows, game.policy
        active = [i for i, episode in enumerate(game.episodes) if episode.plays(turn)]
        fresh = {i: e for i in active if isinstance(e := game.episodes[i], Episode)}

        def look(i: int, anchor: Any) -> None:
            fresh[i].turn_states.append(_numbered(anchor))

        self._user("anchor", look, rows, list(fresh), [(e.state, e.observation) for e in fresh.values()])
        so_far = [game.episodes[i].before(turn) for i in active]
        contexts = pack([game.episodes[i].prompt + own for i, own in zip(active, so_far, strict=True)], "prompt", "i32")
        starts = torch.tensor([len(own) for own in so_far], dtype=torch.int64)
        sampled = policy.respond(contexts, game.seeds[torch.tensor(active)], starts, game.sampling)
        version = policy.read_version()
        at = {i: place for place, i in enumerate(active)}
        ids = sampled.ids.to_list()
        rollout, sampling = sampled.rollout_logprobs.to_list(), sampled.sampling_logprobs.to_list()
        stopped = sampled.finished.tolist()
        texts = policy.tokenizer.batch_decode([ids[at[i]] for i in fresh], skip_special_tokens=True)

        def step(i: int, returned: Any) -> None:
            episode, place = fresh[i], at[i]
            state, observation, reward, outcome = _stepped(returned)
            episode.act(ids[place], rollout[place], sampling[place], version)
            episode.temperature, episode.cut = sampled.temperature, not stopped[place]
            episode.state, episode.observation, episode.outcome = state, observation, outcome
            episode.turn_rewards.append(reward)
            if observation and not outcome:
                episode.observe(policy.tokenizer.encode(observation, add_special_tokens=False))
            if episode.over or turn + 1 == game.limit:
                game.keep(i, episode)

        acted = [(episode.state, text) for episode, text in zip(fresh.values(), texts, strict=True)]
        self._user("step", step, rows, list(fresh), acted)

    def _user(
        self,
        name: str,
        take: Callable[[int, Any], None],
        rows: Batch,
        which: Sequence[int],
        given: Sequence[tuple[Any, ...]],
    ) -> None:
        """Call user code for some rows, one after another, and ``take`` what each returned before the next is called.

        A failure of either names the row.
        """
        title, fn = f"{self.name or type(self).__name__}.{name}", getattr(self, name)
        call, code = rows.call or CallInfo(), code_of(fn)
        told = [Row(call.program, call.step, title, rows.keys[i], code) for i in which]
        dead = next((row for row in told if self._notes.count_deaths(row) >= DEATHS), None)
        if dead is not None:
            raise self._failed(dead, Died(self._notes.count_deaths(dead)))
        self._aside = self._aside or Aside()
        jobs = [lambda i=i, args=args: take(i, fn(*args)) for i, args in zip(which, given, strict=True)]
        outcomes = self._aside.run(jobs, self.timeout, self._notes, lambda place: told[place])
        last = outcomes[-1] if outcomes else None
        if isinstance(last, WorkerError):
            raise last
        if isinstance(last, BaseException):
            raise self._failed(told[len(outcomes) - 1], last) from last

    def _failed(self, row: Row, error: BaseException) -> RewardError:
        longer = "; where it needs longer, write timeout = SECONDS in the class" if isinstance(error, Late) else ""
        step = f" of step {row.step}" if row.program else ""
        return RewardError(
            f"{row.op}{step} failed for row {named_row(row.key)}: {said(error)}.", fix=f"Mend {row.code}{longer}."
        )
