"""Models that are trained: what their constructors are told of it, what their updates read, and how one is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ..errors import ModelError, ProgramError
from ..graph.ops.function_spec import Spec
from ..graph.ops.signature import CallShape
from ..graph.ops.update_metrics import Metrics
from .base import Opening
from .engine import Trains
from .engine import trains as can_train
from .model_options import OPTIM, UPDATE, Build, Model, Optim
from .model_worker import ModelWorker
from .tokens.packed_tokens import masked
from .tokens.temperature import at_temperature
from .weights.freeze_patterns import read_freeze

if TYPE_CHECKING:
    from ..batch import Batch

_TRAINED = {"logprobs": "an actor", "values": "a critic", "scores": "a reward model"}


def trains(on: str, reads: str, *, what: str) -> Callable[[CallShape], str | Mapping[str, str]]:
    """``reads=`` of an update whose losses are functions of ``on``: another loss raises ProgramError.

    A second batch, ``pretraining``, is read where it is given. ``what`` names the worker, which ``lr=None`` freezes: an
    update of a frozen one raises ProgramError.
    """

    def declared(shape: CallShape) -> str | Mapping[str, str]:
        if "lr" in shape.init and shape.init["lr"] is None:
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


class TrainedModel(ModelWorker):
    """A model that is trained. With ``lr=None`` it is frozen: it has no optimizer, and cannot be updated."""

    head: ClassVar[str] = "lm"

    def keep_settings(self, model: Model | None, settings: Mapping[str, Any]) -> None:
        """Keep what a constructor was given of the model and its training: ``settings`` are its ``locals()``."""
        lr, lora = settings["lr"], settings["lora"]
        self.model, self.lora, self.dtype = model, lora, settings["dtype"]
        self.trains = lr is not None
        self.optim = replace(Optim(**{name: settings[name] for name in OPTIM if name != "lr"}), lr=lr or 0.0)
        self.freeze = read_freeze(settings["freeze"], lr=lr, lora=lora)
        self.gradient_checkpointing, self.seed = settings["gradient_checkpointing"], settings["seed"]

    def build(self) -> Build:
        return Build(
            cast("Model", self.model),
            head=self.head,
            optim=self.optim if self.trains else None,
            lora=self.lora,
            freeze=self.freeze,
            dtype=self.dtype,
            gradient_checkpointing=self.gradient_checkpointing,
            seed=self.seed,
        )

    def open(self, opening: Opening) -> None:
        """Open its engine. Raises as :meth:`reading_engine`, unless it may follow another worker before it is read."""
        super().open(opening)
        if self.head == "scalar" and can_train(self.engine) and not opening.policies and not opening.by_hand:
            self.reading_engine()

    def reading_engine(self) -> Trains:
        """Return the engine to read with. ModelError where its head is random, and nothing has ever written to it."""
        engine = self.training_engine()
        if self.trains or self.version or self.dirty or (others := engine.fresh_head) is None:
            return engine
        title = cast("Model", self.model).title
        raise ModelError(
            f"'{title}' holds no score.weight, the head that gives numbers, and lr=None trains none.",
            have=others[:5] or None,
            fix="Name a model that has such a head, or give lr= to train one.",
        )

    def train(
        self, batch: Batch, loss: Spec, call: Mapping[str, Any], *, temperature: float | None = None, **more: Any
    ) -> Metrics:
        """Train on rows as an update says, ``call`` its ``locals()``. Returns what the engine reports."""
        self.mark_updated()
        how = {name: call[name] for name in UPDATE}
        rows = at_temperature(masked(batch, loss), temperature)
        if temperature is not None and rows.call is not None:  # its log-probabilities are of another kind
            rows = rows.with_call(replace(rows.call, recorded=()))
        found = self.training_engine().update(rows, loss, **how, **more)
        metrics = Metrics(found)
        metrics.rows_seen = getattr(found, "rows_seen", ())
        return metrics
