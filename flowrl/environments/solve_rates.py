"""How many tasks several samples solve: pass@k, and maj@n, the verdict on the answer that most of them give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes import c_float
from math import comb
from typing import Any

from .verify.answers import answer_value


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that ``k`` samples have a right one among them, where ``c`` of ``n`` are right.

    ``1 - C(n - c, k) / C(n, k)``, the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, section 2.1): the mean
    over all sets of ``k`` of the ``n`` samples. It is computed in whole numbers, and rounded once. Raises ValueError
    for more right samples, or larger sets, than there are samples.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"{c} of {n} samples are right and sets have {k} of them: that cannot be")
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)


def majority(answers: Sequence[str | None]) -> int | None:
    """Return the place of the first sample with the answer that most samples give; None where none gives one.

    Of several answers with equally many votes it is the one that was sampled first. Two answers are the same where both
    are the same number, or the same text but for white space (self-consistency, Wang et al. 2022, arXiv:2203.11171).

    >>> majority(["4", "1/2", None, "0.5"])
    1
    """
    values = [answer_value(answer) if answer else None for answer in answers]
    votes = Counter(value for value in values if value is not None)
    return values.index(max(votes, key=votes.__getitem__)) if votes else None


def solve_rates(records: Sequence[Mapping[str, Any]], *, right_at: float) -> dict[str, list[float]]:
    """Return the values of each measure, one for each task: ``pass@k`` for k = 1, 2, 4, ... n, and ``maj@n``.

    ``records`` have a ``task``, a ``reward`` (None of a failure) and, where the response marks one, an ``answer``.
    ``n`` is how many of them a task has. A sample is right from the reward ``right_at`` on. A task with fewer than
    ``k`` rewards is left out of ``pass@k``, and with fewer than ``n`` out of ``maj@n``. That is there where tasks have
    several samples and one of them has an answer. A task without any answer is not solved by the majority.

    >>> rewards, answers = [1.0, 0.0, 0.0], ["4", "5", "5"]
    >>> records = [{"task": 0, "reward": r, "answer": a} for r, a in zip(rewards, answers, strict=True)]
    >>> {name: round(*values, 2) for name, values in solve_rates(records, right_at=1.0).items()}
    {'pass@1': 0.33, 'pass@2': 0.67, 'pass@3': 1.0, 'maj@3': 0.0}
    """
    tasks: dict[Any, list[Mapping[str, Any]]] = {}
    for record in records:
        tasks.setdefault(record["task"], []).append(record)
    n = max(map(len, tasks.values()), default=0)
    bound = c_float(right_at).value  # rewards are f32, in which 0.9 is a little less
    graded = [[record for record in of if record["reward"] is not None] for of in tasks.values()]
    right = [[c_float(record["reward"]).value >= bound for record in of] for of in graded]
    found = {f"pass@{k}": [pass_at_k(len(of), sum(of), k) for of in right if len(of) >= k] for k in _sizes(n)}
    if n > 1 and any(record.get("answer") for of in graded for record in of):
        chosen = [majority([record.get("answer") for record in of]) for of in graded]
        pairs = [(of, first) for of, first in zip(right, chosen, strict=True) if len(of) == n]
        found[f"maj@{n}"] = [float(first is not None and of[first]) for of, first in pairs]
    return found


def _sizes(n: int) -> list[int]:
    """The powers of two below ``n``, and ``n``."""
    return [*(2**i for i in range((n - 1).bit_length())), n] if n else []
