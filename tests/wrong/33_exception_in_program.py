"""ProgramError: the program failed while it was traced: KeyError: 'medium'.
  at   tests/wrong/33_exception_in_program.py:22   flow.log(step, actor.update(batch, loss=rl.sft()), rate=rates[rate])
  fix  Mend that line; check runs the program with its defaults, and with symbols for numbers.

sft: 1 error, 0 lints
"""

# An ordinary mistake in ordinary Python, inside a program.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")
rates = {"low": 1.0, "high": 2.0}

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int = 10, rate: str = "medium"):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()), rate=rates[rate])
