"""How type checkers and editors see an op: what a call of it gives in a program, whatever its function returns.

A function that returns the fields it adds is called for a batch. These classes are never made: ``@op`` gives an
:class:`~flowrl.graph.ops.op.Op`, which is declared as one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from ...batch import Batch
from .op import Op
from .update_metrics import Metrics

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)


class RowsCall(Protocol[P]):
    """A call that gives a batch, with the parameters of the function; ``into`` renames the fields that it adds."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Batch: ...
    @overload
    def __call__(self, batch: Batch, /, *, into: Mapping[str, str], **kwargs: Any) -> Batch: ...


class RowsOp(Op, Generic[P]):
    """An op whose calls give a batch: of a library as it is, of a worker when it is looked up on its handle."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Batch: ...
    @overload
    def __call__(self, batch: Batch, /, *, into: Mapping[str, str], **kwargs: Any) -> Batch: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self: RowsOp[Concatenate[Any, Q]], instance: object, owner: type | None = None) -> RowsCall[Q]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return super().__get__(instance, owner)


class ValueOp(Op, Generic[P, R]):
    """An op whose calls give what its function returns: metrics, a number, or nothing."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return super().__call__(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: ValueOp[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return super().__get__(instance, owner)


class Declare(Protocol):
    """What ``@op(...)`` makes of a function, by what the function returns."""

    @overload
    def __call__(self, fn: Callable[P, Metrics], /) -> ValueOp[P, Metrics]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self, fn: Callable[P, float], /) -> ValueOp[P, float]: ...
    @overload
    def __call__(self, fn: Callable[P, None], /) -> ValueOp[P, None]: ...
    @overload
    def __call__(
        self, fn: Callable[P, Batch | Mapping[str, Any] | Iterator[tuple[int, Mapping[str, Any]]]], /
    ) -> RowsOp[P]: ...
    @overload
    def __call__(self, fn: Callable[P, Generator[Any, Any, Mapping[str, Any]]], /) -> RowsOp[P]: ...
