"""What becomes of rows whose reward failed: they are asked again, counted, marked, and told of once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RewardError

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


def settle(
    title: str,
    failures: Mapping[str, BaseException],
    failed: int,
    rows: int,
    policy: Policy,
    warn: Callable[[str], None],
    code: str = "",
) -> None:
    """Say what failed: RewardError where the run is to stop, one warning else.

    ``failures`` are errors by the rows that failed with them, in the order of rows; ``failed`` counts those rows.
    ``code`` is the function with its file and line.
    """
    if not failures:
        return
    first, error = next(iter(failures.items()))
    why = said(error)
    if policy.on_error == "raise":
        raise RewardError(
            f"{title} failed for {first}: {why}.",
            fix=f"Mend the function{f' ({code})' if code else ''}; or give FunctionReward retries=3, and "
            'on_error="mark" to go on without such rows.',
        ) from error
    what = f"{title} failed for {first}: {why}" if len(failures) == 1 else _several(title, failures, failed, rows)
    if failed >= _FEW and failed > policy.max_failed * rows:
        raise RewardError(
            f"{title} failed for {failed} of {rows} rows; max_failed is {policy.max_failed:g}. First {first}: {why}.",
            fix="See that the service runs, and go on with --resume; or give it retries=3, or a longer timeout=.",
        ) from error
    warn(what)


def _several(title: str, failures: Mapping[str, BaseException], failed: int, rows: int) -> str:
    """All failures of a call in one line: how many, and what they said, each once."""
    reasons: dict[str, list[str]] = {}
    for which, error in failures.items():
        reasons.setdefault(said(error), []).append(which.removeprefix("row "))
    first = [f"{why} ({_shortened(which)})" for why, which in list(reasons.items())[:3]]
    more = f", and {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
    return f"{title} failed for {failed} of {rows} rows: {'; '.join(first)}{more}"


def _shortened(which: Sequence[str]) -> str:
    rows = "; ".join(f"row {w}" for w in which[:3])
    return rows if len(which) <= 3 else f"{rows} and {len(which) - 3} more"


def said(error: BaseException) -> str:
    """An exception of user code in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, (Late, Died)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
