"""ProgramError: actor.generate: got an unexpected keyword argument 'num_generations'.
  at   tests/wrong/92_num_generations.py:27   batch = reward.score(actor.generate(batch, num_generations=8))
  have batch, greedy, max_tokens, min_p, n, repetition_penalty, stop, support, temperature, top_k, top_p
  fix  Write n= for num_generations=.

grpo: 1 error, 0 lints
"""

# The size of a group, as TRL calls it
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)

@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, num_generations=8))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
