"""Arguments as trees: what lies in tuples, lists, dicts and the parameters of specs is found there, or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, TypeVar, cast

T = TypeVar("T")


def find_in(tree: Any, kinds: type[T] | tuple[type[T], ...]) -> Iterator[T]:
    """Yield everything of some classes inside arguments, in order."""
    if isinstance(tree, kinds):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in cast("Sequence[Any]", tree):
            yield from find_in(item, kinds)
    elif isinstance(tree, Mapping):
        for item in cast("Mapping[Any, Any]", tree).values():
            yield from find_in(item, kinds)
    elif _is_spec(tree):
        yield from find_in(tree.parameters, kinds)


def rebuild(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments with ``change`` applied to everything that is no container."""
    if isinstance(tree, (tuple, list)):
        items = [rebuild(item, change) for item in cast("Sequence[Any]", tree)]
        if isinstance(tree, list):
            return items
        cls = cast("Any", tree).__class__
        return cls(*items) if hasattr(cls, "_fields") else tuple(items)
    if isinstance(tree, dict):
        entries = {k: rebuild(v, change) for k, v in cast("dict[Any, Any]", tree).items()}
        if cast("Any", tree).__class__ is dict:
            return entries
        copied = copy(cast("dict[Any, Any]", tree))  # such as metrics, or a dict with a default
        copied.update(entries)
        return copied
    if _is_spec(tree) and tree.parameters:
        parameters = {k: rebuild(v, change) for k, v in tree.parameters.items()}
        changed = any(a is not b for a, b in zip(parameters.values(), tree.parameters.values(), strict=True))
        return tree.with_parameters(parameters) if changed else tree
    return change(tree)


def _is_spec(tree: Any) -> bool:
    cls = cast("Any", type(tree))  # asked of the class: a handle would take the name for an op
    return hasattr(cls, "with_parameters")
