"""ProgramError: flow.more was called outside of flow.steps.
  at   tests/wrong/29_more_outside_steps.py:20   batch = flow.more(16)
  fix  Use flow.take(source, n).

sft: 1 error, 0 lints
"""

# More prompts are asked for outside of a step.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int = 10):
    batch = flow.more(16)
    for step, batch in flow.steps(prompts, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
