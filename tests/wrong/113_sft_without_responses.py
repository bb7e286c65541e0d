"""FieldError: actor.update reads 'tokens', which no op before it adds.
  at   tests/wrong/113_sft_without_responses.py:31   flow.log(step, actor.update(batch, loss=rl.sft()))
  have answer, prompt, prompt_ids
  fix  Give the source response=, the column to learn from; or sample with actor.generate before this line.

WorkerError: worker 'reward' (FunctionReward) is never used by a program of this flow.
  at   tests/wrong/113_sft_without_responses.py:26   reward = flow.worker(fl.FunctionReward, exact)
  fix  Call one of its ops, or take the worker out.

sft: 2 errors, 0 lints
"""

# Supervised training on prompts alone
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)

@flow.program
def sft(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
