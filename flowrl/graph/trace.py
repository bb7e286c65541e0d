"""The program run abstractly: two iterations on symbols, once per outcome of its conditions, into recorded calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import At, FlowError, ProgramError
from . import session as sessions
from .oracle import Path
from .shims import shimmed
from .site import defined_at, raised_at
from .surroundings import LIMIT, Surroundings
from .terms import Adder, Lint, Traced
from .tracer import Tracer

PATH_CAP = 64
_SYMBOLIC = ("Symbol", "ScalarValue", "FieldValue", "BatchValue", "MetricsValue")


def trace(
    program: Callable[..., Any],
    parameters: Mapping[str, Any],
    *,
    name: str,
    adders: Sequence[Adder] = (),
    owner: Any = None,
    cap: int = PATH_CAP,
) -> Traced:
    """Run ``program(**parameters)`` on symbols, once per path, breadth first, at most ``cap`` times.

    ``owner`` is the handle of the flow's first model, whose tokenizer is that of data without one.

    Errors do not stop the trace: a missing field is reported and then taken as there, so that all are found in one go.
    """
    traced = Traced(name, [], [], [])
    broken: list[tuple[FlowError, Path]] = []
    waiting: list[tuple[bool, ...]] = [()]
    meanings: dict[str, tuple[str, At]] = {}  # of the names that are logged
    around = Surroundings(program)
    while waiting:
        if len(traced.trails) >= cap:
            traced.capped = True
            traced.lints.append(
                Lint(
                    "paths",
                    f"only {cap} of the program's paths were followed; rarer ones are checked when they run.",
                    defined_at(program),
                )
            )
            break
        path = Path(told=waiting.pop(0))
        tracer = Tracer(path, adders, program, meanings, owner=owner)
        failure, crashed = _run(tracer, program, parameters)
        around.restore()
        waiting += path.others()
        if failure is None:
            traced.trails.append(tracer.trail)
        elif crashed:
            broken.append((failure, path))
        else:
            tracer.errors.append(failure)
        traced.whole &= failure is None
        _add(traced.errors, tracer.errors)
        _add(traced.lints, tracer.lints)
    if traced.trails:
        longer = Tracer(Path(), adders, program, dict(meanings), rounds=3, owner=owner)
        traced.longer = longer.trail if _run(longer, program, parameters)[0] is None else None
        around.restore()
    _add(traced.errors, around.leaks())
    if not around.whole:
        what = f"{LIMIT} objects around the program are put back after check; it may change others for good."
        _add(traced.lints, [Lint("state", what, defined_at(program))])
    if not traced.trails:
        _add(traced.errors, [failure for failure, _ in broken[:1]])
    else:  # the trace may take paths that no run takes, where plain Python fails
        _add(traced.lints, [_not_followed(failure, path) for failure, path in broken])
    return traced


def _run(tracer: Tracer, program: Callable[..., Any], parameters: Mapping[str, Any]) -> tuple[FlowError | None, bool]:
    """Run one path. What ended it, and whether that was Python's error and not one of flowrl."""
    with sessions.using(tracer):
        try:
            shimmed(program)(**parameters)
        except FlowError as error:
            error.at = error.at or raised_at(error)
            return error, False
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            symbolic = any(word in said for word in _SYMBOLIC)
            fix = (
                "In the trace numbers are symbols; keep to arithmetic, comparisons, float() and int() on them."
                if symbolic
                else "Mend that line; check runs the program with its defaults, and with symbols for numbers."
            )
            what = f"the program failed while it was traced: {said.rstrip('.')}."
            return ProgramError(what, at=raised_at(error) or defined_at(program), fix=fix), True
    return None, False


def _not_followed(failure: FlowError, path: Path) -> Lint:
    said = failure.what.partition("traced: ")[2]
    where = " and ".join(dict.fromkeys(d.label for d in path.taken))
    return Lint("path", f"not followed further where {where}: {said}", failure.at or At("<unknown>", 0))


def _add(into: list[Any], more: Iterable[Any]) -> None:
    """Append what is not there yet; the same finding on several paths or iterations is one."""
    seen = {x.report() for x in into}
    for item in more:
        if item.report() not in seen:
            seen.add(item.report())
            into.append(item)
