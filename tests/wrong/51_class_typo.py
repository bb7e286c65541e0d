"""ProgramError: tests/wrong/51_class_typo.py failed while it was loaded: AttributeError: module 'flowrl' has no attribute 'Acter'.
  at   tests/wrong/51_class_typo.py:13   actor = flow.worker(fl.Acter, model="Qwen/Qwen3-0.6B")
  fix  Did you mean 'Actor'?
"""

# A class is misspelt, outside of the program.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Acter, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
