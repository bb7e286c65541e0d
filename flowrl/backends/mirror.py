"""The weights of an engine that computes elsewhere: they lie here, and whatever changes them is published to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..errors import ModelError
from ..workers.engine import Published
from ..workers.model_options import Build, dtypes
from ..workers.weights.offloaded import Offloaded
from ..workers.weights.weight_boxes import Shard
from .hf import engine as reference

#: The kinds of models whose weights are known to arrive in such an engine, by their name in a configuration.
KINDS = ("llama", "qwen2", "qwen3")


def check_build(build: Build, name: str, title: str) -> None:
    """Raise ModelError for what such an engine is not given: ``check_build(build, "vllm", "vLLM")``."""
    if build.head != "lm":
        raise ModelError(
            f"{title} generates, and this model has a scalar head.", fix=f"Leave engine: {name} out for it."
        )
    if build.lora is not None:
        raise ModelError(
            f"The model '{build.model.title}' has adapters of its own here, which {title} is not given.",
            fix="Add train: {backend: hf} to its place: what is trained there is published with its adapters merged.",
        )


def open_mirror(build: Build, name: str, kinds: tuple[str, ...] = KINDS) -> Any:
    """Open the model in this process, on the CPU and without an optimizer. ModelError where it is none of ``kinds``."""
    on_cuda = reference.pick_device(build.device).type == "cuda"
    _, dtype = dtypes(build.dtype, trained=False, cuda=on_cuda)  # that of the place, although it lies on the CPU
    mirror = reference.open_engine(replace(build, device="cpu", dtype=dtype, optim=None, gradient_checkpointing=False))
    kind = mirror.net.config.model_type
    if kind not in kinds:
        raise ModelError(
            f"The engine '{name}' does not know models of the kind '{kind}'.", fix="Write engine: hf.", have=kinds
        )
    return mirror


class Mirrored(ABC):
    """An engine whose weights, as they were last published, are those of ``mirror``: the reference engine, here.

    They are moved, compared and saved there.
    """

    def __init__(self, build: Build, mirror: Any, options: Mapping[str, Any]) -> None:
        self.build, self.mirror, self.options = build, mirror, options
        self.published: Published | None = None  # the last one
        self.publishes = 0
        self.offloaded: Offloaded | None = None  # what is out of memory while it sleeps

    def _offload(self, tensors: Iterable[Tensor], empty: Callable[[], None]) -> int:
        """Set the weights here aside; returns their bytes. ``empty`` gives the pages of ``tensors`` back."""
        offloaded = Offloaded(self.state_shards())
        offloaded.take(tensors, empty)
        self.offloaded = offloaded
        return offloaded.bytes

    def wake(self) -> int:
        """Take the memory of the weights here back. The engine's comes with the next publish, or before its next token.

        Returns the bytes; 0 where it is awake.
        """
        if self.offloaded is None:
            return 0
        size = self.offloaded.bring_back()
        self.offloaded = None
        return size

    @abstractmethod
    def _publish(self) -> None:
        """Have the engine take the weights as they are here. Raises RunError where it does not compute with them."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. ModelError where it has none."""
        return self.mirror.tokenizer

    @property
    def positions(self) -> int | None:
        """How many tokens a sequence may have: the model's, or fewer where the plan says ``context``."""
        found = [p for p in (self.mirror.positions, self.options["context"]) if p]
        return min(found) if found else None

    @property
    def _dtype(self) -> str:
        return str(self.mirror.net.compute).removeprefix("torch.")

    def plain_weights(self) -> Mapping[str, Tensor]:
        """The weights by name; they are views."""
        return self.mirror.plain_weights()

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take whole weights by name, and publish them. Raises ModelError when one is missing or has another shape."""
        self.mirror.take_weights(weights)
        self._publish()

    def shards(self) -> list[Shard]:
        """The weights as boxes: views on what the engine reads when :meth:`weights_written` is called."""
        return self.mirror.shards()

    def weights_written(self) -> None:
        """Publish what somebody has written into the views of :meth:`shards`."""
        self.mirror.weights_written()
        self._publish()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The weights as tensors by name, and JSON."""
        return self.mirror.state()

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self.mirror.load_state(tensors, meta)
        self._publish()

    def state_shards(self) -> tuple[list[Shard], dict[str, Any]]:
        """What a checkpoint saves, as boxes, and JSON."""
        return self.mirror.state_shards()

    def load_state_shards(self, read: Callable[[Shard], bool], meta: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_shards` gave, on whichever ranks."""
        self.mirror.load_state_shards(read, meta)
        self._publish()

    def digest(self) -> str:
        """A digest of all weights; the same for every layout."""
        return self.mirror.digest()

    def save(self, folder: str) -> None:
        """A Hugging Face folder."""
        self.mirror.save(folder)
