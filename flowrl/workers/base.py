"""What every worker has: a name, a state that it declares, and a moment at which it opens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..errors import WorkerError
from ..graph.ops.op import Op
from ..graph.script.site import caller, defined_at
from .engine import Engine
from .model_options import Build
from .packed_state import Mark, pack, undeclared, unpack
from .user_code.failed_rewards import Failures
from .user_code.rows_in_progress import Notes
from .weights.weight_boxes import Shard

if TYPE_CHECKING:
    from torch import Tensor


State = tuple[dict[str, "Tensor"], dict[str, Any]]
ShardedState = tuple[list[Shard], dict[str, Any]]
RANKS = "on ranks every worker has weights of its own, which make way for others alone"


class Stored(Protocol):
    """The state of a worker as a checkpoint holds it: ``fill`` a box in place, or take a tensor as a ``whole``."""

    def names(self) -> list[str]: ...
    def whole(self, name: str) -> Tensor: ...
    def fill(self, shard: Shard) -> bool: ...


@dataclass(frozen=True)
class Opening:
    """What a worker may ask for when it opens: an engine for a :class:`Build`, another worker, a tokenizer."""

    open_engine: Callable[[Build], Engine]
    peer: Callable[[Any], Any]  # a handle -> the open worker behind it
    tokenizer: Callable[[Any], Any]  # what ``tokenizer=`` says, None: that of the flow's actor
    warn: Callable[[str], None]
    seed: int = 0
    device: str = "auto"
    apart: Callable[[Any], str] = lambda handle: RANKS  # why weights cannot be those of that worker too; empty: can be
    serving: bool = False  # the copy that only generates: it has no optimizer, and adapters are merged into it
    notes: Notes = field(default_factory=Notes)  # of the rows that user code is at
    settle: Callable[[Failures], None] | None = None  # takes rows that failed, where the whole call is looked at
    policies: Sequence[Any] = ()  # handles of the workers that its ops are handed, in any program
    by_hand: bool = False  # it is in no program, so what its ops will be handed is not known


class Worker:
    """Base of all workers. Subclass it, declare ops with ``@fl.op``, and name the attributes that are state.

    ``__init__`` only keeps its arguments; what is heavy is loaded in :meth:`open`. ``keeps`` names the attributes
    that a checkpoint saves: numbers, texts, tensors, and lists, tuples, sets and dicts of them. An op that changes one
    says so with ``updates=``. Raises WorkerError for one that changes state and does not say so.

    >>> class Count(fl.Worker):
    ...     keeps = ("seen",)
    ...
    ...     def __init__(self):
    ...         self.seen = 0
    ...
    ...     @fl.op(reads="rewards", updates="seen")
    ...     def tally(self, batch) -> fl.Metrics:
    ...         self.seen += len(batch)
    ...         return fl.Metrics(seen=self.seen)
    >>> fl.open(Count()).tally(fl.Batch.of(3, rewards=[0.0, 1.0, 1.0]))["seen"]
    3
    """

    name: str = ""
    init_arguments: Mapping[str, Any] = {}
    keeps: ClassVar[tuple[str, ...]] = ()
    without_effect: ClassVar[tuple[str, ...]] = ()  # arguments that change no results: a resume may have others
    notes_rows: ClassVar[bool] = False  # it notes by itself which rows its user code is at
    #: Ops of token ids, and the op that reads the text of any rows in the place of each.
    reads_text: ClassVar[Mapping[str, str]] = {}
    copies_of: ClassVar[bool] = True  # with ``of=`` it has that worker's weights when a program starts
    version: int = 0  # publishes so far
    dirty: bool = False  # updated since the last publish
    stamp: int = 0  # grows whenever the state changes
    opened_as: str = ""  # of one made by hand: what tells it from others of its name

    def identity(self) -> str:
        """Who it is to the rows that it samples: its name, which a flow gives to one worker only."""
        return self.opened_as or self.name

    def tokenizer_digest(self) -> str:
        """The digest of the tokenizer whose ids its ops read and make; empty where it reads none, or any."""
        return ""

    @classmethod
    def declared_tokenizer(cls, arguments: Mapping[str, Any]) -> Any:
        """What says which tokenizer it reads ids of: a name, a function, a handle; None reads none.

        ``arguments`` are those of the constructor. :data:`flowrl.graph.tracing.column_origins.FIRST` stands for that
        of the flow's first model.
        """
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        keeps: Any = cls.__dict__.get("keeps", ())
        if not isinstance(keeps, (tuple, list)) or not all(isinstance(name, str) for name in keeps):
            raise WorkerError(
                f"{cls.__name__}: keeps={keeps!r} is no tuple of names.",
                at=caller(),
                fix=f'Write keeps = ("{keeps}",).' if isinstance(keeps, str) else 'Write keeps = ("seen",).',
            )

    @classmethod
    def check_declaration(cls, arguments: Mapping[str, Any]) -> None:
        """Look at constructor arguments before anything is loaded; raise FlowError on what cannot work."""

    @classmethod
    def check_call(cls, op: str, columns: Collection[str]) -> None:
        """Look at a call in a program, with the columns of its batch; raise FlowError on what cannot work."""

    @classmethod
    def is_trained(cls, arguments: Mapping[str, Any]) -> bool:
        """Whether a worker of these arguments is trained; ``lr=None`` freezes one that could be."""
        frozen = "lr" in arguments and arguments["lr"] is None
        return hasattr(cls, "update") and not frozen

    def open(self, opening: Opening) -> None:
        """Load what is heavy. Called once, on the rank, before the first op."""

    def program_starts(self) -> None:
        """Called when a program starts, after :meth:`open`."""

    def close(self) -> None:
        """Let go of what was opened."""

    def read_version(self) -> int:
        """The version that a reader of the weights sees; updates since the last read are published by it."""
        if self.dirty:
            self.version += 1
            self.dirty = False
        return self.version

    @property
    def version_now(self) -> int:
        """The version that the weights as they are have, or will have once they are published."""
        return self.version + self.dirty

    def mark_published(self, version: int) -> None:
        """Note that the weights as they are now are a version of their own."""
        self.version, self.dirty = version, False
        self.mark_changed()

    def stage(self) -> Any:
        """The weights as they are now, set aside for a copy that generates."""
        raise WorkerError(
            f"{self.name or type(self).__name__} has no weights that another copy could follow.",
            fix="Place its ops in one pool, with staleness: 0.",
        )

    def in_use(self) -> Any:
        """As :meth:`stage`, of weights that nobody changes before they are installed."""
        return self.stage()

    def install(self, staged: Any, version: int) -> int | None:
        """Take what :meth:`stage` of the trained copy gave. Returns its bytes, where they are counted."""
        raise WorkerError(f"{self.name or type(self).__name__} cannot take weights.")

    def mark_changed(self) -> None:
        """Note that the state changed."""
        self.stamp += 1

    def mark_updated(self) -> None:
        """Note an update of the weights, to be published at the next read."""
        self.dirty = True
        self.mark_changed()

    def state(self) -> State:
        """What a checkpoint saves: tensors by name, and a JSON record."""
        tensors: dict[str, Any] = {}
        return tensors, {name: pack(name, getattr(self, name), tensors) for name in self.keeps}

    def load_state(self, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        for name in self.keeps:
            setattr(self, name, unpack(record[name], tensors) if name in record else tensors[name])

    def check_kept(self) -> None:
        """Raise WorkerError for what ``keeps`` names and no checkpoint could hold. Called once the worker is open."""
        for name in self.keeps:
            if not hasattr(self, name):
                raise WorkerError(
                    f"{type(self).__name__} keeps '{name}', which it does not have when it is open.",
                    fix=f"Set self.{name} in __init__, or leave it out of keeps.",
                )
            pack(name, getattr(self, name), {})

    @contextmanager
    def _watch_state(self, op: Op) -> Iterator[None]:
        """Hold an op to what it declares: raise WorkerError where it has changed kept state and does not say so."""
        before = {name: Mark(getattr(self, name, None)) for name in self.keeps}
        yield
        for name, mark in before.items():
            if not mark.holds(getattr(self, name, None)):
                raise undeclared(op.title(self), name, type(self).__name__, defined_at(op.fn))

    def state_shards(self) -> ShardedState:
        """What this rank has of :meth:`state`, as boxes that any layout can take back, and the record."""
        tensors, record = self.state()
        return whole_shards(tensors), record

    def load_state_shards(self, files: Stored, record: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_shards` gave, on whichever ranks."""
        self.load_state({name: files.whole(name) for name in files.names()}, record)

    def digest(self) -> str | None:
        """A digest of the weights that does not depend on layout; None for a worker without weights."""
        return None

    def save_model(self, folder: str) -> bool:
        """Save the model as a Hugging Face folder. False for a worker without one."""
        return False


def whole_shards(tensors: Mapping[str, Tensor]) -> list[Shard]:
    """Return tensors as boxes that are each the whole of a weight."""
    return [Shard(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in tensors.items()]
