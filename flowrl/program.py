"""A program of a flow: a function over its workers, with its parameters and presets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from .errors import At, ProgramError, UsageError, did_you_mean
from .graph.stand_ins import current_session as sessions


@dataclass(frozen=True)
class Program:
    """A program of a flow, with its parameters. Calling it is an error; a flow runs it."""

    fn: Callable[..., Any]
    name: str
    at: At
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    cell: CodeType | None = None

    def __post_init__(self) -> None:
        waits, yields = inspect.iscoroutinefunction(self.fn), inspect.isgeneratorfunction(self.fn)
        if waits or yields or inspect.isasyncgenfunction(self.fn):
            fix = "Write def and call ops without await: they return at once, and steps overlap by the plan."
            raise ProgramError(
                f"program '{self.name}' is {'async' if waits else 'a generator: it yields'}.",
                at=self.at,
                fix=fix if waits else "Record what it yields with flow.log(step, ...).",
            )
        several = [p for p in self.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if several:
            raise ProgramError(
                f"program '{self.name}' takes '{several[0]}', and its parameters are its flags.",
                at=self.at,
                fix="Name each parameter, with a default: --NAME VALUE gives it another value.",
            )
        for preset, values in self.presets.items():
            for name in values:
                if name not in self.parameters:
                    what = f"preset '{preset}' gives '{name}', which is no parameter of program '{self.name}'."
                    fix = did_you_mean(name, self.parameters)
                    raise ProgramError(what, at=self.at, have=self.parameters, fix=fix)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.fn).parameters

    def preset(self, name: str) -> dict[str, Any]:
        """The values of that preset. Raises UsageError with the near miss."""
        if name not in self.presets:
            what, fix = f"program '{self.name}' has no preset '{name}'.", did_you_mean(name, self.presets)
            raise UsageError(what, at=self.at, have=self.presets or None, fix=fix)
        return dict(self.presets[name])

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All parameters: given or by default. Raises UsageError for an unknown or a missing one."""
        arguments: dict[str, Any] = {}
        for name in given:
            if name not in self.parameters:
                what, fix = f"program '{self.name}' has no parameter '{name}'.", did_you_mean(name, self.parameters)
                raise UsageError(what, at=self.at, have=self.parameters, fix=fix)
        for name, parameter in self.parameters.items():
            if name in given:
                arguments[name] = given[name]
            elif parameter.default is parameter.empty:
                flag = "--" + name.replace("_", "-")
                raise UsageError(
                    f"program '{self.name}' needs a value for '{name}'.",
                    at=self.at,
                    fix=f"Give it a default, or {flag} VALUE.",
                )
            else:
                arguments[name] = parameter.default
        return arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fix = f"Run programs in a row with --program {self.name},...; put shared lines into a plain function."
        raise ProgramError(f"program '{self.name}' was called like a function.", at=sessions.caller(), fix=fix)
