"""Models that give numbers: the critic, a value for each response token, and the reward model, a score for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..graph.arguments import takes
from ..graph.declare import op
from ..graph.metrics import Metrics
from ..graph.spec import Spec
from ..rl import value_clip
from .base import ModelWorker, trains
from .freeze import read_freeze
from .records import MODEL, OPTIM, UPDATE, Build, Lora, Model, Optim
from .tokens import masked

if TYPE_CHECKING:
    from ..batch import Batch

VALUE_LOSS: Spec = value_clip()


class _Scalar(ModelWorker):
    """A model with a scalar head. With ``lr=None`` it is frozen: it has no optimizer, and cannot be updated."""

    @takes(**OPTIM, **MODEL)
    def __init__(
        self,
        model: str | Mapping[str, Any] | Model,
        *,
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        schedule: str = "constant",
        warmup: int = 0,
        total: int | None = None,
        min_lr: float = 0.0,
        lora: Lora | None = None,
        freeze: str | Sequence[str] = (),
        dtype: str = "auto",
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        self.model = Model.of(model)
        self.trains = lr is not None
        self.freeze = read_freeze(freeze, lr=lr, lora=lora)
        self.optim = Optim(lr or 0.0, betas, eps, weight_decay, grad_clip, schedule, warmup, total, min_lr)
        self.lora, self.dtype = lora, dtype
        self.gradient_checkpointing, self.seed = gradient_checkpointing, seed

    def build(self) -> Build:
        return Build(
            self.model,
            head="scalar",
            optim=self.optim if self.trains else None,
            lora=self.lora,
            freeze=self.freeze,
            dtype=self.dtype,
            gradient_checkpointing=self.gradient_checkpointing,
            seed=self.seed,
        )

    def _train(self, batch: Batch, loss: Spec, **how: Any) -> Metrics:
        self.mark_updated()
        return Metrics(self.training_engine().update(masked(batch, loss), loss, **how))


class Critic(_Scalar):
    """A value model: what the rest of a response is worth, before each of its tokens. Arguments as :class:`Actor`.

    >>> flow = fl.Flow("example")
    >>> critic = flow.worker(fl.Critic, "Qwen/Qwen3-0.6B", lr=1e-5)  # a value head on this model
    """

    @takes(**OPTIM, **MODEL)
    def __init__(
        self,
        model: str | Mapping[str, Any] | Model,
        *,
        lr: float | None = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        schedule: str = "constant",
        warmup: int = 0,
        total: int | None = None,
        min_lr: float = 0.0,
        lora: Lora | None = None,
        freeze: str | Sequence[str] = (),
        dtype: str = "auto",
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip=grad_clip,
            schedule=schedule,
            warmup=warmup,
            total=total,
            min_lr=min_lr,
            lora=lora,
            freeze=freeze,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            seed=seed,
        )

    @op(reads="tokens, response_mask", adds="values: f32[*response]", cost="forward", pieces=True)
    def values(self, batch: Batch) -> Mapping[str, Any]:
        """Adds ``values``: for each response token, of the state in which it was chosen."""
        return {"values": self.training_engine().values(batch)}

    @op(reads=trains("values", "tokens, response_mask", what="critic"), updates="weights", cost="train")
    @takes(**UPDATE)
    def update(
        self,
        batch: Batch,
        *,
        loss: Spec = VALUE_LOSS,
        minibatch: int | None = None,
        minibatch_tokens: int | None = None,
        epochs: int = 1,
        micro_tokens: int | None = None,
        lr: float | None = None,
    ) -> Metrics:
        """Regress to ``returns``, with squared error clipped around the old ``values``; the rest as :class:`Actor`."""
        return self._train(
            batch,
            loss,
            minibatch=minibatch,
            minibatch_tokens=minibatch_tokens,
            epochs=epochs,
            micro_tokens=micro_tokens,
            lr=lr,
        )


class RewardModel(_Scalar):
    """A scalar head over the whole row: its value at the last token is the reward.

    Arguments as :class:`Actor`, but ``lr`` is None unless it is said: the model is frozen.

    >>> flow = fl.Flow("example")
    >>> judge = flow.worker(fl.RewardModel, "runs/judge/model/judge")  # frozen
    """

    @op(reads="tokens", adds="rewards: f32[]", cost="forward", pieces=True)
    def score(self, batch: Batch) -> Mapping[str, Any]:
        """Adds ``rewards``: the score of each row."""
        return {"rewards": self.training_engine().scores(batch)}

    @op(reads=trains("scores", "tokens, response_mask", what="reward model"), updates="weights", cost="train")
    @takes(**UPDATE)
    def update(
        self,
        batch: Batch,
        *,
        loss: Spec,
        minibatch: int | None = None,
        minibatch_tokens: int | None = None,
        epochs: int = 1,
        micro_tokens: int | None = None,
        lr: float | None = None,
    ) -> Metrics:
        """Train on the rows, with a loss on scores such as ``rl.bradley_terry()``; the rest as :class:`Actor`."""
        return self._train(
            batch,
            loss,
            minibatch=minibatch,
            minibatch_tokens=minibatch_tokens,
            epochs=epochs,
            micro_tokens=micro_tokens,
            lr=lr,
        )
