"""DataError: the list of rows has no column 'questions', which is its prompt.
  at   tests/wrong/47_data_column_typo.py:13   examples = fl.data.rows([{"question": "1+2=", "answer": "3"}], batch=1, prompt="questions", response="answer")
  have answer, question
  fix  Write prompt='question'.

sft: 1 error, 0 lints
"""

# A column of the data is misspelt.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"question": "1+2=", "answer": "3"}], batch=1, prompt="questions", response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
