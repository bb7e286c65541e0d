"""What a worker is made of, as frozen records: the model, its optimizer, adapters, and how it samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import ModelError
from ..graph.ops.allowed import Allowed, check_record, flag, instance, number, numbers, one_of, whole
from ..graph.stand_ins.values import is_handle
from .weights.saved_lora import read_saved

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Column

SCHEDULES = ("constant", "linear", "cosine")

#: What the settings of an optimizer may be, of a worker and of :class:`Optim` alike.
OPTIM: Mapping[str, Allowed] = {
    "lr": number(least=0) | None,
    "betas": numbers(2, least=0, below=1, fix="Write betas=(0.9, 0.999)."),
    "eps": number(above=0),
    "weight_decay": number(least=0),
    "grad_clip": number(above=0, fixes={0: "Write grad_clip=None."}) | None,
    "schedule": one_of(*SCHEDULES),
    "warmup": whole(least=0, fix="Give warmup= the number of optimizer steps, not a share of them."),
    "total": whole(least=1, fix="Give total= the number of optimizer steps.") | None,
    "min_lr": number(least=0, most=1, fix="Give min_lr= a fraction of lr, from 0 to 1."),
}
_LIKELIEST = "Write generate(batch, greedy=True) for the likeliest tokens."
#: What the settings of sampling may be.
SAMPLING: Mapping[str, Allowed] = {
    "max_tokens": whole(least=1, fix="Give max_tokens= the most tokens that a response may have, 1 or more."),
    "temperature": number(above=0, fixes={0: _LIKELIEST}),
    "top_p": number(above=0, most=1, fix="Give top_p= a number above 0 and at most 1, which takes all tokens."),
    "top_k": whole(least=0, fixes={-1: "Write top_k=0, which takes all tokens."}),
    "min_p": number(least=0, most=1, fix="Give min_p= a number from 0, which takes all tokens, to 1."),
    "repetition_penalty": number(above=0, fix="Give repetition_penalty= 1 for none, 1.1 for a weak one."),
}
_ADAPTERS = "Write lora=fl.Lora(r=16), or another rank."
#: What the settings of a model may be.
MODEL: Mapping[str, Allowed] = {
    "lora": instance("Lora", form="a record fl.Lora(r=...)", fix=_ADAPTERS) | None,
    "dtype": one_of("auto", "fp32", "bf16", "fp64"),
}
#: What a model may be allowed.
TRUST: Mapping[str, Allowed] = {"trust_remote_code": flag(), "pickled_weights": flag()}
#: What an update may be told.
UPDATE: Mapping[str, Allowed] = {
    "minibatch": whole(least=1, fix="Give minibatch= the rows of one optimizer step, or leave it out for all rows."),
    "minibatch_tokens": whole(least=1, fix="Give minibatch_tokens= a number of tokens, or leave it out for all rows."),
    "epochs": whole(least=1, fix="Give epochs= 1 or more."),
    "micro_tokens": whole(least=1, fix="Give micro_tokens= a number of tokens, or leave it out."),
    "lr": number(least=0),
}


@dataclass(frozen=True)
class Model:
    """A model by hub name or local folder, or a configuration for random weights.

    ``Model("Qwen/Qwen3-0.6B")``, ``Model("runs/first/model/actor")``, or
    ``Model(config={"model_type": "qwen2", "hidden_size": 192, ...}, tokenizer=build_tokenizer)``.

    ``tokenizer`` is a name, a folder, or a function that builds one; None takes the one beside the model.

    ``trust_remote_code=True`` runs Python files that lie beside the model or its tokenizer (``auto_map``), and
    ``pickled_weights=True`` reads weights that are no safetensors (``pytorch_model.bin``), as tensors and plain data
    alone. Neither happens unless it is said here.

    >>> fl.Model("Qwen/Qwen3-0.6B", revision="main").title
    'Qwen/Qwen3-0.6B'
    >>> fl.Model(config={"model_type": "qwen2"}, seed=7).seed
    7
    """

    name: str | None = None
    config: Mapping[str, Any] | None = None
    tokenizer: str | Callable[[], Any] | None = None
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False
    pickled_weights: bool = False

    def __post_init__(self) -> None:
        check_record(self, TRUST)
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
        if isinstance(said, (str, Path)):
            return Model(name=str(said))
        handle = f"Write of={getattr(said, 'name', 'actor')}, to a worker that takes of=." if is_handle(said) else None
        raise ModelError(
            f"model={said!r} is no model.",
            fix=handle or 'Give a name, a folder, or fl.Model(config={"model_type": ...}).',
        )

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
        check_record(self, OPTIM)
        if self.schedule != "constant" and not self.total:
            raise ModelError(
                f"schedule='{self.schedule}' needs to know where it ends.",
                fix="Give total=, the number of optimizer steps.",
            )


_PLAIN_LORA: Mapping[str, Any] = {"r": 8, "alpha": 16, "targets": "all-linear"}


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters instead of full training (Hu et al. 2021, arXiv:2106.09685): ``Lora(r=16, alpha=32)``.

    ``Lora(path="runs/first/model/actor/adapter")`` begins with adapters that were saved as peft saves them. What they
    are is said in that folder, so ``r``, ``alpha`` and ``targets`` are left out, or say the same. Raises ModelError
    where the folder has none, or such as are more than a product of two factors.

    >>> fl.Lora(r=16, alpha=32)
    Lora(r=16, alpha=32, targets='all-linear', path=None)
    """

    r: int = cast("int", None)  # 8, or that of the folder
    alpha: int = cast("int", None)  # 16, or that of the folder
    targets: tuple[str, ...] | str = cast("str", None)  # "all-linear", or those of the folder
    path: str | Path | None = None

    def __post_init__(self) -> None:
        given = {n: v for n in _PLAIN_LORA if (v := getattr(self, n)) is not None}
        check_record(self, {n: r for n, r in {"r": whole(least=1), "alpha": number(above=0)}.items() if n in given})
        found = _PLAIN_LORA if self.path is None else read_saved(Path(self.path), given)
        for name, value in {**found, **given}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: ``Sampling(max_tokens=256, temperature=1.0, top_p=1.0, top_k=0)``.

    ``top_k=0`` takes all. ``min_p`` leaves out tokens less likely than that share of the likeliest one
    (arXiv:2407.01082). ``repetition_penalty`` divides the logits of tokens that the row already has, its prompt
    included, where they are above 0, and multiplies them below (CTRL, arXiv:1909.05858). ``stop`` are token ids that
    end a response, besides the tokenizer's end-of-sequence. ``support``: record which tokens could be drawn at each
    place. ``row_temperature`` is that of the rows: 1 for greedy ones.

    >>> fl.testing.Sampling(max_tokens=64, temperature=0.7).is_policy
    True
    >>> fl.testing.Sampling(top_p=0.9).is_policy
    False
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    stop: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    support: bool = False

    def __post_init__(self) -> None:
        check_record(self, SAMPLING)

    @property
    def row_temperature(self) -> float:
        return 1.0 if self.greedy else float(self.temperature)

    @property
    def is_policy(self) -> bool:
        """Whether tokens are drawn from the policy itself, at the temperature."""
        whole = (False, 1.0, 0, 0.0, 1.0)  # the vocabulary, and no logit is changed
        return (self.greedy, self.top_p, self.top_k, self.min_p, self.repetition_penalty) == whole


@dataclass(frozen=True)
class Build:
    """All that a backend needs to open an engine: ``Build(Model("Qwen/Qwen3-0.6B"), head="lm", optim=Optim())``.

    ``head`` is ``lm`` (logits) or ``scalar`` (a number per token). No ``optim``: the engine does not train.

    ``axes``: the mesh of ranks that open it together, outermost first, such as ``{"fsdp": 2, "tp": 2}``; empty is one
    process. ``offload``: weights and optimizer stay on the CPU between uses. ``freeze``: the weights that are not
    trained, as of :func:`~flowrl.workers.weights.freeze_patterns.frozen_names`. ``seed`` draws a fresh head and
    adapters. ``options``: what the plan says beside the engine, by name.
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
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trainable(self) -> bool:
        return self.optim is not None


def dtypes(said: str, *, trained: bool, cuda: bool) -> tuple[str, str]:
    """The dtype of the weights and that of the computation. Weights of what is trained are never below fp32."""
    compute = said if said != "auto" else "bf16" if cuda else "fp32"
    return ("fp32" if trained and compute == "bf16" else compute), compute


@dataclass(frozen=True)
class Sampled:
    """What an engine sampled, a row per response. Log-probabilities have the shape of ``ids``.

    ``rollout_logprobs`` are the policy's at ``temperature``, over the whole vocabulary; ``sampling_logprobs`` are those
    of the distribution that was sampled from: after the repetition penalty, temperature, top-k, top-p and min-p.
    ``finished`` bool[rows]: whether a stop token ended the row; the others are cut off. ``support``, where it was asked
    for: the ids that could be drawn, i32[*support], and how many at each token, i32[*response]; 0 is all. ``versions``
    i32[*response]: of the weights behind each token, where some were published while the rows were sampled;
    ``kept_cache``: and rows kept their keys and values then.
    """

    ids: Column
    rollout_logprobs: Column
    sampling_logprobs: Column
    finished: Tensor
    temperature: float = 1.0
    support: tuple[Column, Column] | None = None
    versions: Column | None = None
    kept_cache: bool = False
