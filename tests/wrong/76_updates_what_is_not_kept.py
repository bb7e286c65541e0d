"""WorkerError: Novelty.rate updates 'counts', which Novelty does not keep.
  at   tests/wrong/76_updates_what_is_not_kept.py:23   def rate(self, batch):
  have seen
  fix  Write keeps = ("counts",) in the class.

train: 1 error, 0 lints
"""

# What the op updates is called otherwise than what the worker keeps.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


class Novelty(fl.Worker):
    keeps = ("seen",)

    def __init__(self):
        self.seen = {}

    @fl.op(reads="response_ids", adds="rewards: f32[]", updates="counts")
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
