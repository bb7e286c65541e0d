"""ProgramError: actor.genrate is not there; the ops of Actor are ask, entropies, follow, generate, logprobs, save, update.
  at   tests/wrong/15_op_typo.py:20   batch = actor.genrate(batch)
  fix  Did you mean actor.generate?

sample: 1 error, 0 lints
"""

# The name of an op is misspelt.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.genrate(batch)
        flow.log(step, length=batch.response_ids.lengths_column().mean())
