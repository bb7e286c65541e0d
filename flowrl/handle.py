"""A worker as a program sees it: its class, its arguments, looked at where it is declared, and its ops by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import At, FlowError, ProgramError, WorkerError, near
from .graph import session as sessions
from .graph.arguments import bad_call, wrong_value
from .graph.habits import PLACE, is_place
from .graph.op import Op
from .graph.site import cell, place, raised_at, user_frame
from .graph.values import NoSuchName
from .names import FIX, name_problem
from .workers.base import Worker
from .workers.records import Model


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
        self.at = place(frame) if frame is not None else At("<unknown>", 0)
        self.cell = cell()
        self._name = name if name is None else checked_name(name, self.at)
        self._scope = frame.f_globals if frame is not None else {}
        self.arguments = self._bind()
        try:
            self._check_values()
            cls.check_declaration(self.arguments)
            self._make()
        except FlowError as error:
            error.at = error.at or self.at
            raise

    @property
    def name(self) -> str:
        """That of the module-level variable that holds it, unless ``name=`` said otherwise."""
        if self._name is None:
            self._name = next((n for n, v in self._scope.items() if v is self), None) or self.cls.__name__.lower()
        return self._name

    def use_model(self, model: Model) -> None:
        """Put another model in the place of the worker's own."""
        if self.args and "model" not in self.kwargs:
            self.args = self.args[1:]
        self.kwargs["model"] = model
        self.arguments = self._bind()

    def _bind(self) -> dict[str, Any]:
        try:
            bound = inspect.signature(self.cls).bind(*self.args, **self.kwargs)
        except TypeError as error:
            named = inspect.signature(self.cls).parameters
            raise bad_call(self.cls.__name__, named, self.kwargs, error, self.at, WorkerError) from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def _check_values(self) -> None:
        for name, value in self.arguments.items():
            if (error := wrong_value(self.cls.__init__, name, value, self.cls.__name__)) is not None:
                raise error

    def _make(self) -> None:
        """Make the worker once, and drop it: a constructor keeps its arguments, so that its errors show here."""
        try:
            self.cls(*self.args, **self.kwargs)
        except FlowError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}".rstrip(".")
            raise WorkerError(
                f"{self.cls.__name__} cannot be made with these arguments: {said}.",
                at=raised_at(error),
                fix=f"Mend {self.cls.__name__}.__init__, or what line {self.at.line} gives it.",
            ) from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = next((c.__dict__[name] for c in self.cls.__mro__ if name in c.__dict__), None)
        if isinstance(found, Op):
            return BoundOp(self, found)
        ops = [n for n in dir(self.cls) if isinstance(inspect.getattr_static(self.cls, n), Op)]
        meant = near(name, ops)
        what = "is no op: it can be called on its rank only" if found is not None else "is not there"
        frame = user_frame()
        raise NoSuchName(
            f"{self.name}.{name} {what}; the ops of {self.cls.__name__} are {', '.join(ops)}.",
            at=place(frame) if frame else None,
            fix=f"Did you mean {self.name}.{meant}?"
            if meant
            else PLACE
            if is_place(name)
            else "Call one of them, or write an op of your own in a subclass.",
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
            frame = user_frame()
            raise ProgramError(
                f"{self.handle.name}.{self.op.name} was called outside of a program.",
                at=place(frame) if frame else None,
                fix="Call it inside a function under @flow.program, and run that with flow.main() or flow.run().",
            )
        return session.call(self.op, self.handle, args, kwargs)
