"""A frozen language model: another one, or the actor as it is when the program starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..graph.ops.allowed import flag, number, worker
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from .base import Opening, Stored
from .engine import Trains
from .model_options import MODEL, Build, Model
from .model_worker import ModelWorker, SharedWeights
from .tokens.temperature import adds_scaled, at_temperature, logprobs_of, scaled_rows, tempered

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch


class Reference(ModelWorker):
    """A frozen language model: another model, or ``of=actor``, the actor as it is when the program starts.

    Of an actor with adapters that are not trained yet it reads the actor's own model with the adapters off, where both
    are in one pool of this process and have the same dtype: bit for bit what a copy gives. Else it has a copy, and says
    so.

    >>> flow = fl.Flow("example")
    >>> actor = flow.worker(fl.Actor, "Qwen/Qwen3-0.6B")
    >>> ref = flow.worker(fl.Reference, of=actor)
    """

    @takes(of=worker("engine", form="the handle of a worker with a model"), dtype=MODEL["dtype"])
    def __init__(
        self, model: str | Mapping[str, Any] | Model | None = None, *, of: Any = None, dtype: str = "auto"
    ) -> None:
        if (model is None) == (of is None):
            raise ModelError("A reference is a model of its own, or of another worker.", fix="Give model= or of=actor.")
        self.model = None if model is None else Model.of(model)
        self.of, self.dtype = of, dtype
        self._opening: Opening | None = None
        self._shared = False  # it reads the model of an actor with adapters

    def build(self) -> Build:
        if self.model is not None:
            return Build(self.model, dtype=self.dtype)
        source: Build = self._source.build()
        dtype = source.dtype if self.dtype == "auto" else self.dtype
        return Build(source.model, dtype=dtype, seed=source.seed)

    def open(self, opening: Opening) -> None:
        """Open an engine of its own, or read that of an actor with adapters, where both take turns and it can be."""
        self._opening = opening
        self.introduce(opening.peer)
        if self.of is not None and self._source.build().lora is not None and self._share(opening):
            return
        super().open(opening)

    def _share(self, opening: Opening) -> bool:
        """Read the actor's model with its adapters off. False, and a warning, where that cannot be."""
        found = self.found_beside(opening, lambda engine: engine.base_alone(self.build()))
        if found is None:
            return False
        self._engine, self._shared = found, True
        return True

    def own_engine(self) -> Trains:
        if self._shared and self._opening is not None:
            self._shared = False
            source = self._engine
            super().open(self._opening)
            self.training_engine().copy_weights_from(source)
        return self.training_engine()

    def program_starts(self) -> None:
        if not isinstance(self._source, ModelWorker):  # elsewhere its weights are moved by the runtime
            return
        if not (self._shared and self._opening is not None and self._share(self._opening)):
            self.own_engine().copy_weights_from(self._source.training_engine())
        self.mark_changed()

    def load_state(self, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        try:
            super().load_state(tensors, record)
        except SharedWeights:
            self.own_engine()
            super().load_state(tensors, record)

    def load_state_shards(self, files: Stored, record: Mapping[str, Any]) -> None:
        try:
            super().load_state_shards(files, record)
        except SharedWeights:
            self.own_engine()
            super().load_state_shards(files, record)

    @op(
        reads=tempered("tokens, response_mask"),
        adds="ref_logprobs: f32[*response]",
        cost="forward",
        pieces=True,
        marks=adds_scaled("ref_logprobs", by="logprobs"),
    )
    @takes(temperature=number(above=0), support=flag())
    def logprobs(self, batch: Batch, *, temperature: float | None = None, support: bool = False) -> Mapping[str, Any]:
        """Adds ``ref_logprobs``: of each response token under this model.

        ``temperature``: None is that of each row, and 1 for rows that nobody sampled. ``support=True``: among the
        tokens that could be drawn at its place, as an update with ``support=True`` has them.
        """
        del support  # it says what is read
        return {"ref_logprobs": logprobs_of(self, "logprobs", batch, temperature)}

    @op(
        reads=tempered("tokens, response_mask"),
        adds="ref_distribution: f32[*response, vocab]",
        cost="forward",
        pieces=True,
        marks=adds_scaled("ref_distribution", by="distribution"),
    )
    @takes(temperature=number(above=0))
    def distribution(self, batch: Batch, *, temperature: float | None = None) -> Mapping[str, Any]:
        """Adds ``ref_distribution``: log-probabilities of the whole vocabulary before each response token.

        ``temperature`` is as in :meth:`logprobs`. It is as large as tokens times vocabulary: for small vocabularies,
        and losses with ``kl_kind="full"``.
        """
        found = self.training_engine().distribution(at_temperature(batch, temperature))
        return {"ref_distribution": found.marked(scaled_rows(self, "distribution", batch, temperature))}
