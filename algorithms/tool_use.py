"""GRPO (Shao et al. 2024, arXiv:2402.03300) of a model that calls a tool: a calculator for sums of several steps.

``--preset gigpo`` and ``--preset turns`` share out the reward of an episode among its turns.

Departures: 1. a response has several turns; what the tool said has no loss. 2. no KL to a reference. 3. the loss is a
mean over the sampled tokens of the step, with one optimizer step per step. ``warmup`` first shows some conversations,
as random weights never call a tool: ``--program warmup,tool_use``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flowrl as fl
from flowrl import rl
from tasks import calculator

flow = fl.Flow("tool_use")
actor = flow.worker(fl.Actor, calculator.MODEL, lr=1e-3, betas=(0.9, 0.99), max_tokens=10)
task = flow.worker(calculator.Calculator)
test = flow.worker(calculator.HeldOut)


@flow.program
def warmup(steps: int = 60, examples: int = 32) -> None:
    for step, batch in flow.steps(calculator.demonstrations(examples), steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))


PRESETS: dict[str, dict[str, Any]] = {
    "tool_use": {},
    "gigpo": {"advantages": rl.gigpo},
    "turns": {"advantages": partial(rl.turn_advantages, gamma=0.95)},
}


@flow.program(presets=PRESETS)
def tool_use(
    steps: int = 150,
    tasks: int = 16,
    episodes: int = 8,
    lr: float = 2e-4,
    advantages: Callable[[fl.Batch], fl.Batch] = rl.group_advantages,
) -> None:
    for step, batch in flow.steps(calculator.Calculator().source(batch=tasks), steps):
        batch = task.rollout(batch, policy=actor, n=episodes)
        ends = task.outcomes(batch)
        batch = advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip(entropy=0.003), lr=lr)
        flow.log(step, metrics, ends, reward=batch.rewards.mean(), turns=batch.turns.mean())


@flow.program
def evaluate() -> None:
    """Greedy answers to the sums that are held out."""
    for step, batch in flow.steps(calculator.HeldOut().source(batch=100, shuffle=False, repeat=False)):
        batch = test.rollout(batch, policy=actor, greedy=True)
        flow.log(step, test.outcomes(batch), greedy_reward=batch.rewards.mean())


if __name__ == "__main__":
    flow.main()
