"""An environment that the policy plays in for several turns, its sampled tokens kept exactly as they were sampled."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import WorkerError
from ..graph.ops.allowed import flag, number, one_of, problem, whole, worker
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.field_types import STANDARD
from ..graph.ops.partial_answers import answers_of_call
from ..graph.ops.signature import CallShape
from ..graph.ops.update_metrics import Metrics
from ..graph.script.site import defined_at
from ..marks import Marks, other_ids, values, vocabulary
from .episodes import BRANCHED, MARKED, OUTCOMES, PLAYED, RECORDED, TOLD, columns_of
from .game import Game, Limits
from .model_options import SAMPLING
from .player import Player
from .tokens.sampling import SamplingArguments, Stop, check_penalty, prompted, sampling_marks
from .user_code.failed_rewards import Policy

if TYPE_CHECKING:
    from ..batch import Batch


def _of_policy(shape: CallShape) -> CallShape:
    """The policy samples, as it was declared to where the call does not say."""
    return replace(shape, init=getattr(shape.call.get("policy"), "arguments", {}))


def _columns(shape: CallShape) -> str:
    return ", ".join([prompted(_of_policy(shape)), *sorted(name for name in shape.have if name not in STANDARD)])


def _played(shape: CallShape) -> Mapping[str, Marks]:
    """``marks=`` of a rollout."""
    return sampling_marks(_of_policy(shape))


def _adds(shape: CallShape) -> str:
    said = shape.call
    wanted = {
        MARKED: said.get("on_error") == "mark",
        BRANCHED: said.get("branches"),
        TOLD: said.get("messages"),
        RECORDED: said.get("support"),
    }
    return ", ".join([PLAYED, *(fields for fields, asked in wanted.items() if asked is True)])


def _counted(shape: CallShape) -> str:
    counted = "outcome, sampled_tokens, response_mask, replaced, scores"
    return f"{counted}, branches" if "branches" in shape.have else counted


class Env(Player):
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

    @property
    def _anchors_are_observations(self) -> bool:
        return type(self).anchor is Env.anchor

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
        spare=whole(least=0),
        branches=flag(),
        messages=flag(),
        support=flag(),
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
        spare: int = 0,
        branches: bool = False,
        messages: bool = False,
        greedy: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Stop | None = None,
        support: bool = False,
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
        each further time. Where it fails then, another episode of the task takes its place, with seeds of its own, up
        to ``spare`` times: so groups stay whole. What fails then raises RewardError with the row, or with
        ``on_error="mark"`` is marked, as in :class:`FunctionReward`: ``failed``, ``failed_why``, and rewards that are
        nan. More than ``max_failed`` of the rows of a call, 8 or more, raise all the same.

        ``turn_rewards`` and ``turn_states`` have one value per turn: its reward, and the number of the anchor
        before it, equal where anchors are. ``turn_ids`` is the turn, from 0, of a sampled token; -1 for observations.
        ``rewards`` is the sum of a row's ``turn_rewards``, ``turns`` their count. ``finished`` is true where the
        environment ended the episode, and ``finish_reason`` says how: the outcome that ``step`` named, or ``done``;
        ``length`` where the tokens of the model, of the episode or of the last turn ran out, ``turns`` where the turns
        did, ``time`` where the seconds did, ``failed``. ``outcome`` is one of ``finished``, ``truncated_turns``,
        ``truncated_tokens``, ``truncated_wall``, ``environment_failure``, ``grader_failure`` and
        ``infrastructure_failure`` (a call that does not come back, an OSError). ``sampled_tokens`` counts what the
        engine sampled for the row, in all attempts, and ``replaced`` the episodes that failed in its place before.
        ``branches`` adds the field of that name: of an agent that rewrote
        its history, the branches beside that of the row, which :func:`flowrl.rl.branches` makes rows of. ``messages``
        adds ``conversation``: the messages of the row, with the prompt and all answers, for ``flowrl export``.
        ``support=True`` records which tokens could be drawn, as :meth:`Actor.generate` does; of a token that was
        observed any.
        """
        if tokens is not None and turn_tokens is None:
            turn_tokens = policy.how(SamplingArguments()).max_tokens if hasattr(policy, "how") else tokens
        sampling = SamplingArguments.of(locals(), max_tokens=turn_tokens)
        if support and hasattr(policy, "how"):
            check_penalty(policy.how(sampling).repetition_penalty)
        answers, children = answers_of_call(), batch.expand(n)
        limits = Limits(self.turns if turns is None else turns, turn_tokens, tokens, seconds)
        failing = Policy(on_error, retries, backoff, max_failed, spare)
        _expect_own_ids(self, children, policy)
        task_seeds = [seed for seed in batch.row_seeds("task").tolist() for _ in range(n)]
        wanted = {"failed": failing.marks, "failed_why": failing.marks, "branches": branches, "conversation": messages}
        wanted |= {"support_ids": support, "support_sizes": support}
        also = [name for name, asked in wanted.items() if asked]
        game = Game(children, policy, limits, failing, answers, task_seeds, also)
        self._play_all(game, sampling)
        episodes = [game.episodes[i] for i in range(len(children))]
        self._settle_failures(game)
        return columns_of(children.keys, episodes, game.known, policy, also=also)

    @op(reads=_counted, cost="local")
    def outcomes(self, batch: Batch) -> Metrics:
        """Count how the episodes of a rollout ended: each outcome, and ``truncated`` and ``failures`` in all.

        ``replaced`` are episodes that failed and that are in no row, as another one took their place.
        ``delivered_fraction`` is which part of the tokens that the engine sampled for them is in the rows. Each name in
        ``scores`` is there with the mean over the episodes that have it.
        """
        counts = Counter(batch["outcome"].to_list())
        sampled = int(batch["sampled_tokens"].values.sum())
        delivered = int(batch["response_mask"].values.sum())
        if "branches" in batch:
            delivered += sum(sum(branch["response_mask"]) for row in batch["branches"].to_list() for branch in row)
        scores = [scores for scores in batch["scores"].to_list() if scores]
        names = sorted({name for each in scores for name in each} - {*OUTCOMES, "truncated", "failures", "replaced"})
        told = {name: [each[name] for each in scores if name in each] for name in names}
        return Metrics(
            {name: float(counts[name]) for name in OUTCOMES} | {n: sum(v) / len(v) for n, v in told.items()},
            truncated=float(sum(counts[name] for name in OUTCOMES if name.startswith("truncated"))),
            failures=float(sum(counts[name] for name in OUTCOMES if name.endswith("failure"))),
            replaced=float(batch["replaced"].values.sum()),
            delivered_fraction=delivered / sampled if sampled else 1.0,
        )


def _expect_own_ids(env: Env, rows: Batch, policy: Any) -> None:
    """Raise where the prompts are ids of another tokenizer than the policy's."""
    made = values(rows["prompt_ids"].marks, "tokenizer")
    if made and (own := vocabulary(policy.tokenizer)) and made != {own}:
        raise other_ids(f"{env.name or type(env).__name__}.rollout", "prompt_ids")
