"""ModelError: lora= trains adapters alone, so freeze= has nothing to leave as it is.
  at   tests/wrong/162_frozen_and_adapted.py:13   actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lora=fl.Lora(), freeze="embeddings")
  fix  Leave freeze= out, or name the layers that get adapters with Lora(targets=...).
"""

# Weights are frozen that adapters do not train anyway.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lora=fl.Lora(), freeze="embeddings")


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
