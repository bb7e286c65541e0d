"""ProgramError: flow.steps(source, steps) takes a source of data, and was given int 10.
  at   tests/wrong/37_steps_arguments_swapped.py:20   for step, batch in flow.steps(steps, examples):
  fix  Give a source, such as fl.data.jsonl(path, batch=16), as the first argument.

sft: 1 error, 0 lints
"""

# The arguments of flow.steps are swapped.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(steps, examples):
        flow.log(step, actor.update(batch, loss=rl.sft()))
