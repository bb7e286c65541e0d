"""An environment that is an agent: it talks to a gateway as to an API, and what it had sampled is its episode."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...data.template_arguments import template_arguments
from ...errors import ModelError, WorkerError
from ...graph.script.site import defined_at
from ...workers.episodes import Episode
from ...workers.policy_calls import Answer, Ask
from ...workers.sessions import CodeFailed
from ...workers.tokens.row_support import RowSupport
from ...workers.user_code.code_calls import CodeCall
from ...workers.user_code.rows_in_progress import named_row
from ..chat import ids_behind
from ..environment import Environment, Message, State
from ..opened_once import opened_once
from ..tool_calls import split_calls
from .agents import Task, run_program, start_agent
from .call_tree import Call, CallTree
from .requests import Refused, Reply, Request
from .server import Gateway
from .sessions import Begun, Ended, ModelCall

if TYPE_CHECKING:
    from ...workers.game import Game


@dataclass
class _Play:
    """An agent under way: its task, and its calls so far."""

    task: Task
    state: State
    tree: CallTree
    text_of: Callable[[Sequence[int]], str] | None  # of ids, where the text of more begins with that of fewer
    used: int = 0  # tokens that were sampled for it
    gone: int = 0  # calls whose answer nobody waited for


class AgentEnvironment(Environment):
    """Base of environments that are agents. Subclass it, and write ``rows()``, an ``agent``, and rewards.

    ``agent(task)`` is any code that asks a model at ``task.base_url`` with the key ``task.api_key``, by OpenAI's chat
    completions or Anthropic's messages; it may be ``async``. What it returns is ``state.result``. In its place,
    ``command`` may be a program, which finds address and key in its environment and the row as JSON on its input.

    Each call is an answer of the policy. One that goes on where another ended extends its tokens exactly; an agent that
    has rewritten its history makes a fork. Trained is the branch with the most sampled tokens; the others are kept by a
    rollout with ``branches=True``, and :func:`flowrl.rl.branches` makes rows of them. ``scores`` have ``calls`` and
    ``forks``; with ``strict`` a fork is refused and fails the episode. The episode is over when the agent
    has returned, or by a limit of the rollout: its turns are calls. Sampling is the rollout's: an agent may ask for
    fewer tokens and for texts that stop, not for another temperature. ``chat_template_kwargs`` of a request come before
    those of the environment.

    >>> class Asks(fl.environments.AgentEnvironment):
    ...     turns = 4
    ...
    ...     def rows(self):
    ...         return [{"prompt": "2+2?", "answer": "4"}]
    ...
    ...     def agent(self, task):
    ...         from openai import OpenAI
    ...
    ...         client = OpenAI(base_url=task.base_url, api_key=task.api_key)
    ...         messages = [{"role": "user", "content": task.row["prompt"]}]
    ...         return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    ...
    ...     @fl.environments.reward()
    ...     def right(self, state, answer):
    ...         return float(state.result == answer)
    >>> Asks.turns
    4
    """

    #: A program that is run in place of ``agent``.
    command: Sequence[str] = ()
    #: Whether a fork is refused.
    strict: bool = False

    _told_silent = False

    @classmethod
    def check_declaration(cls, arguments: Mapping[str, Any]) -> None:
        super().check_declaration(arguments)
        if cls.agent is AgentEnvironment.agent and not cls.command:
            raise WorkerError(
                f"{cls.__name__} has no agent.",
                at=defined_at(cls.rows),
                fix="Define agent(self, task), or write command = ('python', 'agent.py').",
            )

    @classmethod
    def _may_add_columns(cls) -> bool:
        return cls.agent is not AgentEnvironment.agent or super()._may_add_columns()

    def agent(self, task: Task) -> Any:
        """Solve a task by asking the model at ``task.base_url``; here by running ``command``."""
        return run_program(self.command, task)

    def close(self) -> None:
        gateway = self.__dict__.pop("_gateway", None)
        if gateway is not None:
            gateway.close()

    @opened_once
    def _gateway(self) -> Gateway:
        return Gateway()

    # -- an episode ---------------------------------------------------------------------------------------------------

    def _function(self, name: str) -> Callable[..., Any]:
        own: dict[str, Callable[..., Any]] = {"begin": self._begin, "agent": self._next}
        return own[name] if name in own else super()._function(name)

    def _begin(self, row: Mapping[str, Any], seed: int, tokenizer: Any) -> _Play:
        session = self._gateway.open()
        task = Task(row, seed, f"{self._gateway.address}/v1", session.token, session)
        state = State(row, seed)
        state.messages, state.result = [], None  # type: ignore[attr-defined]
        start_agent(self.agent, task)
        tidies = getattr(tokenizer, "clean_up_tokenization_spaces", False)  # by what comes behind
        text_of = None if tidies else partial(tokenizer.decode, skip_special_tokens=True)
        return _Play(task, state, CallTree(tokenizer), text_of)

    async def _next(self, play: _Play) -> ModelCall | Ended:
        """The agent's next call, or its end. Raises what it raised."""
        found = await play.task.session.take()
        if isinstance(found, Ended) and found.error is not None:
            raise found.error if isinstance(found.error, Exception) else RuntimeError(f"it raised {found.error!r}")
        return found

    async def _replay(self, game: Game, i: int) -> None:
        """Nothing: no agent is run again for an episode that was played before."""

    async def _episode(self, game: Game, i: int, episode: Episode) -> None:
        given = (game.row(i), game.own_seeds[i], game.tokenizer)
        play: _Play = await self._code(game, i, "begin", given)
        episode.state, episode.begun = play.state, True
        try:
            await self._calls(game, i, episode, play)
        finally:
            play.task.session.close("the episode of this session is over")
            self._deliver(play, episode, branches="branches" in game.also)

    async def _calls(self, game: Game, i: int, episode: Episode, play: _Play) -> None:
        """Answer the agent's calls until it ends, or a limit is reached."""
        limits = game.limits
        while True:
            call = await self._code(game, i, "agent", (play,))
            if isinstance(call, Ended):
                play.state.result = call.result  # type: ignore[attr-defined]
                episode.outcome = "done"
                if not play.tree.calls and not play.gone:
                    self._tell_silent(game, i)
                return
            if len(play.tree.calls) + play.gone >= limits.turns or episode.full:
                return  # it would need more than it may have
            try:
                parent, before = self._placed(play, call.request)
            except Refused as refused:
                call.refuse(refused)
                if refused.status == 409:
                    failed = CodeCall(i, self.agent, (), self._row(game, i, "agent"))
                    raise CodeFailed(failed, ValueError(refused.why)) from None
                continue
            ids = [*(parent.ids if parent else ()), *before]
            if game.room is not None and len(ids) + 1 > game.room:
                call.refuse(Refused(400, f"{len(ids)} tokens leave no room for an answer: {game.room} is the most"))
                episode.full = True
                return
            most, asked = limits.most(play.used), call.request.max_tokens
            if asked is not None:
                most = min([asked, *(each for each in (most, game.own_most) if each is not None)])
            call.begun = Begun(secrets.token_hex(8), len(ids), play.text_of)
            follows = bool(play.tree.calls) or play.gone > 0
            answer = await game.sampled(Ask(i, ids, game.seeds[i], play.used, most, call, follows=follows))
            play.used += len(answer.ids)
            episode.full = limits.tokens is not None and play.used >= limits.tokens
            if call.is_gone:
                play.gone += 1
                continue
            self._answer(game, play, call, (parent, before), answer)
            episode.temperature, episode.cut = answer.temperature, False

    def _tell_silent(self, game: Game, i: int) -> None:
        """Warn, once, that an agent has ended without an answer of the policy: nothing of its episode is trained."""
        if self._told_silent:
            return
        self._told_silent = True
        self._warn(
            f"{self.name or type(self).__name__}: the agent of row {named_row(game.rows.keys[i])} has ended without an "
            "answer of the policy, so nothing of its episode is trained. It has to ask task.base_url with the key "
            "task.api_key; a program finds them in OPENAI_BASE_URL and OPENAI_API_KEY. Others are not told of."
        )

    def _expect_template(self, tokenizer: Any) -> None:
        """Raise ModelError for a chat template by which no call can go on from another.

        What an agent says behind an answer is not known before it does: of a template that refuses what tools gave,
        it is warned.
        """
        self._expect_arguments(tokenizer)
        if self.turns < 2:
            return
        more = template_arguments((), self.chat_template_kwargs)
        following: list[Message] = [{"role": "user", "content": "x"}]
        ids_behind(following, tokenizer, last=None, more=more)
        tool: Message = {"role": "tool", "name": "tool", "content": "x"}
        try:
            ids_behind([tool], tokenizer, last=None, more=more)
            following.insert(0, tool)
        except ModelError as error:
            self._warn(f"{self.name or type(self).__name__}: {error.what} Calls of agents that use tools are refused.")
        self._tell_forgotten(following, tokenizer)

    def _more_of(self, request: Request) -> dict[str, Any]:
        """What the chat template is given beside the messages of a request: its own arguments come first."""
        return template_arguments(request.tools, {**(self.chat_template_kwargs or {}), **request.chat_template_kwargs})

    def _placed(self, play: _Play, request: Request) -> tuple[Call | None, list[int]]:
        """Where in the tree a request goes on, and the tokens up to its answer. Raises Refused."""
        parent, before = play.tree.place(request.messages, self._more_of(request))
        if self.strict and play.tree.is_fork(parent):
            raise Refused(409, "the agent has rewritten its history, or asks twice; strict = True refuses forks")
        return parent, before

    def _answer(
        self, game: Game, play: _Play, call: ModelCall, place: tuple[Call | None, list[int]], answer: Answer
    ) -> None:
        """Note what was sampled in the tree, and hand it to the agent."""
        request, tokenizer = call.request, game.tokenizer
        kept, said, stopped_by = _until(answer, request.stop, tokenizer)
        content, tool_calls = _read(said, request)
        reason = "tool_calls" if tool_calls else "stop" if kept.stopped else "length"
        parent, before = place
        assert call.begun is not None, "it was sampled for"
        tokens = [tokenizer.decode([token]) for token in kept.ids] if request.logprobs else []
        reply = Reply(
            call.begun.id,
            content,
            tool_calls,
            reason,
            call.begun.prompt_tokens,
            len(kept.ids),
            list(zip(tokens, kept.sampling_logprobs, strict=False)),
            stopped_by,
        )
        made = play.tree.add(parent, before, kept, [*request.messages, reply.message], self._more_of(request))
        made.wasted = len(answer.ids) - len(kept.ids)
        play.state.responses.append(said)
        call.answer(reply)

    def _deliver(self, play: _Play, episode: Episode, *, branches: bool) -> None:
        """Make the row of the main branch, and with ``branches`` of the others; count what is not in the main one."""
        tree, state = play.tree, play.state
        state.scores |= {"calls": float(len(tree.calls)), "forks": float(tree.forks)}
        episode.forks, episode.repairs = tree.forks, tree.repairs
        main = tree.main
        if main is None:
            episode.wasted += play.used
            return
        chain = main.chain
        state.messages = [*main.messages]
        trained: set[Call] = set()
        _lay(chain, episode, trained)
        episode.wasted += play.used - len(episode.sampled)
        for leaf in tree.leaves if branches else ():
            if leaf is not main:
                support = None if episode.support is None else RowSupport()
                episode.branches.append(branch := Episode(None, "", [], support=support))
                _lay(leaf.chain, branch, trained)


def _lay(chain: Sequence[Call], episode: Episode, trained: set[Call]) -> None:
    """Put the tokens of calls into an episode. An answer that is ``trained`` elsewhere is as what was observed."""
    episode.prompt = chain[0].before
    for n, call in enumerate(chain):
        answer = call.answer
        for ids in (call.before if n else [], answer.ids if call in trained else []):
            episode.add_context(ids)
        if call not in trained:
            episode.act(answer)
        trained.add(call)
        episode.turn_states.append(0)
        episode.turn_rewards.append(0.0)


def _until(answer: Answer, stops: Sequence[str], tokenizer: Any) -> tuple[Answer, str, str]:
    """An answer up to the token that completes a text that stops; its text before that; and which one that is."""

    def has_stopped(count: int) -> bool:
        said = answer.text(tokenizer, count)
        return any(stop in said for stop in stops)

    if not stops or not has_stopped(most := len(answer.ids)):
        return answer, answer.text(tokenizer), ""
    count = 1 + bisect_left(range(1, most), True, key=has_stopped)
    said = answer.text(tokenizer, count)
    at, stopped_by = min((said.index(stop), stop) for stop in stops if stop in said)
    return answer.until(count), said[:at], stopped_by


def _read(said: str, request: Request) -> tuple[str, list[dict[str, Any]]]:
    """The text of an answer and its calls of tools; malformed calls are text."""
    names = [tool["function"]["name"] for tool in request.tools]
    before, calls = split_calls(said, names) if names else (said, [])
    if not calls or any(call.error or not isinstance(call.arguments, dict) for call in calls):
        return said, []
    return before.rstrip(), [
        {"id": f"call_{secrets.token_hex(8)}", "name": call.name, "arguments": call.arguments} for call in calls
    ]
