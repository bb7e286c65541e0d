"""Steps of GRPO that NeMo-RL published, predicted, and the constants that are fitted to some of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import flowrl as fl
from flowrl import rl
from flowrl.analysis.row_lengths import Tokens
from flowrl.analysis.study import Study
from flowrl.placement.cost.efficiency import Efficiency
from flowrl.placement.cost.length_distribution import Lengths
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.model.model_shape import shape_named
from flowrl.placement.plan.plan_file import read

#: Assumed of every row: tokens of a prompt of OpenMathInstruct-2 with its template, and the sigma of the logarithm of
#: responses. The mean of the latter is such that rows cut at the longest length have the published average.
PROMPT, SIGMA = 150, 0.7
#: GiB of a GPU as vLLM sees them on an H100 of 80 GB, and GiB that it needs beside weights and KV cache (assumed).
GPU_GIB, ENGINE_GIB = 79.1, 2.8


@dataclass(frozen=True)
class Row:
    """A published step: ``Row("v0.4", "llama-3.1-8b", 2, "dp=8,pp=2", "dp=16", 1060, 97.7)``.

    ``nodes`` of 8 GPUs; ``train`` and ``generate`` are meshes, on all of them, or with ``trainers`` on so many devices
    and on the others, one step off. ``average``: tokens of a prompt and its response; ``most``: at most.
    """

    release: str
    model: str
    nodes: int
    train: str
    generate: str
    average: int
    seconds: float
    trainers: int = 0
    prompts: int = 64
    most: int = 4096
    recompute: bool = False
    kind: str = "h100-80"

    @property
    def title(self) -> str:
        return f"{self.model}, {'1 step off' if self.trainers else 'synchronous'}, {self.nodes * 8} GPUs"


def _rows() -> tuple[Row, ...]:
    rows: list[Row] = []
    for release, figures in _FIGURES.items():
        for key, (average, seconds) in figures.items():
            layout = _LAYOUTS.get(f"{key} {release}", _LAYOUTS.get(key))
            assert layout is not None, key
            rows.append(Row(release, average=average, seconds=seconds, **layout))  # type: ignore[arg-type]
    return tuple(rows)


_BIG = {"model": "qwen3-235b-a22b", "prompts": 16, "most": 8192, "recompute": True}
_LLAMA = {"model": "llama-3.1-8b", "nodes": 2, "recompute": True}
_SPARSE = {"model": "qwen3-30b-a3b", "nodes": 4}
_LATENT = {"model": "deepseek-v3", "prompts": 16, "most": 1536, "recompute": True}
#: Layouts of the recipes, NeMo-RL r0.4.0 to r0.6.0, examples/configs/recipes/llm/performance. Their expert parallelism
#: is folded: whole experts lie on the ranks of data, context and tensor parallelism of a stage.
_LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "llama": _LLAMA | {"train": "dp=8,pp=2", "generate": "dp=16"},
    "llama off": _LLAMA | {"train": "dp=4,pp=2", "generate": "dp=8", "trainers": 8},
    "llama off v0.5": _LLAMA | {"train": "dp=8", "generate": "dp=8", "trainers": 8},
    "32b": {"model": "qwen3-32b", "nodes": 4, "train": "dp=2,pp=4,tp=4", "generate": "dp=8,tp=4"},
    "32b off": {"model": "qwen3-32b", "nodes": 8, "train": "dp=2,pp=4,tp=4", "generate": "dp=8,tp=4", "trainers": 32},
    "30b": _SPARSE | {"train": "dp=32,folded_ep=8", "generate": "dp=16,tp=2"},
    "30b v0.4": _SPARSE | {"train": "dp=16,tp=2,folded_ep=8", "generate": "dp=8,tp=4"},
    "30b off": _SPARSE | {"train": "dp=8,pp=2,folded_ep=8", "generate": "dp=8,tp=2", "trainers": 16},
    "30b off v0.4": _SPARSE | {"train": "dp=8,tp=2,folded_ep=8", "generate": "dp=4,tp=4", "trainers": 16},
    "235b": _BIG | {"nodes": 16, "train": "pp=8,dp=4,cp=2,tp=2,folded_ep=16", "generate": "dp=8,tp=16"},
    "235b 256": _BIG | {"nodes": 32, "train": "pp=8,dp=8,cp=2,tp=2,folded_ep=16", "generate": "dp=16,tp=16"},
    "671b": _LATENT | {"nodes": 32, "train": "pp=16,dp=16,folded_ep=16", "generate": "dp=8,tp=32"},
    "671b 512": _LATENT | {"nodes": 64, "train": "pp=16,dp=32,folded_ep=16", "generate": "dp=16,tp=32"},
    "671b off": _LATENT | {"nodes": 64, "train": "pp=16,dp=16,folded_ep=16", "generate": "dp=8,tp=32", "trainers": 256},
    "235b off": _BIG | {"nodes": 32, "train": "pp=8,dp=4,tp=4,folded_ep=16", "generate": "dp=16,tp=8", "trainers": 128},
}
#: By release: average tokens of a row, and seconds of a step. NeMo-RL, docs/about/performance-summary.md of r0.4.0 (at
#: commit cff17f83b), r0.5.0 and r0.6.0, H100 in BF16. The step of each is an average over five.
_FIGURES: Mapping[str, Mapping[str, tuple[int, float]]] = {
    "v0.4": {
        "llama": (1060, 97.7),
        "llama off": (1129, 74.6),
        "32b": (3206, 393),
        "32b off": (3207, 215),
        "30b": (3154, 225),
        "30b off": (3158, 244),
        "235b": (5671, 506),
        "235b off": (5691, 241),
        "671b": (745, 154),
        "671b off": (744, 77.9),
    },
    "v0.5": {
        "llama": (1019, 92.8),
        "llama off": (1123, 64.8),
        "32b": (3251, 376),
        "32b off": (3252, 200),
        "30b": (3196, 198),
        "30b off": (3201, 154),
        "235b": (5700, 431),
        "235b off": (5707, 203),
        "671b": (744, 134),
        "671b off": (738, 64.9),
    },
    "v0.6": {
        "30b": (3203, 192),
        "30b off": (3201, 152),
        "235b": (5698, 395),
        "235b 256": (5713, 312),
        "235b off": (5721, 231),
        "671b": (701, 134),
        "671b 512": (697, 111),
        "671b off": (710, 64.1),
    },
}
ROWS = _rows()
#: The rows that the constants were fitted on.
FITTED = tuple(r for r in ROWS if r.release == "v0.4" and r.model in ("llama-3.1-8b", "qwen3-30b-a3b"))
#: Of the constants, those that were searched for, and where the search begins.
SEARCHED = {"train": 0.4, "experts": 0.4, "step_s": 4e-3, "slot_s": 4e-5}


def study(row: Row, efficiency: Efficiency) -> Study:
    """The program of a row under its plan: GRPO with 32 responses to a prompt and four updates a step."""
    plan = read(plan_text(row))
    mean = _mean(row.average - PROMPT, row.most - PROMPT)
    tokens = Tokens(PROMPT, "lognormal", (mean, SIGMA, float(row.most - PROMPT)))
    return _flow(row).study(plan, costs=Roofline(plan.cluster, efficiency, shares_prompts=False), tokens=tokens)


def predict(row: Row, efficiency: Efficiency) -> float:
    """Return the seconds of a steady step."""
    return study(row, efficiency).simulate(steps=6).step_seconds


def plan_text(row: Row) -> str:
    """The plan of a row. Weights are taken over while rows are sampled, as ``in_flight_weight_updates`` does."""
    size = row.nodes * 8
    pools = [("train", f"0-{row.trainers - 1}"), ("rollout", f"{row.trainers}-{size - 1}")]
    pools = pools if row.trainers else [("gpu", f"0-{size - 1}")]
    train, generate = (f"{{{mesh.replace('=', ': ').replace(',', ', ')}}}" for mesh in (row.train, row.generate))
    tp = fl.Mesh.of(row.generate)["tp"]
    share = 0.8 if row.trainers else 0.6  # gpu_memory_utilization of the recipes
    cache = share * GPU_GIB - shape_named(row.model).bytes / tp / 2**30 - ENGINE_GIB
    memory = f"kv_cache: {cache:.2f}, rows: 1024"
    return "\n".join(
        [
            f"cluster: {row.kind}:{row.nodes}x8",
            "pools:",
            *(f'  {name}: {{devices: "{devices}"}}' for name, devices in pools),
            "  cpu: {processes: 64}",
            "place:",
            "  actor:",
            f"    train: {{pool: {pools[0][0]}, mesh: {train}, backend: megatron}}",
            f"    generate: {{pool: {pools[-1][0]}, mesh: {generate}, engine: vllm, {memory}}}",
            f"  reference: {{pool: {pools[0][0]}, mesh: {train}, backend: megatron}}",
            "  reward: {pool: cpu}",
            "pipeline: {staleness: 1, publish: continue}" if row.trainers else "pipeline: {staleness: 0}",
        ]
    )


def _flow(row: Row) -> fl.Flow:
    flow = fl.Flow("grpo")
    actor = flow.worker(
        fl.Actor, row.model, name="actor", dtype="bf16", max_tokens=row.most, gradient_checkpointing=row.recompute
    )
    reference = flow.worker(fl.Reference, of=actor, name="reference")
    reward = flow.worker(fl.FunctionReward, _right, name="reward")

    @flow.program
    def grpo(steps: int = 6) -> None:
        for _, batch in flow.steps(fl.data.rows([{"prompt": "1+1="}] * row.prompts, batch=row.prompts), steps):
            batch = actor.generate(batch, n=32)
            batch = reward.score(batch)
            batch = actor.logprobs(batch)
            batch = reference.logprobs(batch)
            batch = rl.advantages(batch)
            actor.update(batch, loss=rl.ppo_clip(kl=0.01), minibatch=512, micro_tokens=row.most)

    return flow


def _right(prompt: str, response: str) -> float:
    return 0.0


def _mean(average: float, most: float) -> float:
    """The mean of a lognormal that has this average once it is cut."""
    low, high = average / 2, average * 100
    for _ in range(60):
        middle = math.sqrt(low * high)
        shorter = Lengths(0, most, "lognormal", (middle, SIGMA)).mean < average
        low, high = (middle, high) if shorter else (low, middle)
    return low


def fit(rows: Sequence[Row] = FITTED) -> dict[str, float]:
    """Return the constants with the least sum of squares of log(predicted / published): a search along each in turn."""

    def loss(found: Mapping[str, float]) -> float:
        each = replace(Efficiency(), **found, forward=found["train"] * 9 / 8)
        return sum(math.log(predict(row, each) / row.seconds) ** 2 for row in rows)

    found, factor = dict(SEARCHED), 1.3
    least = loss(found)
    while factor > 1.02:
        moved = False
        for name in found:
            for by in (factor, 1 / factor):
                tried = found | {name: found[name] * by}
                if (left := loss(tried)) < least - 1e-6:
                    least, found, moved = left, tried, True
        factor = factor if moved else math.sqrt(factor)
    return found


def tables(within: float) -> dict[str, str]:
    """The table of steps, and how many of them are predicted within a part of what was published."""
    ratios = {row: predict(row, Efficiency.published()) / row.seconds for row in ROWS}
    head = ["| step | training | generation | published, s | predicted, s | ratio |", "|---|---|---|---|---|---|"]
    lines = [_line(row, ratio, within) for row, ratio in ratios.items()]
    first = [ratio for row, ratio in ratios.items() if row.release != "v0.6" and row.model != "deepseek-v3"]
    held = [ratio for row, ratio in ratios.items() if row not in FITTED]
    near, near_held = (sum(abs(ratio - 1) <= within for ratio in some) for some in (first, held))
    return {
        "steps": "\n".join([*head, *lines]),
        "count": f"Of the {len(first)} of v0.4 and v0.5 on Llama and Qwen, {near} are within {100 * within:.0f} %; of "
        f"the {len(held)} that the constants were not fitted on, {near_held}.",
    }


def _line(row: Row, ratio: float, within: float) -> str:
    mark = " (fitted)" if row in FITTED else "" if abs(ratio - 1) <= within else " **\\***"
    seconds = f"{row.seconds:g} | {row.seconds * ratio:.0f} | {ratio:.2f}{mark}"
    return f"| {row.release} {row.title} | {_mesh(row.train)} | {_mesh(row.generate)} | {seconds} |"


def _mesh(text: str) -> str:
    return text.replace(",", " ")
