"""ProgramError: a number has no 'mean'.
  at   tests/wrong/35_mean_of_metrics.py:22   flow.log(step, loss=metrics.loss.mean())
  fix  It is one number already: use it as it is.

sft: 1 error, 0 lints
"""

# The mean of what is one number already.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        metrics = actor.update(batch, loss=rl.sft())
        flow.log(step, loss=metrics.loss.mean())
