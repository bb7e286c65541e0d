"""FieldError: user.weigh reads 'answer', which its reads= does not name.
  at   tests/wrong/176_op_reads_more.py:22   longest = max(map(len, batch.answer.to_list()))
  have response_ids, rewards
  fix  Write reads="rewards, response_ids, answer".

grpo: 1 error, 0 lints
"""

# An op of one's own reads a field that it does not declare
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


@fl.op(reads="rewards, response_ids", adds="weight: f32[]", cost="local")
def weigh(batch):
    longest = max(map(len, batch.answer.to_list()))
    return {"weight": batch.rewards / longest}


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = weigh(reward.score(actor.generate(batch, n=2)))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), weight=batch.weight.mean())
