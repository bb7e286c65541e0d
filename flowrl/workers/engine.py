"""What a backend offers on one rank: an engine generates, or trains, or both; one with weights can be moved and saved.

Shapes are those of the reference engine. An engine offers whole protocols and leaves out the others:
:func:`generates`, :func:`has_weights` and :func:`trains` tell which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from .model_options import Build, Sampled, Sampling
from .weights.weight_boxes import Shard

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch, Column


class Engine(Protocol):
    """What every engine has."""

    @property
    def tokenizer(self) -> Any: ...


class Generates(Engine, Protocol):
    """Samples responses."""

    @property
    def positions(self) -> int | None: ...
    def generate(
        self, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None = None
    ) -> Sampled: ...


class HasWeights(Engine, Protocol):
    """Has weights, which others take, give, compare and save."""

    def plain_weights(self) -> Mapping[str, Tensor]: ...
    def take_weights(self, weights: Mapping[str, Tensor]) -> None: ...
    def shards(self) -> list[Shard]: ...
    def weights_written(self) -> None: ...
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...
    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None: ...
    def state_shards(self) -> tuple[list[Shard], dict[str, Any]]: ...
    def load_state_shards(self, read: Callable[[Shard], bool], meta: Mapping[str, Any]) -> None: ...
    def digest(self) -> str: ...
    def save(self, folder: str) -> None: ...


class Trains(HasWeights, Protocol):
    """Reads rows, and trains on them where it was opened with an optimizer."""

    @property
    def positions(self) -> int | None: ...
    @property
    def padding_id(self) -> int | None: ...
    @property
    def fresh_head(self) -> Sequence[str] | None: ...
    def logprobs(self, batch: Batch, *, micro_tokens: int | None = None, entropy: bool = False) -> Any: ...
    def distribution(self, batch: Batch) -> Column: ...
    def values(self, batch: Batch) -> Column: ...
    def scores(self, batch: Batch) -> Column: ...
    def update(self, batch: Batch, loss: Any, **how: Any) -> Mapping[str, float]: ...
    def restart_optimizer(self) -> None: ...
    def copy_weights_from(self, other: Any) -> None: ...
    def blend(self, other: Any, decay: float) -> float: ...
    def base_alone(self, build: Build) -> Any: ...
    def other_adapters(self, build: Build) -> Any: ...


class Sleeps(Engine, Protocol):
    """Leaves its memory to others between calls.

    All that it holds goes: weights, what trains them, keys and values. Rows that run wait, and go on as they were.
    Asleep it makes no token, and RunError is raised by what begins a call. Where its state is in this process, its
    attribute ``offloaded`` is the :class:`flowrl.workers.weights.offloaded.Offloaded` that has it meanwhile, from which
    checkpoints take it; None while it is awake.
    """

    def sleep(self) -> int:
        """Free the memory of its device; return the bytes, 0 where it is asleep already."""
        ...

    def wake(self) -> int:
        """Take the memory back, with what was in it; return the bytes, 0 where it is awake."""
        ...


class Ends(Engine, Protocol):
    """Has something outside of this process that has to be ended."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Published:
    """What a publish was: ``Published(bytes=6_400_000, load=0.06, proof=0.02, gap=4e-6, rows=4)``, times in seconds.

    ``proof``: what it took here and there to see that it has arrived. ``gap``: the largest difference of a
    log-probability of the probe, which had so many ``rows``.
    """

    bytes: int
    load: float
    proof: float
    gap: float
    rows: int

    @staticmethod
    def of_ranks(parts: Iterable[Published | None]) -> Published | None:
        """Return that of several ranks: all bytes, and the most of each of the others. None where none says anything.

        >>> Published.of_ranks([Published(8, 0.5, 0.1, 2e-6, 4), None, Published(8, 0.2, 0.3, 4e-6, 4)])
        Published(bytes=16, load=0.5, proof=0.3, gap=4e-06, rows=4)
        """
        told = [part for part in parts if part is not None]
        if not told:
            return None
        most = [max(getattr(part, name) for part in told) for name in ("load", "proof", "gap", "rows")]
        return Published(sum(part.bytes for part in told), *most)


def published(worker: object) -> Published | None:
    """Return what a worker's engine says of its last publish; None of one that computes with the weights as they lie
    here.
    """
    return getattr(getattr(worker, "engine", None), "published", None)


def ends(engine: Engine) -> TypeGuard[Ends]:
    """Return whether an engine has to be closed."""
    return hasattr(engine, "close")


def sleeps(engine: Engine) -> TypeGuard[Sleeps]:
    """Return whether an engine leaves its memory to others when it is told to."""
    return hasattr(engine, "sleep")


def generates(engine: Engine) -> TypeGuard[Generates]:
    """Return whether an engine samples responses."""
    return hasattr(engine, "generate")


def has_weights(engine: Engine) -> TypeGuard[HasWeights]:
    """Return whether an engine has weights that can be moved and saved."""
    return hasattr(engine, "shards")


def trains(engine: Engine) -> TypeGuard[Trains]:
    """Return whether an engine reads and trains."""
    return hasattr(engine, "update")
