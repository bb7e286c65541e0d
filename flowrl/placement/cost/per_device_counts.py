"""How many parameters, operations and bytes of a model fall to one device of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from ..backends import REFERENCE
from ..backends import backend as row_of
from ..cluster.mesh import Mesh
from ..model.model_shape import ModelShape
from .work import Role, Workload

#: Tokens of a replica in one forward pass unless a call says otherwise (assumed), and never less than one row.
MICRO_TOKENS = 8192
#: Tokens of a sequence that rows of a group share, at most: a mask has the square of them.
SHARED_TOKENS = 8192


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model by what is done with them: ``Sizes(body, experts, head, embedding, one_expert)``.

    ``body`` is in every layer and used by every token; ``experts`` are all routed experts, of which a token uses a
    few; ``head`` gives logits and is counted in ``embedding`` where the two are one matrix.
    """

    body: int
    experts: int
    head: int
    embedding: int
    one_expert: float  # of every layer

    @property
    def dense(self) -> int:
        """What is not an expert."""
        return self.body + self.embedding + self.head

    @property
    def all(self) -> int:
        """Every parameter."""
        return self.dense + self.experts


@lru_cache(maxsize=1024)
def sizes(model: ModelShape, head: str = "lm") -> Sizes:
    """Return the parts of a model. With ``head="scalar"`` a value for each token replaces the logits."""
    idle = model.experts - model.experts_per_token
    one = (model.parameters - model.active_parameters) / idle if model.experts and idle else 0.0
    experts = round(one * model.experts)
    embedding = model.vocab * model.hidden
    own_head = 0 if model.tied else embedding
    body = model.parameters - experts - embedding - own_head
    return Sizes(body, experts, (0 if model.tied else model.hidden) if head == "scalar" else own_head, embedding, one)


def parts_of(role: Role) -> Sizes:
    """Return the parts of the model of a role, which must have one."""
    assert role.model is not None, f"{role.name} has no model to measure"
    return sizes(role.model, role.head)


def stages(model: ModelShape | None, mesh: Mesh) -> float:
    """Return into how many parts pp splits the layers, as the fullest stage has it: 94 / 12 for pp=8 and 94 layers.

    That stage sets the pace of a pipeline and has the least memory left. It is pp where pp divides the layers.
    """
    pp = mesh["pp"]
    if model is None or pp == 1 or model.layers % pp == 0:
        return pp
    return model.layers / ceil(model.layers / pp)


def parameters_on_device(role: Role, mesh: Mesh, *, sharded: bool = True) -> float:
    """Return parameters that one device holds; ``sharded`` over fsdp, as in training.

    Those of the fullest stage where pp does not divide the layers; the vocabulary is taken to be spread like them.
    """
    parts = parts_of(role)
    layers = stages(role.model, mesh) * (mesh["fsdp"] if sharded else 1)
    return (parts.dense / mesh["tp"] + parts.experts / mesh.experts["ep"] / mesh.experts["tp"]) / layers


def optimizer_parameters(role: Role, mesh: Mesh, backend: str = REFERENCE) -> float:
    """Parameters whose optimizer state one device holds: those of adapters if there are any, sharded like the weights.

    Frozen ones are left out, as many on each device. Some backends shard it over every rank that has a copy of the
    weight, too.
    """
    spread = row_of(backend).optimizer_over_copies
    copies = mesh["dp"] * mesh["cp"] if spread else 1
    if role.lora:
        return role.lora / (mesh["tp"] * stages(role.model, mesh) * mesh["fsdp"]) / copies
    parts, split = parts_of(role), mesh["tp"] * stages(role.model, mesh) * mesh["fsdp"] * copies
    dense = parts.dense / split / (mesh["ep"] if spread else 1)
    if mesh.folded > 1:
        split = stages(role.model, mesh) * (mesh.experts["dp"] if spread else 1)
    return (1 - role.frozen) * (dense + parts.experts / split / mesh.experts["ep"])


def forward_operations(
    role: Role, rows: float, load: Workload, expert: float = 1.0, *, shares_prompts: bool = False
) -> float:
    """Return operations of one forward pass over whole rows, prompts and responses.

    Two for each parameter that a token meets, the head on response tokens alone, and causal attention:
    ``2 layers heads head_dim length^2`` for a row (half of Narayanan et al. 2021, arXiv:2104.04473, appendix, which
    counts the masked half too). An operation of an expert counts as ``expert`` ones: as many as it takes the time of.

    With ``shares_prompts`` 2, 4, 8 and so on of the rows of a group, or all, are one sequence of at most
    :data:`SHARED_TOKENS` that has their prompt once, where that is less: a mask keeps them apart, and every pair of
    tokens is computed.
    """
    assert role.model is not None
    body, pair = 2 * _body(role, expert), _attention(role.model)

    def layers(together: int) -> float:
        tokens = load.prompt + together * load.response
        return (body * tokens + pair * tokens**2 / (1 if together > 1 else 2)) / together

    options = {1}
    if shares_prompts:
        several = {1 << k for k in range(1, load.group.bit_length())} | {load.group}
        options |= {rows for rows in several if load.prompt + rows * load.response <= SHARED_TOKENS}
    return rows * (min(map(layers, options)) + _head(role) * load.response)


def prefill_operations(role: Role, rows: float, load: Workload, expert: float = 1.0) -> float:
    """Return operations of reading the prompts before the first token is drawn."""
    assert role.model is not None
    return rows * (2 * _body(role, expert) * load.prompt + _head(role) + _attention(role.model) * load.prompt**2 / 2)


def decode_operations(role: Role, rows: float, load: Workload, expert: float = 1.0) -> float:
    """Return operations of all response tokens, each of which attends to what came before it."""
    assert role.model is not None
    context = load.prompt + load.response / 2
    return rows * load.response * (2 * _body(role, expert) + _head(role) + _attention(role.model) * context)


def touched_parameters(role: Role, mesh: Mesh, rows: float) -> float:
    """Return parameters that a device reads to make a token for each of ``rows`` rows of its replica.

    Of E experts, ``E (1 - (1 - k/E)^rows)`` are expected to be chosen by at least one row when routing is uniform.
    """
    assert role.model is not None
    parts, model = parts_of(role), role.model
    dense = parts.body + _head(role) / 2
    touched = 0.0
    if parts.experts:
        missed = (1 - model.experts_per_token / model.experts) ** (rows * mesh["ep"])
        touched = parts.one_expert * model.experts * (1 - missed) / mesh["ep"]
    return (dense + touched) / mesh["tp"]


def kv_bytes(model: ModelShape, mesh: Mesh, tokens: float) -> float:
    """Bytes of the KV cache of so many tokens on one device: split over pp, cp, and tp as far as there are KV heads.

    Latents are not split over tp: every head needs them whole.
    """
    if not model.kv_heads:
        return 0.0
    heads = 1.0 if model.kv_rank else ceil(model.kv_heads / mesh["tp"]) / model.kv_heads
    return tokens * model.kv_bytes_per_token * heads / stages(model, mesh) / mesh["cp"]


def engine_bytes(role: Role, *, fp8: bool) -> float:
    """Return bytes of a number of an engine's weights, on average: with ``fp8`` those of its layers have one each."""
    assert role.model is not None
    wide = role.model.dtype_bytes
    if not fp8 or wide <= 1:
        return wide
    parts = parts_of(role)
    layers = parts.body + parts.experts
    return (layers + (parts.all - layers) * wide) / parts.all


def micro_tokens(load: Workload, micro: int = 0) -> float:
    """Return tokens of a replica in one forward pass."""
    return max(micro or MICRO_TOKENS, load.prompt + load.response)


def rows_of_replica(load: Workload, mesh: Mesh, processes: int = 0) -> int:
    """Return rows that the fullest replica gets. Processes without a mesh are replicas."""
    return ceil(load.rows / (mesh.data if mesh.size > 1 else max(1, processes)))


def _body(role: Role, expert: float) -> float:
    """Parameters of the layers that one token meets, those of experts counted ``expert`` times."""
    assert role.model is not None
    parts = parts_of(role)
    return parts.body + parts.one_expert * role.model.experts_per_token * expert


def _head(role: Role) -> float:
    """Operations of the head for one token."""
    assert role.model is not None
    return 2.0 * role.model.hidden * (1 if role.head == "scalar" else role.model.vocab)


def _attention(model: ModelShape) -> float:
    """Operations of attention for each token and each token that it attends to."""
    return 2.0 * model.layers * model.attention_width
