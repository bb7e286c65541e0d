"""Supervised fine-tuning: cross entropy on the tokens of given responses."""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model=arithmetic.MODEL, lr=1e-3, max_tokens=8)


@flow.program
def sft(steps: int = 300, rows: int = 128) -> None:
    for step, batch in flow.steps(arithmetic.examples(rows), steps):
        metrics = actor.update(batch, loss=rl.sft())
        flow.log(step, metrics)


if __name__ == "__main__":
    flow.main()
