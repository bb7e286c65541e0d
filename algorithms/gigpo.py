"""GiGPO (Feng et al. 2025, arXiv:2505.10978): advantages in groups of episodes, and in groups of turns from one state.

Departures: 1. an episode is one row, and a turn sees all turns before it; in the paper each turn has a prompt of its
own. 2. no KL to a reference, as the model starts out random, but an entropy bonus. 3. the loss is a mean over the
sampled tokens of the step, with one optimizer step per step. 4. standard deviations have Bessel's correction.
"""

import flowrl as fl
from flowrl import rl
from tasks import guessing

flow = fl.Flow("gigpo")
actor = flow.worker(fl.Actor, guessing.MODEL, lr=1e-3, betas=(0.9, 0.99), max_tokens=1)
game = flow.worker(guessing.Guess)


@flow.program
def gigpo(steps: int = 300, games: int = 16, episodes: int = 8, weight: float = 1.0, gamma: float = 0.95) -> None:
    for step, batch in flow.steps(guessing.prompts(games), steps):
        batch = game.rollout(batch, policy=actor, n=episodes)
        batch = rl.gigpo(batch, weight=weight, gamma=gamma)
        metrics = actor.update(batch, loss=rl.ppo_clip(entropy=0.05))
        flow.log(step, metrics, reward=batch.rewards.mean(), turns=batch.turns.mean())


@flow.program
def evaluate() -> None:
    """Greedy play of every game there is."""
    for step, batch in flow.steps(guessing.every_game()):
        batch = game.rollout(batch, policy=actor, greedy=True)
        flow.log(step, greedy_reward=batch.rewards.mean(), greedy_turns=batch.turns.mean())


if __name__ == "__main__":
    flow.main()
