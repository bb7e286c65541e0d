"""A worker around an engine: how it opens, gives and takes weights, and what a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, WorkerError
from ..graph.ops.allowed import number, worker
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.update_metrics import Metrics
from ..marks import vocabulary
from .base import Opening, ShardedState, State, Stored, Worker, whole_shards
from .decode_passes import DecodePasses, tells_passes
from .engine import Engine, Generates, HasWeights, Trains, ends, generates, has_weights
from .engine import trains as can_train
from .model_options import Build, Model

if TYPE_CHECKING:
    from torch import Tensor

KEPT = "keeps."  # before the names of tensors that a subclass of a model worker keeps besides its model


class SharedWeights(ModelError):
    """Weights cannot be read into an engine whose weights are another worker's."""


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

    def take_passes(self) -> tuple[DecodePasses, ...]:
        """Return how long passes of its engine took since it was asked last; none where it does not tell."""
        return tuple(self._engine.take_passes()) if tells_passes(self._engine) else ()

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
        if self._engine is not None and ends(self._engine):
            self._engine.close()
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
        return [*shards, *whole_shards({KEPT + n: t for n, t in kept.items()})], self._record(record, plain)

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
