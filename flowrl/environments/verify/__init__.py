"""Verifiers: what an answer is worth, by comparison, by mathematics, by unit tests in a sandbox, and by a judge.

docs/verification.md shows each.
"""

from __future__ import annotations

from .answers import choice, exact, final_answer, numeric
from .commands import Ran, run_command
from .judge import Judge, score_of_ten
from .known_answers import VerdictCache
from .mathematics import symbolic
from .sandbox import Limits
from .unit_tests import code_of, unit_tests
from .verdict import Verdict, VerifierFailed

__all__ = [
    "exact",
    "numeric",
    "choice",
    "symbolic",
    "unit_tests",
    "Judge",
    "Limits",
    "Ran",
    "Verdict",
    "VerdictCache",
    "VerifierFailed",
    "code_of",
    "final_answer",
    "run_command",
    "score_of_ten",
]
