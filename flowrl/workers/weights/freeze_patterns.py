"""Which weights ``freeze=`` leaves as they are: patterns over the names that a model gives its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ...errors import ModelError, near

EMBEDDINGS = "embeddings"
_LAYERS = re.compile(r"layers\[(-?\d*)(:(-?\d*))?\]")
_WRITE = 'Write freeze="embeddings", "layers[:-2]", or a name such as "model.norm".'


def read_freeze(said: Any, *, lr: float | None, lora: Any) -> tuple[str, ...]:
    """What a user wrote as ``freeze=``, as patterns. ModelError for what is none, and where nothing would train it."""
    patterns: Any = (said,) if isinstance(said, str) else said
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) and p for p in patterns):
        raise ModelError(f"freeze={said!r} names no weights.", fix=_WRITE)
    found = tuple(patterns)
    for pattern in found:
        if pattern.startswith("layers[") and not _LAYERS.fullmatch(pattern):
            raise ModelError(
                f"freeze='{pattern}' is no range of layers.",
                fix='Write "layers[:-2]" for all but the last two, "layers[0]" for the first.',
            )
    if found and lora is not None:
        raise ModelError(
            "lora= trains adapters alone, so freeze= has nothing to leave as it is.",
            fix="Leave freeze= out, or name the layers that get adapters with Lora(targets=...).",
        )
    if found and lr is None:
        raise ModelError("lr=None trains nothing, so freeze= has nothing to leave as it is.", fix="Leave freeze= out.")
    return found


def frozen_names(patterns: Sequence[str], names: Sequence[str], embeddings: Iterable[str], title: str) -> set[str]:
    """The names of parameters that stay as they are.

    ``embeddings`` are the names of the input embedding, ``title`` the model for messages. A pattern is
    ``embeddings``, a layer or a range of layers as Python would slice them (``layers[:-2]``), or a name, or the
    beginning of names, where ``*`` stands for anything. Raises ModelError for one that names nothing, or for patterns
    that leave nothing to train.

    >>> frozen_names(["layers[:-1]"], ["model.layers.0.w", "model.layers.1.w", "lm_head.w"], [], "a model")
    {'model.layers.0.w'}
    """
    found: set[str] = set()
    for pattern in patterns:
        if pattern == EMBEDDINGS:
            these = set(embeddings)
        elif pattern.startswith("layers["):
            these = _of_layers(pattern, names, title)
        else:
            these = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
        if not these:
            raise _no_such(pattern, names, title)
        found |= these
    if patterns and found >= set(names):
        raise ModelError(
            f"freeze={list(patterns)} leaves no weight of {title} to train.", fix="Freeze less, or write lr=None."
        )
    return found


def _of_layers(pattern: str, names: Sequence[str], title: str) -> set[str]:
    """The weights of a layer, or of a range of them."""
    match = _LAYERS.fullmatch(pattern)
    assert match is not None, "read_freeze has looked at it"
    numbers = {name: number for name in names if (number := _layer(name)) is not None}
    every = range(max(numbers.values(), default=-1) + 1)
    first = int(match[1]) if match[1] else None
    try:
        chosen = every[first : int(match[3]) if match[3] else None] if match[2] else [every[first or 0]]
    except IndexError:
        chosen = []
    if not chosen:
        raise ModelError(
            f"freeze='{pattern}' names no layer of {title}, which has {len(every)}.",
            fix=f"Count from 0 to {len(every) - 1}.",
        )
    return {name for name, number in numbers.items() if number in chosen}


def _layer(name: str) -> int | None:
    """The number of the layer that a weight belongs to: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _no_such(pattern: str, names: Sequence[str], title: str) -> ModelError:
    """What is said of a pattern that names nothing, with the nearest name or beginning of names."""
    parts = [name.split(".") for name in names]
    beginnings = dict.fromkeys(".".join(p[:n]) for p in parts for n in range(1, len(p) + 1))
    outer = dict.fromkeys(".".join(p[:2]) for p in parts)
    meant = near(pattern, [EMBEDDINGS, *beginnings])
    return ModelError(
        f"freeze='{pattern}' names no weight of {title}.",
        have=outer,
        fix=f"Did you mean '{meant}'?" if meant else _WRITE,
    )
