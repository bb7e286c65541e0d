"""DataError: A data source: batch=1.0 is not a whole number of at least 1.
  at   tests/wrong/89_batch_is_a_fraction.py:11   prompts = fl.data.rows(sums, batch=len(sums) / 2)
  fix  Write batch=1.
"""

# Half of the rows, divided with one slash
import flowrl as fl
from flowrl import rl

sums = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "2+2=", "answer": "4"}]
prompts = fl.data.rows(sums, batch=len(sums) / 2)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
