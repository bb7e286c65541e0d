"""WorkerError: Actor: schedule='cosin' is none of constant, linear, cosine.
  at   tests/wrong/19_bad_schedule.py:13   actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", schedule="cosin", total=100)
  fix  Write schedule="cosine".
"""

# A schedule that there is not.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", schedule="cosin", total=100)


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
