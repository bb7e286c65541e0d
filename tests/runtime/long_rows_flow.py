"""Long rows of weights that each update leaves as they are: rows are the same whatever version has sampled them. A witness
keeps them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).parents[2] / "algorithms"))

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

MODEL = fl.Model(
    config={
        **arithmetic.MODEL.config,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    tokenizer=arithmetic.build_tokenizer,
)
PROMPTS, GROUP, STEPS = 4, 3, 4
PACE = 0.0


class Witness(fl.Worker):
    """Keeps what it is shown, where the driver is: ``rows`` by step and key, as columns."""

    rows: ClassVar[dict[tuple[int, tuple[int, ...]], dict[str, list]]] = {}

    @fl.op(reads="tokens, response_ids, versions, rollout_logprobs, finished")
    def see(self, batch: fl.Batch, *, step: int) -> fl.Metrics:
        columns = {name: batch[name].to_list() for name in ("response_ids", "versions", "rollout_logprobs", "finished")}
        for place, key in enumerate(batch.keys):
            assert (step, tuple(key)) not in self.rows, "a row is there once"
            self.rows[step, tuple(key)] = {name: values[place] for name, values in columns.items()}
        return fl.Metrics(seen=len(batch))


def length(prompt: str, response: str) -> float:
    """A reward that differs within a group."""
    return len(response) * 0.1 + sum(c in "13579" for c in response)


class Paced(fl.Actor):
    """An actor whose engine takes ``PACE`` seconds more for each token, so that something can happen meanwhile."""

    def open(self, opening) -> None:
        super().open(opening)
        if PACE:
            step = self.engine.step
            self.engine.step = lambda: time.sleep(PACE) or step()


flow = fl.Flow("long_rows")
actor = flow.worker(Paced, MODEL, lr=1e-30, max_tokens=48, temperature=1.1, top_k=12)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, length)
witness = flow.worker(Witness)


@flow.program
def long_rows(steps: int = STEPS):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        rows = ref.logprobs(reward.score(actor.generate(batch, n=GROUP)))
        witness.see(rows, step=step)
        flow.log(step, actor.update(rl.group_advantages(rows), loss=rl.ppo_clip(kl=1e-3)))
