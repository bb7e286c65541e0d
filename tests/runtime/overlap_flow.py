"""Programs whose steps overlap, on a tiny model, with a witness of every row that is trained on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

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
PROMPTS, GROUP = 4, 2


class Witness(fl.Worker):
    """Keeps what it is shown, for the test alone: ``rows`` by step, as they are trained on."""

    rows: ClassVar[list[tuple[int, fl.Batch]]] = []

    @fl.op(reads="prompt_ids, tokens, response_mask, versions, rollout_logprobs, temperature")
    def see(self, batch: fl.Batch, *, step: int) -> fl.Metrics:
        self.rows.append((step, batch))
        return fl.Metrics(seen=len(batch))


def length(prompt: str, response: str) -> float:
    """A reward that differs within a group."""
    return len(response) * 0.1 + sum(c in "13579" for c in response)


flow = fl.Flow("overlap")
actor = flow.worker(fl.Actor, MODEL, lr=3e-3, max_tokens=12)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, length)
witness = flow.worker(Witness)


def sampled(batch: fl.Batch, **how: Any) -> fl.Batch:
    """What training and evaluation have in common, as in many programs: they are told apart by who calls it."""
    return actor.generate(batch, **how)


@flow.program
def overlap(steps: int = 6, more: bool = False, every: int = 1, look: bool = False):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        rows = sampled(batch, n=GROUP)
        if more:
            rows = rows.concat(sampled(flow.more(2), n=GROUP, max_tokens=5))
        rows = rl.group_advantages(ref.logprobs(reward.score(rows)))
        witness.see(rows, step=step)
        if step % every == 0:
            flow.log(step, actor.update(rows, loss=rl.ppo_clip(kl=1e-3)))
        if look and step % 3 == 2:
            held = sampled(flow.take(arithmetic.heldout(4, repeat=True)), greedy=True)
            flow.log(step, at=held.versions.row_mean().min(), at_most=held.versions.row_mean().max())
