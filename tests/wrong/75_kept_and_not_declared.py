"""WorkerError: Novelty.rate changes 'seen', which Novelty keeps, and does not declare it.
  at   tests/wrong/75_kept_and_not_declared.py:25   self.seen[answer] = self.seen.get(answer, 0) + 1
  fix  Write @fl.op(..., updates="seen"): then it is saved, and the op is not run again for the same rows.

train: 1 error, 0 lints
"""

# The worker says that it keeps a count, and its op, which changes it, does not say so: a resumed run would lose it.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


class Novelty(fl.Worker):
    keeps = ("seen",)

    def __init__(self):
        self.seen = {}

    @fl.op(reads="response_ids", adds="rewards: f32[]")
    def rate(self, batch):
        answers = [str(ids) for ids in batch.response_ids.to_list()]
        for answer in answers:
            self.seen[answer] = self.seen.get(answer, 0) + 1
        return {"rewards": [1 / self.seen[answer] for answer in answers]}


flow = fl.Flow("train")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6)
novelty = flow.worker(Novelty)


@flow.program
def train(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = rl.group_advantages(novelty.rate(actor.generate(batch, n=4)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
