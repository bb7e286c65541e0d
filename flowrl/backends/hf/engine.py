"""The reference engine: generate, log-probabilities, values, scores and updates of one transformers model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch, Column
from ...errors import ModelError, ProgramError
from ...rl.spec import Loss
from ...workers.records import Build, Sampled, Sampling
from . import adapters
from .generate import generate
from .load import load_model, load_tokenizer, pick_device, pick_dtypes, quiet
from .logits import distributions, token_logprobs
from .net import Net
from .pack import Rows, micro_batches
from .ragged import padded
from .train import Trainer

#: Memory that the activations of one micro-batch may take.
ACTIVATION_BYTES = {"cpu": 2 << 30, "cuda": 12 << 30}


def open_engine(build: Build) -> HFEngine:
    """Load the model of ``build`` and try what it can do."""
    return HFEngine(build)


class HFEngine:
    """A model on one device: ``HFEngine(Build(Model("Qwen/Qwen3-0.6B"), optim=Optim(lr=1e-5)))``.

    Dropout is never on. Results are columns on the CPU; they do not depend on the order of rows, nor on how rows are
    split, save rounding.
    """

    def __init__(self, build: Build) -> None:
        self.build = build
        self.device = pick_device(build.device)
        dtype, compute = pick_dtypes(build, self.device)
        self._tokenizer = load_tokenizer(build.model)
        model = load_model(build, self.device, dtype)
        _check_vocabulary(model, self._tokenizer)
        _adopt_ids(model, self._tokenizer, build)
        if build.lora is not None:
            adapters.add(model, build.lora, build.seed)
        if not build.trainable:
            model.requires_grad_(False)
        self.net = Net(model, build.head, self.device, compute)
        self.net.probe()
        if build.gradient_checkpointing:
            self.net.recompute_layers()
        self.trainer = Trainer(self.net, build.optim) if build.optim is not None else None

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

    # -- reading ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None = None
    ) -> Sampled:
        """``n`` responses to each prompt; see :func:`flowrl.backends.hf.generate.generate`."""
        self._needs("lm", "generate")
        return generate(self.net, prompts, n, seeds, sampling, (*self.eos_ids, *sampling.stop), starts)

    def logprobs(self, batch: Batch, *, micro_tokens: int | None = None, entropy: bool = False) -> Any:
        """``log p`` of every response token, f32[*response]; with ``entropy`` a pair with the entropy before each.

        Reads ``tokens`` and ``response_mask`` (for its lengths: tokens outside the mask have a log-probability too).
        """
        self._needs("lm", "logprobs")
        rows = Rows.of(batch)
        targets = rows.targets.to(self.device)
        head = self.net.head.cast()
        found = torch.zeros(len(targets), dtype=torch.float32, device=self.device)
        spread = torch.zeros_like(found)
        with torch.no_grad():
            for micro in self._micro(rows, micro_tokens):
                part, uncertain = token_logprobs(micro.hidden(self.net), head, targets[micro.at], entropy=entropy)
                found[micro.at] = part.float()
                if uncertain is not None:
                    spread[micro.at] = uncertain.float()
        column = batch.response_mask.with_values(found.cpu())
        return (column, column.with_values(spread.cpu())) if entropy else column

    def distribution(self, batch: Batch, *, micro_tokens: int | None = None) -> Column:
        """``log p`` of every token of the vocabulary before each response token, f32[*response, vocab]."""
        self._needs("lm", "distribution")
        rows = Rows.of(batch)
        head = self.net.head.cast()
        found = torch.zeros(int(rows.responses.sum()), self.vocab_size, dtype=torch.float32)
        with torch.no_grad():
            for micro in self._micro(rows, micro_tokens):
                found[micro.at.cpu()] = distributions(micro.hidden(self.net), head).float().cpu()
        return batch.response_mask.with_values(found)

    def values(self, batch: Batch, *, micro_tokens: int | None = None) -> Column:
        """The scalar head's number before each response token, f32[*response]: at the state that predicts it."""
        self._needs("scalar", "values")
        rows = Rows.of(batch)
        found = torch.zeros(int(rows.responses.sum()), dtype=torch.float32, device=self.device)
        with torch.no_grad():
            for micro in self._micro(rows, micro_tokens):
                found[micro.at] = self.net.values(micro.hidden(self.net)).float()
        return batch.response_mask.with_values(found.cpu())

    def scores(self, batch: Batch, *, micro_tokens: int | None = None) -> Column:
        """The scalar head's number at the last token of each row of ``tokens``, f32[]."""
        self._needs("scalar", "scores")
        tokens = batch.tokens
        lengths, starts = tokens.lengths, tokens.offsets[:-1]
        if len(lengths) and int(lengths.min()) < 1:
            raise ProgramError("A row without tokens has no score.", fix="Filter empty rows first.")
        order = torch.argsort(lengths, descending=True, stable=True)
        budget = micro_tokens or self._micro_tokens(training=False)
        found = torch.zeros(len(lengths), dtype=torch.float32)
        ids, a = tokens.values.long(), 0
        with torch.no_grad():
            while a < len(order):
                part = order[a : a + max(1, budget // int(lengths[order[a]]))]
                held = padded(ids, starts[part], lengths[part], int(lengths[part[0]]), self.net.filler).to(self.device)
                with self.net.mixed():
                    hidden = self.net.hidden(held)
                last = hidden[torch.arange(len(part), device=self.device), (lengths[part] - 1).to(self.device)]
                found[part] = self.net.values(last).float().cpu()
                a += len(part)
        return Column(found)

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
            minibatch: rows of an optimizer step; None is all of them.
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
        self._needs("lm" if loss.on == "logprobs" else "scalar", f"update with {loss.name}")
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
        """All weights by name, tied ones once. With adapters: the base and the adapters."""
        return adapters.plain(self.net.model)

    def digest(self) -> str:
        """sha256 over names, dtypes, shapes and bytes of all weights in the order of their names."""
        total = hashlib.sha256()
        for name, weight in sorted(self.weights().items()):
            total.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
            flat = weight.contiguous().reshape(-1)
            total.update(flat.view(torch.uint8).cpu().numpy().tobytes())
        return total.hexdigest()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that training needs to go on exactly, as tensors and JSON. They are not copies."""
        if self.trainer is None:
            return {f"weights.{n}": w for n, w in self.weights().items()}, {}
        return self.trainer.state()

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        if self.trainer is not None:
            self.trainer.load_state(tensors, meta)
            return
        with torch.no_grad():
            for name, weight in self.net.model.named_parameters():
                weight.copy_(tensors[f"weights.{name}"])

    def plain_weights(self) -> dict[str, Tensor]:
        """The weights by name, as a model without adapters has them: what it has are merged. They may be views."""
        if self.build.lora is None:
            return dict(adapters.plain(self.net.model))
        return dict(adapters.merged(self.net.model))

    def copy_weights_from(self, other: HFEngine) -> None:
        """Take the weights of another engine of the same model; adapters are merged on the way."""
        self.take_weights(self._given(other), other.build.model.title)

    def blend(self, other: HFEngine, decay: float) -> float:
        """``w = decay w + (1 - decay) w_other`` for every weight; gives the norm of the change.

        Raises ModelError when the two are not of the same model, when this one has adapters, or weights in half
        precision for an average; ProgramError for a decay outside [0, 1].
        """
        if not 0 <= decay <= 1:
            raise ProgramError(f"decay={decay} is no share of the old weights.", fix="Give a number from 0 to 1.")
        if self.build.lora is not None:
            raise ModelError(
                f"'{self.build.model.title}' has adapters here, and averaged factors are no average of the weights.",
                fix="Let a worker without adapters follow: fl.Actor(model) or fl.Reference(model), without lora=.",
            )
        given = self._given(other)
        mine = self._fitting(given, other.build.model.title)
        low = next((w.dtype for w in mine.values() if w.dtype not in (torch.float32, torch.float64)), None)
        if low is not None and 0 < decay < 1:
            raise ModelError(
                f"The weights of '{self.build.model.title}' are {low}, in which small steps of an average are lost.",
                fix='Declare the worker that follows with dtype="fp32".',
            )
        moved = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for name, weight in mine.items():
                step = (given[name].to(weight) - weight) * (1 - decay)
                if decay == 0:
                    weight.copy_(given[name])
                else:
                    weight.add_(step)
                moved += step.double().square().sum().cpu()
        return float(moved.sqrt())

    def _given(self, other: HFEngine) -> Mapping[str, Tensor]:
        """The weights of another engine under the names of this one."""
        given = adapters.plain(other.net.model)
        return given if set(given) == set(dict(self.net.model.named_parameters())) else adapters.merged(other.net.model)

    def take_weights(self, weights: Mapping[str, Tensor], title: str = "another copy") -> None:
        """Take weights by name. Raises ModelError when one is missing or has another shape."""
        mine = self._fitting(weights, title)
        with torch.no_grad():
            for name, weight in mine.items():
                weight.copy_(weights[name])

    def _fitting(self, weights: Mapping[str, Tensor], title: str) -> dict[str, Tensor]:
        """The weights of this engine, where the given ones have all of their names and shapes."""
        mine = dict(self.net.model.named_parameters())
        lacking = sorted(set(mine) - set(weights))
        if lacking or any(mine[n].shape != weights[n].shape for n in mine):
            raise ModelError(
                f"The weights of '{title}' do not fit '{self.build.model.title}'.",
                have=lacking[:5] or None,
                fix="Use the same model for both.",
            )
        return mine

    def save(self, folder: str | Path) -> None:
        """A Hugging Face folder: weights (adapters merged), configuration, generation settings, tokenizer."""
        model = self.net.model
        if self.build.head == "scalar" and model.config.pad_token_id is None:
            model.config.pad_token_id = self.pad_id  # its own class cannot score batches without
        model.config.use_cache = True
        try:
            with quiet():
                model.save_pretrained(str(folder), state_dict=adapters.whole_state(model))
        finally:
            model.config.use_cache = False
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(str(folder))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _needs(self, head: str, what: str) -> None:
        if self.build.head != head:
            raise ProgramError(
                f"The model '{self.build.model.title}' has the head '{self.build.head}'; {what} needs '{head}'.",
                fix="Call it on a worker of the right kind: log-probabilities on an actor, values on a critic.",
            )

    def _micro(self, rows: Rows, micro_tokens: int | None) -> Iterable[Any]:
        budget = micro_tokens or self._micro_tokens(training=False)
        for micro in micro_batches(self.net, rows, torch.arange(len(rows)), budget):
            yield micro.to(self.device)

    def _micro_tokens(self, *, training: bool) -> int:
        """Tokens of a forward pass whose activations fill a fixed share of memory, whatever is free just now."""
        config = self.net.config
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        layer = 16 * config.hidden_size + 5 * inner
        kept = config.num_hidden_layers * (config.hidden_size if self.build.gradient_checkpointing else layer)
        held = (kept if training else 0) + 2 * layer
        return max(1024, ACTIVATION_BYTES.get(self.device.type, 2 << 30) // (held * self.net.compute.itemsize))


def _check_vocabulary(model: Any, tokenizer: Any) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer is not None and len(tokenizer) > rows:
        raise ModelError(
            f"The tokenizer has {len(tokenizer)} tokens; the model embeds {rows}.",
            fix="Use the model's own tokenizer, or a configuration with a larger vocab_size.",
        )


def _adopt_ids(model: Any, tokenizer: Any, build: Build) -> None:
    """A model made from a configuration ends and pads where its tokenizer does, unless the configuration says."""
    said = build.model.config
    if said is None or tokenizer is None:
        return
    settings = getattr(model, "generation_config", None)
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        if name not in said:
            for place in (model.config, settings):
                if place is not None:
                    setattr(place, name, getattr(tokenizer, name, None))
