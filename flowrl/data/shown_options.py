"""What ``help(fl.data.jsonl)`` shows: the options that all constructors take, each by name and with its default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from .source import Options, Reading

F = TypeVar("F", bound=Callable[..., Any])


def shows_options(fn: F) -> F:
    """Give a function that takes ``**options`` a signature that names them, for ``help`` and notebooks.

    >>> str(inspect.signature(fl.data.jsonl)).split(", ")[:4]
    ["(paths: 'Paths'", '*', "batch: 'int'", "prompt: 'str' = 'prompt'"]
    """
    shown = inspect.signature(fn)
    mine = [p for p in shown.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    fn.__signature__ = shown.replace(parameters=[*mine, *_options()])  # type: ignore[attr-defined]
    return fn


def _options() -> list[inspect.Parameter]:
    """The options as parameters that are given by name; the number of rows is the only one without a default."""
    defaults = {f.name: f.default for f in fields(Reading) if f.name != "batch" and f.default is not MISSING}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name, inspect.Parameter.empty),
            annotation=getattr(said, "__forward_arg__", said),
        )
        for name, said in Options.__annotations__.items()
    ]
