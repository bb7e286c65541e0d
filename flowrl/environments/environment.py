"""An environment of messages: it replies to what the policy says; marked functions stop it and grade it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .. import data
from ..data.template_arguments import check_read, template_arguments, wrong_arguments
from ..errors import DataError, FieldError, WorkerError, did_you_mean
from ..graph.ops.field_types import STANDARD
from ..graph.script.site import caller, defined_at
from ..workers.env import Env
from ..workers.episodes import GraderFailed
from ..workers.game import TASK_SEED
from .chat import forgotten_text, has_template, ids_behind, title_of
from .hooks import Hook, hooks_of
from .replies import Message, Replied, messages_of, text_of
from .tool_calls import ToolCall, read_tool_calls
from .tools import BadCall, Tool, tools_of
from .verify.verdict import Verdict

if TYPE_CHECKING:
    from ..workers.episodes import Episode
    from ..workers.game import Game

_LONGEST = 8192  # characters of what a tool gives
_OPEN = ("state", "response", "responses")
#: What sees an episode before it is graded, and so may put more into ``state.row``.
_PLAYS = ("setup", "respond", "anchor", "reset", "step", "_reset", "_step", "by_name")


class State:
    """What is known of an episode under way; an environment may put attributes of its own on it.

    ``row`` are the columns of the data, ``seed`` is the episode's own, ``row["task_seed"]`` that of all episodes of the
    task, ``messages`` the conversation so far, ``responses`` the texts of the policy, ``turn`` how many there are.
    ``tool_calls`` and ``bad_tool_calls`` count.

    >>> state = fl.environments.State({"prompt": "1+2?", "answer": "3"}, seed=7)
    >>> state.messages, state.response
    ([{'role': 'user', 'content': '1+2?'}], '')
    """

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row, self.seed = row, seed
        found = row.get("messages")
        self.messages: list[Message] = (
            [dict(m) for m in found] if found else [{"role": "user", "content": str(row.get("prompt", ""))}]
        )
        self.responses: list[str] = []
        self.tool_calls = self.bad_tool_calls = 0
        self.scores: dict[str, float] = {}
        self._said: list[Message] = []

    @property
    def response(self) -> str:
        """The latest text of the policy; empty before the first."""
        return self.responses[-1] if self.responses else ""

    @property
    def turn(self) -> int:
        """How many turns the policy has had."""
        return len(self.responses)


class Environment(Env):
    """Base of environments of messages. Subclass it; each of these is left out where it is not needed.

    ``rows()`` gives the tasks, each a dict with a ``prompt``. ``setup(state)`` begins an episode. ``respond(state)``
    replies to ``state.response``: a text, a message, several, or None, which ends the episode. ``tools`` are plain
    typed functions that the model may call. Functions marked by ``stop`` end an episode, those marked by ``reward``,
    ``metric`` and ``group_reward`` grade it, also one that a limit has cut off. Any of them may be ``async``.

    >>> from flowrl.environments import reward, stop
    >>> class Guess(fl.environments.Environment):
    ...     turns = 5
    ...
    ...     def rows(self):
    ...         return [{"prompt": "Guess a digit.", "secret": str(i)} for i in range(10)]
    ...
    ...     def respond(self, state):
    ...         return "higher" if state.response < state.row["secret"] else "lower"
    ...
    ...     @stop
    ...     def found(self, state):
    ...         return state.response == state.row["secret"]
    ...
    ...     @reward()
    ...     def quick(self, state, secret):
    ...         return (state.response == secret) / state.turn
    >>> env = Guess()
    >>> state, _ = env.reset({"prompt": "Guess a digit.", "secret": "7"}, seed=0)
    >>> env.step(state, "5")[1:]
    ('higher', 0.0, False)
    >>> env.step(state, "7")[1:]
    ('', 0.0, 'found')
    """

    #: Functions that the model may call.
    tools: Sequence[Callable[..., Any]] = ()
    #: The system message of chats that have none.
    system: str | None = None
    #: Whether prompts that are text go through the tokenizer's chat template.
    chat: bool = True
    #: Arguments of the chat template, of prompts and replies alike, such as ``{"enable_thinking": False}``.
    chat_template_kwargs: Mapping[str, Any] | None = None

    @classmethod
    def check_declaration(cls, arguments: Mapping[str, Any]) -> None:
        super().check_declaration(arguments)
        if not isinstance(cls.tools, (tuple, list)):
            raise WorkerError(
                f"{cls.__name__}: tools = {cls.tools!r} is no tuple of functions.",
                at=defined_at(cls.rows),
                fix="Write tools = (fn,).",
            )
        if wrong := wrong_arguments(cls.chat_template_kwargs):
            raise WorkerError(f"{cls.__name__}: {wrong[0]}", at=defined_at(cls.rows), fix=wrong[1])
        tools_of(cls.tools)
        hooks_of(cls)

    @classmethod
    def check_call(cls, op: str, columns: Collection[str]) -> None:
        super().check_call(op, columns)
        if op != "rollout" or cls._may_add_columns():
            return
        known = [*_OPEN, *sorted(name for name in columns if name not in STANDARD)]
        for hook in hooks_of(cls).values():
            asks = hook.asks if hook.kind in ("reward", "metric") else ()
            for name in (n for n in asks if n not in known and n not in STANDARD and n != TASK_SEED):
                raise FieldError(
                    f"{cls.__name__}.{hook.name} asks for '{name}', which is no column of the data.",
                    at=defined_at(getattr(cls, hook.name)),
                    have=known,
                    fix=did_you_mean(name, known, "Have the data give it, or take a column that is there."),
                )

    @classmethod
    def _may_add_columns(cls) -> bool:
        """Whether code of its own is handed an episode before it is graded: what it puts into the row is known late."""
        if any(getattr(cls, name) is not getattr(Environment, name) for name in _PLAYS):
            return True
        stops = any(hook.kind == "stop" for hook in hooks_of(cls).values())
        return stops or any(tool.takes_state for tool in tools_of(cls.tools).values())

    # -- what a subclass writes ---------------------------------------------------------------------------------------

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The tasks: each a dict with a ``prompt``, a text or a list of messages, and other columns."""
        raise WorkerError(f"{type(self).__name__} has no tasks.", fix="Define rows(self), which gives dicts.")

    def setup(self, state: State) -> str | None:
        """Begin an episode. A text is shown after the prompt, where the tokenizer has no chat template."""
        return None

    def respond(self, state: State) -> str | Message | Sequence[Message] | None:
        """Reply to ``state.response``. What tools gave is in the reply already; None adds nothing to it."""
        return None

    # -- tasks --------------------------------------------------------------------------------------------------------

    def source(self, **options: Any) -> data.Source:
        """The tasks as a source for ``flow.steps``, with options of :func:`fl.data.rows`; tools are in the prompts.

        Raises DataError for other ``chat_template_kwargs`` than the environment's: replies are rendered with these.
        """
        rows = self.rows()
        return self.source_of(data.rows, rows if isinstance(rows, Sequence) else list(rows), **options)

    def source_of(self, kind: Callable[..., data.Source], *where: Any, **options: Any) -> data.Source:
        """Tasks from elsewhere, such as ``env.source_of(fl.data.jsonl, "tasks.jsonl", batch=16)``.

        With ``messages=`` these are conversations to learn from; they show the system message and the tools of tasks.
        All go through the chat template with ``chat_template_kwargs``.
        """
        own: dict[str, Any] = {} if options.get("messages") else {"chat": self.chat}
        if self.chat and self.system is not None:
            own["system"] = self.system
        if self.chat and self.schemas:
            own["tools"] = self.schemas
        if self.chat_template_kwargs:  # whatever ``chat`` is: lists of messages have them, plain text is refused
            own["chat_template_kwargs"] = self.chat_template_kwargs
        given = options.get("chat_template_kwargs", self.chat_template_kwargs)
        if (given or {}) != (self.chat_template_kwargs or {}) and not options.get("messages"):
            raise DataError(
                f"The replies of {type(self).__name__} would be rendered without the chat_template_kwargs of the data.",
                at=caller(),
                fix=f"Write chat_template_kwargs = {given!r} in the class.",
            )
        return kind(*where, **{**own, **options})

    @cached_property
    def by_name(self) -> dict[str, Tool]:
        """The tools by their names."""
        return tools_of(self.tools)

    @property
    def _more(self) -> dict[str, Any]:
        """What the chat template is given beside messages."""
        return template_arguments(self.schemas, self.chat_template_kwargs)

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.schema for tool in self.by_name.values()]

    # -- an episode, as Env plays it ----------------------------------------------------------------------------------

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[State, str]:
        """Begin an episode."""
        return _finished(self._reset(row, seed))

    def step(self, state: State, action: str) -> tuple[State, str, float, bool | str]:
        """Take what the policy said: call its tools, ask what stops, and reply. Grades come at the end."""
        return _finished(self._step(state, action))

    def grade(self, state: State) -> tuple[float, dict[str, float]]:
        """The reward of an episode, and what each function gave."""
        return _finished(self._graded(state))

    async def _reset(self, row: Mapping[str, Any], seed: int) -> tuple[State, str]:
        state = State(row, seed)
        if self.chat and self.system is not None and state.messages[0]["role"] != "system":
            state.messages.insert(0, {"role": "system", "content": self.system})  # as the prompt has it
        said = await _value(self.setup(state))
        if said is None:
            said = ""
        if not isinstance(said, str):
            raise TypeError(f"setup returned {said!r}, which is no text")
        state._said = list(state.messages)
        return state, said

    async def _step(self, state: State, action: str) -> tuple[State, str, float, bool | str]:
        state.responses.append(action)
        calls = read_tool_calls(action, self.by_name) if self.by_name else []
        answer: dict[str, Any] = {"role": "assistant", "content": action}
        state.messages.append(answer)
        if name := await self._stopped(state):
            return state, "", 0.0, name
        replies = [await self._called(call, state) for call in calls]
        replies += messages_of(await _value(self.respond(state)))
        if state.messages[: len(state._said)] != state._said or state.messages[len(state._said) :] != [answer]:
            raise ValueError(
                "it has rewritten state.messages, whose tokens are sampled already; reply with messages, which are "
                "put behind them"
            )
        if not replies:
            return state, "", 0.0, True
        state.messages += replies
        state._said = list(state.messages)
        if name := await self._stopped(state):
            return state, "", 0.0, name
        return state, Replied.of(replies), 0.0, False

    async def _stopped(self, state: State) -> str:
        """The name of the first function that ends the episode; empty where none does."""
        for hook in self._hooks("stop"):
            if await _value(getattr(self, hook.name)(state)):
                return hook.name
        return ""

    async def _called(self, call: ToolCall, state: State) -> Message:
        """What a tool gives, as a message. What the model did wrong, or the tool raised, is told to the model."""
        state.tool_calls += 1
        try:
            if call.error:
                raise BadCall(call.error)
            tool = self.by_name.get(call.name)
            if tool is None:
                raise BadCall(f"there is no tool '{call.name}'; there are {', '.join(self.by_name)}")
            given = tool.arguments(call.arguments)
            text = text_of(await _value(tool.fn(**given, **({"state": state} if tool.takes_state else {}))))
        except BadCall as error:
            state.bad_tool_calls += 1
            text = f"error: {error}"
        except OSError:  # the machine's or the network's fault, and no matter of the model
            raise
        except Exception as error:
            text = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "name": call.name, "content": text[:_LONGEST]}

    async def _graded(self, state: State) -> tuple[float, dict[str, float]]:
        total = 0.0
        for hook in self._hooks("reward", "metric"):
            given = await _value(getattr(self, hook.name)(**self._given(hook, state)))
            value = state.scores[hook.name] = _number(given, hook.name)
            if isinstance(given, Verdict):
                state.scores |= {f"{hook.name}_{name}": each for name, each in given.scores.items()}
            total += hook.weight * value
        if self.by_name:
            state.scores |= {"tool_calls": float(state.tool_calls), "bad_tool_calls": float(state.bad_tool_calls)}
        return total, state.scores

    def _given(self, hook: Hook, state: State) -> dict[str, Any]:
        known = {**state.row, "state": state, "response": state.response, "responses": state.responses}
        missing = [name for name in hook.asks if name not in known]
        if missing:
            have = ", ".join([*_OPEN, *state.row])
            raise TypeError(f"{hook.name} asks for '{missing[0]}', which is no column of the data; there are {have}")
        names = known if hook.takes_all else [*hook.asks, *(name for name in hook.takes if name in known)]
        return {name: known[name] for name in names}

    def _hooks(self, *kinds: str) -> list[Hook]:
        return [hook for hook in self._all_hooks.values() if hook.kind in kinds]

    @cached_property
    def _all_hooks(self) -> Mapping[str, Hook]:
        return hooks_of(type(self))

    # -- what Env asks ------------------------------------------------------------------------------------------------

    @cached_property
    def _is_async(self) -> bool:
        """Whether any function that is written for it is async."""
        functions = [self.setup, self.respond, *(tool.fn for tool in self.by_name.values())]
        functions += [getattr(self, name) for name in self._all_hooks]
        return any(inspect.iscoroutinefunction(fn) for fn in functions)

    def _function(self, name: str) -> Callable[..., Any]:
        own = {"reset": self._reset, "step": self._step, "grade": self._grade_state, "group": self._group}
        fn = own.get(name)
        if fn is None or (name in ("reset", "step") and getattr(type(self), name) is not getattr(Environment, name)):
            return super()._function(name)
        return fn if self._is_async else lambda *given: _finished(fn(*given))

    async def _grade_state(self, state: State) -> tuple[float, dict[str, float]]:
        try:
            return await self._graded(state)
        except Exception as error:
            raise GraderFailed(f"{type(error).__name__}: {error}") from error

    async def _group(self, states: Sequence[State]) -> list[list[float]]:
        found: list[list[float]] = []
        try:
            for hook in self._hooks("group_reward"):
                values = list(await _value(getattr(self, hook.name)(states)))
                if len(values) != len(states):
                    raise ValueError(f"{hook.name} returned {len(values)} numbers for {len(states)} episodes")
                found.append([_number(value, hook.name) for value in values])
        except Exception as error:
            raise GraderFailed(f"{type(error).__name__}: {error}") from error
        return found

    async def _grade(self, game: Game, i: int, episode: Episode) -> None:
        reward, scores = await self._code(game, i, "grade", (episode.state,), ends=True)
        episode.give(reward)
        episode.scores = dict(scores)

    @property
    def _grades_groups(self) -> bool:
        return bool(self._hooks("group_reward"))

    async def _grade_group(self, game: Game, episodes: Mapping[int, Episode]) -> None:
        first, states = next(iter(episodes)), [episode.state for episode in episodes.values()]
        given = await self._code(game, first, "group", (states,))
        for hook, values in zip(self._hooks("group_reward"), given, strict=True):
            for episode, value in zip(episodes.values(), values, strict=True):
                episode.scores[hook.name] = value
                episode.give(hook.weight * value)

    def _conversation(self, game: Game, episode: Episode) -> list[dict[str, Any]]:
        return [dict(message) for message in episode.state.messages] if episode.begun else []

    @classmethod
    def asks_of_template(cls) -> bool:
        """Whether its tools are known before it is open: those of some packages are not."""
        return cls.schemas is Environment.schemas

    def _expect_template(self, tokenizer: Any) -> None:
        """Raise ModelError for a chat template that refuses what follows an answer, or rewrites the answer.

        Warns of one that shows earlier answers in another way than they were sampled, such as without their thoughts.
        """
        self._expect_arguments(tokenizer)
        following = [{"role": "tool", "name": name, "content": "x"} for name in [*self.by_name][:1]]
        following += [{"role": "user", "content": "x"}] if self._replies else []
        for message in following:
            ids_behind([message], tokenizer, last=None, more=self._more)
        self._tell_forgotten(following, tokenizer)

    def _expect_arguments(self, tokenizer: Any) -> None:
        """Raise ModelError for an argument that the chat template never reads, WorkerError for what is none.

        ``__init__`` may have set others than the class has.
        """
        if wrong := wrong_arguments(self.chat_template_kwargs):
            raise WorkerError(f"{type(self).__name__}: {wrong[0]}", fix=wrong[1])
        if self.chat_template_kwargs:
            check_read(self._more, tokenizer)

    def _tell_forgotten(self, following: Sequence[Message], tokenizer: Any) -> None:
        """Warn where a chat template shows answers in another way once these messages follow."""
        if not following or self.turns < 2 or not has_template(tokenizer):
            return
        if what := forgotten_text(following, tokenizer, self._more):
            self._warn(
                f"{self.name or type(self).__name__}: the chat template of {title_of(tokenizer)} breaks the prefix: "
                f"{what}. Here a turn goes on from the ids of the one before, so the policy is trained on what it saw; "
                "who renders the messages anew with this template, such as a server, shows it something else. "
                "Give the tokenizer a chat_template that keeps what was said, there and here."
            )

    @property
    def _replies(self) -> bool:
        """Whether something of its own may follow an answer."""
        return type(self).respond is not Environment.respond

    def _encoded_by(self, episode: Episode) -> tuple[Any, ...]:
        said = episode.observation
        if not isinstance(said, Replied):
            return (said,)
        return repr(said.messages), episode.tokens[-1] if episode.tokens else None

    def _encode(self, tokenizer: Any, episode: Episode) -> list[int]:
        said = episode.observation
        if isinstance(said, Replied):
            last = episode.tokens[-1] if episode.tokens else None
            return ids_behind(said.messages, tokenizer, last=last, more=self._more)
        if has_template(tokenizer):
            raise WorkerError(
                f"{type(self).__name__}.setup returned a text, and the prompt of a chat ends where the answer begins.",
                fix="Put it into the prompt of the row; rows() gives the prompts.",
            )
        return super()._encode(tokenizer, episode)


def _finished(running: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives that waits for nothing."""
    try:
        running.send(None)
    except StopIteration as done:
        return done.value
    running.close()
    raise TypeError("a function of this environment waits and is not async; write async def, or do not await in it")


async def _value(given: Any) -> Any:
    return await given if inspect.isawaitable(given) else given


def _number(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} returned {value!r}, which is no finite number")
    return number
