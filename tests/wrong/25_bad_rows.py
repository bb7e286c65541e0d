"""WorkerError: Taste.keep: rows='filtered' is none of same, expand, filter, apart, regroup.
  at   tests/wrong/25_bad_rows.py:13   @fl.op(reads="response_ids", rows="filtered", cost="local")
  fix  Write rows='filter'.
"""

# A row effect that there is not.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)


class Taste(fl.Worker):
    @fl.op(reads="response_ids", rows="filtered", cost="local")
    def keep(self, batch):
        return batch.filter(batch.response_ids.lengths_column() > 2)


flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
taste = flow.worker(Taste)


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = taste.keep(actor.generate(batch))
        flow.log(step, length=batch.response_ids.lengths_column().mean())
