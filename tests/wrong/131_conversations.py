"""DataError: A message of 'prompt' lacks 'role' or 'content'.
  at   tests/wrong/131_conversations.py:12   prompts = fl.data.rows([{"prompt": [{"from": "human", "value": "1+2="}], "answer": "3"}], batch=1)
  fix  Write messages as {"role": "user", "content": "..."}.

grpo: 1 error, 0 lints
"""

# Messages with the keys of ShareGPT
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": [{"from": "human", "value": "1+2="}], "answer": "3"}], batch=1)


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
