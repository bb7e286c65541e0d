"""What is computed of each value of a list, where rows share their values: rows of a prompt have what came with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def of_each(values: Sequence[Any], compute: Callable[[Any], T]) -> list[T]:
    """Return ``[compute(value) for value in values]``, computed once for each object, however many rows have it.

    >>> of_each(["a", "bc", "a"], len)
    [1, 2, 1]
    """
    objects = {id(value): value for value in values}  # equal ones may differ, as 1 and True do
    found = {at: compute(value) for at, value in objects.items()}
    return [found[id(value)] for value in values]
