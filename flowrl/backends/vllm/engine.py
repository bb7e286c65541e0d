"""vLLM as an engine that generates: the weights lie here, in memory that its own process reads, and it has its rows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor

from ...batch import Column
from ...errors import ModelError, RunError
from ...placement.backends import backend
from ...placement.cluster.mesh import Mesh
from ...placement.model.model_shape import ModelShape
from ...placement.model.rank_parameters import Parameter, parameters_of
from ...placement.model.weight_layout import Layout
from ...workers.model_options import Build, Sampled, Sampling
from ...workers.streaming import FailedCall, SampledRow, Streams, gathered
from ...workers.weights.weight_boxes import sums
from ..continuous import check_lengths
from ..hf import engine as reference
from ..hf.finite import check_finite, not_finite
from ..mirror import Mirrored, Published, check_build, open_mirror
from ..probe import expected, probe_rows
from ..stream import Stream, stream_of
from .child import Child
from .proof import check_proof
from .versions import installed
from .weight_memory import WeightMemory


def open_engine(build: Build) -> VLLMEngine:
    """Start a process with vLLM and the model of ``build``. Raises ModelError for what it does not do."""
    version = installed()
    check_build(build, "vllm", "vLLM")
    if reference.pick_device(build.device).type != "cpu":
        raise ModelError(
            "The engine 'vllm' has been run on the CPU alone, and this place has a GPU.",
            fix="Write engine: hf, or give the pool processes or device: cpu.",
        )
    return VLLMEngine(build, open_mirror(build, "vllm"), version)


class VLLMEngine(Mirrored):
    """A replica of vLLM: ``open_engine(Build(Model("Qwen/Qwen3-0.6B"), options={"kv_cache": 4.0}))``.

    A copy of the model with the weights as they were last published is in this process, where they are moved, compared
    and saved as those of the reference engine. They are views on vLLM's own parameters, fused and rounded as it has
    them, in memory that its process reads in place, and packs as it computes. A token
    depends on its row's seed and its place alone: rows are those of the reference engine, save rounding.
    """

    #: What a publish may do while rows run.
    publish_modes = ("drain", "interrupt")

    def __init__(self, build: Build, mirror: Any, version: str) -> None:
        super().__init__(build, mirror, {**{o.name: o.default for o in backend("vllm").options}, **build.options})
        self._running: dict[tuple[int, int], None] = {}  # in the order of calls and rows
        self._paused, self._version = False, 0
        self._memory = WeightMemory(_parameters(mirror), mirror.net.compute)
        _share(mirror, self._memory)
        self._probe = probe_rows(mirror.net.config.vocab_size, self.positions)
        with tempfile.TemporaryDirectory(prefix="flowrl-vllm-") as folder:
            config = mirror.net.model.config
            config.architectures = [type(mirror.net.model).__name__]
            config.save_pretrained(folder)
            self.child = Child(
                {
                    "folder": folder,
                    "version": version,
                    "dtype": self._dtype,
                    "positions": self.positions,
                    "options": self.options,
                }
            )

    def close(self) -> None:
        """End its process."""
        self.child.close()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None = None
    ) -> Sampled:
        """``n`` responses to each prompt; see :func:`flowrl.backends.hf.generate.generate`."""
        said = self._asked(prompts, n, seeds, sampling, starts)
        rows = [_row(row) for row in self.child.ask("generate", len(seeds), **said)]
        found = gathered(rows, sampling)
        check_finite("log-probabilities of sampled tokens", found.rollout_logprobs.values, self.mirror.parameters)
        return found

    def _asked(
        self, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None
    ) -> dict[str, Any]:
        """Return what vLLM's process is told of a call."""
        if not self.publishes:
            self._publish()
        most = check_lengths(self.positions, prompts.lengths)
        limits = torch.full_like(prompts.lengths, sampling.max_tokens)
        if most is not None:
            limits = limits.minimum(most - prompts.lengths)
        return {
            "prompts": [row.tolist() for row in prompts],
            "n": n,
            "seeds": seeds.tolist(),
            "starts": [0] * len(seeds) if starts is None else starts.tolist(),
            "limits": limits.repeat_interleave(n).tolist(),
            "sampling": asdict(sampling),
            "stops": sorted({*self.mirror.eos_ids, *sampling.stop}),
        }

    # -- rows one by one; see flowrl.workers.streaming.Streams --------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """Its calls, for threads and for asyncio."""
        return stream_of(cast("Streams", self))

    def submit(self, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None = None) -> int:
        """Begin a call whose rows leave one by one."""
        (said,) = self.child.ask("submit", 1, **self._asked(prompts, n, seeds, sampling, starts))
        self._running.update(dict.fromkeys((said["call"], row) for row in range(len(seeds))))
        return said["call"]

    def step(self) -> list[SampledRow | FailedCall]:
        """Go on by a token of each row; return what has ended."""
        if self._paused or not self._running:
            return []
        (said,) = self.child.ask("step", 1, version=self._version)
        return [self._left(ended) for ended in said["left"]]

    def _left(self, said: Mapping[str, Any]) -> SampledRow | FailedCall:
        """Note that a row has left, or all rows of a call that failed."""
        call, row = said["call"], said["row"]
        if "ids" in said:
            del self._running[call, row]
            return _row(said)
        self._running = {key: None for key in self._running if key[0] != call}
        what = f"Log-probabilities of row {row} of call {call}, token {said['token']}, are not finite"
        return FailedCall(call, not_finite(what, self.mirror.parameters))

    def running(self) -> list[tuple[int, int]]:
        """Return ``(call, row)`` of the rows that have not left."""
        return list(self._running)

    def abort(self, call: int, rows: Iterable[int] | None = None) -> list[SampledRow]:
        """End rows of a call, or all of them; return them with the tokens that they have."""
        (said,) = self.child.ask("abort", 1, of=call, rows=None if rows is None else list(rows))
        for row in said["rows"]:
            del self._running[call, row["row"]]
        return [_row(row) for row in said["rows"]]

    def pause(self) -> None:
        """Make no tokens until :meth:`resume`, so that weights may be written."""
        self._paused = True

    def resume(self, version: int | None = None, *, keep_cache: bool = False) -> None:
        """Go on, under the weights of ``version``. RunError for ``keep_cache``: a publish empties the cache."""
        if keep_cache:
            raise RunError("vLLM computes keys and values again after a publish.", fix="Publish with 'interrupt'.")
        self._paused = False
        self._version = self._version if version is None else version

    # -- weights ------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Have vLLM take the weights as they are here. Raises RunError where it does not compute with them after."""
        if self._running and not self._paused:
            raise RunError(
                f"The weights were written while {len(self._running)} rows were being sampled with them.",
                fix="Call pause() before they are written and resume(version) after.",
            )
        self.publishes += 1
        what = f"publish {self.publishes} of {self.build.model.title}"
        began = time.monotonic()
        full = (self.publishes - 1) % self.options["probe"] == 0
        probe = self._probe if full else self._probe[:1]
        wanted, here = expected(self.mirror, probe), sums(self.mirror.shards())
        reference = time.monotonic() - began
        try:
            (said,) = self.child.ask("publish", 1, number=self.publishes, weights=self._memory.told, probe=probe)
        except RunError as error:
            raise RunError(f"{what} failed. {error.what}", fix=error.fix) from error
        gap = check_proof(what, said, sums=here, wanted=wanted, dtype=self._dtype)
        seconds = said["seconds"]
        self.published = Published(
            self._memory.size, load=seconds["load"], proof=reference + seconds["proof"], gap=gap, rows=len(probe)
        )


def _parameters(mirror: Any) -> list[Parameter]:
    """Return the parameters of vLLM for a model."""
    shape = ModelShape.from_config(mirror.net.model.config.to_dict())
    return list(parameters_of(Layout(shape, Mesh({}), rules=backend("vllm").layout), 0))


def _share(mirror: Any, memory: WeightMemory) -> None:
    """Put the weights of the copy that is here into the memory of vLLM's parameters, and let them be views on it."""
    views = {shard.name: shard.tensor for shard in memory.shards}
    weights = dict(mirror.net.model.named_parameters())
    if {n: tuple(w.shape) for n, w in weights.items()} != {n: tuple(v.shape) for n, v in views.items()}:
        raise ModelError(
            f"The engine 'vllm' does not know where all weights of '{mirror.build.model.title}' lie in its parameters.",
            have=sorted(weights.keys() ^ views.keys())[:5] or None,
            fix="Write engine: hf.",
        )
    for name, weight in weights.items():
        views[name].copy_(weight.data)
        weight.data = views[name]


def _row(said: Mapping[str, Any]) -> SampledRow:
    """A row as it came from vLLM's process."""
    return SampledRow(
        said["call"],
        said["row"],
        tuple(said["ids"]),
        tuple(said["rollout_logprobs"]),
        tuple(said["sampling_logprobs"]),
        tuple((version, tokens) for version, tokens in said["versions"]),
        said["reason"],
    )
