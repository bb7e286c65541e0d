"""Plays games of textarena by a policy, then by textarena itself with the same answers; prints both as JSON."""

from __future__ import annotations

import json
import random
import re

import textarena
from adapter_play import page_trained, played

from flowrl.environments import TextArenaEnvironment
from flowrl.errors import WorkerError


def any_square(observation, luck):
    """A free square of tic-tac-toe."""
    free = re.findall(r"'\[(\d)\]'", observation.rsplit("Available Moves:", 1)[1])
    return f"[{luck.choice(free)}]"


class Crosses(TextArenaEnvironment):
    def opponent(self, state, observation, luck):
        return any_square(observation, luck)


def raw(game, row, players=1, seat=0):
    """What textarena gives for the answers of a row, played alone in a process."""
    seed = row["task"]["task_seed"]
    env, luck, texts = textarena.make(game), random.Random(seed), iter(row["texts"])
    env.reset(num_players=players, seed=seed)
    done, last = False, ""
    while not done:
        player, observation = env.get_observation()
        if player != seat:
            done, _ = env.step(any_square(observation, luck))
            continue
        last = observation
        text = next(texts, None)
        if text is None:
            return {"reward": 0.0, "ended": "", "last": last, "left": 0}
        done, _ = env.step(text)
    rewards, about = env.close()
    ended = "invalid_move" if about[seat]["invalid_move"] else "done"
    return {"reward": float(rewards[seat]), "ended": ended, "last": last, "left": len(list(texts))}


def both(env, words, **how):
    found = played(env, words, tasks=5, n=4, max_tokens=1, **how)
    for row in found["rows"]:
        row["theirs"] = raw(env.id, row, env.players, env.seat)
    return found


def refused(*given, **options):
    try:
        list(TextArenaEnvironment(*given, **options).rows())
    except WorkerError as error:
        return str(error)


if __name__ == "__main__":
    squares, numbers = [f"[{i}]" for i in range(9)], [f"[{i}]" for i in range(1, 21)]
    found = {
        "guess": both(TextArenaEnvironment("GuessTheNumber-v0", tasks=5), numbers),
        "cards": both(TextArenaEnvironment("Blackjack-v0", tasks=5), ["[Hit]", "[Stand]"]),
        "first": both(Crosses("TicTacToe-v0", players=2, tasks=5), squares),
        "second": both(Crosses("TicTacToe-v0", players=2, seat=1, tasks=5), squares),
        "page": page_trained("Games of textarena", numbers),
        "refused": [
            refused("GuessTheNumbr-v0"),
            refused("Blackjack-v0", hands=3),
            refused("TicTacToe-v0", players=2, tasks=1),
        ],
    }
    print(f"\n{json.dumps(found)}")
