"""Seconds of a call from first principles: operations over peak, bytes over bandwidth, rings over links.

Each term is a closed form of the model's size, the rows and the devices, times a factor of :class:`Efficiency`. The
factors are not measured on the machine at hand: predictions of two plans compare well where the same terms rule both,
and are no promise of seconds. ``flowrl calibrate`` gives those.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Any

from ..backends import backend as row_of
from ..cluster.cluster import Cluster
from ..cluster.hardware import Hardware
from . import communication as traffic
from .communication import model_of
from .continuous_batch import Engine, between_points, seconds_of
from .efficiency import Efficiency
from .length_distribution import Lengths
from .mixed_replicas import deal_rows, replicas_by_kind, together
from .per_device_counts import (
    decode_operations,
    engine_bytes,
    forward_operations,
    kv_bytes,
    micro_tokens,
    optimizer_parameters,
    parameters_on_device,
    prefill_operations,
    rows_of_replica,
    stages,
    touched_parameters,
)
from .work import Work, Workload
from .worker_memory import room

_STAND_INS = 256  # rows that are looked at one by one
_POINTS = 8  # numbers of rows between none and all, at which it is looked how much of prefill decode hides


@dataclass(frozen=True)
class Roofline:
    """Predicted seconds on a cluster: ``Roofline(Cluster.of("h100-80:2x8")).seconds(work)``.

    A pool without devices runs on the device kind ``cpu``, each of its processes as one such device.
    ``row_seconds``: seconds of one row by title, for ops that run user code (``{"reward.score": 0.2}``); rows spread
    over the processes. A worker without a model costs the same way, whatever its op. Of devices of several kinds the
    slowest decides, but replicas of an engine get rows by their speed. ``steady``: a generate of rows that vary takes
    what it takes an engine that other steps keep full.
    ``received`` gives the bytes of a publish: the reshard planner, which raises PlanError for a mesh
    that does not divide the model, or ``traffic.publish_bytes``, a closed form. Without ``shares_prompts`` rows of a
    group are trained on one by one, whatever the backend does. Left out: experts that are chosen unevenly, stragglers
    other than ``longest``; the simulator has pools share links.
    """

    cluster: Cluster | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)
    row_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    received: traffic.Received = traffic.planned_bytes
    steady: bool = False
    shares_prompts: bool = True
    _seen: dict[tuple[int, int], tuple[tuple[int, ...], Hardware]] = field(
        init=False, default_factory=dict[Any, Any], repr=False, compare=False
    )
    _decoded: dict[object, float] = field(init=False, default_factory=dict[object, float], repr=False, compare=False)
    _rows_dealt: dict[Work, list[Work]] = field(init=False, default_factory=dict[Any, Any], repr=False, compare=False)

    @property
    def source(self) -> str:
        name = self.efficiency.name
        return f"roofline (efficiencies: {name})" if name else "roofline"

    @property
    def error(self) -> float | None:
        """By what part its seconds were off, where that was measured."""
        return self.efficiency.error

    def seconds(self, work: Work) -> float:
        """Return seconds of one call, 0 for a call that computes nothing."""
        kind = work.kind
        if kind == "none" or (kind not in ("publish", "offload", "onload") and not work.load.rows):
            return 0.0
        if kind == "publish":
            if work.source is None or traffic.in_one_process(work):
                return 0.0
            return traffic.publish(work, self.hardware(work), self.received) + self.efficiency.publish_s
        if kind in ("offload", "onload"):
            return work.moved / self.hardware(work).host / self.efficiency.host
        if kind == "external" or work.role.model is None:
            row = self.row_seconds.get(work.title, self.efficiency.row_s)
            return row * ceil(work.load.rows / max(1, work.processes, work.mesh.data))
        return sum(self.terms(work).values())

    def _dealt(self, work: Work) -> list[Work]:
        """The replicas of a generate on each kind of devices, with the rows that they get; one where there is one."""
        if len(self.hardware(work).kinds) < 2:
            return [work]
        if work not in self._rows_dealt:
            parts = replicas_by_kind(work, self.cluster)
            if len(parts) > 1:
                parts = deal_rows(parts, lambda part: sum(self._generate(part).values()))
            self._rows_dealt[work] = parts
        return self._rows_dealt[work]

    def publish_least(self, work: Work) -> float:
        """Return seconds that a publish between different devices does not take less than, as is soon known."""
        return traffic.publish_least(work, self.hardware(work)) if self.received is traffic.planned_bytes else 0.0

    def terms(self, work: Work) -> dict[str, float]:
        """Return the seconds of a generate, forward or train by what takes them; they add up to :meth:`seconds`."""
        if work.kind == "generate":
            return max((self._generate(part) for part in self._dealt(work)), key=lambda found: sum(found.values()))
        return self._train(work) if work.kind == "train" else self._forward(work)

    def hardware(self, work: Work) -> Hardware:
        """Return the devices of a call."""
        devices, size = work.devices, work.mesh.size
        known = self._seen.get((id(devices), size))
        if known is None or known[0] is not devices:  # many works have the same devices, and to hash them takes long
            e = self.efficiency
            known = devices, Hardware.of(self.cluster, devices[:size], e.link, e.network)
            self._seen[id(devices), size] = known
        return known[1]

    def _compute(self, work: Work, operations: float, part: float) -> float:
        """Seconds of so many operations of a replica, on its shards, at ``part`` of their peak."""
        shards = work.mesh["tp"] * stages(model_of(work), work.mesh) * work.mesh["cp"]
        width = 1 if work.fp8_weights else model_of(work).dtype_bytes
        return operations / shards / self.hardware(work).flops(width) / part

    def _generate(self, work: Work) -> dict[str, float]:
        """A token for every row at a time: the slower of reading memory and computing, then what ranks exchange.

        A CPU, whose caches hold little of it, does one after the other.

        Rows that the KV cache has no room for wait for the next wave; waves are even. With ``longest`` the last wave
        is as long as its longest response, all others as the mean: finished rows make room. Where lengths are
        distributed, rows enter as others leave, and the engine is the faster the fewer run.
        """
        load = work.load
        rows = rows_of_replica(load, work.mesh, work.processes)
        prefill = self._prefill(work, work.decoding.prompts_read(rows, load.group))
        if not load.response:
            return {"prefill": prefill, "decode": 0.0, "exchange": 0.0, "steps": 0.0}
        if load.varies:
            return {"prefill": prefill, "decode": self._of_rows_that_vary(work, rows, prefill)}
        waves = ceil(rows / self.rows_at_once(work))
        steps = (waves - 1) * load.response + max(load.response, load.longest)
        running = rows * load.response / steps
        prefill *= 1 - self._part_beside(work, rows / waves)
        return {"prefill": prefill, **{k: s * steps for k, s in self._token(work, running, rows / waves).items()}}

    def _token(self, work: Work, running: float, together: float) -> dict[str, float]:
        """Seconds of a token for ``running`` rows, of at most ``together`` in a wave.

        With pp the rows go round in as many groups as there are stages, each of which reads the weights of a stage when
        it comes by, and begins anew for each. Where tokens are drafted a pass judges several of each row, and what it
        and the drafts take is shared by those that are kept.
        """
        drafted = work.decoding.speculative
        terms = self._pass(work, running, together, 1 + drafted)
        if not drafted:
            return terms
        draft = drafted * work.decoding.draft * sum(self._pass(work, running, together, 1).values())
        return {name: seconds / work.decoding.kept for name, seconds in (terms | {"draft": draft}).items()}

    def _pass(self, work: Work, running: float, together: float, judged: int) -> dict[str, float]:
        """Seconds of a pass over ``judged`` tokens of each row that runs."""
        groups, e, hardware = self._groups(work, together), self.efficiency, self.hardware(work)
        both = self._read_and_computed(work, running, together, judged)
        return {
            "decode": sum(both) if hardware.is_host else max(both),
            "exchange": traffic.decoded_token(work, hardware, running * judged, groups),
            "steps": e.step_s * work.mesh["pp"] + e.slot_s * running,
        }

    def _groups(self, work: Work, together: float) -> float:
        return min(work.mesh["pp"], max(1.0, together))

    def _read_and_computed(self, work: Work, running: float, together: float, judged: int) -> tuple[float, float]:
        """Seconds in which a pass reads weights, keys and values, and in which it computes."""
        mesh, load, hardware, e = work.mesh, work.load, self.hardware(work), self.efficiency
        groups = self._groups(work, together)
        weights = touched_parameters(work.role, mesh, together * judged / groups)
        weights *= engine_bytes(work.role, fp8=work.fp8_weights)
        weights *= mesh["pp"] / stages(model_of(work), mesh)  # every stage takes as long as the fullest
        answered = load.response / 2 if load.lengths is None else load.lengths.running
        cache = _kv_bytes(work, load.prompt + answered) * mesh["pp"] / groups
        tokens = decode_operations(work.role, running * judged, load, 1 / e.experts) / load.response
        computed = self._compute(work, tokens * mesh["pp"] / groups, e.decode)
        return (weights + running * cache) / hardware.bandwidth / e.memory, computed

    def _prefill(self, work: Work, prompts: float) -> float:
        e = self.efficiency
        computed = self._compute(work, prefill_operations(work.role, prompts, work.load, 1 / e.experts), e.prefill)
        return computed + traffic.activations(work, self.hardware(work), prompts * work.load.prompt, passes=1)

    def _part_beside(self, work: Work, together: float) -> float:
        """The part of prefill that decode hides while rows come in one after another, up to so many."""
        beside = self._beside(work, together)
        return sum(beside(ceil((i + 0.5) / _POINTS * together)) for i in range(_POINTS)) / _POINTS if beside else 0.0

    def _beside(self, work: Work, rows: float) -> Callable[[int], float] | None:
        """By rows that run, the part of prefill that their step hides; None where prompts are not read beside it.

        A chunk is computed while the step reads memory, as far as the step's own computing leaves that time.
        """
        tokens, chunk = rows * work.load.prompt, work.decoding.chunk
        if not chunk or not tokens or not work.load.response or self.hardware(work).is_host:
            return None
        each = self._prefill(work, rows) / tokens * chunk

        def part(running: int) -> float:
            read, computed = self._read_and_computed(work, running, running, 1 + work.decoding.speculative)
            return min(1.0, max(0.0, read - computed) / each) if running else 0.0

        return between_points(part)

    def _replica(self, work: Work, rows: float) -> Engine:
        """The engine of one replica with so many rows."""
        tokens, prompts = rows * work.load.prompt, work.decoding.prompts_read(rows, work.load.group)
        whole = self._prefill(work, rows)
        prefill = whole / tokens if tokens else 0.0
        brought = self._prefill(work, prompts) / prefill / rows if prefill else work.load.prompt
        step = between_points(lambda n: sum(self._token(work, n, n).values()))
        return Engine(self._at_once(work, rows), step, prefill, brought, beside=self._beside(work, rows))

    def _of_rows_that_vary(self, work: Work, rows: float, prefill: float) -> float:
        """Seconds of decoding: of the rows alone, or where other steps keep the engine full, of as many tokens in it.

        Less what it hides of ``prefill``. What others hold on a device matters through the rows that run at once alone,
        so few engines are looked at.
        """
        load, at_once = work.load, self._at_once(work, rows)
        engines = work.fp8_weights, work.fp8_cache, work.decoding
        key = (work.role, load, work.mesh, work.devices, work.processes, *engines, at_once)
        if key not in self._decoded:
            engine = self._replica(work, rows)
            if self.steady:
                sizes = {at_once, *(1 << k for k in range(at_once.bit_length()))}
                hidden = prefill * max((engine.beside(n) for n in sizes), default=0.0) if engine.beside else 0.0
                self._decoded[key] = rows * load.response * min(engine.step(n) / n for n in sizes) - hidden
            elif engine.beside is None:
                self._decoded[key] = seconds_of(replace(engine, prefill=0.0), *_stand_ins(load, ceil(rows)), load.turns)
            else:
                self._decoded[key] = seconds_of(engine, *_stand_ins(load, ceil(rows)), load.turns) - prefill
        return self._decoded[key]

    def _at_once(self, work: Work, rows: float) -> int:
        """Rows of a replica that run at once: waves of equal ones are even; of others one enters as another leaves."""
        most = self.rows_at_once(work)
        if work.load.varies:
            return min(ceil(rows), most)
        return ceil(rows / ceil(rows / most))

    def token_seconds(self, work: Work, rows: float) -> float:
        """Return the seconds of a token for so many rows of a replica, all of them at once."""
        return sum(self._token(work, rows, rows).values())

    def engine(self, work: Work) -> Engine:
        """Return the replicas of a generate as one engine, among which its rows are divided evenly.

        Those on devices of several kinds get rows by their speed.
        """
        if len(parts := self._dealt(work)) > 1:
            return together([self.engine(part) for part in parts], [part.load.rows for part in parts])
        rows = rows_of_replica(work.load, work.mesh, work.processes)
        replicas = max(1, ceil(work.load.rows / rows))
        one = self._replica(work, rows)
        beside = one.beside
        return Engine(
            one.slots * replicas,
            lambda n: one.step(ceil(n / replicas)),
            one.prefill / replicas,
            one.prompt,
            beside=(lambda n: beside(ceil(n / replicas))) if beside is not None else None,
        )

    def rows_at_once(self, work: Work) -> int:
        """Return rows of a replica whose KV cache fits beside the weights and what others hold; one at least.

        A cache whose bytes the plan says beside the engine has them, whatever else is there: ``flowrl check`` tells
        whether they fit. Nor are there more than its ``rows``. On CPUs an engine takes its defaults for both.
        """
        engine, cache, most = row_of(work.backend), work.kv_cache, work.most_rows
        if engine.keeps_cache and self.hardware(work).is_host:
            cache, most = cache or engine.default("kv_cache") * (1 << 30), most or int(engine.default("rows"))
        width = engine_bytes(work.role, fp8=work.fp8_weights)
        weights = parameters_on_device(work.role, work.mesh, sharded=False) * width
        lengths, tokens = work.load.lengths, work.load.response
        if lengths is not None and lengths.varies:
            tokens = lengths.running  # its cache grows with each token
        row = _kv_bytes(work, work.decoding.prompt_kept(work.load.prompt, work.load.group) + tokens)
        free = cache or room(self.hardware(work).memory) - work.held - weights
        rows = max(1, int(free / row)) if row else work.load.rows
        return min(rows, most or rows)

    def _forward(self, work: Work) -> dict[str, float]:
        rows = rows_of_replica(work.load, work.mesh, work.processes)
        terms = self._passes(work, rows, operations=1, passes=1, part=self.efficiency.forward)
        tokens = rows * (work.load.prompt + work.load.response)
        weights = self._exposed(work, terms, self._weights(work, tokens, 1))
        return terms | {"weights": weights, "call": self.efficiency.call_s}

    def _train(self, work: Work) -> dict[str, float]:
        """Forward, backward (twice a forward) and, with recomputation, another forward; then the optimizer.

        Adapters leave out the gradients of the weights themselves: their backward pass costs one forward. Weights that
        are frozen do so for their part.
        """
        role, hardware = work.role, self.hardware(work)
        load = replace(work.load, rows=ceil(work.load.rows / work.minibatches))
        rows = rows_of_replica(load, work.mesh, work.processes)
        again = 1.0 if role.recomputes(work.backend) else 0.0
        if role.assumes_recomputation(work.backend):
            again *= self.efficiency.recomputation
        operations = (2 if role.lora else 3 - role.frozen) + again
        terms = self._passes(work, rows, operations, 2 + again, self.efficiency.train)
        tokens = rows * (load.prompt + load.response)
        weights = self._weights(work, tokens, 2 if role.lora else 3)
        exposed = self._exposed(work, terms, weights + traffic.gradients(work, hardware))
        terms |= {"weights": exposed, "optimizer": self._optimizer(work), "call": self.efficiency.call_s}
        return {name: seconds * work.minibatches * work.epochs for name, seconds in terms.items()}

    def _passes(self, work: Work, rows: float, operations: float, passes: float, part: float) -> dict[str, float]:
        """``operations`` times those of a forward pass, ``passes`` times its exchanges, and the bubble of pp.

        With m micro-batches on p stages everything takes (m + p - 1) / m as long (Narayanan et al. 2021,
        arXiv:2104.04473, section 2.2). There are at least as many micro-batches as stages where rows suffice.
        """
        tokens, depth = rows * (work.load.prompt + work.load.response), work.mesh["pp"]
        shares = self.shares_prompts and row_of(work.backend).shares_prompts
        once = forward_operations(work.role, rows, work.load, 1 / self.efficiency.experts, shares_prompts=shares)
        compute = self._compute(work, operations * once, part)
        exchange = traffic.activations(work, self.hardware(work), tokens, passes)
        micro_batches = max(tokens / micro_tokens(work.load, work.micro), min(rows, depth), 1)
        return {
            "compute": compute,
            "exchange": exchange,
            "bubble": (compute + exchange) * (depth - 1) / micro_batches,
        }

    def _weights(self, work: Work, tokens: float, times: int) -> float:
        """Seconds until the layers at work are on a device, from other devices and from the host."""
        hardware = self.hardware(work)
        copies = traffic.host_copies(work, hardware, tokens, times) / self.efficiency.host
        return traffic.sharded_weights(work, hardware, tokens, times) + copies

    def _exposed(self, work: Work, terms: Mapping[str, float], seconds: float) -> float:
        """What is left of the traffic when part of the computation hides it: none where a CPU does both."""
        if self.hardware(work).is_host:
            return seconds
        return max(0.0, seconds - self.efficiency.overlap * terms["compute"])

    def _optimizer(self, work: Work) -> float:
        """AdamW reads gradient, master weight and two moments, and writes master, moments and weight: memory bound.

        That of an offloaded worker computes on the host, whose memory is taken to be as fast as the way to it.
        """
        width = model_of(work).dtype_bytes
        moved = 2 * width + 24 if width < 4 else 2 * width + 20  # fp32 weights are their own master: read as well
        size = optimizer_parameters(work.role, work.mesh, work.backend) * moved
        if work.offload:
            return size / self.hardware(work).host / self.efficiency.host
        return size / self.hardware(work).bandwidth / self.efficiency.memory


def _kv_bytes(work: Work, tokens: float) -> float:
    """Bytes of keys and values of so many tokens on one device of an engine."""
    model = model_of(work)
    return kv_bytes(model, work.mesh, tokens) / (model.dtype_bytes if work.fp8_cache else 1)


def _stand_ins(load: Workload, rows: int) -> tuple[list[float], list[int]]:
    """Lengths of the rows of the replica that has the longest one, and of how many rows each is the length.

    Up to :data:`_STAND_INS` rows stand for themselves. Of more, the longest do, and each other stands for several. They
    come in an order that depends on nothing.
    """
    assert load.lengths is not None
    return _spread(load.lengths, load.rows, rows, load.group)


@lru_cache(maxsize=256)
def _spread(distributed: Lengths, all_rows: int, rows: int, group: int) -> tuple[list[float], list[int]]:
    """The same of a distribution: sizes of replicas are few."""
    longest = distributed.longest(all_rows, group)
    lengths = [min(length, longest) for length in distributed.spread(rows)]
    lengths[-1] = longest
    weights = [1] * rows
    if rows > _STAND_INS:
        tail = _STAND_INS // 4
        each = ceil((rows - tail) / (_STAND_INS - tail))
        parts = [lengths[i : min(i + each, rows - tail)] for i in range(0, rows - tail, each)]
        lengths = [sum(part) / len(part) for part in parts] + lengths[rows - tail :]
        weights = [len(part) for part in parts] + [1] * tail
    order = random.Random(0).sample(range(len(lengths)), len(lengths))
    return [lengths[i] for i in order], [weights[i] for i in order]
