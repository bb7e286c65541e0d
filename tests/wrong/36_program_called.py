"""ProgramError: program 'warmup' was called like a function.
  at   tests/wrong/36_program_called.py:28   warmup(steps=5)
  fix  Run programs in a row with --program warmup,...; put shared lines into a plain function.

train: 1 error, 0 lints

warmup: fine
"""

# A program is called like a function.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("train")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def warmup(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))


@flow.program
def train(steps: int = 10):
    warmup(steps=5)
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
