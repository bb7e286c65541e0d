"""ModelError: freeze='layers[:-x]' is no range of layers.
  at   tests/wrong/161_frozen_layers.py:13   actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", freeze=["embeddings", "layers[:-x]"])
  fix  Write "layers[:-2]" for all but the last two, "layers[0]" for the first.
"""

# A range of layers that is none.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", freeze=["embeddings", "layers[:-x]"])


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
