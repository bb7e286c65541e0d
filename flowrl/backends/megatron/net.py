"""A stage of a model as the losses and the reading ops see it: hidden states, head, and passes through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..hf.logits import Head
from ..hf.net import Net
from ..messages import broadcast_json, dtype_name, empty_like
from .parallel import Parallel
from .passes import Feed, feed, run, whole
from .plain import Plain


class StageNet(Net):
    """A stage and its place on the mesh: ``net.through([(ids, compute)])``.

    ``compute`` is what is wanted of a pass; on the last stage it finds the hidden states of that pass as
    ``net.hidden(...)``, whatever it asks for. ``model`` is the transformers model without weights.
    """

    #: What generates is an engine of its own.
    generates = False

    def __init__(self, model: Any, plain: Plain, stage: Any, settings: Any, parallel: Parallel, kind: str) -> None:
        self.model, self.plain, self.stage, self.settings, self.parallel = model, plain, stage, settings, parallel
        self.kind, self.config = kind, plain.config
        self.compute = self.weights_dtype = settings.params_dtype
        self.device = next(stage.parameters()).device
        self.output = getattr(stage, "score", None)  # type: ignore[assignment]
        self.reach: int | None = 0
        self.own_cache = self.grouped = self.cached = False
        self.recomputed: list[Any] = []
        self._given: Tensor | None = None

    @property
    def head(self) -> Head:
        """This rank's part of the output layer, without padding. On the last stage only."""
        tp, each = self.parallel["tp"], -(-self.plain.vocab // self.parallel.mesh["tp"])
        alone = self.parallel.mesh["tp"] == 1
        layer = self.stage.embedding.word_embeddings if self.plain.tied and self.parallel.first else None
        weight = (layer or self.stage.output_layer).weight[: max(0, min(each, self.plain.vocab - tp * each))]
        group = None if alone else self.parallel.group("tp")
        return Head(weight, compute=self.compute, group=group, first=tp * each)

    def hidden(self, *_: Any, **__: Any) -> Tensor:
        """The hidden states [sequences, tokens, hidden] of the pass that is computed now."""
        assert self._given is not None, "hidden states are there on the last stage of a pass"
        return self._given

    def through(self, passes: Sequence[tuple[Tensor, Callable[[], Any]]], *, module: Any = None) -> list[Any]:
        """What ``compute`` gives for each pass of (ids [sequences, tokens], compute); nothing but on the last stage.

        With ``module``, the stage as its optimizer has it, ``compute`` gives a tuple that begins with a loss. Gradients
        of all losses add up; what is given is detached.
        """
        feeds = [feed(ids, f, self.parallel, self.device, filler=self.filler) for ids, f in passes]
        with self.parallel.active():
            return run(module or self.stage, self.settings, feeds, self._last, train=module is not None)

    def _last(self, hidden: Tensor, fed: Feed) -> tuple[Tensor, Any]:
        """A pass on the last stage: its loss, and what is kept."""
        self._given = whole(hidden, fed, self.settings, self.parallel)
        try:
            found = fed.compute()
        finally:
            self._given = None
        if not torch.is_grad_enabled():
            return hidden, found
        value, *others = found
        # Every rank along cp computes the loss of all tokens, and their gradients are added up.
        return value / self.parallel.mesh["cp"], (value.detach(), *others)

    def passes(self, count: int, most: Callable[[int], int]) -> int:
        """How many passes this rank makes for ``count`` micro-batches.

        One at least. Ranks that share experts make as many as each other: ``most`` over them.
        """
        return max(1, most(count) if self.plain.experts is not None else count)

    def told(self, item: Any) -> Any:
        """What the last stage says, on all stages of the pipeline: anything that JSON can say, tensors apart."""
        if self.parallel.mesh["pp"] == 1:
            return item
        group = self.parallel.group("pp")
        return broadcast_json(item, torch.distributed.get_process_group_ranks(group)[-1], group)

    def shown(self, found: list[Any]) -> list[Any]:
        """The tensors that the last stage has, or pairs of them, on all stages of the pipeline."""
        if self.parallel.mesh["pp"] == 1:
            return found
        rows: list[tuple[Tensor | None, ...]] = [row if isinstance(row, tuple) else (row,) for row in found]
        made = self.told([[None if t is None else (list(t.shape), dtype_name(t)) for t in row] for row in rows])
        if not self.parallel.last:
            rows = [tuple(None if s is None else empty_like(s[0], s[1], self.device) for s in row) for row in made]
        group = self.parallel.group("pp")
        for tensor in (t for row in rows for t in row if t is not None and t.numel()):
            torch.distributed.broadcast(tensor, torch.distributed.get_process_group_ranks(group)[-1], group=group)
        return [row[0] if len(row) == 1 else row for row in rows]
