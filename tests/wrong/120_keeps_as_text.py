"""WorkerError: Novelty: keeps='seen' is no tuple of names.
  at   tests/wrong/120_keeps_as_text.py:22   class Novelty(fl.Worker):
  fix  Write keeps = ("seen",).
"""

# A tuple of one name, without its comma
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)


class Novelty(fl.Worker):
    keeps = ("seen")

    def __init__(self, weight: float = 0.1):
        self.weight = weight
        self.seen = {}

    @fl.op(reads="response_ids, rewards", adds="novelty: f32[]", updates="seen", cost="local")
    def rate(self, batch):
        answers = [str(ids) for ids in batch.response_ids.to_list()]
        for answer in answers:
            self.seen[answer] = self.seen.get(answer, 0) + 1
        return {"novelty": [self.weight / self.seen[answer] for answer in answers]}


novelty = flow.worker(Novelty)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = novelty.rate(reward.score(actor.generate(batch, n=2)))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), novelty=batch.novelty.mean())
