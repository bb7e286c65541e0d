"""A worker as a program sees it: its class, its arguments, looked at where it is declared, and its ops by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import At, FlowError, ModelError, ProgramError, WorkerError, did_you_mean, shown
from .graph.ops.check_arguments import bad_call, wrong_value
from .graph.ops.op import Op
from .graph.ops.shown_settings import settings_of_worker
from .graph.record import WorkerInfo
from .graph.script.names_in_other_libraries import PLACE, is_place
from .graph.script.site import cell, raised_at, user_frame
from .graph.stand_ins import current_session as sessions
from .graph.stand_ins.values import NoSuchName
from .graph.tracing.log_names import LIBRARIES
from .valid_names import FIX, name_problem
from .workers.base import Worker
from .workers.model_options import Model
from .workers.tokens.tokenizer import actor_of

if TYPE_CHECKING:
    from .graph.tracing.trace_records import Traced

_FILES = frozenset(("live", "manifest"))


def checked_name(name: Any, at: At) -> str:
    """The name of a worker, which files, options and actors have too. WorkerError for one that cannot be."""
    if (wrong := name_problem(name)) is not None:
        raise WorkerError(f"name={name!a:.80} {wrong}.", at=at, fix=f'{FIX} name="judge".')
    return name


class Handle:
    """A worker as a program sees it: its ops, by name. To type checkers it is the worker itself."""

    is_handle = True

    def __init__(self, cls: type[Worker], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str | None) -> None:
        frame = user_frame()
        self.cls, self.args, self.kwargs = cls, args, dict(kwargs)
        self.at = self.model_at = sessions.caller()
        self.cell = cell()
        self._name = name if name is None else checked_name(name, self.at)
        self._scope = frame.f_globals if frame is not None else {}
        self.arguments = self._bind()
        try:
            self.check(f"line {self.at.line}")
        except FlowError as error:
            error.at = error.at or self.at
            raise

    @property
    def name(self) -> str:
        """That of the module-level variable that holds it, unless ``name=`` said otherwise."""
        if self._name is None:
            self._name = next((n for n, v in self._scope.items() if v is self), None) or self.cls.__name__.lower()
        return self._name

    def info(self) -> WorkerInfo:
        """Return what a graph says of the worker."""
        about = (inspect.getdoc(self.cls) or "").split("\n")[0]
        plain = re.sub(r":\w+:`([^`]*)`", r"\1", about).replace("``", "")
        settings = settings_of_worker(self.cls, self.arguments)
        return WorkerInfo(self.name, self.cls.__name__, shown(self.at.file), self.at.line, plain, settings)

    def use_model(self, model: Model) -> None:
        """Put another model in the place of the worker's own; ``model_at`` says what named it."""
        self.rebind({"model": model})
        self.model_at = At(f"--model {self.name}={model.title}", 0, f"in place of the one of {shown(self.at.file)}")

    def rebind(self, changed: Mapping[str, Any]) -> None:
        """Put other values in the place of these arguments, whose names are known; :meth:`check` looks at them."""
        signature = inspect.signature(self.cls)
        bound = signature.bind(*self.args, **self.kwargs)
        others = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
        for name, value in changed.items():
            if name in signature.parameters:
                bound.arguments[name] = value
            else:
                bound.arguments[others] = {**bound.arguments.get(others, {}), name: value}
        self.args, self.kwargs = bound.args, bound.kwargs
        self.arguments = self._bind()

    def check(self, given: str) -> None:
        """Hold the arguments against all rules of the class. Raises FlowError; ``given`` says where they were given."""
        for parameter, value in self.arguments.items():
            if (error := wrong_value(self.cls.__init__, parameter, value, self.cls.__name__)) is not None:
                raise error
        self.cls.check_declaration(self.arguments)
        self._make(given)

    def _bind(self) -> dict[str, Any]:
        try:
            bound = inspect.signature(self.cls).bind(*self.args, **self.kwargs)
        except TypeError as error:
            named = inspect.signature(self.cls).parameters
            raise bad_call(self.cls.__name__, named, self.kwargs, error, self.at, WorkerError) from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def _make(self, given: str) -> None:
        """Make the worker once, and drop it: a constructor keeps its arguments, so that its errors show here."""
        try:
            self.cls(*self.args, **self.kwargs)
        except FlowError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".rstrip(".")
            raise WorkerError(
                f"{self.cls.__name__} cannot be made with these arguments: {cause}.",
                at=raised_at(error),
                fix=f"Mend {self.cls.__name__}.__init__, or what {given} gives it.",
            ) from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = next((c.__dict__[name] for c in self.cls.__mro__ if name in c.__dict__), None)
        if isinstance(found, Op):
            return BoundOp(self, found)
        ops = [n for n in dir(self.cls) if isinstance(inspect.getattr_static(self.cls, n), Op)]
        what = "is no op: it can be called on its rank only" if found is not None else "is not there"
        fix = PLACE if is_place(name) else "Call one of them, or write an op of your own in a subclass."
        raise NoSuchName(
            f"{self.name}.{name} {what}; the ops of {self.cls.__name__} are {', '.join(ops)}.",
            at=sessions.caller(),
            fix=did_you_mean(name, ops, fix, form=f"Did you mean {self.name}.{{}}?"),
        )

    def __repr__(self) -> str:
        return f"<{self.cls.__name__} '{self.name}'>"


@dataclass(frozen=True)
class BoundOp:
    """An op of a handle, ready to be called in a program."""

    handle: Handle
    op: Op

    def __getattr__(self, name: str) -> Any:
        """An op has no methods; Ray's and torch's are the ones that are looked for."""
        if name.startswith("__"):
            raise AttributeError(name)
        title = f"{self.handle.name}.{self.op.name}"
        raise NoSuchName(f"{title} is an op and has no '{name}'.", at=sessions.caller(), fix=f"Call it: {title}(...).")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = sessions.current()
        if session is None:
            raise ProgramError(
                f"{self.handle.name}.{self.op.name} was called outside of a program.",
                at=sessions.caller(),
                fix="Call it inside a function under @flow.program, and run that with flow.main() or flow.run().",
            )
        return session.call(self.op, self.handle, args, kwargs)


def misnamed(handles: Sequence[Handle]) -> list[FlowError]:
    """Return the errors of workers that plans, graphs and records could not tell apart from others, or a library."""
    errors: list[FlowError] = []
    first: dict[str, Handle] = {}
    looped: set[Handle] = set()
    for handle in handles:
        other = first.setdefault(handle.name.casefold(), handle)
        if other is not handle:
            same = other.name == handle.name
            if other.at == handle.at and same:  # a loop makes them, as often as it goes round
                what = f"several workers of this line are called '{handle.name}'."
                fix = f'Give each its own name: flow.worker(..., name=f"{handle.name}_{{i}}").'
                if other not in looped:
                    errors.append(WorkerError(what, at=handle.at, fix=fix))
                looped.add(other)
                continue
            taken = f"as is the one at line {other.at.line}{'' if same else f', {other.name!r}, but for its case'}"
        elif (wrong := name_problem(handle.name)) is not None:
            taken = f"which {wrong}"
        elif handle.name in LIBRARIES:
            taken = "which is the name of a library"
        elif handle.name in _FILES:
            taken = "which is the name of a file in every checkpoint"
        else:
            continue
        fix = f'Give it a variable of its own, or a name: flow.worker(..., name="{handle.name}_2").'
        errors.append(WorkerError(f"a worker is called '{handle.name}', {taken}.", at=handle.at, fix=fix))
    return errors


def worker_names_for_tokenizers(traced: Traced, handles: Sequence[Handle]) -> list[FlowError]:
    """Return the errors of ``tokenizer="judge"`` where a worker is called so: a text is a name of the hub or a folder.

    It may be both: that of a worker whose own tokenizer is called like it, or of a folder that is there.
    """
    said = [(handle.name, handle.arguments.get("tokenizer"), handle.at) for handle in handles]
    for trail in traced.trails:
        said += [(draw.name, getattr(draw.source, "tokenizer", None), draw.at) for draw in trail.draws.values()]
        said += [(call.title, call.arguments.get("tokenizer"), call.at) for call in trail.calls]
    named = {handle.name: handle for handle in handles}
    errors: dict[tuple[str, At | None], FlowError] = {}
    for what, text, at in said:
        if not isinstance(text, str) or text not in named or Path(text).is_dir():
            continue
        cls, arguments = named[text].cls, named[text].arguments
        if not hasattr(cls, "declared_tokenizer") or cls.declared_tokenizer(arguments) != text:
            errors[what, at] = WorkerError(
                f"{what} has tokenizer='{text}', the name of a worker: as a text it would be loaded from the hub.",
                at=at,
                fix=f"Give the worker itself, tokenizer={text}, below the line that declares it.",
            )
    return list(errors.values())


def first_model(handles: Sequence[Handle]) -> Handle | None:
    """Return the worker whose tokenizer reads data that says no other, as a run finds it; None where none has one."""
    try:
        name = actor_of({h.name: (h.cls, h.arguments) for h in handles})
    except ModelError:
        return None
    return next(h for h in handles if h.name == name)
