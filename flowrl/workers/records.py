"""What a worker is made of, as frozen records: the model, its optimizer, adapters, and how it samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, near

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Column

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Model:
    """A model by hub name or local folder, or a configuration for random weights.

    ``Model("Qwen/Qwen3-0.6B")``, ``Model("runs/first/model/actor")``, or
    ``Model(config={"model_type": "qwen2", "hidden_size": 192, ...}, tokenizer=build_tokenizer)``.

    ``tokenizer`` is a name, a folder, or a function that builds one; None takes the one beside the model.
    """

    name: str | None = None
    config: Mapping[str, Any] | None = None
    tokenizer: str | Callable[[], Any] | None = None
    seed: int = 0
    revision: str | None = None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.config is None):
            raise ModelError(
                "A model is either named or given by a configuration.",
                fix='Write Model("name or folder") or Model(config={"model_type": ..., ...}, tokenizer=...).',
            )
        if self.config is not None and "model_type" not in self.config:
            raise ModelError(
                "A model configuration needs 'model_type'.",
                have=self.config,
                fix='Add "model_type": "qwen2", or another.',
            )

    @staticmethod
    def of(said: str | Path | Mapping[str, Any] | Model) -> Model:
        """A model from what a user wrote: a name, a folder, a configuration, or a Model."""
        if isinstance(said, Model):
            return said
        if isinstance(said, Mapping):
            return Model(config=said)
        return Model(name=str(said))

    @property
    def title(self) -> str:
        """A short name for tables: the name, or the kind of the random model."""
        return self.name or f"random {(self.config or {}).get('model_type', 'model')}"


@dataclass(frozen=True)
class Optim:
    """AdamW and its schedule: ``Optim(lr=1e-5, schedule="cosine", warmup=10, total=400)``.

    ``grad_clip`` is the largest gradient norm. ``warmup`` and ``total`` count optimizer steps; the rate falls to
    ``min_lr`` (a fraction of ``lr``) at ``total``.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float | None = 1.0
    schedule: str = "constant"
    warmup: int = 0
    total: int | None = None
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            meant = near(self.schedule, SCHEDULES) or "constant"
            raise ModelError(
                f"schedule='{self.schedule}' is none of {', '.join(SCHEDULES)}.", fix=f"Write schedule='{meant}'."
            )
        if self.schedule != "constant" and not self.total:
            raise ModelError(
                f"schedule='{self.schedule}' needs to know where it ends.",
                fix="Give total=, the number of optimizer steps.",
            )
        if not self.lr >= 0:
            raise ModelError(f"lr={self.lr} is no learning rate.", fix="Give a number of at least 0.")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters instead of full training (Hu et al. 2021, arXiv:2106.09685): ``Lora(r=16, alpha=32)``."""

    r: int = 8
    alpha: int = 16
    targets: tuple[str, ...] | str = "all-linear"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: ``Sampling(max_tokens=256, temperature=1.0, top_p=1.0, top_k=0)``.

    ``top_k=0`` takes all. ``min_p`` leaves out tokens less likely than that share of the likeliest one
    (arXiv:2407.01082). ``repetition_penalty`` divides the logits of tokens that the row already has, its prompt
    included, where they are above 0, and multiplies them below (CTRL, arXiv:1909.05858). ``stop`` are token ids that
    end a response, besides the tokenizer's end-of-sequence. ``row_temperature`` is that of the rows: 1 for greedy ones.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    stop: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ModelError(
                f"max_tokens={self.max_tokens}: a response needs room for one token.", fix="Give 1 or more."
            )
        if not self.temperature > 0:
            raise ModelError(
                f"temperature={self.temperature} is no temperature.", fix="Give a number above 0, or greedy=True."
            )
        if not 0 < self.top_p <= 1:
            raise ModelError(f"top_p={self.top_p} is no share.", fix="Give a number above 0 and at most 1.")
        if self.top_k < 0:
            raise ModelError(f"top_k={self.top_k} is no count.", fix="Give 0 for all tokens, or a count.")
        if not 0 <= self.min_p <= 1:
            raise ModelError(f"min_p={self.min_p} is no share.", fix="Give a number from 0, which takes all, to 1.")
        if not 0 < self.repetition_penalty < math.inf:
            raise ModelError(
                f"repetition_penalty={self.repetition_penalty} is no penalty.",
                fix="Give a number above 0: 1 for none, 1.1 for a weak one.",
            )

    @property
    def row_temperature(self) -> float:
        return 1.0 if self.greedy else float(self.temperature)


@dataclass(frozen=True)
class Build:
    """All that a backend needs to open an engine: ``Build(Model("Qwen/Qwen3-0.6B"), head="lm", optim=Optim())``.

    ``head`` is ``lm`` (logits) or ``scalar`` (a number per token). No ``optim``: the engine does not train.

    ``axes``: the mesh of ranks that open it together, outermost first, such as ``{"fsdp": 2, "tp": 2}``; empty is one
    process. ``offload``: weights and optimizer stay on the CPU between uses. ``freeze``: the weights that are not
    trained, as of :func:`~flowrl.workers.freeze.frozen_names`.
    """

    model: Model
    head: str = "lm"
    optim: Optim | None = None
    lora: Lora | None = None
    dtype: str = "auto"
    gradient_checkpointing: bool = False
    device: str = "auto"
    seed: int = 0
    axes: Mapping[str, int] = field(default_factory=dict)
    offload: bool = False
    freeze: tuple[str, ...] = ()

    @property
    def trainable(self) -> bool:
        return self.optim is not None


@dataclass(frozen=True)
class Sampled:
    """What an engine sampled, a row per response. Log-probabilities have the shape of ``ids``.

    ``rollout_logprobs`` are the policy's at ``temperature``, over the whole vocabulary; ``sampling_logprobs`` are those
    of the distribution that was sampled from: after the repetition penalty, temperature, top-k, top-p and min-p.
    ``finished`` bool[rows]: whether a stop token ended the row; the others are cut off.
    """

    ids: Column
    rollout_logprobs: Column
    sampling_logprobs: Column
    finished: Tensor
    temperature: float = 1.0
