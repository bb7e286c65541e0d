"""ProgramError: this flow has a program 'sft' already, at line 17.
  at   tests/wrong/32_program_twice.py:23   def sft(steps: int = 20):  # noqa: F811
  fix  Give one of them another name.
"""

# The second program was copied from the first, and kept its name.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))


@flow.program
def sft(steps: int = 20):  # noqa: F811
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft(aggregate="token-sum")))
