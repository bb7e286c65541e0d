"""What becomes of rows whose reward failed: they are asked again, counted, marked, and told of once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...batch import CallInfo
from ...errors import RewardError, cut

_LONGEST = 30.0  # seconds between two attempts, at most
_FEW = 8  # a share of fewer rows says little


class Late(TimeoutError):
    """A row ran out of the time that it had. One that user code raises says something else."""

    def __init__(self, timeout: float | None, why: str = "") -> None:
        super().__init__(f"it took longer than {timeout} s{why}")


class Died(Exception):
    """Processes that were at this row have died, so that it is not asked for again: ``Died(3)``."""

    def __init__(self, times: int) -> None:
        super().__init__(f"its process has died {times} times at this row; it is not called for it again")


@dataclass(frozen=True)
class Policy:
    """How failures are met: ``Policy("mark", retries=3, backoff=1.0, max_failed=0.5)``; see ``FunctionReward``."""

    on_error: str | float = "raise"
    retries: int = 0
    backoff: float = 1.0
    max_failed: float = 0.5
    spare: int = 0  # other episodes that are played in the place of one that failed, of rollouts

    @property
    def marks(self) -> bool:
        """Whether rows that failed are marked."""
        return self.on_error == "mark"

    @property
    def reward(self) -> float:
        """The reward of a row that failed."""
        return math.nan if isinstance(self.on_error, str) else float(self.on_error)


def ask_again(
    ask: Callable[[Sequence[int]], Sequence[Any]],
    rows: int,
    policy: Policy,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Any]:
    """Outcomes of ``ask(numbers of rows)``, an exception where a row failed, also at the last attempt.

    Rows that failed are asked again, all together, ``retries`` times: after ``backoff`` seconds, and each time after
    twice as many, at most 30.
    """
    outcomes, wait = list(ask(range(rows))), policy.backoff
    for _ in range(policy.retries):
        failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
        if not failed:
            break
        sleep(min(wait, _LONGEST))
        wait = min(2 * wait, _LONGEST)
        for i, outcome in zip(failed, ask(failed), strict=True):
            outcomes[i] = outcome
    return outcomes


@dataclass(frozen=True)
class Failures:
    """Rows of a call, or of a part of it, that failed and did not stop it.

    ``Failures("reward.score of step 3: exact", {"row 3, sample 2": "OSError: down"}, failed=1, most=0.5)``: reasons by
    the rows in words, how many rows these are, and the share of all rows of the call that may be.
    """

    title: str
    why: Mapping[str, str]
    failed: int
    most: float
    call: CallInfo = field(default_factory=CallInfo)


def first_failure(title: str, failures: Mapping[str, BaseException], code: str) -> RewardError:
    """The error of a call that a failed row stops. ``code`` is the function with its file and line."""
    first, error = next(iter(failures.items()))
    raised = RewardError(
        f"{title} failed for {first}: {said(error)}.",
        fix=f"Mend the function{f' ({code})' if code else ''}; or give FunctionReward retries=3, and "
        'on_error="mark" to go on without such rows.',
    )
    raised.__cause__ = error
    return raised


def settle(parts: Sequence[Failures], rows: int, warn: Callable[[str], None]) -> None:
    """Say in one warning what failed of a call of so many rows. RewardError where that is too much."""
    failed = sum(part.failed for part in parts)
    why = {row: reason for part in parts for row, reason in part.why.items()}
    if not why:
        return
    title, most = parts[0].title, parts[0].most
    first, reason = next(iter(why.items()))
    if failed >= _FEW and failed > most * rows:
        raise RewardError(
            f"{title} failed for {failed} of {rows} rows; max_failed is {most:g}. First {first}: {reason}.",
            fix="See that the service runs, and go on with --resume; or give it retries=3, or a longer timeout=.",
        )
    warn(f"{title} failed for {first}: {reason}" if len(why) == 1 else _several(title, why, failed, rows))


def _several(title: str, why: Mapping[str, str], failed: int, rows: int) -> str:
    """All failures of a call in one line: how many, and what they said, each once."""
    reasons: dict[str, list[str]] = {}
    for which, reason in why.items():
        reasons.setdefault(reason, []).append(which.removeprefix("row "))
    first = [f"{why} ({_shortened(which)})" for why, which in list(reasons.items())[:3]]
    more = f", and {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
    return f"{title} failed for {failed} of {rows} rows: {'; '.join(first)}{more}"


def _shortened(which: Sequence[str]) -> str:
    rows = "; ".join(f"row {w}" for w in which[:3])
    return rows if len(which) <= 3 else f"{rows} and {len(which) - 3} more"


def said(error: BaseException) -> str:
    """An exception of user code in one line."""
    text = cut(" ".join(str(error).split()))
    if isinstance(error, (Late, Died)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
