"""Evaluates a policy on an environment by the rollout that trains it; saved results can be compared, task by task."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..batch import Batch, CallInfo
from ..data import Source
from ..errors import UsageError
from ..workers.env import Env
from .solve_rates import solve_rates
from .verify.answers import marked_answer

RESULTS, SUMMARY = "results.jsonl", "summary.json"
SO_FAR = "results.part.jsonl"  # of an evaluation that goes on, or was broken off
Record = dict[str, Any]


def evaluate(
    env: Env,
    policy: Any,
    source: Source,
    *,
    n: int = 1,
    rows: int = 64,
    seed: int = 0,
    note: Callable[[Sequence[Record]], None] | None = None,
    **how: Any,
) -> list[Record]:
    """Play the first ``rows`` tasks of a source ``n`` times each; a record per episode, in their order.

    ``note`` is told the records of each batch of tasks when it is played. ``how`` are further arguments of ``rollout``.
    Failures are marked; their reward is None. A record whose last sampled turn marks a final answer has it as
    ``answer``; it is None in the others.
    """
    cursor, found, first = source.cursor(), list[Record](), 0
    while first < rows:
        drawn = list(cursor.draw())[: rows - first]
        if not drawn:
            break
        batch = source.to_batch(drawn, first, policy.tokenizer).with_call(CallInfo(seed=seed, op="eval.rollout"))
        new = _records(env.rollout(batch, policy=policy, n=n, on_error="mark", max_failed=1.0, **how), policy)
        found += new
        first += len(drawn)
        if note is not None:
            note(new)
    return found


def _records(played: Batch, policy: Any) -> list[Record]:
    names = ("reward", "scores", "outcome", "finish_reason", "turns", "sampled_tokens", "failed_why")
    fields = [played["rewards" if name == "reward" else name].to_list() for name in names]
    prompts, responses, turns = (played[name].to_list() for name in ("prompt_ids", "response_ids", "turn_ids"))
    found: list[Record] = []
    for key, prompt, response, turn, *values in zip(played.keys, prompts, responses, turns, *fields, strict=True):
        record: Record = {"task": key[0], "sample": key[-1], "prompt": policy.tokenizer.decode(prompt)}
        record |= {"response": policy.tokenizer.decode(response), "answer": _answer(response, turn, policy.tokenizer)}
        record |= dict(zip(names, values, strict=True))
        if record["failed_why"]:
            record |= {"reward": None, "scores": {}}
        else:
            del record["failed_why"]
        found.append(record)
    return found


def _answer(response: Sequence[int], turns: Sequence[int], tokenizer: Any) -> str | None:
    """The final answer that the last sampled turn of a response marks; None where it marks none."""
    last = max(turns, default=-1)
    sampled = [token for token, turn in zip(response, turns, strict=True) if turn == last >= 0]
    return marked_answer(tokenizer.decode(sampled, skip_special_tokens=True)) or None


def summary_of(records: Sequence[Record], about: Mapping[str, Any], *, right_at: float = 1.0) -> Record:
    """What records come to: mean rewards with their standard error over tasks, scores, and how episodes ended.

    Tasks that are solved: see :func:`flowrl.environments.solve_rates.solve_rates`; ``right_at`` is the
    reward from which on an episode counts as right.
    """
    rewards = _by_task(records)
    means = [_mean(values) for values in rewards.values()]
    scored = [record["scores"] for record in records if record["scores"]]
    names = sorted({name for scores in scored for name in scores})
    solved: Record = {}
    for name, values in solve_rates(records, right_at=right_at).items():
        solved |= {name: _mean(values), f"{name}_standard_error": _standard_error(values)}
    return {
        **about,
        "tasks": len({record["task"] for record in records}),
        "episodes": len(records),
        "reward": _mean(means),
        "reward_standard_error": _standard_error(means),
        "best_of_n": _mean([max(values) for values in rewards.values()]),
        **solved,
        "scores": {name: _mean([scores[name] for scores in scored if name in scores]) for name in names},
        "outcomes": dict(sorted(Counter(record["outcome"] for record in records).items())),
        "turns": _mean([record["turns"] for record in records]),
        "sampled_tokens": sum(record["sampled_tokens"] for record in records),
        "digest_of_tasks": _digest(records),
    }


class SoFar:
    """The episodes of an evaluation that goes on: a file that grows by each batch, and their mean reward.

    >>> import tempfile
    >>> so_far = SoFar(Path(tempfile.mkdtemp()))
    >>> so_far.add([{"task": 0, "reward": 1.0}, {"task": 0, "reward": 0.0}, {"task": 1, "reward": None}])
    >>> so_far.tasks, so_far.reward
    (2, 0.5)
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.tasks = folder / SO_FAR, 0
        self._begun, self._rewarded, self._total = False, 0, 0.0

    @property
    def reward(self) -> float:
        """The mean reward so far, over tasks; nan where none has a reward."""
        return self._total / self._rewarded if self._rewarded else math.nan

    def add(self, records: Sequence[Record]) -> None:
        """Write a batch's records behind those before it; the first ones take the place of an older evaluation's.

        All episodes of a task are in one batch.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a" if self._begun else "w", encoding="utf-8") as file:
            self._begun = True
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        means = [_mean(values) for values in _by_task(records).values()]
        self.tasks += len({record["task"] for record in records})
        self._rewarded, self._total = self._rewarded + len(means), self._total + sum(means)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Make ``results.jsonl`` of what was added, and write ``summary.json`` beside it."""
        if not self._begun:
            self.add([])
        self.path.replace(self.path.with_name(RESULTS))
        self.path.with_name(SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def save_results(folder: Path, records: Sequence[Record], summary: Mapping[str, Any]) -> None:
    """Write ``results.jsonl`` and ``summary.json`` into a folder."""
    so_far = SoFar(folder)
    so_far.add(records)
    so_far.finish(summary)


def read_results(folder: Path) -> tuple[list[Record], Record]:
    """Read what :func:`save_results` has written. Raises UsageError where a folder holds none."""
    if not (folder / RESULTS).exists() or not (folder / SUMMARY).exists():
        if (folder / SO_FAR).exists():
            what = f"{folder} holds an evaluation that was broken off: {SO_FAR} is what had been played."
            raise UsageError(what, fix="Evaluate again into that folder.")
        raise UsageError(f"{folder} holds no results of an evaluation.", fix="Name the --out of flowrl eval.")
    lines = (folder / RESULTS).read_text(encoding="utf-8").split("\n")  # a text may have other ends of lines in it
    return [json.loads(line) for line in lines if line], json.loads((folder / SUMMARY).read_text(encoding="utf-8"))


def compare(first: Path, second: Path) -> Record:
    """The difference of two evaluations on the same tasks: its mean over tasks, and the standard error of that.

    Raises UsageError where their tasks differ.
    """
    (one, of_one), (other, of_other) = read_results(first), read_results(second)
    if of_one["digest_of_tasks"] != of_other["digest_of_tasks"]:
        same = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(_tasks(one), _tasks(other), strict=False))]
        raise UsageError(
            f"{first} and {second} played other tasks: their first {len(same)} are the same.",
            fix="Evaluate both with the same environment, --arg, --chat-template-kwargs, --rows and data.",
        )
    rewards, others = _by_task(one), _by_task(other)
    both = [task for task in rewards if task in others]
    differences = [_mean(others[task]) - _mean(rewards[task]) for task in both]
    return {
        "tasks": len(both),
        "first": of_one["reward"],
        "second": of_other["reward"],
        "difference": _mean(differences),
        "standard_error": _standard_error(differences),
    }


def _by_task(records: Sequence[Record]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for record in records:
        if record["reward"] is not None:
            found.setdefault(record["task"], []).append(record["reward"])
    return found


def _tasks(records: Sequence[Record]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((record["task"], record["prompt"]) for record in records))


def _digest(records: Sequence[Record]) -> str:
    return hashlib.sha256(json.dumps(_tasks(records)).encode()).hexdigest()[:16]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
