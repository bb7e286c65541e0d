"""An environment that the policy plays in for several turns, its sampled tokens kept exactly as they were sampled."""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from ..batch import CallInfo, Key
from ..data.surrogates import half_of_pair
from ..errors import RewardError, WorkerError
from ..graph.ops.allowed import flag, number, one_of, problem, whole, worker
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.field_types import STANDARD
from ..graph.ops.partial_answers import Answers, answers_of_call
from ..graph.ops.signature import CallShape
from ..graph.ops.update_metrics import Metrics
from ..graph.script.site import defined_at
from ..marks import Marks, other_ids, values, vocabulary
from .base import Opening, Worker
from .episodes import BRANCHED, MARKED, OUTCOMES, PLAYED, TOLD, Episode, Played, columns_of, failure_of
from .model_options import SAMPLING
from .policy_calls import Ask, policy_calls
from .sessions import CodeFailed, OutOfTime, Sessions, called, paused, sampled
from .tokens.sampling import SamplingArguments, Stop, sampling_marks
from .user_code.code_calls import CodeCall, CodeCalls
from .user_code.failed_rewards import Died, Failures, Late, Policy, said, settle
from .user_code.rows_in_progress import DEATHS, Notes, Row, code_of, named_row

if TYPE_CHECKING:
    from ..batch import Batch

#: What ``row`` holds besides the columns of the data: a seed that all episodes of a task share.
TASK_SEED = "task_seed"
#: Observations of so many characters at most are remembered with their ids, and so many of them.
SHORT, MOST_ENCODED = 200, 10_000


def _columns(shape: CallShape) -> str:
    return ", ".join(["prompt_ids", *sorted(name for name in shape.have if name not in STANDARD)])


def _played(shape: CallShape) -> Mapping[str, Marks]:
    """``marks=`` of a rollout: the policy samples, as it was declared to where the call does not say."""
    policy = getattr(shape.call.get("policy"), "arguments", {})
    return sampling_marks(replace(shape, init=policy))


def _adds(shape: CallShape) -> str:
    said = shape.call
    wanted = {MARKED: said.get("on_error") == "mark", BRANCHED: said.get("branches"), TOLD: said.get("messages")}
    return ", ".join([PLAYED, *(fields for fields, asked in wanted.items() if asked is True)])


def _counted(shape: CallShape) -> str:
    counted = "outcome, sampled_tokens, response_mask, scores"
    return f"{counted}, branches" if "branches" in shape.have else counted


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
        self.tokenizer = policy.tokenizer
        self.seeds: list[int] = rows.row_seeds().tolist()
        self.own_seeds: list[int] = rows.row_seeds("episode").tolist()
        columns = {n: rows[n].to_list() for n in rows.fields}
        self.prompts = [list(prompt) for prompt in columns.pop("prompt_ids")]
        columns.setdefault(TASK_SEED, list(task_seeds))
        self.columns = columns
        self.known = answers.known if answers is not None else None
        self.told: dict[tuple[int, str], Row] = {}  # by row and function, as notes name them
        self.numbers: dict[str, int] = {}  # of observations as anchors
        self.encoded: dict[tuple[Any, ...], list[int]] = {}  # ids of short observations
        self.episodes: dict[int, Episode | Played] = self._played()
        fresh = len(self.episodes) < len(rows)
        self.room: int | None = policy.positions if fresh else None

    def _played(self) -> dict[int, Episode | Played]:
        """The episodes that were played before."""
        if self.known is None:
            return {}
        tokens, turns = self.known["response_ids"].to_list(), self.known["turn_ids"].to_list()
        at = {key: place for place, key in enumerate(self.known.keys)}
        return {
            i: Played.of(prompt, tokens[at[key]], turns[at[key]])
            for i, (key, prompt) in enumerate(zip(self.rows.keys, self.prompts, strict=True))
            if key in at
        }

    def keep(self, ended: Mapping[int, Episode]) -> None:
        """Hand over episodes that have ended, by their rows; all of them or none are known to a later process."""
        self.episodes |= ended
        if self._answers is None:
            return
        if failed := [i for i, episode in ended.items() if episode.failed]:
            self._answers.fail([self.rows.keys[i] for i in failed])
        elif ended:
            fields = [episode.fields(self.also) for episode in ended.values()]
            together = {name: [value for each in fields for value in each[name]] for name in fields[0]}
            self._answers.keep([self.rows.keys[i] for i in ended], together)


class Env(Worker):
    """Base of environments. Subclass it and write two plain functions, :meth:`reset` and :meth:`step`.

    ``row`` holds the columns of the batch, and ``task_seed``, which the episodes of a task have in common: an opponent
    that draws from it plays all of them alike. ``seed`` is the episode's own. An observation is text; an empty one adds
    nothing. Rewards add up. ``done`` is true where the episode is over, or the name of its outcome: ``"won"``.
    ``turns`` is the most turns of an episode (32 unless a subclass or a call says otherwise). ``timeout`` is the most
    seconds of one call of these functions, ten minutes unless a subclass says otherwise; with None they are called in
    the thread of the op, where a debugger works, and may take for ever. A third function, :meth:`anchor`, says which
    states are the same. All three may be ``async``: then those of all episodes wait beside each other.

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
    _notes = Notes()
    _settle: Callable[[Failures], None] | None = None
    _now: Callable[[], float] = staticmethod(time.monotonic)

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
        self._warn, self._settle, self._notes = opening.warn, opening.settle, opening.notes

    @op(reads=_columns, adds=_adds, rows="expand", cost="external", pieces=True, marks=_played)
    @takes(
        policy=worker("respond", form="the handle of a worker that samples", fix="Write policy=actor."),
        n=whole(least=1, fix="Give n= 1 or more."),
        turns=whole(least=1),
        turn_tokens=whole(least=1),
        tokens=whole(least=1),
        seconds=number(above=0) | None,
        on_error=one_of("raise", "mark"),
        retries=whole(least=0),
        backoff=number(least=0),
        max_failed=number(least=0, most=1),
        branches=flag(),
        messages=flag(),
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
        tokens: int | None = None,
        seconds: float | None = None,
        on_error: str = "raise",
        retries: int = 0,
        backoff: float = 1.0,
        max_failed: float = 0.5,
        branches: bool = False,
        messages: bool = False,
        greedy: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Stop | None = None,
    ) -> Mapping[str, Any]:
        """Play ``n`` episodes per row with ``policy``, the handle of an actor that serves.

        Each episode runs on its own: as soon as its environment has answered, it joins the batch of the policy's
        engine, and one that takes long holds up no other. A response is everything after the prompt: observations
        (``response_mask`` false) and sampled tokens (true). Sampled ids are kept as sampled and never made again from
        text; the next turn's prompt is exactly the tokens so far. ``turn_tokens`` bounds one turn, the others from
        ``greedy`` to ``stop`` say how its tokens are sampled, as in :meth:`Actor.generate`. Whether an episode is over
        is asked before each turn, so nothing is sampled after its end; it also ends where the model has no position
        left. ``turns``, ``tokens`` (sampled ones) and ``seconds`` are the most of an episode.

        An exception in user code, a call of it that takes longer than ``timeout``, or a result that is not as declared,
        is a failure of the episode, which is played anew ``retries`` times, after ``backoff`` seconds and twice as many
        each further time. What fails then raises RewardError with the row, or with ``on_error="mark"`` is marked, as in
        :class:`FunctionReward`: ``failed``, ``failed_why``, and rewards that are nan. More than ``max_failed`` of the
        rows of a call, 8 or more, raise all the same.

        ``turn_rewards`` and ``turn_states`` have one value per turn: its reward, and the number of the anchor
        before it, equal where anchors are. ``turn_ids`` is the turn, from 0, of a sampled token; -1 for observations.
        ``rewards`` is the sum of a row's ``turn_rewards``, ``turns`` their count. ``finished`` is true where the
        environment ended the episode, and ``finish_reason`` says how: the outcome that ``step`` named, or ``done``;
        ``length`` where the tokens of the model, of the episode or of the last turn ran out, ``turns`` where the turns
        did, ``time`` where the seconds did, ``failed``. ``outcome`` is one of ``finished``, ``truncated_turns``,
        ``truncated_tokens``, ``truncated_wall``, ``environment_failure``, ``grader_failure`` and
        ``infrastructure_failure`` (a call that does not come back, an OSError). ``sampled_tokens`` counts what the
        engine sampled for the row, in all attempts. ``branches`` adds the field of that name: of an agent that rewrote
        its history, the branches beside that of the row, which :func:`flowrl.rl.branches` makes rows of. ``messages``
        adds ``conversation``: the messages of the row, with the prompt and all answers, for ``flowrl export``.
        """
        if tokens is not None and turn_tokens is None:
            turn_tokens = policy.how(SamplingArguments()).max_tokens if hasattr(policy, "how") else tokens
        sampling = SamplingArguments.of(locals(), max_tokens=turn_tokens)
        answers, children = answers_of_call(), batch.expand(n)
        limits = Limits(self.turns if turns is None else turns, turn_tokens, tokens, seconds)
        failing = Policy(on_error, retries, backoff, max_failed)
        _expect_own_ids(self, children, policy)
        task_seeds = [seed for seed in batch.row_seeds("task").tolist() for _ in range(n)]
        wanted = {"failed": failing.marks, "failed_why": failing.marks, "branches": branches, "conversation": messages}
        also = [name for name, asked in wanted.items() if asked]
        game = Game(children, policy, limits, failing, answers, task_seeds, also)
        self._play_all(game, sampling)
        episodes = [game.episodes[i] for i in range(len(children))]
        self._settle_failures(game)
        return columns_of(children.keys, episodes, game.known, policy, also=also)

    @op(reads=_counted, cost="local")
    def outcomes(self, batch: Batch) -> Metrics:
        """Count how the episodes of a rollout ended: each outcome, and ``truncated`` and ``failures`` in all.

        ``delivered_fraction`` is which part of the tokens that the engine sampled for them is in the rows. Each name in
        ``scores`` is there with the mean over the episodes that have it.
        """
        counts = Counter(batch["outcome"].to_list())
        sampled = int(batch["sampled_tokens"].values.sum())
        delivered = int(batch["response_mask"].values.sum())
        if "branches" in batch:
            delivered += sum(sum(branch["response_mask"]) for row in batch["branches"].to_list() for branch in row)
        scores = [scores for scores in batch["scores"].to_list() if scores]
        names = sorted({name for each in scores for name in each} - {*OUTCOMES, "truncated", "failures"})
        told = {name: [each[name] for each in scores if name in each] for name in names}
        return Metrics(
            {name: float(counts[name]) for name in OUTCOMES} | {n: sum(v) / len(v) for n, v in told.items()},
            truncated=float(sum(counts[name] for name in OUTCOMES if name.startswith("truncated"))),
            failures=float(sum(counts[name] for name in OUTCOMES if name.endswith("failure"))),
            delivered_fraction=delivered / sampled if sampled else 1.0,
        )

    # -- playing ------------------------------------------------------------------------------------------------------

    def _play_all(self, game: Game, sampling: SamplingArguments) -> None:
        """Play all episodes to their ends."""
        stops = game.failing.on_error == "raise" and not game.failing.retries
        wasted: Counter[int] = Counter()
        sessions = Sessions(
            policy_calls(game.policy, sampling),
            CodeCalls(self.timeout, self._notes, stop_at_error=stops),
            seconds=game.limits.seconds,
            now=self._now,
            wasted=lambda session, tokens: wasted.update({session: tokens}),
        )
        players = {
            i: self._replay(game, i) if i in game.episodes else self._play(game, i, wasted)
            for i in range(len(game.rows))
        }
        sessions.run(players)
        if self._grades_groups:
            self._grade_groups(game)

    def _grade_groups(self, game: Game) -> None:
        """Have the episodes of each prompt graded together, once all of them have ended."""
        groups: dict[Key, dict[int, Episode]] = {}
        for i, episode in sorted(game.episodes.items()):
            if isinstance(episode, Episode):
                groups.setdefault(game.rows.keys[i][:-1], {})[i] = episode

        async def grade(episodes: dict[int, Episode]) -> None:
            whole = {i: episode for i, episode in episodes.items() if not episode.failed}
            try:
                if whole:
                    await self._grade_group(game, whole)
            except CodeFailed as failed:
                if not game.failing.marks:
                    raise self._failed(failed.call.row, failed.error) from failed.error
                for episode in whole.values():
                    episode.failed, episode.why = failure_of(failed.error), said(failed.error)
            game.keep(episodes)

        calls = CodeCalls(self.timeout, self._notes, stop_at_error=not game.failing.marks)
        policy = policy_calls(game.policy, SamplingArguments())
        Sessions(policy, calls).run({next(iter(each)): grade(each) for each in groups.values()})

    async def _replay(self, game: Game, i: int) -> None:
        """Sample for an episode that was played before: the bits of others may depend on how many rows there are."""
        played = cast("Played", game.episodes[i])
        used = 0
        for turn in range(len(played.begins)):
            start = played.begins[turn]
            ask = Ask(i, played.prompt + played.before(turn), game.seeds[i], start, game.limits.most(used))
            try:
                used += len((await sampled(ask)).ids)
            except OutOfTime:
                return

    async def _play(self, game: Game, i: int, wasted: Counter[int]) -> None:
        """Play an episode, anew where it fails and there are attempts left; keep it."""
        attempt = 0
        while True:
            episode = Episode(None, "", game.prompts[i], game.room)
            try:
                await self._to_the_end(game, i, episode)
                break
            except CodeFailed as failed:
                if isinstance(failed.error, WorkerError):
                    raise failed.error from None
                if await self._may_retry(game, i, failed, attempt):
                    wasted[i] += len(episode.sampled) + episode.wasted
                    attempt += 1
                    continue
                if not game.failing.marks:
                    raise self._failed(failed.call.row, failed.error) from failed.error
                episode.failed, episode.why = failure_of(failed.error), said(failed.error)
                break
        episode.wasted += wasted[i]
        if "conversation" in game.also:
            episode.conversation = self._conversation(game, episode)
        if self._grades_groups:
            game.episodes[i] = episode
        else:
            game.keep({i: episode})

    async def _may_retry(self, game: Game, i: int, failed: CodeFailed, attempt: int) -> bool:
        """Whether a row that failed is played anew, once that may be."""
        if attempt >= game.failing.retries or isinstance(failed.error, Died):
            return False
        try:
            await paused(i, min(game.failing.backoff * 2**attempt, 30.0))
        except OutOfTime:
            return False
        return True

    async def _to_the_end(self, game: Game, i: int, episode: Episode) -> None:
        """Play an episode and have it graded, also where its time is up."""
        try:
            await self._episode(game, i, episode)
        except OutOfTime:
            episode.late = True
            if not episode.begun:
                row = self._row(game, i, "reset")
                call = CodeCall(i, self.reset, (), row)
                raise CodeFailed(call, Late(game.limits.seconds, ", before the episode began")) from None
        await self._grade(game, i, episode)

    async def _episode(self, game: Game, i: int, episode: Episode) -> None:
        """Play an episode to its end."""
        row = {name: values[i] for name, values in game.columns.items()}
        begun = await self._code(game, i, "reset", (row, game.own_seeds[i]), _begun)
        episode.state, episode.observation = begun
        episode.begun = True
        self._observe(game, episode)
        limits = game.limits
        while not episode.over and len(episode.turn_rewards) < limits.turns:
            episode.turn_states.append(await self._anchor(game, i, episode))
            ask = Ask(
                i,
                episode.prompt + episode.tokens,
                game.seeds[i],
                len(episode.tokens),
                limits.most(len(episode.sampled)),
            )
            answer = await sampled(ask)
            episode.wasted += len(answer.ids)  # until the environment has taken them
            action = game.tokenizer.decode(answer.ids, skip_special_tokens=True)
            given = (episode.state, action)
            state, observation, reward, outcome = await self._code(game, i, "step", given, _stepped)
            episode.wasted -= len(answer.ids)
            episode.act(answer.ids, answer.rollout_logprobs, answer.sampling_logprobs, answer.versions)
            episode.temperature, episode.cut = answer.temperature, not answer.stopped
            episode.state, episode.observation, episode.outcome = state, observation, outcome
            episode.turn_rewards.append(reward)
            if not outcome and limits.tokens is not None and len(episode.sampled) >= limits.tokens:
                episode.full = True
            elif not outcome:
                self._observe(game, episode)

    async def _anchor(self, game: Game, i: int, episode: Episode) -> int:
        if type(self).anchor is Env.anchor:
            number = game.numbers.get(episode.observation)
            if number is None:
                number = game.numbers[episode.observation] = _numbered(episode.observation)
            return number
        return await self._code(game, i, "anchor", (episode.state, episode.observation), _numbered)

    async def _grade(self, game: Game, i: int, episode: Episode) -> None:
        """Grade an episode that was played as far as it came; here what its turns gave is its reward."""

    @property
    def _grades_groups(self) -> bool:
        """Whether the episodes of a prompt are graded together."""
        return False

    async def _grade_group(self, game: Game, episodes: Mapping[int, Episode]) -> None:
        """Grade the episodes of a prompt that did not fail, by their rows."""

    def _observe(self, game: Game, episode: Episode) -> None:
        """Append the latest observation to the tokens. A short one is encoded once: episodes of a task see the same."""
        said = episode.observation
        if not said:
            return
        key = self._encoded_by(episode) if len(said) <= SHORT else None
        ids = game.encoded.get(key) if key is not None else None
        if ids is None:
            ids = self._encode(game.tokenizer, episode)
            if key is not None and len(game.encoded) < MOST_ENCODED:
                game.encoded[key] = ids
        episode.observe(ids)

    def _encoded_by(self, episode: Episode) -> tuple[Any, ...]:
        """What the ids of the latest observation depend on."""
        return (episode.observation,)

    def _encode(self, tokenizer: Any, episode: Episode) -> list[int]:
        """The ids of the latest observation."""
        return tokenizer.encode(episode.observation, add_special_tokens=False)

    def _conversation(self, game: Game, episode: Episode) -> list[dict[str, Any]]:
        """The messages of an episode: here what was observed and what was sampled, as text."""
        turns: list[tuple[str, list[int]]] = [("user", list(episode.prompt))]
        for token, turn in zip(episode.tokens, episode.turn_ids, strict=True):
            role = "user" if turn < 0 else "assistant"
            if turns[-1][0] != role:
                turns.append((role, []))
            turns[-1][1].append(token)
        decode = game.tokenizer.decode
        return [{"role": role, "content": decode(ids, skip_special_tokens=True)} for role, ids in turns]

    def _function(self, name: str) -> Callable[..., Any]:
        """The function of the environment that is called under a name."""
        return getattr(self, name)

    async def _code(self, game: Game, i: int, name: str, args: tuple[Any, ...], take: Callable[[Any], Any]) -> Any:
        """What a function of the environment gives for a row. Raises CodeFailed."""
        fn, _, is_async = self._known(name)
        row = self._row(game, i, name)
        call = CodeCall(i, fn, args, row, take, is_async)
        if (times := self._notes.count_deaths(row)) >= DEATHS:
            raise CodeFailed(call, Died(times))
        return await called(call)

    def _row(self, game: Game, i: int, name: str) -> Row:
        """A row that a function is called for, as notes and messages name it."""
        row = game.told.get((i, name))
        if row is None:
            info, title = game.rows.call or CallInfo(), f"{self.name or type(self).__name__}.{name}"
            code = self._known(name)[1]
            row = game.told[i, name] = Row(info.program, info.step, title, game.rows.keys[i], code)
        return row

    def _known(self, name: str) -> tuple[Callable[..., Any], str, bool]:
        """A function, where it is written, and whether it is async."""
        found = self._functions.get(name)
        if found is None:
            fn = self._function(name)
            written = getattr(type(self), name, fn)
            found = self._functions[name] = fn, code_of(written), inspect.iscoroutinefunction(fn)
        return found

    @cached_property
    def _functions(self) -> dict[str, tuple[Callable[..., Any], str, bool]]:
        return {}

    def _settle_failures(self, game: Game) -> None:
        """Tell of the rows that failed, once all rows of the call are done."""
        failed = {i: e for i, e in sorted(game.episodes.items()) if isinstance(e, Episode) and e.failed}
        if not failed:
            return
        info = game.rows.call or CallInfo()
        title = f"{self.name or type(self).__name__}.rollout" + (f" of step {info.step}" if info.program else "")
        why = {f"row {named_row(game.rows.keys[i])}": episode.why for i, episode in failed.items()}
        found = Failures(title, why, len(failed), game.failing.max_failed, info)
        if self._settle is not None:
            self._settle(found)
        else:
            settle([found], len(game.rows), self._warn)

    def _failed(self, row: Row, error: BaseException) -> RewardError:
        longer = "; where it needs longer, write timeout = SECONDS in the class" if isinstance(error, Late) else ""
        step = f" of step {row.step}" if row.program else ""
        return RewardError(
            f"{row.op}{step} failed for row {named_row(row.key)}: {said(error)}.", fix=f"Mend {row.code}{longer}."
        )


def _expect_own_ids(env: Env, rows: Batch, policy: Any) -> None:
    """Raise where the prompts are ids of another tokenizer than the policy's."""
    made = values(rows["prompt_ids"].marks, "tokenizer")
    if made and (own := vocabulary(policy.tokenizer)) and made != {own}:
        raise other_ids(f"{env.name or type(env).__name__}.rollout", "prompt_ids")
