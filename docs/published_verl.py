"""Steps of DAPO that verl published, in turns and asynchronous on H20, predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import flowrl as fl
from flowrl import rl
from flowrl.analysis.row_lengths import Tokens
from flowrl.analysis.study import Study
from flowrl.placement.cost.efficiency import Efficiency
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.plan.plan_file import read


@dataclass(frozen=True)
class Verl:
    """A step of verl's recipe fully_async_policy: ``Verl(32, 790.10, update=269.80, gen=357.41, old=107.71)``.

    Seconds on so many H20; ``apart``: half of them train, with no pass for ``old_log_prob``, and ``gen`` is but a wait.
    """

    gpus: int
    step: float
    update: float
    gen: float = 0.0
    old: float = 0.0
    apart: bool = False


#: verl, recipe/fully_async_policy/README.md at commit 19997f9ec, "Asynchronous Training on 7B Model".
VERL = (
    Verl(32, 790.10, update=269.80, gen=357.41, old=107.71),
    Verl(64, 365.28, update=133.41, gen=150.72, old=70.26),
    Verl(128, 356.30, update=113.81, gen=177.85, old=53.92),
    Verl(32, 294.77, update=313.81, apart=True),
    Verl(64, 189.26, update=156.98, apart=True),
    Verl(128, 150.63, update=113.16, apart=True),
)
#: Settings of its shell/dapo_7b_math_fsdp2_64_64.sh; the tokens of a prompt and the sigma are assumed.
_QWEN_MATH = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_PROMPT, _SIGMA, _MOST = 150, 1.0, 28 * 1024


def seconds_of(row: Verl) -> dict[str, float]:
    """Return the seconds of the calls of a step, and of ``step``."""
    made = _study(row, _mean(row))
    alone = {work.title: made.cost_model.seconds(work) for work in made.works.values() if work.role.model is not None}
    return alone | {"step": made.simulate(steps=8).step_seconds}


def _mean(row: Verl) -> float:
    """The mean length with which an update takes what was published: lengths were not."""
    low, high = 100.0, 20000.0
    for _ in range(24):
        middle = math.sqrt(low * high)
        made = _study(row, middle)
        less = sum(made.cost_model.seconds(w) for w in made.works.values() if w.title == "actor.update") < row.update
        low, high = (middle, high) if less else (low, middle)
    return low


def _study(row: Verl, mean: float) -> Study:
    tokens = Tokens(_PROMPT, "lognormal", (mean, _SIGMA, float(_MOST)))
    plan = read(_plan_text(row))
    costs = Roofline(plan.cluster, Efficiency.published(), shares_prompts=False)
    return _flow(row.apart).study(plan, costs=costs, tokens=tokens)


def _plan_text(row: Verl) -> str:
    gpus, apart = row.gpus, row.apart
    half = gpus // 2 if apart else gpus
    pools = [("train", f"0-{half - 1}"), ("rollout", f"{half}-{gpus - 1}")] if apart else [("gpu", f"0-{gpus - 1}")]
    return "\n".join(
        [
            f"cluster: h20:{gpus // 8}x8",
            "pools:",
            *(f'  {name}: {{devices: "{devices}"}}' for name, devices in pools),
            "  cpu: {processes: 64}",
            "place:",
            "  actor:",
            f"    train: {{pool: {pools[0][0]}, mesh: {{fsdp: {half}}}, backend: fsdp2}}",
            f"    generate: {{pool: {pools[-1][0]}, mesh: {{dp: {half // 4}, tp: 4}}, engine: vllm, rows: 1024}}",
            "  reward: {pool: cpu}",
            "pipeline: {staleness: 1, publish: interrupt, order: window, window: 0.5}"
            if apart
            else "pipeline: {staleness: 0}",
        ]
    )


@lru_cache(maxsize=2)
def _flow(apart: bool) -> fl.Flow:
    flow = fl.Flow("dapo")
    actor = flow.worker(fl.Actor, _QWEN_MATH, name="actor", dtype="bf16", max_tokens=_MOST, gradient_checkpointing=True)
    reward = flow.worker(fl.FunctionReward, _right, name="reward")

    @flow.program
    def dapo(steps: int = 8) -> None:
        for _, batch in flow.steps(fl.data.rows([{"prompt": "1+1="}] * 512, batch=512), steps):
            batch = actor.generate(batch, n=16)
            batch = reward.score(batch)
            batch = batch if apart else actor.logprobs(batch)
            batch = rl.group_advantages(batch)
            actor.update(batch, loss=rl.ppo_clip(anchor="rollout"), minibatch=512, micro_tokens=2 * 30 * 1024)

    return flow


def table(within: float) -> str:
    """The table of the page."""
    lines = ["| H20 | placement | what | published, s | predicted, s | ratio |", "|---|---|---|---|---|---|"]
    for row in VERL:
        found = seconds_of(row)
        where = f"{row.gpus // 2} + {row.gpus // 2}, asynchronous" if row.apart else "in turns"
        parts = [("`gen`", row.gen, "actor.generate"), ("`old_log_prob`", row.old, "actor.logprobs")]
        for what, published, title in (*(parts if not row.apart else ()), ("step", row.step, "step")):
            ratio = found[title] / published
            mark = "" if abs(ratio - 1) <= within else " **\\***"
            said = f"{published:.0f} | {found[title]:.0f} | {ratio:.2f}{mark}"
            lines.append(f"| {row.gpus} | {where} | {what} | {said} |")
    return "\n".join(lines)


def _right(prompt: str, response: str) -> float:
    return 0.0
