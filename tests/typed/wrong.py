# pyright: strict
"""Lines that a type checker refuses: those that end in "wrong"."""

import flowrl as fl
from flowrl import rl


def exact(response: str, answer: str) -> float:
    return float(response == answer)


rows = fl.data.generated(lambda index: {"prompt": f"{index}="}, batch=8)

flow = fl.Flow("wrong")
actor = flow.worker(fl.Actor, "some/model", lr=1e-6)
reward = flow.worker(fl.FunctionReward, exact)
other = flow.worker(fl.Actor, "some/model", learning_rate=1e-6)  # wrong
misspelt = fl.Acter  # wrong


@flow.program
def wrong(steps: int = 10) -> None:
    for step, batch in flow.steps(rows, steps):
        actor.generate(batch, m=4)  # wrong
        actor.sample(batch)  # wrong
        reward.score()  # wrong
        reward.score(batch.rewards)  # wrong
        reward.score(batch, into={"rewards": 1})  # wrong
        rl.gae(batch, lamda=0.9)  # wrong
        rl.advantages(batch, eps="small")  # wrong
        actor.update(batch)  # wrong
        again: fl.Batch = actor.update(batch, loss=rl.sft())  # wrong
        flow.log(step, grades=rows.rewards.mean(), again=again)  # wrong
