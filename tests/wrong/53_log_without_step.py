"""ProgramError: flow.log takes the step first, and was given metrics.
  at   tests/wrong/53_log_without_step.py:22   flow.log(metrics)
  fix  Write flow.log(step, ...).

sft: 1 error, 0 lints
"""

# The step is left out of flow.log.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int = 10):
    for _step, batch in flow.steps(examples, steps):
        metrics = actor.update(batch, loss=rl.sft())
        flow.log(metrics)
