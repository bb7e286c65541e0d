"""What the driver and ranks tell each other: where a worker is, what to run, what came of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...batch import CallInfo, Key
from ...errors import LONGEST, EngineLost, FlowError, NotFinite, RunError, cut
from ...graph.ops.op import Op
from ...workers.base import Worker
from ...workers.decode_passes import DecodePasses
from ...workers.decode_slots import EngineSlots
from ...workers.engine import Engine
from ...workers.environment_waits import EnvironmentWaits
from ...workers.model_options import Build, Model
from ...workers.model_worker import ModelWorker
from ...workers.streaming import SampledRow, SampleRequest
from ...workers.tokens.tokenizer import Tokenizers
from ...workers.user_code.failed_rewards import Failures
from ..values.process_memory import ProcessMemory
from ..values.remote_batch import Kind
from .told_tokens import ToldTokens


@dataclass(frozen=True)
class Named:
    """A worker by its name, where a program says its handle: ``Named("actor")``."""

    name: str
    is_handle = True


@dataclass(frozen=True)
class Blueprint:
    """A worker as the flow declares it, ready to travel: its class, and arguments in which handles are names."""

    name: str
    cls: type[Worker]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: Mapping[str, Any]

    def make(self) -> Worker:
        """A new worker, not open yet."""
        worker = self.cls(*self.args, **self.kwargs)
        worker.name, worker.init_arguments = self.name, self.arguments
        return worker


def unopened(blueprints: Mapping[str, Blueprint], name: str) -> Worker:
    """A new worker, not open yet, that knows the one behind its ``of=``: it can say which engine it would ask for."""
    worker = blueprints[name].make()
    if isinstance(worker, ModelWorker):
        worker.introduce(lambda of: unopened(blueprints, of.name))
    return worker


@dataclass(frozen=True)
class RankConfig:
    """What every rank knows of the run. ``open_tokenizer`` loads that of a model without the model; ``sign`` is a file
    in the ``folder`` that each of them has to see."""

    blueprints: Mapping[str, Blueprint]
    open_engine: Callable[[str, Build], Engine]
    open_tokenizer: Callable[[Model], Any]
    folder: str
    seed: int = 0
    sign: str = ""

    def tokenizers(self) -> Tokenizers:
        """Return the tokenizers of the run, which are read without a model."""
        workers = {name: (b.cls, b.arguments) for name, b in self.blueprints.items()}
        return Tokenizers(workers, lambda name: self.open_tokenizer(unopened(self.blueprints, name).build().model))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Serving:
    """Where the copy of a policy is that an environment calls: its ranks, and the version of its weights.

    ``follows``: publishes come while it is asked, and rows go on under their weights. ``beside``: where ranks split its
    engine, those that have it together with one of ``ranks``, which alone is asked.
    """

    name: str
    ranks: tuple[int, ...]
    version: int
    follows: bool = False
    beside: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, "tuple[int, ...]"])


@dataclass(frozen=True)
class Offers:
    """What the engine of a policy offers: ``Offers(2048, True, True, most_rows=256)``.

    ``positions`` are tokens of a row at most. ``streams``: its rows leave one by one. ``counts_slots``: each step of it
    is a token of each row, of ``most_rows`` at most.
    """

    positions: int | None
    streams: bool
    counts_slots: bool = False
    most_rows: int | None = None


@dataclass(frozen=True)
class Asked:
    """A call for the engine of a policy, and the number by which who asks knows it."""

    number: int
    request: SampleRequest


@dataclass(frozen=True)
class Polled:
    """What has come of calls for the engine of a policy: ``Polled((row,), open=7, latest=2, first=0, steps=12)``.

    ``rows`` have ended, ``open`` are so many others, of the calls up to number ``latest``. ``first`` is how many steps
    the engine had made when the first of these calls came, ``steps`` how many now. ``version`` is that of the weights,
    at which no row can be ahead of them, and ``kept_cache`` whether rows have kept keys and values through a publish,
    where publishes come in between. ``grown`` are rows that somebody listens to, with the tokens alone that were not
    known there.
    """

    rows: tuple[SampledRow, ...]
    open: int
    latest: int
    first: int
    steps: int
    version: int = 0
    kept_cache: bool = False
    grown: tuple[SampledRow, ...] = ()


@dataclass(frozen=True)
class RankCall:
    """One call, or the part of it that falls to this rank. ``op`` is the name of a worker's op, or one of a library.

    ``arguments`` are by parameter; ``into`` renames the fields that it adds.

    ``weights``: version of the worker's weights, and whether they were updated since. ``keep``: the number under which
    the result is kept; 0 for a rank whose result is that of another one. ``journal``: (program, call) of one
    that touches the world, ``journal_since`` the parts from which on journals may answer it, and ``epoch`` how often
    ranks were restarted before: rows may come from another rank, which has answered some of them. ``frees``: objects
    that nobody needs any more. ``kept``: what a rank that is lost has told of the rows that it sampled.
    """

    title: str
    op: Op | str
    worker: tuple[str, bool] | None
    arguments: Mapping[str, Any]
    info: CallInfo
    into: Mapping[str, str] = field(default_factory=dict[str, str])
    keep: int = 0
    weights: tuple[int, bool] = (0, False)
    journal: tuple[int, float] | None = None
    journal_since: Mapping[str, int] = field(default_factory=dict[str, int])
    epoch: int = 0
    frees: tuple[int, ...] = ()
    policies: Mapping[str, Serving] = field(default_factory=dict[str, Serving])
    kept: ToldTokens | None = None

    @property
    def joins(self) -> bool:
        """Whether others of the kind are beside it."""
        return any(policy.follows for policy in self.policies.values())


#: Those of :class:`flowrl.runtime.values.row_digests.RowDigests`, without the keys.
Digests = tuple[Mapping[str, int], bytes]


@dataclass
class Reply:
    """What came of a call: a plain value, or what is kept of it here, without its numbers.

    Rows that are those of the call's first batch, in its order, come back as ``alike``, and their keys not with them.
    """

    value: Any = None
    keys: tuple[Key, ...] | None = None
    alike: bool = False
    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    bytes: Mapping[str, int] = field(default_factory=dict[str, int])  # of each column
    oldest: Sequence[int | None] = ()  # versions of the oldest token of each row, where they were sampled
    column: bool = False
    weights: tuple[int, bool, int] | None = None  # version, dirty, stamp of the worker after it
    pulled: int = 0  # bytes that came from other ranks
    warnings: tuple[str, ...] = ()
    failures: tuple[Failures, ...] = ()  # rows that failed and have not stopped the call
    times: tuple[float, float, float] | None = None  # of its clock: asked, its rows were there, it was through
    memory: ProcessMemory | None = None  # of its process then
    check: str = ""  # of the rows that are kept: the same for the same rows in the same order
    digests: Digests = ({}, b"")  # of these rows, by field and by row
    slots: tuple[EngineSlots, ...] = ()  # of the engines that its sessions asked
    passes: tuple[DecodePasses, ...] = ()  # of its engine, since it was asked last
    waits: EnvironmentWaits | None = None  # of its environments


@dataclass(frozen=True)
class Advanced:
    """What came of a time in which a rank sampled: ``Advanced({17: reply}, entered=(18,))``, by numbers of calls.

    ``over`` are those whose rows have all left, ``entered`` those whose rows all have a place in the batch by now,
    ``steps`` what the engine has made in all, ``told`` the tokens of rows that run. An answer is given again until it
    is no longer asked for, and tokens until they are known: whoever asks loses it where another rank dies meanwhile.
    """

    over: Mapping[int, Reply | Failed]
    entered: tuple[int, ...] = ()
    steps: int = 0
    told: Mapping[int, tuple[ToldTokens, ...]] = field(default_factory=dict[int, tuple[ToldTokens, ...]])


@dataclass
class Failed:
    """What went wrong on a rank, with the traceback there.

    ``before``: the call has not begun, as its rows did not come; ``elsewhere``: those of another rank of it did not.
    """

    error: FlowError | None
    text: str
    traceback: str
    before: bool = False
    elsewhere: bool = False

    @property
    def knows_less(self) -> tuple[bool, bool]:
        """Larger for one that only tells of what is wrong on another rank: of several, the smallest is told."""
        return self.elsewhere, isinstance(self.error, NotFinite) and not self.error.names

    def raised(self, rank: int) -> FlowError:
        """Return what to raise on another rank that needed the answer of this one."""
        if isinstance(self.error, EngineLost) and self.error.rank is None:
            self.error.rank = rank
        return self.error or RunError(self.text)

    @staticmethod
    def of(error: BaseException) -> Failed:
        """Made where it happened."""
        trace = "".join(traceback.format_exception(error))
        text = cut(f"{type(error).__name__}: {error}")
        return Failed(error if isinstance(error, FlowError) else None, text, trace[-10 * LONGEST :])
