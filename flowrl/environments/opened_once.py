"""A property that opens something, made once for all rollouts, which may be beside each other in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")


class opened_once(cached_property[T]):
    """A cached property that one thread makes, while others that ask for it wait.

    >>> class Served:
    ...     @opened_once
    ...     def address(self):
    ...         return object()
    >>> served = Served()
    >>> served.address is served.address
    True
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        super().__init__(make)
        self._making = threading.RLock()

    if not TYPE_CHECKING:  # it is typed as any cached property is

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            with self._making:
                return super().__get__(instance, owner)
