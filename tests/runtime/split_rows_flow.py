"""Long rows that ranks sample slowly, and what befalls one of them: the program of ``long_rows_flow``, with an actor that is
sent a signal once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import long_rows_flow as long

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

MODEL, PROMPTS, GROUP = long.MODEL, long.PROMPTS, long.GROUP
#: Seconds more for each token.
PACE = 0.0
#: As it makes which step which rank of its team, or the process of its engine, is sent which signal: ("engine", 1, 9, 20).
FAULT: tuple[str, int, int, int] | None = None
#: Where it is noted, as it happens once.
NOTE = ""


class Struck(fl.Actor):
    """An actor whose engine is slow, and may be struck."""

    def open(self, opening) -> None:
        super().open(opening)
        self._steps, step = 0, getattr(self.engine, "step", None)

        def slow():
            self._steps += 1
            if FAULT is not None:
                who, place, signal, steps = FAULT
                if self.engine._team.place == place and self._steps >= steps and _first():
                    os.kill(self.engine.child.pid if who == "engine" else os.getpid(), signal)
            time.sleep(PACE)
            return step()

        self.engine.step = slow


def _first() -> bool:
    """Whether nobody has been sent it yet: of several teams one is."""
    try:
        Path(NOTE).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


flow = fl.Flow("split_rows")
actor = flow.worker(Struck, MODEL, lr=1e-30, max_tokens=48, temperature=1.1, top_k=12)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, long.length)


@flow.program
def split_rows(steps: int = 4):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        rows = ref.logprobs(reward.score(actor.generate(batch, n=GROUP)))
        flow.log(step, actor.update(rl.group_advantages(rows), loss=rl.ppo_clip(kl=1e-3)))
