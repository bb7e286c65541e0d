"""A driver whose environment notes every call of it in a file, and holds some episodes until the test lets them go."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from answers_driver import HERE, note

sys.path.insert(0, str(Path(__file__).parents[2] / "algorithms"))

import flowrl as fl
from flowrl import rl
from tasks import guessing

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
HELD = 7  # the prompt whose episodes wait at their last turn


class Game(fl.Env):
    """An episode of prompt p has 1 + p % 3 turns; its rewards are those of its actions."""

    def reset(self, row, seed):
        return (int(row["number"]), 0), "3"

    def step(self, state, action):
        number, turn = state
        note("step" if turn else "begin", number)
        while turn == number % 3 and number == HELD and not (HERE / "go").exists():
            time.sleep(0.02)
        return (number, turn + 1), str(turn), float(len(action) + number % 2), turn == number % 3


flow = fl.Flow("episodes")
model = fl.Model(config={**guessing.MODEL.config, **SMALL}, tokenizer=guessing.build_tokenizer)
actor = flow.worker(fl.Actor, model, lr=1e-2, name="actor")
game = flow.worker(Game, name="game")
rows = fl.data.rows([{"prompt": "?", "number": i} for i in range(16)], batch=8, shuffle=False)


@flow.program
def episodes(steps: int = 2):
    for step, batch in flow.steps(rows, steps):
        batch = rl.group_advantages(game.rollout(batch, policy=actor, n=2, turn_tokens=2))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean())


if __name__ == "__main__":
    flow.main()
