"""vLLM as an engine that generates: the weights lie here, in memory that its own process reads, and it has its rows."""

from __future__ import annotations

import secrets
import tempfile
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from ...batch import Column
from ...errors import DataError, EngineLost, ModelError, NotFinite, RunError
from ...placement.backends import backend
from ...placement.cluster.mesh import Mesh
from ...placement.model.model_shape import ModelShape
from ...placement.model.rank_parameters import parameters_of
from ...placement.model.weight_layout import Layout
from ...workers.decode_passes import DecodePasses
from ...workers.engine import Published
from ...workers.model_options import Build, Sampled, Sampling
from ...workers.streaming import FailedCall, PrefixTokens, SampledRow, SampleRequest, Streams, drawn_apart, gathered
from ...workers.tokens.row_support import CallSupport
from ...workers.weights.weight_boxes import Sums, sums
from ..continuous import RunningRow, asleep, check_lengths, grown_rows
from ..hf import engine as reference
from ..hf.copy_weights import copy
from ..hf.finite import check_finite, not_finite
from ..mirror import KINDS, Mirrored, check_build, open_mirror
from ..probe import TOLERANCE, expected, probe_rows
from ..stream import Stream, stream_of
from ..team import Ranks, Team, open_team, rank_on
from .child import Child
from .expert_stacks import as_transformers_has_them
from .proof import check_probe, check_weights
from .row_messages import as_message, from_message
from .split_weights import SplitParameters, WholeOneByOne
from .versions import check_device, installed
from .weight_memory import WeightMemory, open_weights

_MIXTURES = ("qwen2_moe", "qwen3_moe")


def open_engine(build: Build) -> VLLMEngine:
    """Start a process with vLLM and the model of ``build``. Raises ModelError for what it does not do."""
    version, device = installed(), reference.pick_device(build.device)
    check_device(device.type)
    check_build(build, "vllm", "vLLM")
    for what, fix in backend("vllm").unrun(build.axes, build.options, device.type):
        raise ModelError(what, fix=fix)
    whole = Mesh(build.axes)["tp"] == 1
    mirror = open_mirror(build if whole else replace(build, axes={}), "vllm", (*KINDS, *_MIXTURES))
    mixture = mirror.net.config.model_type in _MIXTURES
    for what, fix in backend("vllm").unrun({}, {}, device.type, experts=mixture):
        raise ModelError(what, fix=fix)
    if mixture and mirror.net.compute != torch.float32:
        raise ModelError(
            f"Rounded to {str(mirror.net.compute).removeprefix('torch.')}, tokens of '{build.model.title}' take other "
            "experts in vLLM than here, which the proof of a publish cannot tell from a fault.",
            fix="Give the actor dtype='fp32', or write engine: hf.",
        )
    return VLLMEngine(build, mirror, version)


class VLLMEngine(Mirrored):
    """A replica of vLLM, or its part on one of the ranks that split it: ``open_engine(Build(model, axes={"tp": 2}))``.

    Its weights lie here as they were last published: in vLLM's own parameters, fused, split and rounded as it has them,
    in memory that its process reads in place, and packs as it computes. A token depends on its row's seed and its place
    alone: rows are those of the reference engine, save rounding. Its rows leave one by one, of several calls in one
    batch. Ranks that split a model have a process each, which make each step together; each rank makes the same calls,
    with the same rows, in the same order, and has all results. What a rank decides by its clock it has to ask the
    others first (:meth:`any_rank`).
    """

    #: What a publish may do while rows run.
    publish_modes = ("drain", "interrupt")

    def __init__(self, build: Build, mirror: Any, version: str) -> None:
        self._running: dict[tuple[int, int], RunningRow] = {}  # with what was told of them; in their order
        self._paused, self._version = False, 0
        self._begun_again = True  # since the last pause, as a publish has them do
        self._written = 0  # how often somebody had written the weights at the last publish
        self._drawn = 0  # a checksum of the rows that have left, to hold against that of other ranks
        super().__init__(build, mirror, {**{o.name: o.default for o in backend("vllm").options}, **build.options})
        self._team = open_team(build.axes, ("tp",))
        self._memory = _memory_of(mirror, build.axes, self._team)
        self._emptied = False  # vLLM has no weights since it slept: the next publish gives them to it
        self._reference: WholeOneByOne | None = None
        if self._team.data > 1:
            self._split()
        else:
            _share(mirror, self._memory)
        # As this process writes them: the model's own, or the parts of a split one.
        split = [shard.tensor for shard in self._memory.shards]
        self._weights = split if self._team.data > 1 else list(mirror.net.model.parameters())
        self._probe = probe_rows(mirror.net.config.vocab_size, self.positions)
        with tempfile.TemporaryDirectory(prefix="flowrl-vllm-") as folder:
            config = mirror.net.model.config
            config.architectures = [type(mirror.net.model).__name__]
            config.save_pretrained(folder)
            meeting = self._team.gather(f"{folder}/{secrets.token_hex(8)}")[0]
            self.child = Child(
                {
                    "folder": folder,
                    "version": version,
                    "dtype": self._dtype,
                    "positions": self.positions,
                    "options": self.options,
                    "ranks": {"size": self._team.data, "rank": self._team.place, "meeting": meeting},
                },
                reference.pick_device(build.device),
            )
            self._team.gather("ready")  # all have met

    def _split(self) -> None:
        """Keep the parts of this rank. The first one puts the whole together for the probe, one weight at a time."""
        mesh, shards = Mesh(self.build.axes), self._memory.shards
        pool = Ranks(mesh.size, rank_on(mesh), None)
        whole, self.mirror.parameters = self.mirror.shards(), SplitParameters(self.build, shards, pool)
        copy(self.mirror.parameters, whole, (self.build.model.title, self.build.model.title))
        told = self._team.gather(self._memory.told)
        try:
            every = [box for memory in told for box in open_weights(memory)[-1]]
        except OSError as error:
            raise ModelError(
                f"Ranks of vLLM split '{self.build.model.title}' and cannot read each other's memory: {error}.",
                fix="Give the ranks of a tp one machine.",
            ) from error
        self._reference = WholeOneByOne(self.mirror.net.model, every)

    def close(self) -> None:
        """End its process."""
        self.child.close()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Column, n: int, seeds: Tensor, sampling: Sampling, starts: Tensor | None = None
    ) -> Sampled:
        """``n`` responses to each prompt; see :func:`flowrl.backends.hf.generation.generate.generate`."""
        said = self._asked(SampleRequest(prompts, n, seeds, sampling, starts))
        rows = [from_message(row) for row in self.child.ask("generate", len(seeds), **said)]
        found = gathered(rows, sampling)
        check_finite("log-probabilities of sampled tokens", found.rollout_logprobs.values, self.mirror.parameters)
        return found

    def _asked(self, request: SampleRequest) -> dict[str, Any]:
        """Return what vLLM's process is told of a call."""
        if self.offloaded is not None:
            raise asleep()
        if not self.publishes or self._emptied:
            self._publish()
        prompts, sampling = request.prompts, request.sampling
        most = check_lengths(self.positions, prompts.lengths)
        limits = torch.full_like(prompts.lengths, sampling.max_tokens)
        if most is not None:
            limits = limits.minimum(most - prompts.lengths)
        return {
            "prompts": [row.tolist() for row in prompts],
            "n": request.n,
            "seeds": request.seeds.tolist(),
            "starts": request.row_starts,
            "limits": limits.repeat_interleave(request.n).tolist(),
            "sampling": asdict(sampling),
            "stops": sorted({*self.mirror.eos_ids, *sampling.stop}),
        }

    # -- rows one by one; see flowrl.workers.streaming.Streams --------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """Its calls, for threads and for asyncio."""
        return stream_of(cast("Streams", self))

    @property
    def most_rows(self) -> int:
        """How many rows get a token in a step, at most."""
        return self.options["rows"]

    def submit(self, request: SampleRequest) -> int:
        """Begin a call whose rows leave one by one."""
        before, sampling = request.kept_rows(), request.sampling
        asked = self._asked(request)
        (said,) = self.child.ask("submit", 1, **asked, kept=[as_message(row) for row in before.values()])
        recorded = CallSupport(request.rows) if sampling.support else None
        for row in range(request.rows):
            had = before.get(row)
            if had is None or had.reason == "aborted":
                heard = RunningRow(said["call"], row, (), 0, 0, 0, sampling, frozenset(), recorded)
                if had is not None:
                    heard.go_on_from(had)
                self._running[said["call"], row] = heard
        return said["call"]

    def tokens_since(self, known: Mapping[int, Mapping[int, int]]) -> list[SampledRow]:
        """Return what rows have got, as it was told with the last steps."""
        return grown_rows(self._running.values(), known)

    def step(self) -> list[SampledRow | FailedCall]:
        """Go on by a token of each row; return what has ended."""
        if self._paused or self.offloaded is not None or not self._running:
            return []
        if self._count_writes() != self._written:
            raise self._written_meanwhile()
        if self._emptied:
            self._publish()
        (said,) = self.child.ask("step", 1, version=self._version)
        for grown in map(from_message, said["grown"]):
            self._running[grown.call, grown.row].go_on_from(grown)
        return [self._left(ended) for ended in said["left"]]

    @property
    def ranks(self) -> int:
        """How many ranks have it together."""
        return self._team.data

    def any_rank(self, said: bool) -> bool:
        """Return whether any of the ranks that have it together says so; each of them has to ask.

        Raises RunError where they have drawn other tokens: from here on none would compute what is right.
        """
        found, most, least = self._team.largest([int(said), self._drawn, -self._drawn])
        if most != -least:
            raise drawn_apart(self.build.model.title)
        return bool(found)

    def _left(self, said: Mapping[str, Any]) -> SampledRow | FailedCall:
        """Note that a row has left, or all rows of a call that failed."""
        call, row = said["call"], said["row"]
        if "ids" in said:
            del self._running[call, row]
            self._drawn = crc32(array("q", (row, *said["ids"])), self._drawn)
            return from_message(said)
        self._running = {key: heard for key, heard in self._running.items() if key[0] != call}
        if "what" in said:
            return FailedCall(call, DataError(said["what"], fix=said["fix"]))
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
        return [from_message(row) for row in said["rows"]]

    def pause(self) -> None:
        """Make no tokens until :meth:`resume`, so that weights may be written."""
        self._paused, self._begun_again = True, False

    def resume(self, version: int | None = None, *, keep_cache: bool = False) -> None:
        """Go on, under the weights of ``version``. RunError for ``keep_cache``: a publish empties the cache."""
        if keep_cache:
            raise RunError("vLLM computes keys and values again after a publish.", fix="Publish with 'interrupt'.")
        if version is not None and self._running and not (self._begun_again or self._emptied):
            list(self.child.ask("again", 1))
        self._paused = False
        self._version = self._version if version is None else version

    def prefix_tokens(self) -> PrefixTokens:
        """Return the tokens that rows have brought, and those that were in the cache; of whole calls too."""
        (said,) = self.child.ask("prefix_tokens", 1)
        return PrefixTokens(said["asked"], said["found"])

    def take_passes(self) -> tuple[DecodePasses, ...]:
        """Return how long passes took since it was asked last, those of whole calls too; the first of ranks that split
        it says it."""
        (said,) = self.child.ask("take_passes", 1)  # by each rank: calls have the same numbers on all
        return () if self._team.place else tuple(DecodePasses(*each) for each in said["passes"])

    # -- weights ------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Have vLLM take the weights as they are here. Raises RunError where it does not compute with them after."""
        if self.offloaded is not None:
            raise asleep()
        if self._running and not self._paused and not (self._emptied and self._count_writes() == self._written):
            raise self._written_meanwhile()
        self.publishes += 1
        what = f"publish {self.publishes} of {self.build.model.title}"
        began = time.monotonic()
        full = (self.publishes - 1) % self.options["probe"] == 0
        probe = self._probe if full else self._probe[:1]
        self._team.gather("written")
        here = sums(replace(shard, main=True) for shard in self._memory.shards)
        wanted: list[list[float]] = []
        asked = {"number": self.publishes, "weights": self._memory.told, "probe": probe}
        try:
            (said,) = self.child.ask("publish", 1, meanwhile=lambda: wanted.extend(self._expected(probe)), **asked)
        except NotFinite:
            raise
        except RunError as error:
            kind = EngineLost if isinstance(error, EngineLost) else RunError
            raise kind(f"{what} failed. {error.what}", fix=error.fix) from error
        self._check_together(what, said, here)
        gap = check_probe(what, said["probe"], wanted, TOLERANCE[self._dtype])
        self._emptied = False
        took = time.monotonic() - began
        self.published = Published(
            self._memory.size, load=said["load"], proof=took - said["load"], gap=gap, rows=len(probe)
        )
        self._begun_again, self._written = True, self._count_writes()

    def _count_writes(self) -> int:
        """How often weights were written, as torch counts: vLLM reads them in place, and a row would have torn ones."""
        return sum(weight._version for weight in self._weights)

    def _written_meanwhile(self) -> RunError:
        return RunError(
            f"The weights were written while {len(self._running)} rows were being sampled with them.",
            fix="Call pause() before they are written and resume(version) after.",
        )

    def _check_together(self, what: str, said: Mapping[str, Any], here: Sums) -> None:
        """Raise RunError where the weights did not arrive on some rank of those that split them; the same on each."""
        try:
            check_weights(what, said, here)
            wrong = None
        except RunError as error:
            wrong = error.what, error.fix
        for place, told in enumerate(self._team.gather(wrong)):
            if told is not None:
                part = f" on rank {place} of tp" if self._team.data > 1 else ""
                raise RunError(told[0].replace(what, what + part, 1), fix=told[1])

    def _expected(self, rows: list[list[int]]) -> list[list[float]]:
        """Return the log-probabilities of the probe's tokens that transformers computes from the weights."""
        if self._reference is None:
            return expected(self.mirror, rows)
        return self._team.gather(None if self._team.place else self._reference.logprobs(rows))[0]

    # -- memory -------------------------------------------------------------------------------------------------------

    def sleep(self) -> int:
        """Leave memory to others: the weights here, and what vLLM holds of them, of keys and of values.

        Rows that run keep their tokens. Returns the bytes that this frees; 0 where it sleeps already.
        """
        if self.offloaded is not None:
            return 0
        (said,) = self.child.ask("sleep", 1, weights=self._memory.told)
        self._emptied = True
        return said["freed"] + self._offload((shard.tensor for shard in self._memory.shards), self._memory.empty)

    def wake(self) -> int:
        """Take the memory of the weights here back; see :meth:`flowrl.backends.mirror.Mirrored.wake`."""
        before = self._count_writes()
        taken = super().wake()
        self._written += self._count_writes() - before  # what comes back is as it was
        return taken


def _memory_of(mirror: Any, axes: Mapping[str, int], team: Team) -> WeightMemory:
    """Return memory for the parameters of this rank, of a team that splits the model; each box counts on one rank."""
    shape = ModelShape.from_config(mirror.net.model.config.to_dict())
    layout = Layout(shape, Mesh({"tp": team.data}), rules=backend("vllm").layout)
    held = [list(as_transformers_has_them(parameters_of(layout, rank))) for rank in range(team.place + 1)]
    again = bool(axes) and Mesh(axes).coordinates(rank_on(Mesh(axes))).get("dp", 0) > 0
    others = {(part.name, part.box) for ones in (held if again else held[:-1]) for one in ones for part in one.parts}
    return WeightMemory(held[-1], mirror.net.compute, others)


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
