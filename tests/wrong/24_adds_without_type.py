"""WorkerError: Length.measure adds 'length' without a type.
  at   tests/wrong/24_adds_without_type.py:13   @fl.op(reads="response_ids", adds="length", cost="local")
  fix  Write length: f32[] or another type.
"""

# A field of one's own, added without a type.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)


class Length(fl.Worker):
    @fl.op(reads="response_ids", adds="length", cost="local")
    def measure(self, batch):
        return {"length": batch.response_ids.lengths_column()}


flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
length = flow.worker(Length)


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = length.measure(actor.generate(batch))
        flow.log(step, length=batch.length.mean())
