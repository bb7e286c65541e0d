"""GRPO (Shao et al. 2024, arXiv:2402.03300) of a game: tic-tac-toe against a player of random and one of optimal moves.

Departures: 1. each turn is also compared with those of its group that began with the same board (GiGPO,
arXiv:2505.10978); all games of a group meet the same opponent. 2. rewards are not divided by their standard deviation.
3. no KL to a reference, but an entropy bonus. 4. the loss is a mean over the sampled tokens of a mini-batch, with
several optimizer steps per step. ``warmup`` first shows 200 games of random moves, as random weights say no move.
"""

import flowrl as fl
from flowrl import rl
from tasks import tictactoe as game

flow = fl.Flow("tictactoe")
actor = flow.worker(fl.Actor, game.MODEL, lr=1e-3, betas=(0.9, 0.99), max_tokens=4)
table = flow.worker(game.TicTacToe)


@flow.program
def warmup(steps: int = 150, examples: int = 50) -> None:
    """Learn what a move looks like."""
    for step, batch in flow.steps(game.examples(examples), steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))


@flow.program
def tictactoe(
    steps: int = 1000,
    tasks: int = 32,
    games: int = 8,
    minibatch: int = 64,
    lr: float = 5e-4,
    entropy: float = 0.1,
) -> None:
    for step, batch in flow.steps(game.games(tasks), steps):
        batch = table.rollout(batch, policy=actor, n=games, turn_tokens=3)
        ends = table.outcomes(batch)
        batch = rl.gigpo(batch, gamma=1.0, scale="none")
        lr_now = lr * (1 - step / steps)
        metrics = actor.update(batch, loss=rl.ppo_clip(entropy=entropy), minibatch=minibatch, lr=lr_now)
        flow.log(step, metrics, ends, reward=batch.rewards.mean())


@flow.program
def evaluate(games: int = 1000) -> None:
    """Greedy games against each opponent, half of them on each side."""
    for opponent in game.OPPONENTS:
        for step, batch in flow.steps(game.held_out(opponent, games)):
            batch = table.rollout(batch, policy=actor, greedy=True, turn_tokens=3)
            ends = table.outcomes(batch)
            named = {"won": ends.won, "drawn": ends.drawn, "lost": ends.lost, "wrong": ends.invalid + ends.malformed}
            flow.log(step, **{f"{opponent}_{name}": value for name, value in named.items()})


if __name__ == "__main__":
    flow.main()
