"""WorkerError: Length.measure: 'int32' is no dtype; the dtypes are i32, i64, f32, f64, bf16, bool, any.
  at   tests/wrong/23_bad_field_type.py:13   @fl.op(reads="response_ids: int32[*response]", adds="length: f32[]", cost="local")
  fix  Write i32.
"""

# A dtype as other libraries call it.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)


class Length(fl.Worker):
    @fl.op(reads="response_ids: int32[*response]", adds="length: f32[]", cost="local")
    def measure(self, batch):
        return {"length": batch.response_ids.lengths_column() * 1.0}


flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
length = flow.worker(Length)


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = length.measure(actor.generate(batch))
        flow.log(step, length=batch.length.mean())
