"""The program run abstractly: two iterations on symbols, once per outcome of its conditions, into recorded calls."""

from __future__ import annotations

import dis
import traceback
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import At, FlowError, ProgramError, names_instead
from ..script.site import defined_at, is_users_code, raised_at
from ..script.surroundings import LIMIT, Surroundings
from ..stand_ins import current_session as sessions
from ..stand_ins.replaced_builtins import shims
from ..stand_ins.symbols import Symbol
from ..stand_ins.values import find
from .follow_branches import Decision, Numbers, Path
from .impossible_paths import contradiction
from .numbers_to_python import Again, Run, beyond, certain, forks, remarks
from .trace_records import Adder, Lint, Traced, each_once
from .tracer import Tracer

PATH_CAP = 64
_NONE: frozenset[str] = frozenset()
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
    Where plain Python is given a number, each path is run with another one too
    (:mod:`flowrl.graph.tracing.numbers_to_python`).
    """
    around = Surroundings(program)
    numbers = Numbers()

    def run(path: Path, meanings: dict[str, tuple[str, At]], rounds: int = 2) -> Run:
        tracer = Tracer(path, adders, program, meanings, rounds=rounds, owner=owner)
        done = _run(tracer, program, parameters)
        around.restore()
        return done

    def again(told: tuple[bool, ...], used: Numbers) -> Run:
        return run(Path(told, numbers=used), {})

    traced = _explore(name, program, run, numbers, cap)
    if any(trail.path.exits for trail in traced.trails):
        numbers.forks = forks(traced.trails, again, numbers)
        if numbers.forks:
            traced = _explore(name, program, run, numbers, cap)
        _add(traced.lints, remarks(traced.trails, numbers))
        _add(traced.lints, beyond(traced.trails, traced.errors, again, numbers))
    _add(traced.errors, around.leaks())
    if not around.whole:
        what = f"{LIMIT} objects around the program are put back after check; it may change others for good."
        _add(traced.lints, [Lint("state", what, defined_at(program))])
    return traced


def _explore(name: str, program: Callable[..., Any], run: Callable[..., Run], numbers: Numbers, cap: int) -> Traced:
    """All paths of a program. Where one fails on a number that it was given, all are run again with the next."""
    known: list[FlowError] = []
    while True:
        before = dict(numbers.choices), set(numbers.plain), set(numbers.patient)
        traced = _paths(name, program, run, numbers, cap, known)
        if (numbers.choices, numbers.plain, numbers.patient) != before:
            continue
        if traced.trails or not numbers.plain:
            _add(traced.errors, known)
            return traced
        numbers.plain.clear()  # that is not what it fails on
        numbers.symbols_only = True


def _paths(
    name: str,
    program: Callable[..., Any],
    run: Callable[..., Run],
    numbers: Numbers,
    cap: int,
    known: list[FlowError],
) -> Traced:
    """All paths with these numbers. ``known`` is given the errors that they show where no symbols are to be tried."""
    held: set[str] = set()
    apart: list[tuple[Run, list[FlowError], list[Decision]]] = []  # with errors, where no number holds
    traced = Traced(name, [], [], [])
    broken: list[tuple[FlowError, Path]] = []
    waiting: list[tuple[bool, ...]] = [()]
    meanings: dict[str, tuple[str, At]] = {}  # of the names that are logged
    waits: dict[At, set[str]] = {}
    while waiting:
        if len(traced.trails) + len(apart) >= cap:
            traced.capped = True
            what = f"only {cap} of the program's paths were followed; rarer ones are checked when they run."
            traced.lints.append(Lint("paths", what, defined_at(program)))
            break
        path = Path(told=waiting.pop(0), numbers=numbers)
        done = run(path, meanings)
        if places := _no_ends(done, lambda told, used: run(Path(told, numbers=used), {}), numbers):
            numbers.patient |= places
            return traced
        if done.refused - numbers.plain and not numbers.symbols_only:
            numbers.plain |= done.refused
            return traced
        if done.crashed and numbers.give_up(path):
            return traced
        waiting += path.others()
        errors = certain(done, lambda told, used: run(Path(told, numbers=used), {}), numbers)
        if errors and (never := _never(done, errors)):
            apart.append((done, errors, never))
            continue
        if done.failure is None:
            traced.trails.append(done.tracer.trail)
        elif done.crashed:
            broken.append((done.failure, path))
            held |= done.held - numbers.plain
        traced.whole &= done.failure is None
        _add(traced.errors, errors)
        for at, titles in done.tracer.waits.items():
            waits.setdefault(at, set()).update(titles)
    if traced.capped or not traced.trails:  # they may stand for others
        for done, errors, _ in apart:
            traced.trails += [done.tracer.trail] if done.failure is None else []
            traced.whole &= done.failure is None
            _add(traced.errors, errors)
    else:
        told = {error.report() for error in traced.errors}
        last = {e.report(): _comes_here(e, never) for _, errors, never in apart for e in errors}  # of each error
        _add(traced.lints, [lint for report, lint in last.items() if report not in told])
    traced.lints[:0] = [_serial(at, titles) for at, titles in waits.items()]
    if traced.trails:
        longer = run(Path(numbers=numbers), dict(meanings), rounds=3)
        traced.longer = longer.tracer.trail if longer.failure is None else None
        first = {failure.report(): (failure, path) for failure, path in reversed(broken)}  # of each line and cause
        _add(traced.lints, [_not_followed(failure, path) for failure, path in reversed(first.values())])
    elif held and not numbers.symbols_only:  # a library was given symbols on every path, as by random.seed(step)
        numbers.plain |= held
        known += traced.errors
    else:  # the trace may take paths that no run takes, where plain Python fails
        _add(traced.errors, [failure for failure, _ in broken[:1]])
    return traced


def _no_ends(done: Run, run: Again, numbers: Numbers) -> set[Hashable]:
    """The places where a path was made to leave a loop, as it would go on for ever, and that end by themselves.

    The last one is in doubt where the path fails behind it: ``for _ in range(9): if loss > 1: raise ...`` never raises
    in some run. So is one whose outcome was known: ``for _ in range(99): if step > 0: ...`` never changes.
    """
    told, found = done.tracer.trail.path.told, set[Hashable]()
    while True:
        ended = done.tracer.trail.path.ended
        doubtful = [p for p, known in ended.items() if (known or done.crashed) and p not in found | numbers.endless]
        if not doubtful:
            return set()
        found.add(doubtful[-1])
        done = run(told, replace(numbers, patient=numbers.patient | found))
        numbers.endless |= found & done.tracer.trail.path.ended.keys()
        if found & numbers.endless:
            return set()
        if done.failure is None or done.tracer.trail.path.open_end:
            return found


def _run(tracer: Tracer, program: Callable[..., Any], parameters: Mapping[str, Any]) -> Run:
    """Run one path."""
    with sessions.using(tracer), shims(program):
        try:
            program(**parameters)
        except FlowError as error:
            error.at = error.at or raised_at(error)
            return Run(tracer, error)
        except (Exception, SystemExit) as error:
            cause = f"{type(error).__name__}: {error}"
            what = f"the program failed while it was traced: {cause.rstrip('.')}."
            meant, have = names_instead(error)
            failure = ProgramError(
                what, at=raised_at(error) or defined_at(program), have=have, fix=meant or _fix(cause)
            )
            perhaps = not _on_any_path(error)
            held, named = (
                _held(error, tracer),
                "Symbol" in cause and not isinstance(error, (AttributeError, LookupError)),
            )
            if named:
                return Run(tracer, failure, perhaps, held or _last(tracer))
            return Run(tracer, failure, perhaps, held=held if isinstance(error, (TypeError, ValueError)) else _NONE)
    return Run(tracer)


def _fix(cause: str) -> str:
    if any(word in cause for word in _SYMBOLIC):
        return "In the trace numbers are symbols; keep to arithmetic, comparisons, float() and int() on them."
    return "Mend that line; check runs the program with its defaults, and with symbols for numbers."


def _on_any_path(error: BaseException) -> bool:
    """Whether the line fails whenever it runs: a name that a module has not, or an argument that a function has not.

    Any other error of Python may be one of a path that no run takes: a variable that only another step sets.
    """
    if isinstance(error, AttributeError):
        return isinstance(error.obj, types.ModuleType)
    code = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1].f_code
    if type(error) is NameError:
        return "free variable" not in str(error) and not _sets_global(code, error.name)
    return isinstance(error, TypeError) and "unexpected keyword argument" in str(error) and is_users_code(code)


def _sets_global(code: types.CodeType, name: str | None) -> bool:
    return any(step.opname == "STORE_GLOBAL" and step.argval == name for step in dis.get_instructions(code))


def _last(tracer: Tracer) -> frozenset[str]:
    """The last symbol that was made and is none of those that stay plain."""
    last = next((text for text in reversed(tracer.symbols) if text not in tracer.trail.path.numbers.plain), None)
    return _NONE if last is None else frozenset((last,))


def _held(error: BaseException, tracer: Tracer) -> frozenset[str]:
    """The symbols that a library was given as it failed, as they are written: what its functions hold, or looked at."""
    frames = list(traceback.walk_tb(error.__traceback__))
    inside = [frame for frame, _ in frames if not is_users_code(frame.f_code)]
    lines = [(frame.f_code.co_filename, line) for frame, line in frames if is_users_code(frame.f_code)]
    symbols = [v for v in find([list(frame.f_locals.values()) for frame in inside]) if isinstance(v, Symbol)]
    looked_at = [exit.text for exit in tracer.trail.path.exits if inside and (exit.at.file, exit.at.line) in lines[-1:]]
    return frozenset((*(str(symbol.ref.text) for symbol in symbols), *looked_at))


def _serial(at: At, titles: set[str]) -> Lint:
    waits = ", ".join(sorted(titles)) or "the data"
    return Lint("serial", f"this line waits for {waits}: steps cannot overlap past it.", at)


def _not_followed(failure: FlowError, path: Path) -> Lint:
    cause = failure.what.partition("traced: ")[2]
    where = " and ".join(dict.fromkeys(d.label for d in path.taken if not path.fixed(d)))
    return Lint("path", f"not followed further where {where}: {cause}", failure.at or At("<unknown>", 0))


def _never(done: Run, errors: Sequence[FlowError]) -> list[Decision]:
    """The decisions for which no run comes to the errors of a path, if there are such.

    The first iteration of a loop is step 0 for what it finds itself. Behind it, in the next loop too, it stands for any
    step before.
    """
    path, counted = done.tracer.trail.path, done.tracer.counted
    if never := contradiction(path, counted):
        return never
    loops = [next((loop for other, loop in done.tracer.at_first if other is error), 0) for error in errors]
    each = [contradiction(path, counted, begins=loop) if loop else [] for loop in dict.fromkeys(loops)]
    return [decision for never in each for decision in never] if all(each) else []


def _comes_here(error: FlowError, never: Sequence[Decision]) -> Lint:
    where = " and ".join(dict.fromkeys(d.label + " in the first step" * (d.iteration == 1) for d in never))
    return Lint("path", f"no run comes here where {where}: {error.what}", error.at or At("<unknown>", 0))


def _add(into: list[Any], more: Iterable[Any]) -> None:
    """Append what is not there yet; the same finding on several paths or iterations is one."""
    into[:] = each_once([*into, *more])
