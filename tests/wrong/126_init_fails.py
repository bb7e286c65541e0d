"""WorkerError: Judge cannot be made with these arguments: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1).
  at   tests/wrong/126_init_fails.py:26   self.rubric = json.loads(rubric)
  fix  Mend Judge.__init__, or what line 33 gives it.
"""

# A worker of one's own whose constructor fails
import json

import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)


class Judge(fl.Worker):
    def __init__(self, rubric: str):
        self.rubric = json.loads(rubric)

    @fl.op(reads="response_ids", adds="rewards: f32[]", cost="local")
    def grade(self, batch):
        return {"rewards": [float(len(self.rubric)) for _ in batch.keys]}


judge = flow.worker(Judge, rubric="{'style': 1}")


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = judge.grade(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
