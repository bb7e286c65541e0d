"""Seconds of a call from first principles: operations over peak, bytes over bandwidth, rings over links.

Each term is a closed form of the model's size, the rows and the devices, times a factor of :class:`Efficiency`. The
factors are not measured on the machine at hand: predictions of two plans compare well where the same terms rule both,
and are no promise of seconds. ``flowrl calibrate`` gives those.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
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


@dataclass(frozen=True)
class Roofline:
    """Predicted seconds on a cluster: ``Roofline(Cluster.of("h100-80:2x8")).seconds(work)``.

    A pool without devices runs on the device kind ``cpu``, each of its processes as one such device.
    ``row_seconds``: seconds of one row by title, for ops that run user code (``{"reward.score": 0.2}``); rows spread
    over the processes. A worker without a model costs the same way, whatever its op. Of devices of several kinds the
    slowest decides. ``steady``: a generate of rows that vary takes what it takes an engine that other steps keep full.
    ``received`` gives the bytes of a publish: the reshard planner, which raises PlanError for a mesh
    that does not divide the model, or ``traffic.publish_bytes``, a closed form. Without ``shares_prompts`` rows of a
    group are trained on one by one, whatever the backend does. Left out: sharing of a network by pools that work at
    once, experts that are chosen unevenly, stragglers other than ``longest``.
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
            return traffic.publish(work, self._hardware(work), self.received) + self.efficiency.publish_s
        if kind in ("offload", "onload"):
            return work.moved / self._hardware(work).host / self.efficiency.host
        if kind == "external" or work.role.model is None:
            row = self.row_seconds.get(work.title, self.efficiency.row_s)
            return row * ceil(work.load.rows / max(1, work.processes, work.mesh.data))
        return sum(self.terms(work).values())

    def publish_least(self, work: Work) -> float:
        """Return seconds that a publish between different devices does not take less than, as is soon known."""
        return traffic.publish_least(work, self._hardware(work)) if self.received is traffic.planned_bytes else 0.0

    def terms(self, work: Work) -> dict[str, float]:
        """Return the seconds of a generate, forward or train by what takes them; they add up to :meth:`seconds`."""
        if work.kind == "generate":
            return self._generate(work)
        return self._train(work) if work.kind == "train" else self._forward(work)

    def _hardware(self, work: Work) -> Hardware:
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
        return operations / shards / self._hardware(work).flops(width) / part

    def _generate(self, work: Work) -> dict[str, float]:
        """A token for every row at a time: the slower of reading memory and computing, then what ranks exchange.

        A CPU, whose caches hold little of it, does one after the other.

        Rows that the KV cache has no room for wait for the next wave; waves are even. With ``longest`` the last wave
        is as long as its longest response, all others as the mean: finished rows make room. Where lengths are
        distributed, rows enter as others leave, and the engine is the faster the fewer run.
        """
        load = work.load
        rows = rows_of_replica(load, work.mesh, work.processes)
        prefill = self._prefill(work, rows)
        if not load.response:
            return {"prefill": prefill, "decode": 0.0, "exchange": 0.0, "steps": 0.0}
        if load.lengths is not None and load.lengths.varies:
            return {"prefill": prefill, "decode": self._of_rows_that_vary(work, rows)}
        waves = ceil(rows / self.rows_at_once(work))
        steps = (waves - 1) * load.response + max(load.response, load.longest)
        running = rows * load.response / steps
        return {"prefill": prefill, **{k: s * steps for k, s in self._token(work, running, rows / waves).items()}}

    def _token(self, work: Work, running: float, together: float) -> dict[str, float]:
        """Seconds of a token for ``running`` rows, of at most ``together`` in a wave.

        With pp the rows go round in as many groups as there are stages, each of which reads the weights of a stage when
        it comes by, and begins anew for each.
        """
        mesh, load, hardware, e = work.mesh, work.load, self._hardware(work), self.efficiency
        groups = min(mesh["pp"], max(1.0, together))
        weights = touched_parameters(work.role, mesh, together / groups) * engine_bytes(work.role, fp8=work.fp8_weights)
        weights *= mesh["pp"] / stages(model_of(work), mesh)  # every stage takes as long as the fullest
        answered = load.response / 2 if load.lengths is None else load.lengths.running
        cache = _kv_bytes(work, load.prompt + answered) * mesh["pp"] / groups
        reading = (weights + running * cache) / hardware.bandwidth / e.memory
        operations = decode_operations(work.role, running, load, 1 / e.experts) / load.response * mesh["pp"] / groups
        computing = self._compute(work, operations, e.decode)
        return {
            "decode": reading + computing if hardware.is_host else max(reading, computing),
            "exchange": traffic.decoded_token(work, hardware, running, groups),
            "steps": e.step_s * mesh["pp"] + e.slot_s * running,
        }

    def _prefill(self, work: Work, rows: float) -> float:
        e = self.efficiency
        computed = self._compute(work, prefill_operations(work.role, rows, work.load, 1 / e.experts), e.prefill)
        return computed + traffic.activations(work, self._hardware(work), rows * work.load.prompt, passes=1)

    def _replica(self, work: Work, rows: float) -> Engine:
        """The engine of one replica with so many rows."""
        tokens = rows * work.load.prompt
        prefill = self._prefill(work, rows) / tokens if tokens else 0.0
        step = between_points(lambda n: sum(self._token(work, n, n).values()))
        return Engine(self._at_once(work, rows), step, prefill, work.load.prompt)

    def _of_rows_that_vary(self, work: Work, rows: float) -> float:
        """Seconds of decoding: of the rows alone, or where other steps keep the engine full, of as many tokens in it.

        What others hold on a device matters through the rows that run at once alone, so few engines are looked at.
        """
        load, at_once = work.load, self._at_once(work, rows)
        key = (work.role, load, work.mesh, work.devices, work.processes, work.fp8_weights, work.fp8_cache, at_once)
        if key not in self._decoded:
            engine = self._replica(work, rows)
            if self.steady:
                sizes = {at_once, *(1 << k for k in range(at_once.bit_length()))}
                self._decoded[key] = rows * load.response * min(engine.step(n) / n for n in sizes)
            else:
                self._decoded[key] = seconds_of(replace(engine, prefill=0.0), *_stand_ins(load, ceil(rows)))
        return self._decoded[key]

    def _at_once(self, work: Work, rows: float) -> int:
        """Rows of a replica that run at once: waves of equal ones are even; of others one enters as another leaves."""
        most = self.rows_at_once(work)
        if work.load.lengths is not None and work.load.lengths.varies:
            return min(ceil(rows), most)
        return ceil(rows / ceil(rows / most))

    def token_seconds(self, work: Work, rows: float) -> float:
        """Return the seconds of a token for so many rows of a replica, all of them at once."""
        return sum(self._token(work, rows, rows).values())

    def engine(self, work: Work) -> Engine:
        """Return the replicas of a generate as one engine, among which its rows are divided evenly."""
        rows = rows_of_replica(work.load, work.mesh, work.processes)
        replicas = max(1, ceil(work.load.rows / rows))
        one = self._replica(work, rows)
        return Engine(one.slots * replicas, lambda n: one.step(ceil(n / replicas)), one.prefill / replicas, one.prompt)

    def rows_at_once(self, work: Work) -> int:
        """Return rows of a replica whose KV cache fits beside the weights and what others hold; one at least.

        A cache whose bytes the plan says beside the engine has them, whatever else is there: ``flowrl check`` tells
        whether they fit. Nor are there more than its ``rows``.
        """
        width = engine_bytes(work.role, fp8=work.fp8_weights)
        weights = parameters_on_device(work.role, work.mesh, sharded=False) * width
        lengths, tokens = work.load.lengths, work.load.response
        if lengths is not None and lengths.varies:
            tokens = lengths.running  # its cache grows with each token
        row = _kv_bytes(work, work.load.prompt + tokens)
        free = work.kv_cache or room(self._hardware(work).memory) - work.held - weights
        rows = max(1, int(free / row)) if row else work.load.rows
        return min(rows, work.most_rows or rows)

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
        role, hardware = work.role, self._hardware(work)
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
        exchange = traffic.activations(work, self._hardware(work), tokens, passes)
        micro_batches = max(tokens / micro_tokens(work.load, work.micro), min(rows, depth), 1)
        return {
            "compute": compute,
            "exchange": exchange,
            "bubble": (compute + exchange) * (depth - 1) / micro_batches,
        }

    def _weights(self, work: Work, tokens: float, times: int) -> float:
        """Seconds until the layers at work are on a device, from other devices and from the host."""
        hardware = self._hardware(work)
        copies = traffic.host_copies(work, hardware, tokens, times) / self.efficiency.host
        return traffic.sharded_weights(work, hardware, tokens, times) + copies

    def _exposed(self, work: Work, terms: Mapping[str, float], seconds: float) -> float:
        """What is left of the traffic when part of the computation hides it: none where a CPU does both."""
        if self._hardware(work).is_host:
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
            return size / self._hardware(work).host / self.efficiency.host
        return size / self._hardware(work).bandwidth / self.efficiency.memory


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
    return _spread(load.lengths, load.rows, rows)


@lru_cache(maxsize=256)
def _spread(distributed: Lengths, all_rows: int, rows: int) -> tuple[list[float], list[int]]:
    """The same of a distribution: sizes of replicas are few."""
    lengths = distributed.spread(rows)
    lengths[-1] = max(lengths[-1], distributed.longest(all_rows))
    weights = [1] * rows
    if rows > _STAND_INS:
        tail = _STAND_INS // 4
        each = ceil((rows - tail) / (_STAND_INS - tail))
        parts = [lengths[i : min(i + each, rows - tail)] for i in range(0, rows - tail, each)]
        lengths = [sum(part) / len(part) for part in parts] + lengths[rows - tail :]
        weights = [len(part) for part in parts] + [1] * tail
    order = random.Random(0).sample(range(len(lengths)), len(lengths))
    return [lengths[i] for i in order], [weights[i] for i in order]
