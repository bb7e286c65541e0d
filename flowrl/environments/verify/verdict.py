"""What a verifier says of an answer: a number, and how it came about."""

from __future__ import annotations

from typing import Any


class VerifierFailed(OSError):
    """A verifier itself has failed, whatever the answer is: a matter of the machine or the network.

    A rollout counts it as ``infrastructure_failure``; it is never a reward.

    >>> issubclass(fl.environments.verify.VerifierFailed, OSError)
    True
    """


class Verdict(float):
    """A reward with its outcome, one of ``outcomes``; ``why`` says what is wrong.

    ``passed`` of ``total`` tests were right, where there are tests. It is a number wherever one is wanted. In an
    environment ``scores`` have, beside the number, each outcome as 0 or 1.

    >>> verdict = fl.environments.verify.Verdict(0.5, "failed", ("passed", "failed"), passed=1, total=2)
    >>> verdict * 2, verdict.outcome
    (1.0, 'failed')
    """

    outcome: str
    outcomes: tuple[str, ...]
    why: str
    passed: int
    total: int

    def __new__(
        cls, value: float, outcome: str, outcomes: tuple[str, ...], *, why: str = "", passed: int = 0, total: int = 0
    ) -> Verdict:
        """A verdict. ``outcome`` is one of ``outcomes``."""
        assert outcome in outcomes, f"{outcome} is none of {outcomes}"
        made = super().__new__(cls, value)
        made.outcome, made.outcomes, made.why, made.passed, made.total = outcome, outcomes, why, passed, total
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As it is copied, and sent to another process."""
        more = {"why": self.why, "passed": self.passed, "total": self.total}
        return (float(self), self.outcome, self.outcomes), more

    @property
    def scores(self) -> dict[str, float]:
        """Each outcome as 0 or 1: ``{"passed": 0.0, "failed": 1.0}``."""
        return {name: float(name == self.outcome) for name in self.outcomes}
