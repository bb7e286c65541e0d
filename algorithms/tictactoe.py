"""GRPO (Shao et al. 2024, arXiv:2402.03300) of a game: tic-tac-toe against a player of random and one of optimal moves.

Departures: 1. each turn is also compared with those of its group that began with the same board (GiGPO,
arXiv:2505.10978), which weighs ``credit``; all games of a group meet the same opponent. 2. rewards are not divided by
their standard deviation. 3. the KL to the model of the warm-up is of whole distributions, and falls to 0. 4. the loss
is a mean over the sampled tokens of a mini-batch, with several optimizer steps per step. ``warmup`` first shows 200
games, as random weights say no move.
"""

import flowrl as fl
from flowrl import rl
from tasks import tictactoe as game

flow = fl.Flow("tictactoe")
actor = flow.worker(fl.Actor, game.MODEL, lr=1e-3, betas=(0.9, 0.99), max_tokens=4)
ref = flow.worker(fl.Reference, of=actor)  # the actor as it is when the program starts
table = flow.worker(game.TicTacToe)


@flow.program
def warmup(steps: int = 200, examples: int = 50) -> None:
    """Learn what a move looks like, and what good ones are."""
    for step, batch in flow.steps(game.examples(examples), steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))


@flow.program
def tictactoe(
    steps: int = 200,
    tasks: int = 36,
    games: int = 8,
    minibatch: int = 72,
    lr: float = 3e-4,
    kl: float = 0.6,
    backwards: float = 0.15,
    credit: float = 3.0,
) -> None:
    for step, batch in flow.steps(game.games(tasks, backwards=round(backwards * steps)), steps):
        batch = table.rollout(batch, policy=actor, n=games, turn_tokens=3)
        ends = table.outcomes(batch)
        batch = ref.distribution(rl.gigpo(batch, weight=credit, gamma=1.0, scale="none"))
        left = 1 - step / steps
        metrics = actor.update(batch, loss=rl.ppo_clip(kl=kl * left, kl_kind="full"), minibatch=minibatch, lr=lr * left)
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
