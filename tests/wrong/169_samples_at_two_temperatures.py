"""FieldError: a subtraction compares log-probabilities of different kinds: 'the left' at temperature 1, 'the right' at temperature 0.5.
  at   tests/wrong/169_samples_at_two_temperatures.py:21   gap = warm.rollout_logprobs.row_mean() - cold.rollout_logprobs.row_mean()
  fix  Sample both at one temperature.

compared: 1 error, 0 lints
"""

# Two samples of the same prompts, at two temperatures, as if their log-probabilities were of one kind.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("compared")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def compared(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        warm, cold = actor.generate(batch, n=8), actor.generate(batch, n=8, temperature=0.5)
        gap = warm.rollout_logprobs.row_mean() - cold.rollout_logprobs.row_mean()
        flow.log(step, gap=gap.mean())
