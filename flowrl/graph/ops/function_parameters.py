"""The parameters of a function, read once: which argument of a call goes to which, and how it is called with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

_REQUIRED = inspect.Parameter.empty


class Parameters:
    """Puts arguments to the parameters of a function, as ``inspect.Signature.bind`` does, without reading it again.

    >>> def update(self, batch, *, epochs=1): ...
    >>> Parameters(update).bind(("rows",), {})
    {'batch': 'rows', 'epochs': 1}
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.signature = inspect.signature(fn)
        self.named = self.signature.parameters
        self.is_method = next(iter(self.named), "") == "self"
        own = list(self.named.values())[self.is_method :]
        self.first = own[0].name if own else "batch"
        self._defaults = {p.name: p.default for p in own}
        self._required = tuple(p.name for p in own if p.default is _REQUIRED)
        self._positional = tuple(p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD)
        self._keyword = tuple(p.name for p in own if p.kind is p.KEYWORD_ONLY)
        self._plain = len(self._positional) + len(self._keyword) == len(own)  # none like *others, **more or a, /

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter, defaults filled in, without ``self``. Raises TypeError like Python."""
        if self._plain and len(args) <= len(self._positional):
            arguments = self._defaults.copy()
            arguments.update(zip(self._positional, args, strict=False))
            arguments.update(kwargs)
            known = len(arguments) == len(self._defaults)
            once = not kwargs or kwargs.keys().isdisjoint(self._positional[: len(args)])
            if known and once and all(arguments[name] is not _REQUIRED for name in self._required):
                return arguments
        bound = self.signature.bind(*((None,) if self.is_method else ()), *args, **kwargs)
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if not self.is_method or name != "self"}

    def passed(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments by parameter as a call writes them, without ``self``: positional ones, and those with a name."""
        if self._plain:
            return [arguments[name] for name in self._positional], {name: arguments[name] for name in self._keyword}
        bound = self.signature.bind_partial()
        bound.arguments.update({**({"self": None} if self.is_method else {}), **arguments})
        return list(bound.args[self.is_method :]), dict(bound.kwargs)


@functools.lru_cache(maxsize=4096)
def parameters_of(fn: Callable[..., Any]) -> Parameters:
    """The parameters of a function."""
    return Parameters(fn)
