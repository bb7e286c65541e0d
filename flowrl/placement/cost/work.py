"""What a call asks of the devices that it runs on: the work, as numbers, that costs and memory are computed from."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..backends import REFERENCE
from ..backends import backend as row_of
from ..cluster.mesh import Mesh
from ..model.model_shape import ModelShape
from .continuous_batch import Turns
from .decoding import Decoding, Said
from .length_distribution import Lengths

KINDS = ("generate", "forward", "train", "external", "none", "publish", "offload", "onload")


@dataclass(frozen=True)
class Workload:
    """The rows of one call: ``Workload(rows=1024, prompt=1024, response=1024)``, tokens per row on average.

    ``longest`` is the most tokens of a response, where that is known to differ from ``response``; ``lengths`` is how
    those of a generate are distributed, where they vary. ``group``: so many rows are to one prompt. ``turns`` in which
    each row is sampled, where they are episodes.
    """

    rows: int
    prompt: float
    response: float
    longest: float = 0.0
    lengths: Lengths | None = None
    group: int = 1
    turns: Turns | None = None

    @property
    def varies(self) -> bool:
        """Whether rows leave the engine at times of their own: they have lengths of their own, or turns."""
        return self.lengths is not None and (self.lengths.varies or self.turns is not None)

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of all rows."""
        return self.rows * (self.prompt + self.response)


@dataclass(frozen=True)
class Role:
    """A worker as placement sees it: ``Role("actor", model, trains=True, generates=True)``.

    ``model`` is None for a worker without one (a reward function, an environment). ``head`` is ``lm`` or ``scalar``.
    ``lora``: parameters that are trained instead of all; ``frozen``: the part of all that is not trained, 1 for a
    worker without an optimizer. ``publishes``: another copy follows its weights.
    """

    name: str
    model: ModelShape | None = None
    trains: bool = False
    generates: bool = False
    head: str = "lm"
    lora: int = 0
    frozen: float = 0.0
    checkpointing: bool | None = True  # whether its driver asks for activations to be recomputed; None: it says nothing

    @property
    def optimized(self) -> bool:
        """Whether it has an optimizer: a frozen worker that follows another one has none."""
        return self.trains and self.frozen < 1

    def recomputes(self, backend: str) -> bool:
        """Whether its backward pass recomputes activations; on some backends it is taken to where nothing is said."""
        return row_of(backend).recomputes if self.checkpointing is None else self.checkpointing

    def assumes_recomputation(self, backend: str) -> bool:
        """Whether that is assumed, where its driver says nothing."""
        return self.optimized and self.recomputes(backend) and self.checkpointing is None


@dataclass(frozen=True)
class Work:
    """One call, one publish or one move between device and host, with where it runs.

    ``Work("actor.generate#2", "actor.generate", "generate", actor, Workload(512, 1024, 1024), Mesh.of("dp=4,tp=2"),
    devices=tuple(range(8)), pool="rollout")``

    ``node`` is its id in the graph, ``title`` its worker and op, under which costs are given. ``devices`` are numbers
    of the cluster, the first of the pool, none for a pool without any (then ``processes``). A publish goes from
    ``source`` (mesh and devices of ``source_pool``) to ``mesh`` and ``devices`` of ``pool``. A train makes
    ``minibatches`` optimizer steps in each of ``epochs``. ``micro``: tokens of a replica in one forward pass, 0 for
    the default of the memory model. ``share``: the part of the whole op that this call does, when it runs in chunks;
    ``load`` has the rows of that part. ``held``: bytes that others keep on each device meanwhile, which a KV cache
    cannot have. ``moved``: bytes of an offload or onload on each device. ``copied``: a publish into weights of their
    own, whatever the pool. ``kv_cache`` and ``most_rows``: the bytes of a KV cache on each device and the rows of a
    replica in one batch that the plan says beside the engine, 0 where it says none. ``holder``: the worker that calls
    a policy which serves it, where that is another one. ``fp8_weights`` and ``fp8_cache``: an engine has the matrices
    of its layers, or keys and values, in a byte each; ``said``: all that the plan says beside the engine. ``offload``:
    its weights, gradients and optimizer are in host memory.
    """

    node: str
    title: str
    kind: str
    role: Role
    load: Workload
    mesh: Mesh = field(default_factory=Mesh)
    devices: tuple[int, ...] = ()
    processes: int = 0
    source: tuple[Mesh, tuple[int, ...]] | None = None
    minibatches: int = 1
    epochs: int = 1
    pool: str = ""
    source_pool: str = ""
    backend: str = REFERENCE
    micro: int = 0
    share: float = 1.0
    held: float = 0.0
    moved: float = 0.0
    copied: bool = False
    kv_cache: float = 0.0
    most_rows: int = 0
    holder: str = ""
    offload: bool = False
    fp8_weights: bool = False
    fp8_cache: bool = False
    said: Said = ()

    @property
    def decoding(self) -> Decoding:
        """How its engine reads prompts and draws tokens."""
        return Decoding.of(self.backend, self.said)

    @property
    def use(self) -> str:
        """Which copy of the worker does it: ``generate``, or ``train`` for everything else."""
        return "generate" if self.kind == "generate" else "train"
