"""FieldError: actor.update with loss ppo_clip reads 'advantages: f32[*response]', but 'advantages' has other dims here: batch.sub gives f32[].
  at   tests/wrong/178_advantages_by_row.py:29   flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
  fix  Write batch.with_columns({"advantages": batch.response_mask * (...)}): each token gets the number of its row.

grpo: 1 error, 0 lints
"""

# A number per row takes the place of advantages, which are per token
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=8))
        batch = batch.with_columns({"advantages": batch.rewards - 0.5})
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
