"""What a worker keeps in the memory of each device: parts that stay between its calls, parts that it works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from ..backends import REFERENCE
from ..backends import backend as row_of
from ..cluster.mesh import Mesh
from ..model.model_shape import ModelShape
from ..plan.plan import Place, Plan
from .decoding import Decoding
from .per_device_counts import (
    engine_bytes,
    kv_bytes,
    micro_tokens,
    optimizer_parameters,
    parameters_on_device,
    rows_of_replica,
    stages,
)
from .work import Role, Workload

#: Kept free on each device (assumed): CUDA context and communication buffers, then a part lost to fragmentation.
RESERVE_BYTES, RESERVE_PART = 1.5e9, 0.05
#: Backends that have logits in chunks hold this many bytes of them at a time, others all of a micro-batch.
CHUNKED_LOGITS = 128 << 20
#: Rows that an engine draws a token for at once (assumed), as far as its logits go.
SAMPLED_ROWS = 256
_PLAIN = Decoding()


def reserve(memory: float) -> float:
    """Return bytes of a device's memory that are nobody's."""
    return RESERVE_BYTES + RESERVE_PART * memory


def room(memory: float) -> float:
    """Return bytes of a device's memory that workers can have."""
    return max(0.0, memory - reserve(memory))


@dataclass(frozen=True)
class Usage:
    """Bytes on each device of one worker in one use, by part.

    ``Usage("actor", "train", idle={"weights": 14e9, "optimizer": 84e9}, working={"gradients": 14e9})``

    ``idle`` parts stay between its calls and can be offloaded; ``emptied`` ones stay too, and are let go when it makes
    way, with nothing kept of them; ``working`` parts are there during a call. ``least``:
    how small a working part can be made: a KV cache holds one row at least, others wait for the next wave; ``rows`` of
    the replica want ``row`` bytes of it each. ``keeps``: its KV cache takes what others leave it in all turns in which
    it is there, and has that between its calls too. ``shares``: the use whose weights serve this one too. ``hosted``
    parts are always in the memory of the host, so many bytes for each device.
    """

    role: str
    use: str
    idle: Mapping[str, float]
    working: Mapping[str, float]
    least: Mapping[str, float] = field(default_factory=dict[str, float])
    rows: int = 0
    row: float = 0.0
    keeps: bool = False
    shares: str = ""
    hosted: Mapping[str, float] = field(default_factory=dict[str, float])
    emptied: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def name(self) -> str:
        """``actor.train``."""
        return f"{self.role}.{self.use}"

    @property
    def staying(self) -> float:
        """Bytes between calls."""
        return self.moved + sum(self.emptied.values())

    @property
    def moved(self) -> float:
        """Bytes that are copied when it makes way, and when it comes back."""
        return sum(self.idle.values())

    @property
    def needed(self) -> float:
        """Bytes of working parts at their least."""
        return sum(min(size, self.least.get(part, size)) for part, size in self.working.items())

    def working_in(self, free: float) -> dict[str, float]:
        """Return working parts in so many bytes: those that can grow take what is left, up to what they want."""
        spare = max(0.0, free - self.needed)
        return {p: min(s, self.least[p] + spare) if p in self.least else s for p, s in self.working.items()}

    def waves(self, free: float) -> int:
        """Return in how many turns the rows get through a KV cache of so many bytes less working parts; 0 without."""
        if not self.row or not self.rows:
            return 0
        cache = free - sum(size for part, size in self.working.items() if part not in self.least)
        return ceil(self.rows / max(1, int(cache / self.row * (1 + 1e-12))))


def resident(
    role: Role, use: str, place: Place, plan: Plan, load: Workload, *, micro: int = 0, reads: bool = False
) -> Usage:
    """Return what a worker keeps on each device of ``place`` for ``use``: ``train`` is any call but a ``generate``.

    ``load``: the rows of its largest call; ``micro``: tokens of a forward pass, 0 for the default. ``reads``: a worker
    that generates has calls of the other use too.
    """
    other, ahead = plan.place_of(role.name, "train"), plan.pipeline.staleness > 0
    staging = role.trains and role.generates and (ahead or plan.split(role.name))
    kept = ahead and plan.split(role.name) and plan.pipeline.copies > 1
    return usage_of(role, use, place, other, load, micro=micro, reads=reads, staging=staging * (1 + kept))


def usage_of(
    role: Role,
    use: str,
    place: Place,
    other: Place | None,
    load: Workload,
    *,
    micro: int = 0,
    reads: bool = False,
    staging: int = 0,
) -> Usage:
    """Return the same of a worker that trains at ``other``.

    ``staging``: so many versions of trained weights are set aside where they are: one until a publish has brought it to
    another pool, or to a copy that steps still sample from; with copies also the one that is there. What takes them has
    no second copy: they come box by box.
    """
    if role.model is None:
        return Usage(role.name, use, {}, {})
    if use == "generate":
        return _mirrored(_kept_cache(_generating(role, place, other, load, reads=reads), place), place)
    trains = training if role.optimized else reading
    usage = trains(role, place.mesh, load, backend=place.backend, micro=micro)
    if staging:
        wide = _model(role).dtype_bytes if row_of(place.backend).optimizer_over_copies else _held_bytes(role)
        aside = parameters_on_device(role, place.mesh) * wide * staging
        usage = replace(usage, idle={**usage.idle, "staged weights": aside})
    if place.offload:  # in host memory, what is staged from there too: the device has the layers at work
        working = {part: size for part, size in usage.working.items() if part != "gradients"}
        gradients = {"gradients": usage.working["gradients"]} if "gradients" in usage.working else {}
        return Usage(role.name, "train", {}, working, hosted={**usage.idle, **gradients})
    return usage


def training(role: Role, mesh: Mesh, load: Workload, *, backend: str = REFERENCE, micro: int = 0) -> Usage:
    """Mixed-precision AdamW, 16 bytes per parameter before sharding (Rajbhandari et al. 2019, arXiv:1910.02054, 3.1).

    Weights and gradients in the dtype of the model; an fp32 master copy and two fp32 moments, 12 bytes (8 for an fp32
    model, its own master, and moments are as wide as it). Beside a master copy that is split over the copies of a
    weight, gradients are added up whole in the dtype of the backend: 18 bytes. Adapters have gradients and optimizer
    state for themselves alone, frozen weights have neither; a worker that trains some of its weights holds the others
    in fp32 too.
    """
    model = _model(role)
    state = 12 if model.dtype_bytes < 4 else 2 * model.dtype_bytes
    trained = optimizer_parameters(role, mesh) if role.lora or role.frozen else parameters_on_device(role, mesh)
    still = parameters_on_device(role, mesh) * (1 if role.lora else role.frozen)
    tokens = _micro(load, mesh, micro)
    in_flight = min(mesh["pp"], max(1, ceil(rows_of_replica(load, mesh) * _length(load) / max(tokens, 1))))
    return Usage(
        role.name,
        "train",
        idle={
            "weights": parameters_on_device(role, mesh) * model.dtype_bytes
            + still * (max(4, model.dtype_bytes) - model.dtype_bytes)
            + _adapters(role, mesh),
            "optimizer": optimizer_parameters(role, mesh, backend) * state,
        },
        working={
            "gradients": trained * _gradient_bytes(model, backend),
            "activations": activations(
                model, mesh, tokens, backend=backend, recompute=role.recomputes(backend), in_flight=in_flight
            ),
            "logits": 2 * _logits(role, mesh, tokens * _answered(load), backend),
            "gathered weights": _gathered(role, mesh),
        },
    )


def reading(role: Role, mesh: Mesh, load: Workload, *, backend: str = REFERENCE, micro: int = 0) -> Usage:
    """Forward passes alone: a reference, a reward model. The activations of one layer are there at a time."""
    model, tokens = _model(role), _micro(load, mesh, micro)
    return Usage(
        role.name,
        "train",
        idle={"weights": parameters_on_device(role, mesh) * model.dtype_bytes},
        working={
            "activations": layer_activations(model, mesh, tokens, backend=backend),
            "logits": _logits(role, mesh, tokens * _answered(load), backend),
            "gathered weights": _gathered(role, mesh),
        },
    )


def generating(
    role: Role,
    mesh: Mesh,
    load: Workload,
    *,
    fp8_weights: bool = False,
    fp8_cache: bool = False,
    decoding: Decoding = _PLAIN,
) -> Usage:
    """Return an engine's copy of the weights, whole over fsdp, and its KV cache."""
    model, rows = _model(role), rows_of_replica(load, mesh)
    width, less = engine_bytes(role, fp8=fp8_weights), model.dtype_bytes if fp8_cache else 1
    weights = parameters_on_device(role, mesh, sharded=False) * width + _adapters(role, mesh, whole=True)
    longest = load.prompt + max(load.response, load.longest)
    least = kv_bytes(model, mesh, longest) / less
    row = kv_bytes(model, mesh, decoding.prompt_kept(load.prompt, load.group) + load.response) / less
    prefill = min(micro_tokens(load), rows * load.prompt) / mesh["cp"]
    vocabulary = 4.0 * model.vocab / mesh["tp"]
    return Usage(
        role.name,
        "generate",
        idle={"weights": weights},
        working={
            "kv cache": max(least, rows * row),
            "activations": layer_activations(model, mesh, prefill),
            "logits": min(rows, SAMPLED_ROWS) * vocabulary,
        },
        least={"kv cache": least},
        rows=rows,
        row=row,
    )


def layer_activations(model: ModelShape, mesh: Mesh, tokens: float, *, backend: str = REFERENCE) -> float:
    """Return bytes that one layer keeps for its backward pass.

    ``tokens * hidden * (10 + 24 / tp)`` for 16-bit values (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2), all
    of it over tp with sequence parallelism (section 4.3). Attention scores are not kept, as with flash
    attention. 16 of the 24 are those of a feed-forward layer of 8 hidden^2 parameters; other sizes go in proportion.
    """
    wide = model.experts_per_token * model.expert_intermediate + model.shared_intermediate if model.experts else 0
    mlp = 16 * 3 * (wide or model.intermediate) / (8 * model.hidden)
    whole = 10 / (mesh["tp"] if row_of(backend).sequence_parallel else 1)
    return tokens * model.hidden * (whole + (8 + mlp) / mesh["tp"]) * model.dtype_bytes / 2


def activations(
    model: ModelShape,
    mesh: Mesh,
    tokens: float,
    *,
    backend: str = REFERENCE,
    recompute: bool = True,
    in_flight: int = 1,
) -> float:
    """Return bytes of activations of a training device: of all its layers, for as many micro-batches as are in flight.

    With recomputation a layer keeps its input, ``2 tokens hidden`` bytes (Korthikanti et al. 2022, section 5), and one
    layer at a time has all of them. The first stage of a pipeline has as many micro-batches in flight as stages.
    """
    layer = layer_activations(model, mesh, tokens, backend=backend)
    layers = model.layers / stages(model, mesh) * in_flight
    if not recompute:
        return layers * layer
    shards = mesh["tp"] if row_of(backend).sequence_parallel else 1
    return layers * tokens * model.hidden * model.dtype_bytes / shards + layer


def over_base(usage: Usage, role: Role, mesh: Mesh, owner: str) -> Usage:
    """Return that of a worker whose weights lie under those of ``owner``, a use that has them: it has its adapters."""
    own = _adapters(role, mesh)
    idle = {part: own if part == "weights" else size for part, size in usage.idle.items()}
    return replace(usage, idle={part: size for part, size in idle.items() if size}, shares=owner)


def _generating(role: Role, place: Place, other: Place | None, load: Workload, *, reads: bool) -> Usage:
    """Same pool, mesh and backend as the other use: one copy serves both. Otherwise it is another layout of its own."""
    said = {name: bool(place.options.get(name)) for name in ("fp8_weights", "fp8_cache")}
    decoding = Decoding.of(place.backend, tuple(place.options.items()))
    usage = generating(role, place.mesh, load, **said, decoding=decoding)
    same = other and (other.pool, other.mesh, other.backend) == (place.pool, place.mesh, place.backend)
    if not (same and (role.trains or reads)):
        return usage
    idle = {part: size for part, size in usage.idle.items() if part != "weights"}
    return replace(usage, idle=idle, shares=f"{role.name}.train")


def _kept_cache(usage: Usage, place: Place) -> Usage:
    """The same with a KV cache that an engine has for as long as it is there. Bytes that the plan says beside the
    engine cannot be changed by others.
    """
    said = float(place.options.get("kv_cache", 0)) * (1 << 30)
    if not said:
        return replace(usage, keeps=row_of(place.backend).keeps_cache)
    working = {part: size for part, size in usage.working.items() if part != "kv cache"}
    return replace(usage, working=working, emptied={"kv cache": said}, least={}, rows=0)


def _mirrored(usage: Usage, place: Place) -> Usage:
    """The same with the weights that an engine has in the memory of the host, whether it is away or not."""
    if not row_of(place.backend).mirrored or "weights" not in usage.idle:
        return usage
    return replace(usage, hosted={"weights": usage.idle["weights"]})


def _model(role: Role) -> ModelShape:
    assert role.model is not None, f"{role.name} has no model to measure"
    return role.model


def _length(load: Workload) -> float:
    return load.prompt + load.response


def _answered(load: Workload) -> float:
    """The part of the tokens that are responses."""
    return load.response / _length(load) if _length(load) else 0.0


def _micro(load: Workload, mesh: Mesh, micro: int) -> float:
    """Tokens of a micro-batch on one device."""
    return min(micro_tokens(load, micro), rows_of_replica(load, mesh) * _length(load)) / mesh["cp"]


def _logits(role: Role, mesh: Mesh, tokens: float, backend: str) -> float:
    if role.head != "lm":
        return 0.0
    whole = tokens * 4.0 * _model(role).vocab / mesh["tp"]
    return min(whole, float(CHUNKED_LOGITS)) if row_of(backend).chunked_logits else whole


def _gathered(role: Role, mesh: Mesh) -> float:
    """FSDP gathers the layer at work while it fetches the next."""
    if mesh["fsdp"] == 1:
        return 0.0
    model = _model(role)
    return (
        2 * parameters_on_device(role, mesh, sharded=False) * model.dtype_bytes / (model.layers / stages(model, mesh))
    )


def _held_bytes(role: Role) -> int:
    """Bytes of a number of trained weights that are their own master copy."""
    return max(4, _model(role).dtype_bytes) if role.optimized else _model(role).dtype_bytes


def _gradient_bytes(model: ModelShape, backend: str) -> int:
    row = row_of(backend)
    wide = row.optimizer_over_copies and row.gradients == "fp32"
    return max(4, model.dtype_bytes) if wide else model.dtype_bytes


def _adapters(role: Role, mesh: Mesh, *, whole: bool = False) -> float:
    if not role.lora:
        return 0.0
    shards = mesh["tp"] * stages(role.model, mesh) * (1 if whole else mesh["fsdp"])
    return role.lora / shards * _model(role).dtype_bytes
