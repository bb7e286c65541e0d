"""UsageError: program 'sft' needs a value for 'steps'.
  at   tests/wrong/31_parameter_without_default.py:17   def sft(steps: int):
  fix  Give it a default, or --steps VALUE.
"""

# A parameter of a program has no default, so check cannot run it.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
