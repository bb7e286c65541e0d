"""ProgramError: actor.generate: got an unexpected keyword argument 'temprature'.
  at   tests/wrong/16_argument_typo.py:21   batch = actor.generate(batch, temprature=0.7)
  have batch, greedy, max_tokens, min_p, n, repetition_penalty, stop, support, temperature, top_k, top_p
  fix  Write temperature= for temprature=.

sample: 1 error, 0 lints
"""

# An argument of an op is misspelt.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, temprature=0.7)
        flow.log(step, length=batch.response_ids.lengths_column().mean())
