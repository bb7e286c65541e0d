"""ModelError: schedule='cosine' needs to know where it ends.
  at   tests/wrong/20_schedule_without_end.py:13   actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", schedule="cosine", warmup=10)
  fix  Give total=, the number of optimizer steps.
"""

# A falling learning rate that does not know where it ends.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", schedule="cosine", warmup=10)


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
