"""Rows of the branches of an episode whose history was rewritten, as an op of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..graph.ops.declare import op
from ..graph.ops.signature import CallShape
from .validate import refusal

if TYPE_CHECKING:
    from ..batch import Batch, Column

_FIELDS = (
    "prompt_ids: i32[*prompt], response_ids: i32[*response], response_mask: bool[*response], "
    "rollout_logprobs: f32[*response], sampling_logprobs: f32[*response], versions: i32[*response], "
    "temperature: f32[], rewards: f32[], advantages: f32[*response]"
)
_OF_TOKENS = ("response_ids", "response_mask", "rollout_logprobs", "sampling_logprobs", "versions")
_SUPPORT = ("support_ids", "support_sizes")


def _fields(shape: CallShape) -> str:
    recorded = _SUPPORT if "support_ids" in shape.have else ()
    return ", ".join([_FIELDS, "tokens: i32[*token]", *recorded])


@op(
    owner="rl",
    reads=lambda shape: f"{_fields(shape)}, branches",
    adds=_fields,
    rows="regroup",
    cost="local",
)
def branches(batch: Batch) -> Batch:
    """Each row, and behind it a row for every other branch of its episode, with the advantage of the episode.

    An agent that rewrites its history, asks a subagent, or asks twice, makes a tree of calls. Its row is one branch of
    it; a rollout with ``branches=True`` keeps the others. An answer that several branches have is trained in the first
    of them, and is context in the others, so that each sampled token is trained once. The baseline is that of episodes,
    not of branches, since advantages come before. That each part of an episode has the credit of the whole is from
    Agent Lightning (arXiv:2508.03680), which trains the calls one by one::

        batch = solver.rollout(batch, policy=actor, n=8, branches=True)
        batch = rl.group_advantages(batch)
        metrics = actor.update(rl.branches(batch), loss=rl.ppo_clip())

    Keys have a number more, the branch: ``(3, 0)`` becomes ``(3, 0, 0)``, ``(3, 0, 1)`` and so on. Rows keep their
    tokens, log-probabilities, versions, temperature, rewards and advantages, and where the rollout has recorded it
    which tokens could be drawn. Other fields are left out; log-probabilities of a reference are computed behind it.
    Raises ProgramError where the sampled tokens of a row have different advantages, as nobody could say which one is
    that of the episode.

    Args:
        batch: rows of a rollout, and ``advantages``.

    >>> def column(rows, dtype, dim="response"):
    ...     return fl.Column.of(rows, dim, dtype)
    >>> logprobs = column([[-0.5, -0.1]], "f32")
    >>> other = {"prompt_ids": [1], "response_ids": [7], "response_mask": [True]}
    >>> other |= {"rollout_logprobs": [-0.2], "sampling_logprobs": [-0.2], "versions": [0]}
    >>> batch = fl.Batch.of(
    ...     [(3, 0)],
    ...     prompt_ids=column([[1]], "i32", "prompt"),
    ...     tokens=column([[1, 8, 9]], "i32", "token"),
    ...     response_ids=column([[8, 9]], "i32"),
    ...     response_mask=column([[True, True]], "bool"),
    ...     rollout_logprobs=logprobs,
    ...     sampling_logprobs=logprobs,
    ...     versions=column([[0, 0]], "i32"),
    ...     temperature=[1.0],
    ...     rewards=[1.0],
    ...     advantages=column([[0.5, 0.5]], "f32"),
    ...     branches=fl.Column.of([[other]], dtype="any"),
    ... )
    >>> rows = rl.branches(batch)
    >>> rows.keys, rows.tokens.to_list(), rows.advantages.to_list()
    (((3, 0, 0), (3, 0, 1)), [[1, 8, 9], [1, 7]], [[0.5, 0.5], [0.5]])
    """
    from ..batch import Batch

    of_tokens = (*_OF_TOKENS, *(_SUPPORT if "support_ids" in batch else ()))
    plain = ("tokens", "temperature", "rewards", "advantages", "branches")
    have = {name: batch[name].to_list() for name in ("prompt_ids", *of_tokens, *plain)}
    keys: list[tuple[int, ...]] = []
    made: dict[str, list[Any]] = {name: [] for name in have if name != "branches"}
    for i, key in enumerate(batch.keys):
        whole = len(have["tokens"][i]) - len(have["response_ids"][i])  # a prompt as its row has it
        own = {name: have[name][i] for name in of_tokens} | {"prompt_ids": have["tokens"][i][:whole]}
        advantage = _of_episode(have["advantages"][i], own["response_mask"], key)
        for number, each in enumerate([own, *have["branches"][i]]):
            keys.append((*key, number))
            for name in ("prompt_ids", *of_tokens):
                made[name].append(each[name])
            made["tokens"].append([*each["prompt_ids"], *each["response_ids"]])
            made["temperature"].append(have["temperature"][i])
            made["rewards"].append(have["rewards"][i])
            made["advantages"].append([advantage if trained else 0.0 for trained in each["response_mask"]])
    return Batch(keys, {name: _like(batch[name], rows) for name, rows in made.items()}, batch.call)


def _of_episode(advantages: list[float], mask: list[bool], key: tuple[int, ...]) -> float:
    """The advantage that all sampled tokens of a row have; 0 where there are none. Raises ProgramError."""
    found = {advantage for advantage, trained in zip(advantages, mask, strict=True) if trained}
    if len(found) > 1:
        raise refusal(
            f"rl.branches: row {key} has {len(found)} different advantages, and its branches get that of the episode.",
            "Use advantages of whole episodes, such as rl.group_advantages.",
        )
    return next(iter(found), 0.0)


def _like(column: Column, rows: list[Any]) -> Column:
    """A column of the same type and origin."""
    made = type(column).of(rows, dim=column.dim, dtype=column.dtype)
    return made.marked(column.marks) if column.marks else made
