"""Plays the episodes of a rollout: each a coroutine that asks the policy and the environment, anew where it fails."""

from __future__ import annotations

import inspect
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import cached_property
from typing import Any, cast

from ..batch import CallInfo, Key
from ..errors import ModelError, RewardError, WorkerError, shown
from ..graph.script.site import is_users_code
from .base import Opening, Worker
from .episodes import Episode, Played, failure_of
from .game import Game
from .policy_calls import Ask, policy_calls
from .sessions import CodeFailed, OutOfTime, Sessions, called, paused, sampled
from .tokens.sampling import SamplingArguments
from .user_code.code_calls import CodeCall, CodeCalls
from .user_code.environment_returns import check_anchor, check_reset, check_step
from .user_code.event_loops import EventLoops
from .user_code.failed_rewards import Died, Failures, Late, said, settle
from .user_code.rows_in_progress import DEATHS, Notes, Row, code_of, named_row

#: Observations of so many characters at most are remembered with their ids, and so many of them.
SHORT, MOST_ENCODED = 200, 10_000


class Player(Worker):
    """Base of :class:`Env`: how it plays. What a user writes, and what is asked of it, is there."""

    timeout: float | None
    notes_rows = True
    _notes = Notes()
    _loops = EventLoops()
    _settle: Callable[[Failures], None] | None = None
    _now: Callable[[], float] = staticmethod(time.monotonic)
    _template_of: Any = None  # whose chat template was looked at last

    def open(self, opening: Opening) -> None:
        self._warn, self._settle, self._notes = opening.warn, opening.settle, opening.notes
        self._loops = EventLoops()
        for policy in opening.policies if type(self)._expect_template is not Player._expect_template else ():
            try:
                tokenizer = opening.tokenizer(policy)
            except ModelError:  # a policy without a tokenizer: its rollout says so
                continue
            self._look_at_template(tokenizer)

    def _play_all(self, game: Game, sampling: SamplingArguments) -> None:
        """Play all episodes to their ends."""
        self._look_at_template(game.tokenizer)
        failing = game.failing
        stops = failing.on_error == "raise" and not failing.retries and not failing.spare
        wasted: Counter[int] = Counter()
        sessions = Sessions(
            policy_calls(game.policy, sampling),
            CodeCalls(self.timeout, self._notes, self._loops, stop_at_error=stops),
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

    @classmethod
    def asks_of_template(cls) -> bool:
        """Whether :meth:`check_template` knows what it asks of a chat template; here it asks nothing."""
        return False

    def check_template(self, tokenizer: Any, warn: Callable[[str], None]) -> None:
        """Look at a policy's chat template without being open. Raises ModelError where no turn can follow another with
        it, and warns of what a run would warn of."""
        self._warn = warn
        self._expect_template(tokenizer)

    def _look_at_template(self, tokenizer: Any) -> None:
        """Look at a policy's chat template, once."""
        if tokenizer is not self._template_of:
            self._expect_template(tokenizer)
            self._template_of = tokenizer

    def _expect_template(self, tokenizer: Any) -> None:
        """Raise where no turn can follow another with this tokenizer, before anything is sampled."""

    def _grade_groups(self, game: Game) -> None:
        """Have the episodes of each prompt graded together, once all of them have ended."""
        groups: dict[Key, dict[int, Episode]] = {}
        for i, episode in sorted(game.episodes.items()):
            if isinstance(episode, Episode):
                groups.setdefault(game.rows.keys[i][:-1], {})[i] = episode

        async def grade(episodes: dict[int, Episode], whole: dict[int, Episode]) -> None:
            try:
                if whole:
                    await self._grade_group(game, whole)
            except CodeFailed as failed:
                if not game.failing.marks:
                    raise self._failed(failed.call.row, failed.error) from failed.error
                for episode in whole.values():
                    episode.failed, episode.why = failure_of(failed.error), said(failed.error)
            game.keep(episodes)

        graded: dict[int, Coroutine[Any, Any, None]] = {}
        for episodes in groups.values():
            whole = {i: episode for i, episode in episodes.items() if not episode.failed}
            graded[min(whole or episodes)] = grade(episodes, whole)  # its calls are of the first row that it grades
        calls = CodeCalls(self.timeout, self._notes, self._loops, stop_at_error=not game.failing.marks)
        Sessions(policy_calls(game.policy, SamplingArguments()), calls).run(graded)

    async def _replay(self, game: Game, i: int) -> None:
        """Sample for an episode that was played before: the bits of others may depend on how many rows there are."""
        played = cast("Played", game.episodes[i])
        used = 0
        for turn in range(len(played.begins)):
            start = played.begins[turn]
            most, response = game.limits.most(used), played.before(turn)
            ask = Ask(i, played.prompt, game.seeds[i], start, most, response=response)
            try:
                used += len((await sampled(ask)).ids)
            except OutOfTime:
                return

    async def _play(self, game: Game, i: int, wasted: Counter[int]) -> None:
        """Play an episode, anew where it fails, and then another one in its place, while there are; keep the last."""
        failing, attempt, retries, replaced = game.failing, 0, 0, 0
        while True:
            episode = game.begin(i)
            try:
                await self._to_the_end(game, i, episode)
                break
            except CodeFailed as failed:
                if isinstance(failed.error, WorkerError):
                    raise failed.error from None
                if await self._may_retry(game, i, failed, episode, attempt):
                    attempt, retries = attempt + 1, retries + 1
                elif replaced < failing.spare and not episode.late and not isinstance(failed.error, Died):
                    attempt, replaced = 0, replaced + 1
                    game.begin_spare(i, replaced, said(failed.error))
                elif failing.marks:
                    episode.failed, episode.why = failure_of(failed.error), said(failed.error)
                    break
                else:
                    raise self._failed(failed.call.row, failed.error) from failed.error
                wasted[i] += len(episode.sampled) + episode.wasted
        episode.wasted, episode.retries, episode.replaced = episode.wasted + wasted[i], retries, replaced
        if "conversation" in game.also:
            episode.conversation = self._conversation(game, episode)
        if self._grades_groups:
            game.episodes[i] = episode
        else:
            game.keep({i: episode})

    async def _may_retry(self, game: Game, i: int, failed: CodeFailed, episode: Episode, attempt: int) -> bool:
        """Whether a row that failed is played anew, once that may be."""
        if attempt >= game.failing.retries or isinstance(failed.error, Died) or episode.late:
            return False
        try:
            await paused(i, min(game.failing.backoff * 2**attempt, 30.0))
        except OutOfTime:
            episode.late = True
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
                call = CodeCall(i, self._function("reset"), (), row)
                raise CodeFailed(call, Late(game.limits.seconds, ", before the episode began")) from None
        await self._grade(game, i, episode)

    async def _episode(self, game: Game, i: int, episode: Episode) -> None:
        """Play an episode to its end."""
        given = game.row(i), game.own_seeds[i]
        episode.state, episode.observation = await self._code(game, i, "reset", given, check_reset)
        episode.begun = True
        self._observe(game, episode)
        limits = game.limits
        while not episode.over and len(episode.turn_rewards) < limits.turns:
            if self._anchors_are_observations:
                anchor = game.number(episode.observation)
            else:
                given = episode.state, episode.observation
                anchor = await self._code(game, i, "anchor", given, check_anchor)
            episode.turn_states.append(anchor)
            start, most = len(episode.tokens), limits.most(len(episode.sampled))
            follows = bool(episode.turn_rewards)
            ask = Ask(i, episode.prompt, game.seeds[i], start, most, response=episode.tokens, follows=follows)
            answer = await game.sampled(ask)
            episode.wasted += len(answer.ids)  # until the environment has taken them
            given = episode.state, answer.text(game.tokenizer)
            state, observation, reward, outcome = await self._code(game, i, "step", given, check_step)
            episode.wasted -= len(answer.ids)
            episode.act(answer)
            episode.temperature, episode.cut = answer.temperature, not answer.stopped
            episode.state, episode.observation, episode.outcome = state, observation, outcome
            episode.turn_rewards.append(reward)
            if not outcome and limits.tokens is not None and len(episode.sampled) >= limits.tokens:
                episode.full = True
            elif not outcome:
                self._observe(game, episode)

    @property
    def _anchors_are_observations(self) -> bool:
        """Whether what was observed last tells the state before a turn."""
        return True

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

    def _code(
        self,
        game: Game,
        i: int,
        name: str,
        args: tuple[Any, ...],
        take: Callable[[Any], Any] = lambda returned: returned,
        *,
        ends: bool = False,
    ) -> Awaitable[Any]:
        """What a function of the environment gives for a row. Raises CodeFailed.

        With ``ends`` the episode has been played, and no seconds of it bound the call.
        """
        fn, _, is_async = self._known(name)
        row = self._row(game, i, name)
        call = CodeCall(i, fn, args, row, take, is_async, ends)
        if (times := self._notes.count_deaths(row)) >= DEATHS:
            raise CodeFailed(call, Died(times))
        return called(call)

    def _row(self, game: Game, i: int, name: str) -> Row:
        """A row that a function is called for, as notes and messages name it."""
        row = game.told.get((i, name))
        if row is None:
            info, title = game.rows.call or CallInfo(), f"{self.name or type(self).__name__}.{name}"
            code = self._known(name)[1]
            key, timeout = game.rows.keys[i], self.timeout
            row = game.told[i, name] = Row(info.program, info.step, title, key, code, timeout=timeout)
        return row

    def _known(self, name: str) -> tuple[Callable[..., Any], str, bool]:
        """A function, where it is written, and whether it is async."""
        found = self._functions.get(name)
        if found is None:
            fn = self._function(name)
            written = getattr(type(self), name, fn)
            of = getattr(written, "__code__", None)
            code = code_of(written) if of is None or is_users_code(of) else _class_and_file(type(self))
            found = self._functions[name] = fn, code, inspect.iscoroutinefunction(fn)
        return found

    @cached_property
    def _functions(self) -> dict[str, tuple[Callable[..., Any], str, bool]]:
        return {}

    def _settle_failures(self, game: Game) -> None:
        """Tell of the rows that failed, and of those in whose place another episode is, once all rows are done."""
        info = game.rows.call or CallInfo()
        title = f"{self.name or type(self).__name__}.rollout" + (f" of step {info.step}" if info.program else "")
        if game.replaced:
            count = sum(len(reasons) for reasons in game.replaced.values())
            first, reasons = min(game.replaced.items())
            what = f"{count} episodes that failed have others in their place"
            self._warn(f"{title}: {what}; first row {named_row(game.rows.keys[first])}: {reasons[0]}")
        failed = {i: e for i, e in sorted(game.episodes.items()) if isinstance(e, Episode) and e.failed}
        if not failed:
            return
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
            f"{row.op}{step} failed for row {named_row(row.key)}: {said(error)}.",
            fix=f"Mend {_code_that_failed(error) or row.code}{longer}.",
        )


def _class_and_file(cls: type) -> str:
    """A class by its name and file: what a user mends where the function that calls theirs is flowrl's."""
    try:
        return f"{cls.__name__}, {shown(inspect.getfile(cls))}"
    except (TypeError, OSError):  # it was made where there is no file
        return cls.__name__


def _code_that_failed(error: BaseException) -> str:
    """The function of the user's in which something was raised, by name, file and line; empty where there is none."""
    raised = (error.__traceback__, error.__cause__.__traceback__ if error.__cause__ else None)
    codes = (frame.f_code for trace in raised for frame, _ in traceback.walk_tb(trace))
    found = next((code for code in codes if is_users_code(code)), None)
    return "" if found is None else f"{found.co_name}, {shown(found.co_filename)}:{found.co_firstlineno}"
