"""What a run is asked to evaluate by, and when to stop: ``evaluate:20``, ``accuracy:3``; and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from .errors import UsageError
from .graph.tracing.trace_records import Traced
from .lowering.scheme_of_program import trained_workers
from .program import Program


def read_evaluations(said: str | Sequence[str], find: Callable[[str], Program]) -> dict[str, int]:
    """Return after how many steps each program is to be run, of words such as ``evaluate:20``; a later word wins.

    Raises UsageError, also for a program that ``find`` does not know.
    """
    found: dict[str, int] = {}
    for word in [said] if isinstance(said, str) else said:
        name, _, every = word.rpartition(":")
        if not name or not every.isdecimal() or not int(every):
            raise UsageError(
                f"--evaluate {word}: that names no program and number of steps.",
                fix="Write PROGRAM:STEPS, such as --evaluate evaluate:20.",
            )
        found[find(name).name] = int(every)
    return found


def check_stop(said: str) -> None:
    """Raise UsageError for what is no metric with a patience: ``accuracy:3``, ``loss:min:3``."""
    name, _, patience = said.rpartition(":")
    if said and (not name.removesuffix(":min") or not patience.isdecimal() or not int(patience)):
        raise UsageError(
            f"--stop-when {said}: that names no metric and patience.",
            fix="Write METRIC:PATIENCE, such as --stop-when accuracy:3, or loss:min:3 where it should fall.",
        )


def check_evaluation(evaluation: Traced, programs: Mapping[str, Traced], used: Collection[str]) -> None:
    """Raise UsageError where a program cannot be run between the steps of these, whose workers are ``used``."""
    if not any(trained_workers(traced) for traced in programs.values()):
        raise UsageError(
            f"--evaluate {evaluation.program}: none of {', '.join(programs)} trains, so there is nothing to evaluate "
            "between their steps.",
            fix=f"Run it by itself: --program {evaluation.program}.",
        )
    for call in (call for trail in evaluation.trails for call in trail.calls):
        if call.updates is not None and call.worker in used:
            raise UsageError(
                f"--evaluate {evaluation.program}: {call.title} changes '{call.worker}', and an evaluation leaves the "
                "workers that are trained with as they are.",
                at=call.at,
                fix="Evaluate with ops that only read and sample.",
            )
