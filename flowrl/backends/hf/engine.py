"""The reference engine: generate, log-probabilities, values, scores and updates of one transformers model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch, Column
from ...errors import DataError, ModelError, PlanError, ProgramError
from ...placement.cluster.mesh import Mesh
from ...rl.loss_spec import Loss
from ...workers.model_options import Build, Sampled, Sampling
from ...workers.weights.offloaded import Offloaded
from ...workers.weights.weight_boxes import Shard
from ..continuous import asleep
from ..team import Team, rank_on
from . import adapters
from .copy_weights import blend, copy
from .finite import check_finite
from .generation.continuous import Streaming
from .generation.generate import generate
from .load import load_tokenizer, pick_device, pick_dtypes, quiet
from .net import Net
from .parameters import Parameters, required
from .prepare_model import open_net, prepare_model
from .read import Reader
from .train import Trainer

#: Memory that the activations of one micro-batch may take.
ACTIVATION_BYTES = {"cpu": 2 << 30, "cuda": 12 << 30}


def open_engine(build: Build) -> HFEngine:
    """Load the model of ``build`` and try what it can do."""
    device = pick_device(build.device)
    main = _first_of_copies(build)
    dtype, compute = pick_dtypes(build, device)
    tokenizer = load_tokenizer(build.model)
    net = open_net(prepare_model(build, tokenizer, device, dtype), build, device, compute)
    return HFEngine(build, tokenizer, net, Parameters(net.model, main=main), Team())


class HFEngine(Streaming):
    """A transformers model: ``open_engine(Build(Model("Qwen/Qwen3-0.6B"), optim=Optim(lr=1e-5)))``.

    Dropout is never on. Results are columns on the CPU; they do not depend on the order of rows, nor on how rows are
    split, save rounding. Where the model is split over ranks, or its rows are, every rank makes the same calls, each
    with rows of its own, which may be none; ``team`` are the ranks that share the rows.
    """

    def __init__(self, build: Build, tokenizer: Any, net: Net, parameters: Parameters, team: Team) -> None:
        self.build, self.net, self.parameters, self.team = build, net, parameters, team
        self.device = net.device
        self._tokenizer = tokenizer
        self.reader = Reader(net, team, self._micro_tokens(training=False))
        self.trainer = None if build.optim is None else Trainer(net, parameters, build.optim, team)
        self.offloaded: Offloaded | None = None  # what is out of memory while it sleeps

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. ModelError where it has none."""
        if self._tokenizer is None:
            raise ModelError(
                f"The model '{self.build.model.title}' has no tokenizer.",
                fix="Give it one: Model(config=..., tokenizer=build_tokenizer).",
            )
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return int(self.net.model.get_input_embeddings().weight.shape[0])

    @property
    def positions(self) -> int | None:
        """How many tokens a sequence may have; None where the model does not say."""
        return self.net.positions

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: the tokenizer's, and those of the model's generation settings."""
        settings = getattr(self.net.model, "generation_config", None)
        said = [getattr(self._tokenizer, "eos_token_id", None)]
        for source in (settings, self.net.config):
            ids = getattr(source, "eos_token_id", None)
            said += ids if isinstance(ids, (list, tuple)) else [ids]
        return tuple(dict.fromkeys(int(i) for i in said if i is not None))

    @property
    def pad_id(self) -> int:
        """An id to fill with; what it is never matters to a result."""
        for source in (self._tokenizer, self.net.config):
            found = getattr(source, "pad_token_id", None)
            if found is not None:
                return int(found)
        return self.eos_ids[0] if self.eos_ids else 0

    @property
    def padding_id(self) -> int | None:
        """The id of padding by the model's configuration, which transformers does not score; None without one."""
        return getattr(self.net.config, "pad_token_id", None)

    @property
    def fresh_head(self) -> Sequence[str] | None:
        """The names of weights in the model's files that it has no place for, where these lack its scalar head."""
        return getattr(self.net.model, "fresh_head", None)

    # -- reading ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None = None
    ) -> Sampled:
        """``n`` responses to each prompt; see :func:`flowrl.backends.hf.generation.generate.generate`."""
        self.check_generates()
        stops = (*self.eos_ids, *sampling.stop)
        notes: Any = {"note_prefix": self.batch.note_prefix, "note_passes": self.batch.passes.add}
        made = generate(self.net, prompts, n, seeds, sampling, stops, starts, **notes)
        check_finite("log-probabilities of sampled tokens", made.rollout_logprobs.values, self.parameters)
        return made

    def logprobs(self, batch: Batch, *, micro_tokens: int | None = None, entropy: bool = False) -> Any:
        """``log p`` of every response token, f32[*response]; with ``entropy`` a pair with the entropy before each.

        Reads ``tokens`` and ``response_mask`` (for its lengths: tokens outside the mask have a log-probability too).
        """
        self._needs("lm", "logprobs", batch)
        found = self.reader.logprobs(batch, micro_tokens, entropy=entropy)
        column: Column = found[0] if entropy else found
        check_finite("log-probabilities", column.values, self.parameters, least=False)
        return found

    def distribution(self, batch: Batch, *, micro_tokens: int | None = None) -> Column:
        """``log p`` of every token of the vocabulary before each response token, f32[*response, vocab]."""
        self._needs("lm", "distribution", batch)
        found = self.reader.distribution(batch, micro_tokens)
        check_finite("log-probabilities", found.values, self.parameters, least=False)
        return found

    def values(self, batch: Batch, *, micro_tokens: int | None = None) -> Column:
        """The scalar head's number before each response token, f32[*response]: at the state that predicts it."""
        self._needs("scalar", "values", batch)
        found = self.reader.values(batch, micro_tokens)
        check_finite("values", found.values, self.parameters)
        return found

    def scores(self, batch: Batch, *, micro_tokens: int | None = None) -> Column:
        """The scalar head's number at the last token of each row of ``tokens``, f32[]."""
        self._needs("scalar", "scores", batch)
        found = self.reader.scores(batch, micro_tokens)
        check_finite("scores", found.values, self.parameters)
        return found

    # -- training ---------------------------------------------------------------------------------------------------

    def update(
        self,
        batch: Batch,
        loss: Loss,
        *,
        minibatch: int | None = None,
        minibatch_tokens: int | None = None,
        epochs: int = 1,
        micro_tokens: int | None = None,
        lr: float | None = None,
        version: int = 0,
        pretraining: Batch | None = None,
        pretraining_weight: float = 1.0,
    ) -> dict[str, float]:
        """Train on the rows. Neither loss nor gradient depends on ``micro_tokens``, the tokens of one forward pass.

        Args:
            batch: reads ``tokens``, ``response_mask`` and what the loss reads.
            loss: a loss on log-probabilities for a language model, on values or scores for a scalar head.
            minibatch: most rows of an optimizer step, which are as equal as can be; None is all of them.
            minibatch_tokens: response tokens of an optimizer step, at least one row.
            epochs: how often every row is trained, each time in another order.
            micro_tokens: tokens of a forward pass; None is what fits a fixed share of the device's memory.
            lr: the learning rate of this call; None is the schedule's.
            version: of the weights as they are, for losses that ask how old a token is.
            pretraining: rows whose cross entropy, a mean over tokens times ``pretraining_weight``, is added to the
                loss of every optimizer step: all of them to a single one, a share each to several.

        Gives ``loss``, ``grad_norm`` (before clipping) and ``lr``, and what the loss reports as means over tokens or
        rows; ``tokens`` and ``rows`` trained, and ``steps``. Raises RunError before a step that is not finite.
        """
        if self.trainer is None:
            raise ProgramError(
                f"The model '{self.build.model.title}' was opened without an optimizer, so it cannot be trained.",
                fix="Give it a learning rate.",
            )
        rows = [batch] if pretraining is None else [batch, pretraining]
        self._needs("lm" if loss.on == "logprobs" else "scalar", f"update with {loss.name}", *rows)
        return self.trainer.update(
            batch,
            loss,
            minibatch=minibatch,
            minibatch_tokens=minibatch_tokens,
            epochs=epochs,
            micro_tokens=micro_tokens or self._micro_tokens(training=True),
            lr=lr,
            version=version,
            pretraining=pretraining,
            pretraining_weight=pretraining_weight,
        )

    def restart_optimizer(self) -> None:
        """Forget the optimizer's moments, and start its schedule again."""
        if self.trainer is not None:
            self.trainer.restart()

    # -- weights ----------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """All weights by name, tied ones once. With adapters: the base and the adapters. As :meth:`plain_weights`."""
        return self._whole(self.parameters.shards())

    def shards(self) -> list[Shard]:
        """What this rank has of the weights, as boxes in Hugging Face names and coordinates; tied ones once.

        They are views: writing into them changes the model, which :meth:`weights_written` has to be told. With adapters
        they are copies, with what the adapters add.
        """
        return self.parameters.shards() if self.build.lora is None else self.parameters.merged()

    def weights_written(self) -> None:
        """Note that somebody has written into the views of :meth:`shards`."""
        self.parameters.since = "since the weights of another copy were taken over"
        self.parameters.written()

    def state_shards(self) -> tuple[list[Shard], dict[str, Any]]:
        """What this rank has of all that training needs to go on exactly, and JSON.

        Names begin with ``weights.``, ``exp_avg.`` and ``exp_avg_sq.``. They are views.
        """
        if self.trainer is not None:
            return self.trainer.state_shards()
        return [replace(s, name=f"weights.{s.name}") for s in self.parameters.shards()], {}

    def load_state_shards(self, read: Callable[[Shard], bool], meta: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_shards` gave, on whichever ranks.

        ``read`` fills the tensor of a box, or says that there is none for it: moments may be missing.
        """
        if self.trainer is not None:
            self.trainer.load_state_shards(read, meta)
            return
        with torch.no_grad():
            for shard in self.state_shards()[0]:
                required(shard, read)
        self.parameters.since = "since the checkpoint that they were read from"
        self.parameters.written()

    def digest(self) -> str:
        """A digest of all weights, adapters apart from what they are added to; the same for every layout."""
        return self.parameters.digest()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """:meth:`state_shards` as tensors by name; they are not copies."""
        shards, meta = self.state_shards()
        return {s.name: s.tensor for s in shards}, meta

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave, bit for bit."""

        def read(shard: Shard) -> bool:
            if shard.name in tensors:
                shard.tensor.copy_(tensors[shard.name])
            return shard.name in tensors

        self.load_state_shards(read, meta)

    def plain_weights(self) -> dict[str, Tensor]:
        """The weights by name, as a model without adapters has them: what it has are merged. They may be views.

        ModelError where this rank has a part of them only.
        """
        return self._whole(self.parameters.merged())

    def copy_weights_from(self, other: HFEngine) -> None:
        """Take the weights of another engine of the same model; adapters are merged on the way.

        Where weights are split, the other has to have all that this rank needs: the same mesh, or all of them.
        """
        copy(self.parameters, self._given(other), self._titles(other))

    def base_alone(self, build: Build) -> HFEngine | str:
        """An engine that reads this one without its adapters, or why there is none; see ``shared.base_of``."""
        from .shared_base import base_of

        return base_of(self, build)

    def other_adapters(self, build: Build) -> HFEngine | str:
        """An engine of the same weights with adapters of its own, or why there is none; see ``shared.beside``."""
        from .shared_base import beside

        return beside(self, build)

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take whole weights by name. Raises ModelError when one is missing or has another shape."""
        given = [Shard(n, tuple(w.shape), (0,) * w.dim(), w) for n, w in weights.items()]
        copy(self.parameters, given, (self.build.model.title, "another copy"))

    def blend(self, other: HFEngine, decay: float) -> float:
        """``w = decay w + (1 - decay) w_other`` for every weight; gives the norm of the change.

        Raises ModelError when the two are not of the same model, when this one has adapters, or weights in half
        precision for an average; ProgramError for a decay outside [0, 1].
        """
        if not 0 <= decay <= 1:
            raise ProgramError(f"decay={decay} is no share of the old weights.", fix="Give a number from 0 to 1.")
        if self.build.freeze:
            raise ModelError(
                f"'{self.build.model.title}' has frozen weights here, which following another worker would change.",
                fix="Let a worker without freeze= follow.",
            )
        if self.build.lora is not None:
            raise ModelError(
                f"'{self.build.model.title}' has adapters here, and averaged factors are no average of the weights.",
                fix="Let a worker without adapters follow: fl.Actor(model) or fl.Reference(model), without lora=.",
            )
        return blend(self.parameters, self._given(other), self._titles(other), decay)

    def _given(self, other: HFEngine) -> list[Shard]:
        """What this rank has of the weights of another engine, under the names of this one."""
        given = other.parameters.shards()
        same = {s.name for s in given} == {s.name for s in self.parameters.shards()}
        return given if same else other.parameters.merged()

    def _titles(self, other: HFEngine) -> tuple[str, str]:
        return self.build.model.title, other.build.model.title

    def _whole(self, shards: list[Shard]) -> dict[str, Tensor]:
        if any(s.shape != tuple(s.tensor.shape) for s in shards):
            raise split_weights(self.build)
        return {s.name: s.tensor for s in shards}

    def save(self, folder: str | Path) -> None:
        """A Hugging Face folder: weights (adapters merged), configuration, generation settings, tokenizer.

        Adapters are saved as peft saves them too, in its folder ``adapter``. Every rank has to call it, and the first
        one writes.
        """
        model, state = self.net.model, self.parameters.whole_state()
        trained = None if self.build.lora is None else self.parameters.whole_trained()
        if self.parameters.pool.place:
            return
        if self.build.head == "scalar" and model.config.pad_token_id is None:
            model.config.pad_token_id = self.pad_id  # its own class cannot score batches without
        model.config.use_cache = True
        try:
            with quiet():
                model.save_pretrained(str(folder), state_dict=state)
        finally:
            model.config.use_cache = False
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(str(folder))
        if trained is not None and self.build.optim is not None:
            adapters.save(Path(folder) / "adapter", model, self.build, trained)

    # -- memory -----------------------------------------------------------------------------------------------------

    def sleep(self) -> int:
        """Leave the memory of the device to others; see :class:`flowrl.workers.engine.Sleeps`.

        Tensors and views stay what they are, with nothing in them. Raises RunError where another process reads them.
        """
        if self.offloaded is not None:
            return 0
        freed = self.batch.cache_bytes() if "batch" in vars(self) else 0
        self.offloaded = Offloaded.of(self.state_shards(), self.parameters.shards())
        if "batch" in vars(self):
            self.batch.fall_asleep()
        if self.trainer is not None:
            freed += self.trainer.fall_asleep()
        if self.device.type == "cuda":  # what is free in torch's allocator is free for this process alone
            torch.cuda.empty_cache()
        return freed + self.offloaded.bytes

    def wake(self) -> int:
        """Take the memory back, with what was in it."""
        if self.offloaded is None:
            return 0
        size = self.offloaded.bring_back()
        self.offloaded = None
        if "batch" in vars(self):
            self.batch.awake()
        return size + (0 if self.trainer is None else self.trainer.awake())

    # -- inside -----------------------------------------------------------------------------------------------------

    def check_generates(self) -> None:
        """Raise ProgramError where this engine does not sample."""
        self._needs("lm", "generate")
        if not self.net.generates:
            raise ProgramError(
                f"The model '{self.build.model.title}' is split over ranks here, where it does not generate.",
                fix="Generate with an engine of its own, such as hf.",
            )

    def _needs(self, head: str, what: str, *batches: Batch) -> None:
        """Raise the error of a call that is not for this engine, or of its rows."""
        if self.offloaded is not None:
            raise asleep()
        if self.build.head != head:
            raise ProgramError(
                f"The model '{self.build.model.title}' has the head '{self.build.head}'; {what} needs '{head}'.",
                fix="Call it on a worker of the right kind: log-probabilities on an actor, values on a critic.",
            )
        for batch in batches if self.net.rotary_reach else ():
            self._check_lengths(batch, self.net.rotary_reach or 0)

    def _check_lengths(self, batch: Batch, most: int) -> None:
        """Raise DataError for a row with which the numbers of others would change."""
        lengths = batch.tokens.lengths
        if len(lengths) and int(lengths.max()) > most:
            row = int(lengths.argmax())
            raise DataError(
                f"Row {batch.keys[row]} has {int(lengths[row])} tokens. From {most + 1} on, "
                f"'{self.build.model.title}' has other rotary embeddings for all rows of a pass: what it gives for one "
                "would depend on those beside it.",
                fix=f"Filter or shorten the rows to {most} tokens, or use a model whose rotary embeddings are fixed.",
            )

    def _micro_tokens(self, *, training: bool) -> int:
        """Tokens of a forward pass whose activations fill a fixed share of memory, whatever is free just now."""
        config = self.net.config
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        layer = 16 * config.hidden_size + 5 * inner
        kept = config.num_hidden_layers * (config.hidden_size if self.build.gradient_checkpointing else layer)
        held = (kept if training else 0) + 2 * layer
        return max(1024, ACTIVATION_BYTES.get(self.device.type, 2 << 30) // (held * self.net.compute.itemsize))


def split_weights(build: Build) -> ModelError:
    """What is said where somebody asks for whole weights that no rank has."""
    return ModelError(
        f"The weights of '{build.model.title}' are split over ranks, so no rank has them whole.",
        fix="Move them by shards().",
    )


def _first_of_copies(build: Build) -> bool:
    """Whether this process counts, of those with a copy each. PlanError for a mesh that this engine cannot be on."""
    mesh = Mesh(build.axes)
    if mesh.size == 1:
        return True
    if mesh.size != mesh["dp"] or build.trainable:
        raise PlanError(
            f"The engine hf has the whole model in each process, so it is not on a mesh {mesh}"
            + (" where it trains." if build.trainable else "."),
            fix="Name the backend fsdp2.",
        )
    return rank_on(mesh) == 0
