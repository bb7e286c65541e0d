"""Values as records hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def spelled(value: Any) -> Any:
    """A parameter as a record holds it: plain values as they are, a loss and the like as a text without addresses."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): spelled(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [spelled(v) for v in cast("Sequence[Any]", value)]
    if isinstance(value, partial):
        made = cast("partial[Any]", value)
        inside = [*map(repr, made.args), *(f"{k}={v!r}" for k, v in made.keywords.items())]
        return ADDRESS.sub("", f"{spelled(made.func)}({', '.join(inside)})")
    return getattr(value, "__name__", None) or ADDRESS.sub("", repr(value))
