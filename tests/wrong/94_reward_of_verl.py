"""FieldError: compute_score takes 'data_source', 'solution_str' and 'ground_truth', which are no columns of the batch: a reward is fn(prompt, response, **columns) -> float.
  at   tests/wrong/94_reward_of_verl.py:16   def compute_score(data_source, solution_str, ground_truth, extra_info=None):
  have answer, prompt, response
  fix  Write response for solution_str: it is called once for each row. Have the data, or an op before the reward, give data_source and ground_truth; or take a column that is there.

grpo: 1 error, 0 lints
"""

# A reward function as verl wants it
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, compute_score)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
