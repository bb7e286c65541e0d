"""Which settings a call or a worker has: arguments besides rows that are not the default, as they are written."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ...errors import shown
from ..stand_ins.symbols import Symbol
from ..stand_ins.values import Value, is_handle
from ..tracing.trace_records import TCall
from .function_spec import Spec

_LONGEST = 40  # characters of a setting


def settings_of(calls: Sequence[TCall]) -> dict[str, str]:
    """The settings of the calls of one place; one that differs between paths is all that it is: ``4 or 8``.

    A loss, a batch and the handle of a worker are none: the graph shows them otherwise.
    """
    settings: dict[str, dict[str, None]] = {}
    for call in calls:
        if call.op.owner != "batch":
            given = {n: v for n, v in call.arguments.items() if n not in ("into", call.op.children)}
            for name, text in _changed(given, call.op.parameters.named).items():
                settings.setdefault(name, {})[text] = None
    return {name: " or ".join(texts) for name, texts in settings.items()}


def settings_of_worker(cls: type, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return what a worker was declared with; another worker by its name."""
    return _changed(arguments, inspect.signature(cls).parameters, handles=True)


def _changed(
    arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], *, handles: bool = False
) -> dict[str, str]:
    changed: dict[str, str] = {}
    for name, value in arguments.items():
        if isinstance(value, Spec) or (isinstance(value, Value) and not isinstance(value, Symbol)):
            continue  # what is not read yet comes along an edge
        if name not in parameters or (is_handle(value) and not handles):
            continue
        default = parameters[name].default
        if isinstance(value, Value) or is_handle(value) or not _equal(value, default):
            changed[name] = written_setting(value)
    return changed


def _equal(value: Any, default: Any) -> bool:
    """Whether a setting is the default. What cannot be compared is not."""
    try:
        return type(value) is type(default) and bool(value == default)
    except Exception:
        return False


def written_setting(value: Any) -> str:
    """A setting as the program writes it, shortened: a number as it is computed, a file below this folder."""
    if isinstance(value, Symbol):
        text = str(value.ref.text)
    elif is_handle(value):
        text = str(value.name)
    elif isinstance(value, (list, tuple)):
        items = [written_setting(item) for item in cast("Sequence[Any]", value)]
        text = ", ".join(items) + "," * (len(items) == 1 and isinstance(value, tuple))
        text = f"[{text}]" if isinstance(value, list) else f"({text})"
    elif isinstance(value, str):
        text = repr(shown(value) if os.path.exists(value) else value)
    elif callable(value) and hasattr(value, "__name__"):
        text = str(value.__name__)
    else:
        text = repr(value)
        text = f"{type(value).__name__}(...)" if text.startswith("<") or len(text) > _LONGEST else text
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
