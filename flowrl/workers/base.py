"""What every worker has: a name, a state that it declares, and a moment at which it opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..errors import ModelError, ProgramError, WorkerError
from ..graph.allowed import number, worker
from ..graph.arguments import takes
from ..graph.declare import op
from ..graph.metrics import Metrics
from ..graph.op import Op
from ..graph.signature import CallShape
from ..graph.site import caller, defined_at
from ..marks import vocabulary
from .engine import Engine, Generates, HasWeights, Trains, generates, has_weights
from .engine import trains as can_train
from .failures import Failures
from .kept import Mark, pack, undeclared, unpack
from .notes import Notes
from .records import Build, Model
from .weights import Shard

if TYPE_CHECKING:
    from torch import Tensor


State = tuple[dict[str, "Tensor"], dict[str, Any]]
ShardedState = tuple[list[Shard], dict[str, Any]]
RANKS = "on ranks every worker has weights of its own, which make way for others alone"
KEPT = "keeps."  # before the names of tensors that a subclass of a model worker keeps besides its model


class Stored(Protocol):
    """The state of a worker as a checkpoint holds it: ``fill`` a box in place, or take a tensor as a ``whole``."""

    def names(self) -> list[str]: ...
    def whole(self, name: str) -> Tensor: ...
    def fill(self, shard: Shard) -> bool: ...


class SharedWeights(ModelError):
    """Weights cannot be read into an engine whose weights are another worker's."""


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

        ``arguments`` are those of the constructor. :data:`flowrl.graph.provenance.FIRST` stands for that of the flow's
        first model.
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
        return _whole(tensors), record

    def load_state_shards(self, files: Stored, record: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_shards` gave, on whichever ranks."""
        self.load_state({name: files.whole(name) for name in files.names()}, record)

    def digest(self) -> str | None:
        """A digest of the weights that does not depend on layout; None for a worker without weights."""
        return None

    def save_model(self, folder: str) -> bool:
        """Save the model as a Hugging Face folder. False for a worker without one."""
        return False


def _whole(tensors: Mapping[str, Tensor]) -> list[Shard]:
    return [Shard(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in tensors.items()]


_TRAINED = {"logprobs": "an actor", "values": "a critic", "scores": "a reward model"}


def trains(on: str, reads: str, *, what: str = "") -> Callable[[CallShape], str | Mapping[str, str]]:
    """``reads=`` of an update whose losses are functions of ``on``: another loss raises ProgramError.

    A second batch, ``pretraining``, is read where it is given. ``what`` names a worker that ``lr=None`` freezes: an
    update of a frozen one raises ProgramError.
    """

    def declared(shape: CallShape) -> str | Mapping[str, str]:
        if what and "lr" in shape.init and shape.init["lr"] is None:
            raise ProgramError(f"This {what} is not trained: it has no lr.", fix="Declare it with lr=1e-5 or another.")
        loss = shape.call.get("loss")
        wanted = getattr(loss, "on", on)
        if wanted != on:
            fix = f"Give it to the update of {_TRAINED.get(wanted, 'another worker')}."
            raise ProgramError(
                f"loss {getattr(loss, 'name', loss)} is one of {wanted}; this update trains {on}.", fix=fix
            )
        if shape.call.get("pretraining") is not None:
            return {"batch": reads, "pretraining": "tokens, response_mask"}
        return reads

    return declared


class ModelWorker(Worker):
    """A worker around an engine: shared by actors, critics, references and reward models."""

    of: Any = None  # the worker whose model it has, where it has none of its own
    _source: Any = None  # that worker, open, or what is known of it
    _engine: Engine | None = None
    _tokenizers: Callable[[Any], Any]  # of whatever names one; None: that of the flow's actor

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise WorkerError(
                f"{self.name or type(self).__name__} is not open.",
                fix="Run it in a program, or open it with fl.open(worker).",
            )
        return self._engine

    def generating_engine(self) -> Generates:
        """Return the engine to generate with. Raises WorkerError where it does not."""
        if not generates(self.engine):
            raise self._unable("generate", "generate: {engine: ...}")
        return self.engine

    def training_engine(self) -> Trains:
        """Return the engine to read and train with. Raises WorkerError where it only generates."""
        if not can_train(self.engine):
            raise self._unable("read or train", "train: {backend: ...}")
        return self.engine

    def engine_with_weights(self) -> HasWeights:
        """Return the engine, whose weights are wanted. Raises WorkerError where it has none."""
        if not has_weights(self.engine):
            raise self._unable("have weights", "another engine")
        return self.engine

    def _unable(self, what: str, better: str) -> WorkerError:
        name = self.name or type(self).__name__
        return WorkerError(f"The engine of '{name}' does not {what}.", fix=f"Write {better} for it in the plan.")

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def tokenizer_digest(self) -> str:
        try:
            return vocabulary(self.tokenizer)
        except ModelError:  # of a model without a tokenizer
            return ""

    @classmethod
    def declared_tokenizer(cls, arguments: Mapping[str, Any]) -> Any:
        if arguments.get("model") is None:
            return arguments.get("of")
        model = Model.of(arguments["model"])
        return model.tokenizer or model.name

    def build(self) -> Build:
        """The engine that it asks for."""
        raise WorkerError(f"{type(self).__name__} does not say which engine it needs.", fix="Define build().")

    def introduce(self, peer: Callable[[Any], Any]) -> None:
        """Learn of the worker behind ``of=``, on whose model :meth:`build` depends; ``peer`` knows workers."""
        if self.of is not None:
            self._source = peer(self.of)

    def open(self, opening: Opening) -> None:
        self._tokenizers = opening.tokenizer
        build = self.build()
        if opening.serving:
            build = replace(build, optim=None, lora=None)
        self._engine = opening.open_engine(
            replace(build, device=opening.device if build.device == "auto" else build.device)
        )

    def found_beside(self, opening: Opening, ask: Callable[[Trains], Any]) -> Engine | None:
        """The engine that ``ask`` finds with that of the worker behind ``of=``. None, and a warning, for a reason."""
        found: Any = "it is in another process"
        if isinstance(self._source, ModelWorker):
            found = opening.apart(self.of) or ask(self._source.training_engine())
        if isinstance(found, str):
            opening.warn(f"'{self.name}' has a copy of the weights of '{getattr(self.of, 'name', '')}': {found}.")
            return None
        return found

    def program_starts(self) -> None:
        """A program is a stage of training: its optimizer and its schedule begin anew."""
        if can_train(self.engine):
            self.engine.restart_optimizer()
        self.mark_changed()

    def close(self) -> None:
        self._engine = None

    @op(updates="weights", cost="local")
    @takes(
        policy=worker("engine", form="the handle of a worker with a model", fix="Give an actor or a critic."),
        decay=number(least=0, most=1),
    )
    def follow(self, policy: Any, *, decay: float = 0.0) -> Metrics:
        """``w = decay w + (1 - decay) w_policy``: the weights of a worker of the same model, averaged over its updates.

        ``policy`` is a handle. With ``decay=0`` it is a copy of that worker as it is now. Reports ``distance``, the
        norm of what the weights moved by. Adapters of ``policy`` are merged. Raises ModelError where the two are not of
        the same model, where this one has adapters, or holds weights in bf16 while ``decay`` is above 0.
        """
        self.mark_updated()
        self.own_engine()
        return Metrics(distance=self.training_engine().blend(policy.training_engine(), float(decay)))

    def own_engine(self) -> HasWeights:
        """Return the engine, whose weights are about to be written."""
        return self.engine_with_weights()

    def stage(self) -> Any:
        """A copy of the weights, adapters merged."""
        return {name: weight.detach().clone() for name, weight in self.in_use().items()}

    def in_use(self) -> Any:
        return self.engine_with_weights().plain_weights()

    def install(self, staged: Any, version: int) -> int:
        self.own_engine().take_weights(staged)
        self.mark_published(version)
        return sum(weight.nbytes for weight in staged.values())

    def state(self) -> State:
        tensors, record = self.engine.state() if has_weights(self.engine) else ({}, {})
        kept, plain = Worker.state(self)
        return {**tensors, **{KEPT + n: t for n, t in kept.items()}}, self._record(record, plain)

    def load_state(self, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        own = {n.removeprefix(KEPT): t for n, t in tensors.items() if n.startswith(KEPT)}
        if has_weights(self.engine):
            self.engine.load_state({n: t for n, t in tensors.items() if not n.startswith(KEPT)}, record["engine"])
        self._take_record(own, record)

    def state_shards(self, of_engine: ShardedState | None = None) -> ShardedState:
        """As every worker's. ``of_engine``: the engine's part, from before its weights have made way for others."""
        if of_engine is None:
            of_engine = self.engine.state_shards() if has_weights(self.engine) else ([], {})
        shards, record = of_engine
        kept, plain = Worker.state(self)
        return [*shards, *_whole({KEPT + n: t for n, t in kept.items()})], self._record(record, plain)

    def load_state_shards(self, files: Stored, record: Mapping[str, Any]) -> None:
        own = {n.removeprefix(KEPT): files.whole(n) for n in files.names() if n.startswith(KEPT)}
        if has_weights(self.engine):
            self.engine.load_state_shards(files.fill, record["engine"])
        self._take_record(own, record)
        self.mark_changed()

    def _record(self, engine: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
        """What is no tensor: of the engine, of the weights' versions, and what a subclass ``keeps`` besides."""
        more = {"keeps": kept} if self.keeps else {}
        return {"engine": engine, "version": self.version, "dirty": self.dirty, **more}

    def _take_record(self, kept: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        self.version, self.dirty = record["version"], record["dirty"]
        if "keeps" in record:
            Worker.load_state(self, kept, record["keeps"])

    def digest(self) -> str | None:
        return self.engine.digest() if has_weights(self.engine) else None

    def save_model(self, folder: str) -> bool:
        if has_weights(self.engine):
            self.engine.save(folder)
        return has_weights(self.engine)
