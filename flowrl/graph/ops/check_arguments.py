"""Whether the arguments of a call fit its function: held against ``@takes`` and against plain annotations.

``@takes(n=whole(least=1), top_p=number(above=0, most=1))`` stands above a function, an op or an ``__init__``. Plain
annotations (``int``, ``float``, ``bool``, ``str``, each with ``| None``) say the type where no rule says more. In the
trace the values that are known are looked at; one that the program computes is looked at by the call itself.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ...errors import At, FlowError, ProgramError, WorkerError, did_you_mean, near
from ..script.names_in_other_libraries import PLACE, is_place, meant_argument
from ..script.site import caller
from ..stand_ins.scalars import ScalarValue
from ..stand_ins.values import BatchValue, FieldValue, MetricsValue
from .allowed import Allowed, flag, number, problem, text, whole
from .function_parameters import parameters_of
from .function_spec import Spec
from .signature import Signature

if TYPE_CHECKING:
    from .op import Op

E = TypeVar("E", bound=FlowError)
F = TypeVar("F", bound=Callable[..., Any])

_LOSSES = "Give what rl.ppo_clip(), rl.sft() or a loss of your own gives."
#: What plain annotations say. They are the user's too, so a number may be infinite.
_ANNOTATED = {"int": whole(), "float": number(finite=False), "bool": flag(), "str": text()}


def takes(**rules: Allowed) -> Callable[[F], F]:
    """Declare what values the arguments of a function may have; a wrong one raises ProgramError at the caller's line.

    Above ``__init__`` of a worker it raises WorkerError. It stands below ``@fl.op``, and the op holds it against every
    call. The default of a parameter is always allowed.

    >>> @fl.takes(power=fl.allowed.number(above=0))
    ... def powered(batch, *, power: float = 2.0):
    ...     return batch.rewards**power
    >>> powered(fl.Batch.of(1, rewards=[1.0]), power=-1.0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    flowrl.errors.ProgramError: powered: power=-1.0 is not a number above 0...
    """

    def declare(fn: F) -> F:
        if not inspect.isfunction(fn):
            raise ProgramError(
                f"takes declares arguments of a function, and stands above {fn!r}.",
                at=caller(),
                fix="Write @fl.takes(...) below @fl.op(...), next to the def.",
            )
        known = parameters_of(fn).named
        for name in rules:
            if name not in known:
                raise ProgramError(
                    f"takes: {fn.__qualname__} has no parameter '{name}'.",
                    at=caller(),
                    have=[n for n in known if n != "self"],
                    fix=did_you_mean(name, known, "Name a parameter of the function."),
                )

        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = parameters_of(fn).signature.bind(*args, **kwargs).arguments
            except TypeError:
                return fn(*args, **kwargs)  # Python says what is wrong
            for name, value in arguments.items():
                if (error := wrong_value(fn, name, value, _title(fn, args))) is not None:
                    error.at = caller()
                    raise error
            return fn(*args, **kwargs)

        cast("Any", fn).__takes__ = cast("Any", checked).__takes__ = rules
        return cast("F", checked)

    return declare


def unchecked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function below ``takes``: whoever calls it holds the rules against its arguments."""
    return cast("Any", fn).__wrapped__ if hasattr(fn, "__takes__") and hasattr(fn, "__wrapped__") else fn


def rule_of(fn: Callable[..., Any], name: str) -> Allowed | None:
    """Return what a parameter of a function may be: as ``takes`` says, else as its annotation does, else None."""
    return _rules(fn).get(name)


def wrong_value(fn: Callable[..., Any], name: str, value: Any, title: str) -> FlowError | None:
    """Return the error of an argument of a function, if it is wrong. The default of its parameter never is."""
    rule = rule_of(fn, name)
    if rule is None or rule.accepts(value):
        return None
    default = parameters_of(fn).named[name].default
    if value is default or (type(value) is type(default) and value == default):
        return None
    cls = WorkerError if getattr(fn, "__name__", "") == "__init__" else ProgramError
    return cls(f"{title}: {problem(name, value, rule)}", fix=rule.mend(name, value))


def wrong_values(fn: Callable[..., Any], arguments: Mapping[str, Any], title: str) -> list[FlowError]:
    """Return the errors of the arguments of a call, as far as they are known: those of specs (a loss) too."""
    rules, errors = _rules(fn), list[FlowError]()
    for name, value in arguments.items():
        if name in rules and (error := wrong_value(fn, name, value, title)) is not None:
            errors.append(error)
        if isinstance(value, Spec):
            errors += value.wrong_values()
    return errors


def wrong_arguments(op: Op, title: str, arguments: Mapping[str, Any], signature: Signature, at: At) -> list[FlowError]:
    """Return the errors of the arguments of an op: wrong values, no batch, no loss where one is declared."""
    errors = wrong_values(op.fn, arguments, title)
    for name, value in arguments.items():
        if signature.reads.get(name) and not isinstance(value, BatchValue):
            fix = "Give the batch"
            if isinstance(value, MetricsValue):
                fix += "; an update gives metrics"
            elif value is None:
                fix += "; a function that makes one must return it"
            errors.append(ProgramError(f"{title} takes a batch, and was given {described(value)}.", fix=f"{fix}."))
        declared = op.parameters.named.get(name)
        if declared is not None and declared.annotation in ("Spec", Spec) and not isinstance(value, Spec):
            called = getattr(value, "__name__", "")
            fix = f"Call it: {name}={called}(...)." if called else _LOSSES
            errors.append(ProgramError(f"{title}: {name}= takes a loss, and was given {described(value)}.", fix=fix))
    for error in errors:
        error.at = at
    return errors


def bad_call(
    title: str, parameters: Mapping[str, Any], given: Iterable[str], error: TypeError, at: At, kind: type[E]
) -> E:
    """The error of arguments that do not fit the parameters: the names there are, and the fix."""
    known = [n for n in parameters if n != "self"]
    wrong = next((n for n in given if n not in known), None)
    lacking = re.search(r"missing a required (?:keyword-only )?argument: '(\w+)'", str(error))
    if wrong is not None:
        meant = meant_argument(wrong, known) or near(wrong, known)
        fix = f"Write {meant}= for {wrong}=." if meant else PLACE if is_place(wrong) else f"Leave out {wrong}=."
    else:
        fix = f"Give {lacking[1]}=." if lacking else f"Its parameters are {', '.join(known)}."
    return kind(f"{title}: {error}.", at=at, have=known, fix=fix)


def described(value: Any) -> str:
    """A value in a message: ``the function exact``, ``int 3``."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    if value is None:
        return "None"
    kinds = {BatchValue: "a batch", FieldValue: "a field", MetricsValue: "metrics", ScalarValue: "a number"}
    kind = next((k for cls, k in kinds.items() if isinstance(value, cls)), None)
    return kind or f"{type(value).__name__} {value!r}"[:60]


@functools.lru_cache(maxsize=4096)
def _rules(fn: Callable[..., Any]) -> dict[str, Allowed]:
    declared = cast("Mapping[str, Allowed]", getattr(fn, "__takes__", {}))
    rules: dict[str, Allowed] = {}
    for name, parameter in parameters_of(fn).named.items():
        if name in declared:
            rules[name] = declared[name]
        elif parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            annotation = parameter.annotation
            text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
            words = text.replace(" ", "").split("|")
            kinds = [w for w in words if w != "None"]
            if len(kinds) == 1 and kinds[0] in _ANNOTATED:
                rule = _ANNOTATED[kinds[0]]
                rules[name] = rule | None if "None" in words else rule
    return rules


def _title(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The name of a function in a message: ``rl.ppo_clip``, and the class for an ``__init__``."""
    if fn.__name__ == "__init__":
        return type(args[0]).__name__ if args else fn.__qualname__.rpartition(".")[0]
    if not fn.__module__.startswith("flowrl.rl"):
        return fn.__qualname__
    return "rl.gates." + fn.__name__ if fn.__module__.endswith(".gates") else "rl." + fn.__name__
