"""The policy: a language model that generates, says how likely its tokens are, and is trained."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, ProgramError
from ..graph.ops.allowed import flag, number, whole, worker
from ..graph.ops.check_arguments import takes
from ..graph.ops.declare import op
from ..graph.ops.function_spec import Spec
from ..graph.ops.signature import CallShape
from ..graph.ops.update_metrics import Metrics
from ..graph.stand_ins.values import is_handle
from ..marks import OWN, Marks, marks, spelled
from .base import Opening
from .gap import compared_fields, with_expected
from .model_options import MODEL, OPTIM, SAMPLING, UPDATE, Build, Lora, Model, Sampled, Sampling
from .streaming import EngineCall, SampleRequest
from .tokens.packed_tokens import marked
from .tokens.prompt_template import asked_columns, asked_fields, written
from .tokens.row_support import not_recorded
from .tokens.sampling import (
    SamplingArguments,
    Stop,
    check_penalty,
    cut_of,
    generated,
    prompted,
    sampled_fields,
    sampled_marks,
    sampling_marks,
)
from .tokens.temperature import adds_scaled, at_temperature, dtype_of, logprobs_of, tempered
from .trained_model import TrainedModel, trains

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch, Column


def _asked(shape: CallShape) -> Mapping[str, Marks]:
    """``marks=`` of an op that encodes text with the worker's own tokenizer."""
    return {"prompt_ids": marks(tokenizer=shape.tokenizer)}


def _update_reads(shape: CallShape) -> str | Mapping[str, str]:
    loss = shape.call.get("loss")
    if shape.call.get("support") is True and getattr(loss, "needs_distribution", False):
        raise ProgramError(
            f"loss {getattr(loss, 'name', loss)} compares distributions over the whole vocabulary, and support=True "
            "leaves a part of it.",
            fix="Leave out support=True.",
        )
    more = [*(["finished"] if "finished" in shape.have else []), *compared_fields(shape)]
    reads = ", ".join([tempered("tokens, response_mask")(shape), *more])
    return trains("logprobs", reads, what="actor")(shape)


class Actor(TrainedModel):
    """A causal language model that is trained and generates.

    Args:
        model: a hub name, a local folder, a transformers configuration, or a :class:`Model`.
        lr: the learning rate of AdamW. None freezes the actor: it generates and reads, has no optimizer, and cannot be
            updated.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW.
        grad_clip: the largest norm of a gradient; None does not clip.
        schedule: the learning rate over optimizer steps: ``constant``, ``linear`` or ``cosine``.
        warmup: optimizer steps in which the learning rate rises from 0.
        total: the optimizer step at which it has fallen to ``min_lr``.
        min_lr: the part of ``lr`` that is left at the end of the schedule.
        max_tokens: how long a response may be, unless a call says otherwise; so with the next six.
        temperature: what logits are divided by.
        top_p: sample from the most probable tokens whose probabilities add up to this.
        top_k: sample from this many of the most probable tokens; 0 takes all.
        min_p: sample from tokens with at least this part of the largest probability (arXiv:2407.01082).
        repetition_penalty: for tokens that the row has already, its prompt included: logits above 0 are divided by it,
            others multiplied (CTRL, arXiv:1909.05858).
        stop: token ids, or strings that are one token (or one of them), besides the tokenizer's end-of-sequence.
        of: an actor with adapters, in place of ``model``: the model under its adapters, with adapters of its own. Where
            both are in one pool of this process and have the same dtype, the weights are in memory once; else it has a
            copy, and says so. Results are bit for bit the same.
        lora: train adapters instead of the whole model.
        freeze: weights that are not trained: ``"embeddings"``, layers as Python would slice them (``"layers[:-2]"``
            is all but the last two), names or beginnings of names, with ``*`` for anything; or several of these.
        dtype: ``auto`` (fp32 on a CPU; bf16 with fp32 master weights on CUDA), ``fp32`` or ``bf16``.
        gradient_checkpointing: recompute activations in the backward pass.
        seed: of random weights that a checkpoint of the model lacks, such as a value head's, and of new adapters.

    >>> flow = fl.Flow("example")
    >>> actor = flow.worker(fl.Actor, "Qwen/Qwen3-0.6B", lr=1e-6, max_tokens=512)  # nothing is loaded yet
    """

    copies_of = False

    @takes(of=worker("generate", "engine", form="the handle of an actor with adapters"), **OPTIM, **SAMPLING, **MODEL)
    def __init__(
        self,
        model: str | Mapping[str, Any] | Model | None = None,
        *,
        of: Any = None,
        lr: float | None = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        schedule: str = "constant",
        warmup: int = 0,
        total: int | None = None,
        min_lr: float = 0.0,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Stop = (),
        lora: Lora | None = None,
        freeze: str | Sequence[str] = (),
        dtype: str = "auto",
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        if (model is None) == (of is None):
            raise ModelError(
                "An actor has a model of its own, or that of another actor with adapters.",
                fix='Give model="name or folder", or of=actor and lora=fl.Lora(r=8).',
            )
        settings = locals()
        self.keep_settings(None if model is None else Model.of(model), settings)
        self.sampling = Sampling(**{name: settings[name] for name in SAMPLING})
        self.of, self.stop = of, stop
        if of is not None:
            check_base(of, lora)

    def build(self) -> Build:
        if self.of is None:
            return super().build()
        source: Build = self._source.build()
        dtype = source.dtype if self.dtype == "auto" else self.dtype
        return replace(super().build(), model=source.model, dtype=dtype)

    def open(self, opening: Opening) -> None:
        """Open an engine of its own, or one with its adapters over the weights of the actor behind ``of=``."""
        self.introduce(opening.peer)
        if self.of is not None and not opening.serving:
            self._tokenizers = opening.tokenizer
            found = self.found_beside(opening, lambda engine: engine.other_adapters(self.build()))
            if found is not None:
                self._engine = found
                return
        super().open(opening)

    @op(reads=prompted, adds=generated, rows="expand", cost="generate", pieces=True, marks=sampling_marks)
    @takes(n=whole(least=1, fix="Give n= 1 or more."), support=flag(), **SAMPLING)
    def generate(
        self,
        batch: Batch,
        *,
        n: int = 1,
        greedy: bool = False,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Stop | None = None,
        support: bool = False,
    ) -> Generator[EngineCall, Sampled, Mapping[str, Any]]:
        """Sample ``n`` responses per row. Each row becomes ``n`` rows; their keys append 0 to n-1.

        Adds ``response_ids`` (with the stop token), ``tokens`` (prompt and response), ``response_mask`` (all true),
        ``rollout_logprobs`` (at the temperature of the row), ``sampling_logprobs`` (of the distribution sampled from),
        ``versions``; per row ``temperature`` (1 for a greedy one), ``finished`` (a stop token ended it) and
        ``finish_reason`` (``stop`` or ``length``). The distribution sampled from is made in the order of Hugging Face:
        repetition penalty, temperature, top-k, top-p, min-p; a greedy token knows of the penalty alone.
        A token depends on its row's seed and its place alone, never on other rows (docs/workers.md).

        ``support=True`` records which tokens could be drawn: ``support_ids``, and ``support_sizes``, how many of them
        each response token has; 0 is the whole vocabulary. ``logprobs``, ``entropies`` and ``update`` take it, so a
        ratio to ``sampling_logprobs`` is exact. Raises ModelError where the engine does not record it.
        """
        how = self.how(SamplingArguments.of(locals()))
        if support:
            check_penalty(how.repetition_penalty)
        children = batch.expand(n)
        request = SampleRequest(batch["prompt_ids"], n, children.row_seeds(), how)
        sampled = yield EngineCall(self.generating_engine(), request)
        if support and sampled.support is None:
            raise not_recorded()
        return marked(sampled_fields(children, sampled, self.read_version()), self._sampled_marks(how))

    def how(self, said: SamplingArguments) -> Sampling:
        """How a call samples: what it says, and else what the worker was declared with."""
        return said.over(self.sampling, self.stop, self.tokenizer)

    def _sampled_marks(self, how: Sampling) -> dict[str, Marks]:
        """Where the fields of rows come from that this worker has sampled."""
        return sampled_marks(
            spelled(how.row_temperature),
            cut_of(asdict(how)),
            worker=self.identity(),
            tokenizer=self.tokenizer_digest(),
            dtype=dtype_of(self.generating_engine()),
        )

    @op(reads=asked_columns, adds=asked_fields, rows="apart", cost="local", marks=_asked)
    def ask(
        self,
        batch: Batch,
        template: str,
        *,
        chat: bool = False,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> Mapping[str, Any]:
        """Prompts for this worker about rows of another one: the same rows, with ``prompt`` and ``prompt_ids`` alone.

        A chat has its ``messages`` besides, which :meth:`RewardModel.score_text` reads.

        ``{prompt}``, ``{response}`` and names of columns in ``template`` are filled in for every row. Text goes from
        one model to the other: it is encoded with this worker's tokenizer, whatever made the rows.

        Args:
            template: the text, such as ``"Question: {prompt} Answer: {response} Is it right?"``.
            chat: put the text through the chat template, as the message of a user.
            system: the system message of such a chat.
            chat_template_kwargs: arguments of its template, such as ``{"enable_thinking": False}``; ModelError for one
                that the template never reads.
            tokenizer: what the rows' own tokens are of; None is that of the flow's actor.
        """
        writer = self._tokenizers(tokenizer)
        more = chat_template_kwargs or {}
        made = written(batch, template, chat=chat, system=system, more=more, reader=self.tokenizer, writer=writer)
        return marked(made, {"prompt_ids": marks(tokenizer=self.tokenizer_digest())})

    @property
    def positions(self) -> int | None:
        """How many tokens a row may have, prompt and response; None where the model does not say."""
        return self.generating_engine().positions

    @classmethod
    def streams_rows(cls) -> bool:
        """Whether environments may ask its engine row by row; a subclass with a :meth:`respond` of its own is asked
        through that."""
        return cls.respond is Actor.respond

    @property
    def stream(self) -> Any:
        """The stream of its engine, where rows leave one by one; None for one that answers in whole calls, or does not
        generate."""
        return getattr(self.engine, "stream", None) if self.streams_rows() else None

    def respond(self, prompts: Column, seeds: Tensor, starts: Tensor, said: SamplingArguments) -> Sampled:
        """One response per prompt, for an environment that holds this handle.

        ``prompts`` ``i32[*prompt]``, ``seeds`` i64[rows], ``starts`` i64[rows]: how many tokens of the row's
        random sequence were used before.
        """
        return self.generating_engine().generate(prompts, 1, seeds, self.how(said), starts)

    @op(
        reads=tempered("tokens, response_mask"),
        adds="old_logprobs: f32[*response]",
        cost="forward",
        pieces=True,
        marks=adds_scaled("old_logprobs", by="logprobs"),
    )
    @takes(temperature=number(above=0), support=flag())
    def logprobs(self, batch: Batch, *, temperature: float | None = None, support: bool = False) -> Mapping[str, Any]:
        """Adds ``old_logprobs``: of each response token under the weights as they are now.

        ``temperature``: None is that of each row, and 1 for rows that nobody sampled. ``support=True``: among the
        tokens that could be drawn at its place (``generate(support=True)``), as ``sampling_logprobs`` are.
        """
        del support  # it says what is read
        return {"old_logprobs": logprobs_of(self, "logprobs", batch, temperature)}

    @op(reads=tempered("tokens, response_mask"), adds="entropies: f32[*response]", cost="forward", pieces=True)
    @takes(temperature=number(above=0), support=flag())
    def entropies(self, batch: Batch, *, temperature: float | None = None, support: bool = False) -> Mapping[str, Any]:
        """Adds ``entropies``: of the distribution before each response token, in nats, under the weights of now.

        ``temperature`` and ``support`` are as in :meth:`logprobs`.
        """
        del support  # it says what is read
        return {"entropies": self.training_engine().logprobs(at_temperature(batch, temperature), entropy=True)[1]}

    @op(reads=_update_reads, updates="weights", cost="train", marks=adds_scaled(OWN))
    @takes(pretraining_weight=number(least=0), temperature=number(above=0), support=flag(), **UPDATE)
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
        temperature: float | None = None,
        support: bool = False,
        pretraining: Batch | None = None,
        pretraining_weight: float = 1.0,
        allow_stale: bool = False,
        foreign: bool = False,
    ) -> Metrics:
        """Train on the rows: one optimizer step per mini-batch and epoch.

        Args:
            loss: what is minimised; fields that it reads are read by this call.
            minibatch, minibatch_tokens: rows, or tokens at most, of a mini-batch; None takes all rows. A loss that
                compares rows of a prompt has all of them in one, where that is more.
            epochs: how often the rows are gone through, in an order of their own each time.
            micro_tokens: tokens at most in one forward pass. Changes memory and speed, never the result.
            lr: the learning rate of this call, in place of the schedule's.
            temperature: what logits are divided by, in the loss, its entropy and its gradient; None is the temperature
                at which each row was sampled, and 1 for rows that nobody sampled.
            support: train each token among those that could be drawn at its place, which ``generate(support=True)``
                has recorded, in the loss, its entropy and its gradient (DeepSeek-V3.2, arXiv:2512.02556, section 3.1,
                "keep sampling mask"): for a loss with ``anchor="sampling"``, whose ratio is then exact.
            pretraining, pretraining_weight: rows of a data source whose cross entropy is added to the loss, so that
                the policy forgets less (PPO-ptx, arXiv:2203.02155, eq. 2); reported as ``pretraining_loss``.
            allow_stale: do not refuse a loss that does not correct for rows older than the weights.
            foreign: do not refuse a loss of the policy that samples on rows that another worker sampled, or that were
                sampled at another temperature.

        Returns: ``loss``, ``grad_norm``, ``lr``, ``tokens``, and what the loss reports, each a mean over the
        response tokens of the call; ``truncated``, the share of rows that are not ``finished``; of a loss that reads
        ``advantages`` what every update of a policy measures (docs/metrics.md); and how far the
        log-probabilities of the engine that sampled lie from those that the update computes, of the tokens of its first
        optimizer step that were sampled with the weights as they are: ``gap_mean`` and ``gap_max`` of the difference,
        ``gap_k3`` (KL), ``gap_beyond`` (the share of tokens beyond ``gap_bound``) and ``gap_tokens`` (how many).
        """
        del allow_stale, foreign, support  # read by the check
        call, version = locals(), self.version_now
        rows = with_expected(batch, worker=self.identity(), version=version, temperature=temperature)
        more = {"pretraining": pretraining, "pretraining_weight": pretraining_weight}
        return self.train(rows, loss, call, temperature=temperature, version=version, **more)

    @op(reads="", cost="local")
    def save(self, folder: str) -> None:
        """Save the model and its tokenizer as a Hugging Face folder."""
        self.engine_with_weights().save(folder)


def check_base(of: Any, lora: Lora | None) -> None:
    """Refuse ``of=`` where one of the two would train the weights that both have."""
    name = getattr(of, "name", "") or "actor"
    if lora is None:
        raise ModelError(
            f"This actor has the weights of '{name}' and no adapters of its own, so it would train those of '{name}'.",
            fix="Give it adapters, lora=fl.Lora(r=8), or a model of its own, model=.",
        )
    said = getattr(of, "arguments", None) if is_handle(of) else {"lora": getattr(of, "lora", None)}
    if said is not None and said.get("lora") is None:  # on a rank a handle is a name; the driver has looked at it
        raise ModelError(
            f"'{name}' has no adapters (lora=), so its weights are no base for those of another actor.",
            fix=f"Give '{name}' adapters, lora=fl.Lora(r=8), or this actor a model of its own, model=.",
        )
