"""ProgramError: flow.steps(source, steps) takes a source of data, and was given list [{'prompt': '1+2=', 'answer': '3'}].
  at   tests/wrong/114_steps_of_a_list.py:25   for step, batch in flow.steps([{"prompt": "1+2=", "answer": "3"}], steps):
  fix  Give a source, such as fl.data.jsonl(path, batch=16), as the first argument.

grpo: 1 error, 0 lints
"""

# A list of rows where a source is asked for
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
    for step, batch in flow.steps([{"prompt": "1+2=", "answer": "3"}], steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
